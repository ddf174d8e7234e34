// The row of each row of a part, as one struct for every kernel: a row map, its kind looked at when the kernel runs.
//
// Kernels are compiled for word sizes and dtypes, not again for every map. The kernels that move most of the data
// (bulk.cuh) are the exception: they are compiled for their map and contain no other code. A mover streams 268 MB in 63
// us, and next to that its start is visible, since every instruction is then fetched from memory. So a warp finds the
// sequences of its rows together (lookup.cuh). The rest of a map is arithmetic on the sequence's bounds, in 32 bits if
// everything fits, without a division by a number that the host knows.
#pragma once

#include "faults.cuh"
#include "lookup.cuh"
#include "row_arithmetic.h"

namespace cp {
namespace cuda {

// Division by a number that the host knows: exact for numerators below 2^31.
struct Divider {
  int64_t divisor;
  uint32_t magic, shift;

  static Divider by(int64_t divisor) {
    Divider result{divisor, 0, 0};
    if (divisor > 1 && divisor < (int64_t(1) << 31)) {
      while ((int64_t(1) << result.shift) < divisor) ++result.shift;
      uint64_t power = uint64_t(1) << (31 + result.shift);
      result.magic = static_cast<uint32_t>((power + divisor - 1) / divisor);
      result.shift -= 1;
    }
    return result;
  }

#if defined(__CUDACC__)
  __device__ __forceinline__ int32_t of(int32_t n) const {
    return divisor == 1 ? n : static_cast<int32_t>(__umulhi(static_cast<uint32_t>(n), magic) >> shift);
  }
  __device__ __forceinline__ int64_t of(int64_t n) const { return n / divisor; }
#endif
};

struct RowPlan : RowRule {
  bool scatter;                  // the map gives the row of the target, not of the source
  bool narrow;                   // rows and keys fit into int32
  int64_t divisor, tail_divisor, end;  // rules: of every length, of the tail, and where lengths end at most
  Divider by_cp_size, by_slice;  // a rank's slice has tokens / cp_size rows

#if defined(__CUDACC__)
  template <typename N>
  __device__ __forceinline__ N real_at(int32_t s) const {
    return length_at<N>(real, s);
  }
  template <typename N>
  static __device__ __forceinline__ N quotient(N a, N b) {
    if constexpr (sizeof(N) == 4)
      return static_cast<N>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
    else
      return a / b;
  }
#endif
};

inline RowPlan plan_of(const RowRule& rows, bool scatter) {
  if (rows.lengths.sequences > INT_MAX - 64) throw std::runtime_error("ValueError: more than 2^31 - 64 sequences");
  RowPlan plan{};
  static_cast<RowRule&>(plan) = rows;
  plan.scatter = scatter;
  plan.narrow = std::max({rows.tokens, rows.count, int64_t{rows.cp_size}}) < (int64_t(1) << 30);
  plan.divisor = rows.RowRule::divisor();
  plan.tail_divisor = rows.RowRule::tail_divisor();
  plan.end = rows.RowRule::end();
  plan.by_cp_size = Divider::by(rows.cp_size);
  plan.by_slice = Divider::by(std::max<int64_t>(rows.tokens / rows.cp_size, 1));
  return plan;
}

#if defined(__CUDACC__)

// Every rule for lengths, every length looked at by one thread of the grid. `thread` counts through the grid of
// `threads`. Neighbours are compared before they are subtracted: the difference of any two may not fit.
__device__ __forceinline__ void check_lengths(const char* helper, const Lengths& lengths, int64_t divisor,
                                              int64_t tail_divisor, int64_t tokens, bool from_zero, int64_t thread,
                                              int64_t threads) {
  for (int64_t at = thread; at <= lengths.sequences; at += threads) {
    int32_t s = static_cast<int32_t>(at);
    int64_t here = length_at<int64_t>(lengths, s);
    if (s == 0 && (from_zero ? here != 0 : here < 0)) {
      fault(helper, from_zero ? Rule::from_zero : Rule::not_negative, s, here, 0);
    }
    if (s == lengths.sequences) {
      if (here > tokens) fault(helper, Rule::end, s, here, tokens);
      int64_t tail = tokens - here;
      if (tail_divisor > 1 && tail % tail_divisor != 0) fault(helper, Rule::tail_divides, s, tail, tail_divisor);
    } else {
      int64_t next = length_at<int64_t>(lengths, s + 1);
      if (next < here) fault(helper, Rule::no_decrease, s, next, here);
      int64_t size = next - here;
      if (divisor > 1 && size % divisor != 0) fault(helper, Rule::divides, s, size, divisor);
    }
  }
}

__device__ __forceinline__ void check_real(const char* helper, const Lengths& real, const Lengths& lengths, int64_t thread,
                                           int64_t threads) {
  for (int64_t at = thread; at < real.sequences; at += threads) {
    int32_t s = static_cast<int32_t>(at);
    int64_t here = length_at<int64_t>(real, s), next = length_at<int64_t>(real, s + 1), size = next - here;
    if (s == 0 && here != 0) fault(helper, Rule::real_from_zero, s, here, 0);
    int64_t slots = length_at<int64_t>(lengths, s + 1) - length_at<int64_t>(lengths, s);
    if (next < here || size > slots) fault(helper, Rule::real_fits, s, size, slots);
  }
}

// At the start of a kernel whose searches would wait for one line of lengths after the other: the first blocks ask for
// all.
__device__ __forceinline__ void prefetch_lengths(const RowPlan& plan) {
  int64_t bytes = (plan.lengths.sequences + 1) * (plan.lengths.wide ? 8 : 4);
  int64_t line = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 128;
  if (line < bytes && plan.lengths.data != nullptr) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(plan.lengths.data) + line));
  }
}

// Every kernel with a plan calls it last, after loads and stores: nothing waits for it. The grid has one dimension.
__device__ __forceinline__ void check_plan(const RowPlan& plan) {
  if (plan.given()) return;
  int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread > plan.lengths.sequences) return;
  int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  check_lengths(plan.helper, plan.lengths, plan.divisor, plan.tail_divisor, plan.end, plan.kind != MapKind::valid, thread,
                threads);
  if (!plan.has_real()) return;
  check_real(plan.helper, plan.real, plan.lengths, thread, threads);
  if (thread == 0) {
    const int64_t last = length_at<int64_t>(plan.real, sequences_of(plan.real));
    if (last > plan.tokens) fault(plan.helper, Rule::end, plan.real.sequences, last, plan.tokens);
  }
}

// The map's row, from the place of its key; -1 for none.
template <typename N>
__device__ __forceinline__ int64_t row_at(const RowPlan& plan, MapKind kind, N row, const Place<N>& place) {
  if (place.sequence < 0) return -1;
  NoRun run;
  return row_of<N>(plan, kind, row, place, place.sequence == sequences_of(plan.lengths), run);
}

// A map's result for one row: its target row, or -1 if there is nothing to do or the target is out of bounds; with
// lengths, also its place.
struct Target {
  int64_t row;
  int32_t sequence;
  int64_t begin;
};

template <typename N, bool kFew>
__device__ __forceinline__ Target look_up_in(const RowPlan& plan, MapKind kind, int64_t row, int lane) {
  N mine = static_cast<N>(row), key = key_of<N>(plan, kind, mine), first = __shfl_sync(kAllLanes, key, 0);
  // Keys rise with the lanes, but where a rank's slice ends they start again.
  if (__shfl_sync(kAllLanes, key, kWarp - 1) < first) first = 0;
  auto window = seek<N, kFew ? 1 : 4>(plan.lengths, first, lane);
  Place<N> place{-1, 0, 0};
  if constexpr (kFew) {
    unsigned left = kAllLanes;  // lanes whose key is not yet looked up; equal keys are neighbours
#pragma unroll 1
    while (left != 0) {
      N asked = __shfl_sync(kAllLanes, key, __ffs(left) - 1);
      Place<N> found = find_one<N>(plan.lengths, window, asked);
      if (key == asked) place = found;
      left &= ~__ballot_sync(kAllLanes, key == asked);
    }
  } else {
    place = find_each<N>(plan.lengths, window, key);
  }
  return {row_at<N>(plan, kind, mine, place), place.sequence, place.begin};
}

// For a whole warp: each lane its own row. Rows rise with the lanes; lanes without one ask for another lane's. kFew:
// there are but a few different rows in a warp. kKind: the plan's kind where a kernel is compiled for it; its rows then
// are narrow.
template <bool kFew, MapKind kKind = MapKind::any>
__device__ __forceinline__ Target look_up(const RowPlan& plan, int64_t row, int lane) {
  const MapKind kind = kKind == MapKind::any ? plan.kind : kKind;
  if (kind == MapKind::span) return {plan.first + row, 0, 0};
  if (kind == MapKind::index) {
    int64_t result = plan.wide ? __ldg(static_cast<const int64_t*>(plan.index) + row)
                               : __ldg(static_cast<const int32_t*>(plan.index) + row);
    if (result < 0 || result >= plan.tokens) {
      fault(plan.helper, Rule::index, row, result, plan.tokens);
      return {-1, 0, 0};
    }
    return {result, 0, 0};
  }
  if (kKind != MapKind::any || plan.narrow) return look_up_in<int32_t, kFew>(plan, kind, row, lane);
  return look_up_in<int64_t, kFew>(plan, kind, row, lane);
}

#endif

}  // namespace cuda
}  // namespace cp
