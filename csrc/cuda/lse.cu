// lse_correction and read_second_half_lse: log-sum-exps of the second halves, a thread a row, its warp's rows side by
// side.
#include "entry_points.h"
#include "lse_math.h"
#include "row_plan.cuh"

namespace cp {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 8;  // of a block

struct LseJob {
  RowPlan plan;        // packed: rows of the half
  Lse lse, half;       // the whole one, and the step's or the result
  int64_t row_blocks;  // blocks over the rows; the grid has this number for every kHeads heads
};

// Rows and places of one thread: element `whole` of lse and `part` of half, without the head's share.
struct Spot {
  int64_t whole, part;
  bool inside, seen;  // there is a row; it belongs to a sequence
};

__device__ __forceinline__ Spot spot_of(const LseJob& job) {
  const int64_t wanted = blockIdx.x % job.row_blocks * kThreads + threadIdx.x;
  const int64_t row = min(wanted, job.plan.count - 1);
  if (job.lse.packed) {
    const Target target = look_up<false>(job.plan, row, threadIdx.x % kWarp);
    const bool seen = target.row >= 0 && target.sequence < sequences_of(job.plan.lengths);
    return {target.row * job.lse.row_stride, row * job.half.row_stride, wanted < job.plan.count, seen};
  }
  const int64_t sequence = row / job.half.rows, position = row - sequence * job.half.rows;
  const int32_t s = static_cast<int32_t>(sequence);
  const int64_t begin = length_at<int64_t>(job.plan.lengths, s);
  const int64_t half = (length_at<int64_t>(job.plan.lengths, s + 1) - begin) / 2;
  return {sequence * job.lse.sequence_stride + (half + position) * job.lse.row_stride,
          sequence * job.half.sequence_stride + position * job.half.row_stride, wanted < job.plan.count,
          position < half && half + position < job.lse.rows};
}

template <typename T>
__global__ void __launch_bounds__(kThreads) read_half_lse_kernel(const __grid_constant__ LseJob job) {
  const Spot spot = spot_of(job);
  const int64_t first = blockIdx.x / job.row_blocks * kHeads, last = min(first + kHeads, job.lse.heads);
  const T* lse = static_cast<const T*>(job.lse.data);
  T* out = static_cast<T*>(job.half.data);
  if (spot.inside) {
    for (int64_t head = first; head < last; ++head) {
      out[spot.part + head * job.half.head_stride] = spot.seen ? lse[spot.whole + head * job.lse.head_stride] : T(0);
    }
  }
  check_plan(job.plan);
}

template <typename To, typename From>
__global__ void __launch_bounds__(kThreads) lse_correction_kernel(const __grid_constant__ LseJob job) {
  using Wide = std::conditional_t<sizeof(To) == 8 || sizeof(From) == 8, double, float>;
  const Spot spot = spot_of(job);
  const int64_t first = blockIdx.x / job.row_blocks * kHeads, last = min(first + kHeads, job.lse.heads);
  To* lse = static_cast<To*>(job.lse.data);
  const From* step = static_cast<const From*>(job.half.data);
  if (spot.inside && spot.seen) {
    for (int64_t head = first; head < last; ++head) {
      const int64_t at = spot.whole + head * job.lse.head_stride;
      const Wide mine = static_cast<Wide>(step[spot.part + head * job.half.head_stride]);
      lse[at] = static_cast<To>(merge_lse<Wide>(static_cast<Wide>(lse[at]), mine));
    }
  }
  check_plan(job.plan);
}

template <typename Kernel>
void launch(Kernel kernel, Helper helper, const Lse& lse, const Lse& half, Lengths lengths, Stream stream,
            const char* name) {
  int64_t rows = half.packed ? half.rows : half.rows * lengths.sequences;
  RowPlan plan = plan_lengths(helper, MapKind::half, lengths, rows, lse.rows);
  plan.half = 1;
  // A padded LSE says nothing about the buffer, and the result of read_second_half_lse nothing about its tail.
  if (helper == Helper::read_second_half_lse || !lse.packed) plan.tail_divisor = 1;
  if (!lse.packed) plan.bound = INT64_MAX;
  if (rows == 0 || lse.heads == 0) return;
  LseJob job{plan, lse, half, divide_up(rows, kThreads)};
  int64_t blocks = job.row_blocks * divide_up(lse.heads, kHeads);
  kernel<<<grid_of(blocks, name), kThreads, 0, stream_of(stream)>>>(job);
  check_launch(name);
}

}  // namespace

void read_second_half_lse(Lse out, Lse lse, Lengths lengths, Stream stream) {
  auto kernel = lse.dtype == Dtype::f32 ? read_half_lse_kernel<float> : read_half_lse_kernel<double>;
  launch(kernel, Helper::read_second_half_lse, lse, out, lengths, stream, "read_second_half_lse");
}

void lse_correction(Lse lse, Lse step_lse, Lengths lengths, Stream stream) {
  auto kernel = lse_correction_kernel<float, float>;
  if (lse.dtype == Dtype::f64) {
    kernel =
        step_lse.dtype == Dtype::f64 ? lse_correction_kernel<double, double> : lse_correction_kernel<double, float>;
  } else if (step_lse.dtype == Dtype::f64) {
    kernel = lse_correction_kernel<float, double>;
  }
  launch(kernel, Helper::lse_correction, lse, step_lse, lengths, stream, "lse_correction");
}

}  // namespace cuda
}  // namespace cp
