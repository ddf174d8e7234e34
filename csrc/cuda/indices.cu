// The table of a row map, one number a row.
#include "entry_points.h"
#include "include/row_plan.cuh"

namespace cp {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSteps = 4;                 // of 32 rows, with one search
constexpr int kRows = kThreads * kSteps;  // of a block

// A warp's rows, all lanes at once.
template <typename I, typename N, MapKind kKind>
__device__ __forceinline__ void write_rows(const RowPlan& plan, I* out) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows + warp * (kSteps * kWarp);
  if (first >= plan.count) return;
  const MapKind kind = kKind == MapKind::any ? plan.kind : kKind;
  const auto window = seek<N, 4>(plan.lengths, key_of<N>(plan, kind, static_cast<N>(first)), lane);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t wanted = first + k * kWarp + lane, row = min(wanted, plan.count - 1);
    const Place<N> place = find_each<N>(plan.lengths, window, key_of<N>(plan, kind, static_cast<N>(row)));
    if (wanted < plan.count) out[wanted] = static_cast<I>(row_at<N>(plan, kind, static_cast<N>(row), place));
  }
}

template <typename I, typename N, MapKind kKind>
__global__ void __launch_bounds__(kThreads) indices_kernel(const __grid_constant__ RowPlan plan, I* out) {
  write_rows<I, N, kKind>(plan, out);
  check_plan(plan);
}

template <typename I>
void launch(I* out, const RowPlan& plan, Stream stream) {
  auto kernel = indices_kernel<I, int64_t, MapKind::any>;
  if (plan.narrow) {
    kernel = plan.kind == MapKind::slice ? indices_kernel<I, int32_t, MapKind::slice>
                                         : indices_kernel<I, int32_t, MapKind::any>;
  }
  const unsigned grid = grid_of(divide_up(plan.count, kRows), plan.helper);
  kernel<<<grid, kThreads, 0, stream_of(stream)>>>(plan, out);
  check_launch(plan.helper);
}

}  // namespace

void row_indices(void* out, RowRule rows, Stream stream) {
  if (rows.count == 0) return;
  if (rows.lengths.wide)
    launch(static_cast<int64_t*>(out), plan_of(rows, false), stream);
  else
    launch(static_cast<int32_t*>(out), plan_of(rows, false), stream);
}

}  // namespace cuda
}  // namespace cp
