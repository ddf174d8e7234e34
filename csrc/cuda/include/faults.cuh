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

// A copy of the helper's name, in memory that outlives the kernel: where string literals lie too.
static __device__ char fault_helper[24];

// `where`: the sequence, or the place in the index; `value`: its value; `limit`: the divisor or bound it breaks.
static __device__ __noinline__ void fault(const char* helper, Rule rule, int64_t where, int64_t value, int64_t limit) {
  for (int k = 0; k < 24; ++k) fault_helper[k] = helper[k];
  printf("cp_fast %s: %s: at %s %lld it is %lld, against %lld\n", fault_helper, text_of(rule),
         rule == Rule::index ? "index" : "sequence", static_cast<long long>(where), static_cast<long long>(value),
         static_cast<long long>(limit));
  __assert_fail(text_of(rule), "cp_fast", static_cast<unsigned>(where), fault_helper);
}

#endif

}  // namespace cuda
}  // namespace cp
