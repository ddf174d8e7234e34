// merge, merge_halves, out_correction: out = out * kept + step * weight, with weights from two log-sum-exps.
//
// A block takes 8 tokens and up to 8 heads: blocks are many, so that the last wave of them is short. An LSE is [h, t],
// so its threads first read it with the tokens side by side (8 floats are a sector of memory), leave the weights in
// shared memory, and then stream out and step with the elements side by side. One thread alone reads an LSE and writes
// the merged one, in between nobody looks.
#include "entry_points.h"
#include "lse_math.h"
#include "row_plan.cuh"
#include "typed.cuh"

namespace cp {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 8;
constexpr int kHeads = 8;
constexpr int kUnroll = 4;

enum class Mode : int32_t { merge, correct };

struct MergeJob {
  RowPlan plan;
  Mode mode;
  Values out, step;
  Lse lse, step_lse;
  int32_t head_blocks, heads;  // of a block
  Divider by_head_blocks, by_heads, by_vectors;
};

template <typename Wide>
__device__ __forceinline__ Wide load_lse(const Lse& lse, int64_t at) {
  return lse.dtype == Dtype::f32 ? static_cast<Wide>(static_cast<const float*>(lse.data)[at])
                                 : static_cast<Wide>(static_cast<const double*>(lse.data)[at]);
}

template <typename Wide>
__device__ __forceinline__ void store_lse(const Lse& lse, int64_t at, Wide x) {
  if (lse.dtype == Dtype::f32)
    static_cast<float*>(lse.data)[at] = static_cast<float>(x);
  else
    static_cast<double*>(lse.data)[at] = static_cast<double>(x);
}

// Where a token's rows lie, in elements; -1: no such token.
struct Token {
  int64_t out, step, lse, step_lse;
};

// For row `row` of the step, whose row of out is target.row.
__device__ __forceinline__ Token token_of(const MergeJob& job, int64_t row, const Target& target) {
  const bool of_lengths = job.plan.kind == MapKind::half || job.plan.kind == MapKind::valid;
  // Rows behind the last sequence are left alone.
  if (target.row < 0 || (of_lengths && target.sequence >= sequences_of(job.plan.lengths))) return {-1, 0, 0, 0};
  int64_t lse_row = target.row, step_row = row, sequence = 0;
  if (!job.lse.packed) {
    sequence = target.sequence;
    lse_row -= target.begin;
    step_row -= job.plan.kind == MapKind::half ? target.begin / 2 : target.begin;
    if (lse_row >= job.lse.rows || step_row >= job.step_lse.rows) return {-1, 0, 0, 0};
  }
  return {target.row * job.out.row_stride, row * job.step.row_stride,
          sequence * job.lse.sequence_stride + lse_row * job.lse.row_stride,
          sequence * job.step_lse.sequence_stride + step_row * job.step_lse.row_stride};
}

template <typename E>
__global__ void __launch_bounds__(kThreads, 4) merge_kernel(const __grid_constant__ MergeJob job) {
  using Wide = typename E::Wide;
  constexpr Wide kUnread = -1;  // for a weight: count the value as 0, and do not look at it, it may be NaN
  __shared__ Token tokens[kTokens];
  __shared__ Wide kept[kTokens * kHeads], weight[kTokens * kHeads];
  const int64_t tile = blockIdx.x / job.head_blocks;
  const int first_head = static_cast<int>(blockIdx.x - tile * job.head_blocks) * job.heads;
  const int heads = min(job.heads, static_cast<int>(job.out.heads) - first_head);
  const int64_t first = tile * kTokens;
  if (threadIdx.x < kWarp) {
    const int64_t row = min(first + min(static_cast<int>(threadIdx.x), kTokens - 1), job.plan.count - 1);
    const Target target = look_up<false>(job.plan, row, threadIdx.x);
    if (threadIdx.x < kTokens) {
      tokens[threadIdx.x] = token_of(job, row, target);
      if (first + threadIdx.x >= job.plan.count) tokens[threadIdx.x].out = -1;
    }
  }
  __syncthreads();

  const int pair = threadIdx.x;  // token pair % 8, head pair / 8
  if (pair < heads * kTokens) {
    const Token token = tokens[pair % kTokens];
    const int64_t head = first_head + pair / kTokens;
    Wide keep = 1, take = kUnread;  // nothing happens
    if (token.out >= 0) {
      const int64_t at = token.lse + head * job.lse.head_stride;
      const Wide lse = load_lse<Wide>(job.lse, at);
      const Wide step = load_lse<Wide>(job.step_lse, token.step_lse + head * job.step_lse.head_stride);
      if (job.mode == Mode::merge) {
        const Weights<Wide> w = merge_weights<Wide>(lse, step);
        store_lse<Wide>(job.lse, at, w.lse);
        keep = w.reads_out ? w.kept : kUnread;
        if (w.reads_step) take = w.step;
      } else if (!is_empty(step)) {
        take = correction_weight<Wide>(lse, step);
      }
    }
    kept[pair] = keep;
    weight[pair] = take;
  }
  __syncthreads();

  constexpr int kVector = E::kVector;
  const int per_head = static_cast<int>(job.by_vectors.divisor);
  const int vectors = kTokens * heads * per_head;
  for (int base = threadIdx.x; base < vectors; base += kThreads * kUnroll) {
    decltype(E::load_to(job.out, 0)) sum[kUnroll], part[kUnroll];
    int64_t at[kUnroll];
    Wide keep[kUnroll], take[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int vector = base + u * kThreads;
      at[u] = -1;
      if (vector < vectors) {
        const int number = job.by_vectors.of(vector);  // token by token, head by head
        const int i = job.heads == heads ? job.by_heads.of(number) : number / heads, head = number - i * heads;
        const int offset = (vector - number * per_head) * kVector;
        keep[u] = kept[head * kTokens + i];
        take[u] = weight[head * kTokens + i];
        if (!(keep[u] == Wide(1) && take[u] == kUnread)) {
          const Token token = tokens[i];
          at[u] = token.out + (first_head + head) * job.out.head_stride + offset;
          if (keep[u] != kUnread) sum[u] = E::load_to(job.out, at[u]);
          if (take[u] != kUnread) {
            part[u] = E::load_from(job.step, token.step + (first_head + head) * job.step.head_stride + offset);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at[u] >= 0) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          Wide x = keep[u] != kUnread ? keep[u] * sum[u].x[k] : Wide(0);
          if (take[u] != kUnread) x += take[u] * part[u].x[k];
          sum[u].x[k] = x;
        }
        E::store_to(job.out, at[u], sum[u]);
      }
    }
  }
  check_plan(job.plan);
}

void launch(const RowPlan& plan, Mode mode, const Values& out, const Values& step, const Lse& lse, const Lse& step_lse,
            Stream stream, const char* name) {
  if (plan.count == 0 || out.heads == 0) return;
  bool doubles = lse.dtype == Dtype::f64 || step_lse.dtype == Dtype::f64;
  visit_elements(out, step, doubles, [&](auto elements) {
    using E = decltype(elements);
    MergeJob job{plan, mode, out, step, lse, step_lse, 0, 0, {}, {}, {}};
    job.head_blocks = static_cast<int32_t>(divide_up(out.heads, kHeads));
    job.heads = static_cast<int32_t>(divide_up(out.heads, job.head_blocks));
    job.head_blocks = static_cast<int32_t>(divide_up(out.heads, job.heads));
    job.by_heads = Divider::by(job.heads);
    job.by_vectors = Divider::by(std::max<int64_t>(out.dim / E::kVector, 1));
    if (out.dim == 0) job.by_vectors.divisor = 0;  // LSEs alone
    int64_t blocks = divide_up(plan.count, kTokens) * job.head_blocks;
    merge_kernel<E><<<grid_of(blocks, name), kThreads, 0, stream_of(stream)>>>(job);
  });
  check_launch(name);
}

}  // namespace

void merge(Values out, Lse lse, Values step, Lse step_lse, RowSet rows, Stream stream) {
  launch(plan_rows(Helper::merge, rows, true), Mode::merge, out, step, lse, step_lse, stream, "merge");
}

void merge_halves(Values out, Lse lse, Values step, Lse step_lse, Lengths lengths, Stream stream) {
  RowPlan plan = plan_lengths(Helper::merge_halves, MapKind::half, lengths, step.rows, out.rows);
  plan.half = 1;
  launch(plan, Mode::merge, out, step, lse, step_lse, stream, "merge_halves");
}

void out_correction(Values out, Values step, Lse lse, Lse step_lse, Lengths lengths, bool only_second_half,
                    Stream stream) {
  RowPlan plan = plan_lengths(Helper::out_correction, only_second_half ? MapKind::half : MapKind::valid, lengths,
                              step.rows, out.rows);
  plan.half = 1;
  plan.real = lengths;  // every row of a sequence
  plan.from_zero = true;
  launch(plan, Mode::correct, out, step, lse, step_lse, stream, "out_correction");
}

}  // namespace cuda
}  // namespace cp
