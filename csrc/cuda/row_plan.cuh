// The target of each row, as one struct for every kernel: the maps of common/maps.h, chosen at run time.
//
// Kernels are compiled for word sizes and dtypes, not again for every map. The kernels that move most of the data
// (bulk.cuh) are the exception: they are compiled for their map and contain no other code. A mover streams 268 MB in 63
// us, and next to that its start is visible, since every instruction is then fetched from memory. So a warp finds the
// sequences of its rows together (lookup.cuh). The rest of a map is arithmetic on the sequence's bounds, in 32 bits if
// everything fits, without a division by a number that the host knows.
#pragma once

#include "faults.cuh"
#include "lookup.cuh"

namespace cp {
namespace cuda {

enum class MapKind : int32_t { span, index, partition, to_rank_order, to_sequence_order, half, valid, any };

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

struct RowPlan {
  Helper helper;
  MapKind kind;
  bool scatter;     // the map gives the row of the target, not of the source
  bool narrow;      // rows and keys fit into int32
  Lengths lengths;  // partition to valid
  Lengths real;     // valid
  RowSet set;       // span and index
  int64_t count;    // rows that are asked for
  int64_t bound;    // rows of the tensor that the map leads into
  int32_t cp_size, cp_rank, half;
  int64_t divisor, tail_divisor;  // of every length, and of the tail
  bool from_zero;                 // lengths begin at 0
  Divider by_cp_size, by_slice;   // a rank's slice has bound / cp_size rows
};

inline RowPlan plan_rows(Helper helper, RowSet rows, bool scatter) {
  RowPlan plan{};
  plan.helper = helper;
  plan.kind = rows.index == nullptr ? MapKind::span : MapKind::index;
  plan.scatter = scatter;
  plan.set = rows;
  plan.count = rows.count;
  plan.bound = rows.bound;
  return plan;
}

// `count` rows that lengths lead to in a tensor of `tokens` rows.
inline RowPlan plan_lengths(Helper helper, MapKind kind, Lengths lengths, int64_t count, int64_t tokens,
                            int64_t cp_size = 1, int64_t cp_rank = 0) {
  if (lengths.sequences > INT_MAX - 64) throw std::runtime_error("ValueError: more than 2^31 - 64 sequences");
  RowPlan plan{};
  plan.helper = helper;
  plan.kind = kind;
  plan.lengths = lengths;
  plan.count = count;
  plan.bound = tokens;
  plan.narrow = std::max(std::max(tokens, count), cp_size) < (int64_t(1) << 30);
  plan.cp_size = static_cast<int32_t>(cp_size);
  plan.cp_rank = static_cast<int32_t>(cp_rank);
  plan.divisor = kind == MapKind::half ? 2 : kind == MapKind::valid ? 1 : 2 * cp_size;
  plan.tail_divisor = std::max<int64_t>(plan.divisor / 2, 1);
  if (kind == MapKind::half) plan.tail_divisor = 2;
  plan.from_zero = kind != MapKind::valid;
  plan.by_cp_size = Divider::by(cp_size);
  plan.by_slice = Divider::by(std::max<int64_t>(tokens / cp_size, 1));
  return plan;
}

#if defined(__CUDACC__)

// Every rule for lengths, every length looked at by one thread of the grid. `thread` counts through the grid of
// `threads`. Neighbours are compared before they are subtracted: the difference of any two may not fit.
__device__ __forceinline__ void check_lengths(Helper helper, const Lengths& lengths, int64_t divisor,
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

__device__ __forceinline__ void check_real(Helper helper, const Lengths& real, const Lengths& lengths, int64_t thread,
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
  if (plan.kind == MapKind::span || plan.kind == MapKind::index) return;
  int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread > plan.lengths.sequences) return;
  int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  check_lengths(plan.helper, plan.lengths, plan.divisor, plan.tail_divisor, plan.bound, plan.from_zero, thread,
                threads);
  if (plan.kind == MapKind::valid) check_real(plan.helper, plan.real, plan.lengths, thread, threads);
}

template <typename N>
__device__ __forceinline__ N quotient(N a, N b) {  // of numbers that are not negative, with right lengths
  if constexpr (sizeof(N) == 4)
    return static_cast<N>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
  else
    return a / b;
}

// The result of a row's search in the lengths.
template <typename N>
__device__ __forceinline__ N key_of(const RowPlan& plan, MapKind kind, N row) {
  switch (kind) {
    case MapKind::partition:
      return row * plan.cp_size;
    case MapKind::to_rank_order:
      return (row - plan.by_slice.of(row) * static_cast<N>(plan.by_slice.divisor)) * plan.cp_size;
    case MapKind::half:
      return row * 2;
    default:
      return row;
  }
}

// Row `local` of a rank's slice -> its row in the whole buffer.
template <typename N>
__device__ __forceinline__ N slice_row(const RowPlan& plan, N local, N rank, const Place<N>& place, bool tail) {
  N offset = local - plan.by_cp_size.of(place.begin);
  if (tail) return place.begin + rank * plan.by_cp_size.of(static_cast<N>(plan.bound) - place.begin) + offset;
  N chunk = plan.by_cp_size.of(place.end - place.begin) / 2;
  return offset < chunk ? place.begin + rank * chunk + offset
                        : place.begin + (static_cast<N>(2) * plan.cp_size - 1 - rank) * chunk + (offset - chunk);
}

// Row of sequence order -> its row in CP rank order.
template <typename N>
__device__ __forceinline__ N rank_order_row(const RowPlan& plan, N row, const Place<N>& place, bool tail) {
  N slice = static_cast<N>(plan.by_slice.divisor), start = plan.by_cp_size.of(place.begin), offset = row - place.begin;
  if (tail) {
    N part = plan.by_cp_size.of(static_cast<N>(plan.bound) - place.begin), rank = quotient(offset, part);
    return rank * slice + start + offset - rank * part;
  }
  N chunk = plan.by_cp_size.of(place.end - place.begin) / 2, number = quotient(offset, chunk),
    rest = offset - number * chunk;
  return number < plan.cp_size ? number * slice + start + rest
                               : (static_cast<N>(2) * plan.cp_size - 1 - number) * slice + start + chunk + rest;
}

// The map's row, from the place of its key; -1 for none.
template <typename N>
__device__ __forceinline__ int64_t row_at(const RowPlan& plan, MapKind kind, N row, const Place<N>& place) {
  if (place.sequence < 0) return -1;
  bool tail = place.sequence == sequences_of(plan.lengths);
  int64_t result = -1;
  switch (kind) {
    case MapKind::partition:
      result = slice_row<N>(plan, row, plan.cp_rank, place, tail);
      break;
    case MapKind::to_rank_order: {
      N rank = plan.by_slice.of(row);
      result = slice_row<N>(plan, row - rank * static_cast<N>(plan.by_slice.divisor), rank, place, tail);
      break;
    }
    case MapKind::to_sequence_order:
      result = rank_order_row<N>(plan, row, place, tail);
      break;
    case MapKind::half: {
      N size = (tail ? static_cast<N>(plan.bound) : place.end) - place.begin;
      result = place.begin + plan.half * (size / 2) + row - place.begin / 2;
      break;
    }
    case MapKind::valid: {
      if (tail) return -1;
      N real = length_at<N>(plan.real, place.sequence + 1) - length_at<N>(plan.real, place.sequence);
      result = row - place.begin < real ? row : -1;
      break;
    }
    default:
      break;
  }
  return result < plan.bound ? result : -1;  // out of bounds: check_plan says why
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
  if (kind == MapKind::span) return {plan.set.first + row, 0, 0};
  if (kind == MapKind::index) {
    int64_t result = plan.set.wide ? __ldg(static_cast<const int64_t*>(plan.set.index) + row)
                                   : __ldg(static_cast<const int32_t*>(plan.set.index) + row);
    if (result < 0 || result >= plan.bound) {
      fault(plan.helper, Rule::index, row, result, plan.bound);
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
