// Finding sequences: a whole warp searches once for its first row, and then finds the others in a window of lengths
// that lies in registers.
//
// A search is 32-ary (or 128-ary, kEntries of a lane at once): of 100,000 sequences it reads four times in a row (three
// times), where one thread would need 17. N is the type of row numbers: int32_t if everything fits.
// Reads stay inside `lengths` for any values.
#pragma once

#include <climits>

#include "launch.cuh"

namespace cp {
namespace cuda {

// Sequences are counted in 32 bits: plan_lengths refuses more.
__device__ __forceinline__ int32_t sequences_of(const Lengths& lengths) {
  return static_cast<int32_t>(lengths.sequences);
}

template <typename N>
__device__ __forceinline__ N length_at(const Lengths& lengths, int32_t s) {
  return lengths.wide ? static_cast<N>(__ldg(static_cast<const int64_t*>(lengths.data) + s))
                      : static_cast<N>(__ldg(static_cast<const int32_t*>(lengths.data) + s));
}

// 32 * kEntries consecutive lengths: entry[k] of a lane is number first + 32 k + lane; past the end, the largest number
// there is.
template <typename N, int kEntries>
struct Window {
  static constexpr int kSpan = kEntries * kWarp;
  int32_t first;
  N entry[kEntries];
};

template <typename N, int kEntries>
__device__ __forceinline__ Window<N, kEntries> window_at(const Lengths& lengths, int32_t first, int lane) {
  Window<N, kEntries> window{first, {}};
#pragma unroll
  for (int k = 0; k < kEntries; ++k) {
    int32_t at = first + k * kWarp + lane;
    window.entry[k] = static_cast<N>(sizeof(N) == 4 ? INT_MAX : INT64_MAX);
    if (at <= sequences_of(lengths)) window.entry[k] = length_at<N>(lengths, at);
  }
  return window;
}

// A window that holds the sequence of `row`, or begins after it only if all sequences do. All lanes ask for the same
// row.
template <typename N, int kEntries>
__device__ __forceinline__ Window<N, kEntries> seek(const Lengths& lengths, N row, int lane) {
  constexpr int kSpan = Window<N, kEntries>::kSpan;
  int32_t low = 0, count = sequences_of(lengths) + 1;
  while (count > (low == 0 ? kSpan : kSpan / 4)) {
    int32_t step = static_cast<int32_t>((static_cast<uint32_t>(count) + kSpan - 1) / kSpan);
    int passed = 0;
#pragma unroll
    for (int k = 0; k < kEntries; ++k) {
      uint32_t offset = static_cast<uint32_t>(k * kWarp + lane) * static_cast<uint32_t>(step);
      bool before =
          offset < static_cast<uint32_t>(count) && length_at<N>(lengths, low + static_cast<int32_t>(offset)) <= row;
      passed += __popc(__ballot_sync(kAllLanes, before));
    }
    int32_t ahead = passed > 0 ? (passed - 1) * step : 0;
    low += ahead;
    count = min(step, count - ahead);
  }
  return window_at<N, kEntries>(lengths, low, lane);
}

// The sequence that holds a row: the last one that begins at or before it, and so not an empty one.
template <typename N>
struct Place {
  int32_t sequence;  // -1 in front of all sequences, sequences_of(lengths) in the tail
  N begin, end;      // end means nothing in the tail
};

// A lane's search alone, without its neighbours.
template <typename N>
static __device__ __noinline__ Place<N> find_alone(const Lengths& lengths, N row) {
  int32_t low = 0, high = sequences_of(lengths) + 1;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (length_at<N>(lengths, middle) <= row)
      low = middle + 1;
    else
      high = middle;
  }
  int32_t s = low - 1;
  return {s, s < 0 ? N(0) : length_at<N>(lengths, s),
          s < 0 || s == sequences_of(lengths) ? N(0) : length_at<N>(lengths, s + 1)};
}

// One row, the same in all lanes.
template <typename N, int kEntries>
__device__ __forceinline__ Place<N> find_one(const Lengths& lengths, const Window<N, kEntries>& window, N row) {
  int passed = 0;
#pragma unroll
  for (int k = 0; k < kEntries; ++k) passed += __popc(__ballot_sync(kAllLanes, window.entry[k] <= row));
  int at = passed - 1;
  int32_t s = window.first + at;
  if (at < 0 || (at == window.kSpan - 1 && s < sequences_of(lengths))) return find_alone<N>(lengths, row);
  N begin = 0, end = 0;
#pragma unroll
  for (int k = 0; k < kEntries; ++k) {
    N here = __shfl_sync(kAllLanes, window.entry[k], at & (kWarp - 1));
    N next = __shfl_sync(kAllLanes, window.entry[k], (at + 1) & (kWarp - 1));
    if (at / kWarp == k) begin = here;
    if ((at + 1) / kWarp == k) end = next;
  }
  return {s, begin, end};
}

// Each lane its own row, not in front of the window.
template <typename N, int kEntries>
__device__ __forceinline__ Place<N> find_each(const Lengths& lengths, const Window<N, kEntries>& window, N row) {
  // Which of the runs of 32 a lane's row is in, and where in it.
  int k_at = 0;
#pragma unroll
  for (int k = 1; k < kEntries; ++k) k_at += __shfl_sync(kAllLanes, window.entry[k], 0) <= row;
  int at = 0;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    N probe = 0;
#pragma unroll
    for (int k = 0; k < kEntries; ++k) {
      N value = __shfl_sync(kAllLanes, window.entry[k], at + step);
      if (k == k_at) probe = value;
    }
    if (probe <= row) at += step;
  }
  N begin = 0, end = 0;
#pragma unroll
  for (int k = 0; k < kEntries; ++k) {
    N here = __shfl_sync(kAllLanes, window.entry[k], at);
    N next = __shfl_sync(kAllLanes, window.entry[k], (at + 1) & (kWarp - 1));
    if (k == k_at) begin = here;
    if (k == k_at + (at == kWarp - 1)) end = next;
  }
  int32_t s = window.first + k_at * kWarp + at;
  bool outside = begin > row || (k_at * kWarp + at == window.kSpan - 1 && s < sequences_of(lengths));
  return outside ? find_alone<N>(lengths, row) : Place<N>{s, begin, end};
}

}  // namespace cuda
}  // namespace cp
