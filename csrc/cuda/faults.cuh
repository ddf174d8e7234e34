// Broken rules that only the GPU can see: lengths and indices in its memory. A fault prints the helper, the rule and
// the numbers, and ends in a device-side assertion; PyTorch's next call then raises.
//
// All of it is cold: out of line, so that kernels pay a comparison and nothing else.
#pragma once

#include <cassert>
#include <cstdint>
#include <cstdio>

namespace cp {
namespace cuda {

enum class Helper : int32_t {
  partition_indices,
  rank_lengths,
  partition,
  reorder,
  read_half,
  take_rows,
  put_rows,
  read_second_half_lse,
  copy_valid,
  pad_sequences,
  heads_to_front,
  heads_to_back,
  merge,
  add_rows,
  lse_correction,
  out_correction,
  grad_correction,
};

enum class Rule : int32_t {
  from_zero,
  not_negative,
  no_decrease,
  divides,
  end,
  tail_divides,
  real_from_zero,
  real_fits,
  index
};

#if defined(__CUDACC__)

__device__ inline const char* name_of(Helper helper) {
  switch (helper) {
    case Helper::partition_indices:
      return "partition_indices";
    case Helper::rank_lengths:
      return "rank_lengths";
    case Helper::partition:
      return "partition";
    case Helper::reorder:
      return "reorder";
    case Helper::read_half:
      return "read_half";
    case Helper::take_rows:
      return "take_rows";
    case Helper::put_rows:
      return "put_rows";
    case Helper::read_second_half_lse:
      return "read_second_half_lse";
    case Helper::copy_valid:
      return "copy_valid";
    case Helper::pad_sequences:
      return "pad_sequences";
    case Helper::heads_to_front:
      return "heads_to_front";
    case Helper::heads_to_back:
      return "heads_to_back";
    case Helper::merge:
      return "merge";
    case Helper::add_rows:
      return "add_rows";
    case Helper::lse_correction:
      return "lse_correction";
    case Helper::out_correction:
      return "out_correction";
    case Helper::grad_correction:
      return "grad_correction";
  }
  return "?";
}

__device__ inline const char* text_of(Rule rule) {
  switch (rule) {
    case Rule::from_zero:
      return "lengths must begin at 0";
    case Rule::not_negative:
      return "lengths must not be negative";
    case Rule::no_decrease:
      return "lengths must not decrease";
    case Rule::divides:
      return "every length must be a multiple of the divisor";
    case Rule::end:
      return "lengths must end inside the tensor";
    case Rule::tail_divides:
      return "the tail behind the last sequence must be a multiple of the divisor";
    case Rule::real_from_zero:
      return "real lengths must begin at 0";
    case Rule::real_fits:
      return "real lengths must not decrease, and must fit into the lengths with padding";
    case Rule::index:
      return "row indices must lie inside the tensor";
  }
  return "?";
}

// `where`: the sequence, or the place in the row set; `value`: its value; `limit`: the divisor or bound it breaks.
static __device__ __noinline__ void fault(Helper helper, Rule rule, int64_t where, int64_t value, int64_t limit) {
  printf("cp_fast %s: %s: at %s %lld it is %lld, against %lld\n", name_of(helper), text_of(rule),
         rule == Rule::index ? "index" : "sequence", static_cast<long long>(where), static_cast<long long>(value),
         static_cast<long long>(limit));
  __assert_fail(text_of(rule), "cp_fast", static_cast<unsigned>(where), name_of(helper));
}

#endif

}  // namespace cuda
}  // namespace cp
