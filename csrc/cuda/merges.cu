// Merges, and the kernel that merges in registers: blocks of 8 tokens and up to 8 heads,
// so that they are many and the last wave of them is short. Its threads first leave the weights in shared memory, one
// thread a token and head, and then stream out and step with the elements side by side.
#include "entry_points.h"
#include "include/merge_bulk.cuh"
#include "include/merger.cuh"

namespace cp {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 8;
constexpr int kUnroll = 4;

template <typename E>
__global__ void __launch_bounds__(kThreads, 4) merge_kernel(const __grid_constant__ MergeJob job) {
  using Wide = typename E::Wide;
  __shared__ Token tokens[kTokens];
  __shared__ Factors<Wide> factors[kTokens * kHeads];  // token pair % 8, head pair / 8
  const Tile tile(job, blockIdx.x);
  const int pair = threadIdx.x;
  if (pair < kWarp) {
    const Token token = token_of_lane(job, tile, pair);
    if (pair < kTokens) tokens[pair] = token;
  }
  __syncthreads();
  if (pair < tile.heads * kTokens) {
    factors[pair] = factors_of<Wide>(job, tokens[pair % kTokens], tile.first_head + pair / kTokens);
  }
  __syncthreads();

  constexpr int kVector = E::kVector;
  constexpr Wide kUnread = Factors<Wide>::kUnread;
  const int per_head = static_cast<int>(job.by_vectors.divisor);
  const int vectors = kTokens * tile.heads * per_head;
  for (int base = threadIdx.x; base < vectors; base += kThreads * kUnroll) {
    decltype(E::load_to(job.out, 0)) sum[kUnroll], part[kUnroll];
    int64_t at[kUnroll];
    Factors<Wide> f[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int vector = base + u * kThreads;
      at[u] = -1;
      if (vector < vectors) {
        const int number = job.by_vectors.of(vector);  // token by token, head by head
        const int i = job.heads == tile.heads ? job.by_heads.of(number) : number / tile.heads;
        const int head = number - i * tile.heads, offset = (vector - number * per_head) * kVector;
        f[u] = factors[head * kTokens + i];
        if (!f[u].change_nothing()) {
          const Token token = tokens[i];
          at[u] = token.out + (tile.first_head + head) * job.out.head_stride + offset;
          if (f[u].keep != kUnread) sum[u] = E::load_to(job.out, at[u]);
          if (f[u].take != kUnread) {
            part[u] = E::load_from(job.step, token.step + (tile.first_head + head) * job.step.head_stride + offset);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at[u] >= 0) E::store_to(job.out, at[u], f[u].applied(sum[u], part[u]));
    }
  }
  check_plan(job.plan);
}

}  // namespace

void merge(Values out, Lse lse, Values step, Lse step_lse, RowRule rows, bool final, Stream stream) {
  const RowPlan plan = plan_of(rows, true);
  if (plan.count == 0 || out.heads == 0) return;
  bool doubles = lse.dtype == Dtype::f64 || step_lse.dtype == Dtype::f64;
  visit_elements(out, step, doubles, [&](auto elements) {
    using E = decltype(elements);
    MergeJob job{plan, final, out, step, lse, step_lse, 0, 0, {}, {}};
    job.by_vectors = Divider::by(std::max<int64_t>(out.dim / E::kVector, 1));
    if (out.dim == 0) job.by_vectors.divisor = 0;  // LSEs alone
    if constexpr (E::kVector > 1) {
      if (const int64_t heads = bulk_heads(out, step, stream); heads > 0) {
        job.cut(heads);
        merge_bulk_kernel<E><<<grid_of(job.tiles(), rows.helper), kWarp, 0, stream_of(stream)>>>(job);
        return;
      }
    }
    job.cut(kHeads);
    merge_kernel<E><<<grid_of(job.tiles(), rows.helper), kThreads, 0, stream_of(stream)>>>(job);
  });
  check_launch(rows.helper);
}

}  // namespace cuda
}  // namespace cp
