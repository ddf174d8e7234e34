// partition_indices, rank_lengths, pad_sequences: small results, one value a token or a sequence.
#include "entry_points.h"
#include "row_plan.cuh"

namespace cp {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSteps = 4;                 // of 32 rows, with one search
constexpr int kRows = kThreads * kSteps;  // of a block

// Calls f(row, place) for the rows of this warp, all lanes at once; lanes past `count` get the last row and active
// false.
template <typename N, MapKind kKind, typename F>
__device__ __forceinline__ void for_rows(const RowPlan& plan, F f) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows + warp * (kSteps * kWarp);
  if (first >= plan.count) return;
  const auto window = seek<N, 4>(plan.lengths, key_of<N>(plan, kKind, static_cast<N>(first)), lane);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t wanted = first + k * kWarp + lane, row = min(wanted, plan.count - 1);
    const Place<N> place = find_each<N>(plan.lengths, window, key_of<N>(plan, kKind, static_cast<N>(row)));
    if (wanted < plan.count) f(static_cast<N>(row), place);
  }
}

template <typename I, typename N>
__global__ void __launch_bounds__(kThreads) partition_indices_kernel(const __grid_constant__ RowPlan plan, I* out) {
  for_rows<N, MapKind::partition>(plan, [&](N row, const Place<N>& place) {
    out[row] = static_cast<I>(row_at<N>(plan, MapKind::partition, row, place));
  });
  check_plan(plan);
}

template <typename I, typename N>
__global__ void __launch_bounds__(kThreads) pad_sequences_kernel(const __grid_constant__ RowPlan plan, I* out,
                                                                 const I* x, int64_t stride, int64_t tokens, I fill) {
  for_rows<N, MapKind::valid>(plan, [&](N row, const Place<N>& place) {
    I value = fill;
    if (place.sequence >= 0) {
      const bool tail = place.sequence == sequences_of(plan.lengths);
      const int64_t begin = length_at<int64_t>(plan.real, place.sequence), offset = row - place.begin;
      const int64_t size = (tail ? tokens : length_at<int64_t>(plan.real, place.sequence + 1)) - begin;
      if (offset >= 0 && offset < size && begin >= 0 && begin < tokens - offset) value = x[(begin + offset) * stride];
    }
    out[row] = value;
  });
  check_plan(plan);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const int64_t end = length_at<int64_t>(plan.real, sequences_of(plan.real));
    if (end > tokens) fault(plan.helper, Rule::end, plan.real.sequences, end, tokens);
  }
}

constexpr int kScan = 1024;

// One block: an inclusive sum over 1,024 sequences at a time, with the sum so far carried along.
template <typename I>
__global__ void __launch_bounds__(kScan)
    rank_lengths_kernel(I* out, Lengths real, Lengths lengths, Divider by_chunks, int64_t early, int64_t late) {
  __shared__ int64_t sums[kScan / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t carried = 0;
  if (threadIdx.x == 0) out[0] = 0;
  for (int64_t first = 0; first < real.sequences; first += kScan) {
    const int32_t s = static_cast<int32_t>(first + threadIdx.x);
    int64_t held = 0;
    if (s < real.sequences) {
      const int64_t tokens = length_at<int64_t>(real, s + 1) - length_at<int64_t>(real, s);
      const int64_t slots = length_at<int64_t>(lengths, s + 1) - length_at<int64_t>(lengths, s);
      const int64_t chunk =
          slots >= 0 && slots <= INT_MAX ? by_chunks.of(static_cast<int32_t>(slots)) : by_chunks.of(slots);
      if (early >= 0) held += min(max(tokens - early * chunk, int64_t(0)), chunk);
      if (late >= 0) held += min(max(tokens - late * chunk, int64_t(0)), chunk);
    }
    int64_t sum = held;  // of the warp's lanes up to this one
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t before = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += before;
    }
    if (lane == kWarp - 1) sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
      int64_t total = sums[lane];
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const int64_t before = __shfl_up_sync(kAllLanes, total, distance);
        if (lane >= distance) total += before;
      }
      sums[lane] = total;
    }
    __syncthreads();
    if (s < real.sequences) out[s + 1] = static_cast<I>(carried + (warp > 0 ? sums[warp - 1] : 0) + sum);
    carried += sums[kScan / kWarp - 1];
    __syncthreads();
  }
  check_lengths(Helper::rank_lengths, lengths, by_chunks.divisor, 1, INT64_MAX, true, threadIdx.x, kScan);
  check_real(Helper::rank_lengths, real, lengths, threadIdx.x, kScan);
}

template <typename I>
void launch_pad(const RowPlan& plan, void* out, const void* x, int64_t stride, int64_t tokens, int64_t fill,
                Stream stream) {
  auto kernel = plan.narrow ? pad_sequences_kernel<I, int32_t> : pad_sequences_kernel<I, int64_t>;
  kernel<<<grid_of(divide_up(plan.count, kRows), "pad_sequences"), kThreads, 0, stream_of(stream)>>>(
      plan, static_cast<I*>(out), static_cast<const I*>(x), stride, tokens, static_cast<I>(fill));
}

}  // namespace

void partition_indices(void* out, Lengths lengths, int64_t total_tokens, int64_t cp_size, int64_t cp_rank,
                       Stream stream) {
  RowPlan plan = plan_lengths(Helper::partition_indices, MapKind::partition, lengths, total_tokens / cp_size,
                              total_tokens, cp_size, cp_rank);
  if (plan.count == 0) return;
  unsigned grid = grid_of(divide_up(plan.count, kRows), "partition_indices");
  cudaStream_t on = stream_of(stream);
  if (lengths.wide) {
    auto kernel = plan.narrow ? partition_indices_kernel<int64_t, int32_t> : partition_indices_kernel<int64_t, int64_t>;
    kernel<<<grid, kThreads, 0, on>>>(plan, static_cast<int64_t*>(out));
  } else {
    auto kernel = plan.narrow ? partition_indices_kernel<int32_t, int32_t> : partition_indices_kernel<int32_t, int64_t>;
    kernel<<<grid, kThreads, 0, on>>>(plan, static_cast<int32_t*>(out));
  }
  check_launch("partition_indices");
}

void rank_lengths(void* out, Lengths real, Lengths lengths, int64_t cp_size, int64_t cp_rank, bool first_half,
                  bool second_half, Stream stream) {
  if (real.sequences > INT_MAX - 2 * kScan) throw std::runtime_error("ValueError: more than 2^31 - 2048 sequences");
  Divider by_chunks = Divider::by(2 * cp_size);
  int64_t early = first_half ? cp_rank : -1, late = second_half ? 2 * cp_size - 1 - cp_rank : -1;
  cudaStream_t on = stream_of(stream);
  if (real.wide) {
    rank_lengths_kernel<<<1, kScan, 0, on>>>(static_cast<int64_t*>(out), real, lengths, by_chunks, early, late);
  } else {
    rank_lengths_kernel<<<1, kScan, 0, on>>>(static_cast<int32_t*>(out), real, lengths, by_chunks, early, late);
  }
  check_launch("rank_lengths");
}

void pad_sequences(void* out, const void* x, int64_t item, int64_t stride, int64_t tokens, Lengths real,
                   Lengths lengths, int64_t padded_tokens, int64_t fill, Stream stream) {
  RowPlan plan = plan_lengths(Helper::pad_sequences, MapKind::valid, lengths, padded_tokens, padded_tokens);
  plan.real = real;
  plan.from_zero = true;
  if (plan.count == 0) return;
  switch (item) {
    case 8:
      launch_pad<int64_t>(plan, out, x, stride, tokens, fill, stream);
      break;
    case 4:
      launch_pad<int32_t>(plan, out, x, stride, tokens, fill, stream);
      break;
    case 2:
      launch_pad<int16_t>(plan, out, x, stride, tokens, fill, stream);
      break;
    default:
      launch_pad<int8_t>(plan, out, x, stride, tokens, fill, stream);
  }
  check_launch("pad_sequences");
}

}  // namespace cuda
}  // namespace cp
