// Merges whose rows the copy engine brings to shared memory and takes back: one warp a tile of 8 tokens and up to 256
// elements of each, so that while some warps wait for memory the others compute. The weights come while the rows do.
#pragma once

#include "engine.cuh"
#include "merger.cuh"

namespace cp {
namespace cuda {

constexpr int kRun = 256;      // elements of a token in a tile, at most
constexpr int kPairHeads = 4;  // of a tile, at most: a lane has one token of one head

// Whether heads are contiguous, the engine can fetch them, and `heads` of them make a copy that is large enough.
inline bool engine_takes(const Values& v, int64_t heads) {
  uint64_t bytes =
      reinterpret_cast<uintptr_t>(v.data) | static_cast<uint64_t>((v.row_stride | v.dim) * size_of(v.dtype));
  return v.head_stride == v.dim && bytes % 16 == 0 && heads * v.dim * size_of(v.dtype) >= kBulkLeast;
}

// Heads of a tile; 0: not for this kernel.
inline int64_t bulk_heads(const Values& out, const Values& step, const Stream& stream) {
  if (out.dim == 0 || out.dim > kRun || !has_engine(stream)) return 0;
  const int64_t heads = std::min({kRun / out.dim, int64_t(kPairHeads), out.heads});
  return engine_takes(out, heads) && engine_takes(step, heads) ? heads : 0;
}

#if defined(__CUDACC__)

// E: a way in vectors, `Fast`.
template <typename E>
__global__ void __launch_bounds__(kWarp) merge_bulk_kernel(const __grid_constant__ MergeJob job) {
#if __CUDA_ARCH__ >= 900
  using To = typename E::To;
  using From = typename E::From;
  __shared__ __align__(128) To sums[kTokens * kRun];
  __shared__ __align__(128) From parts[kTokens * kRun];
  __shared__ Factors<float> factors[kWarp];
  __shared__ __align__(8) uint64_t counted;
  const int lane = threadIdx.x;
  prefetch_lengths(job.plan);
  const Arrival arrival(&counted);
  if (lane == 0) arrival.make();

  const Tile tile(job, blockIdx.x);
  const int dim = static_cast<int>(job.out.dim), run = tile.heads * dim;
  const Token mine = token_of_lane(job, tile, lane);
  const bool moves = lane < kTokens && mine.out >= 0;
  const uint32_t tokens = __popc(__ballot_sync(kAllLanes, moves));
  if (lane == 0) arrival.expect(tokens * run * static_cast<uint32_t>(sizeof(To) + sizeof(From)));
  __syncwarp();
  To* out = static_cast<To*>(job.out.data) + mine.out + tile.first_head * dim;
  const uint32_t place = shared_address(sums + lane * run);
  if (moves) {
    engine_load(place, out, run * sizeof(To), arrival);
    const From* step = static_cast<const From*>(job.step.data) + mine.step + tile.first_head * dim;
    engine_load(shared_address(parts + lane * run), step, run * sizeof(From), arrival);
  }

  const int pair_head = lane / kTokens, pair_token = lane % kTokens;
  Token token = mine;
  token.out = __shfl_sync(kAllLanes, mine.out, pair_token);
  token.lse = __shfl_sync(kAllLanes, mine.lse, pair_token);
  token.step_lse = __shfl_sync(kAllLanes, mine.step_lse, pair_token);
  if (pair_head < tile.heads) factors[lane] = factors_of<float>(job, token, tile.first_head + pair_head);
  check_plan(job.plan);
  __syncwarp();
  arrival.wait();

  const int per_head = static_cast<int>(job.by_vectors.divisor), vectors = kTokens * tile.heads * per_head;
#pragma unroll 4
  for (int vector = lane; vector < vectors; vector += kWarp) {
    const int number = job.by_vectors.of(vector);  // token by token, head by head
    const int i = job.heads == tile.heads ? job.by_heads.of(number) : number / tile.heads;
    const Factors<float> f = factors[(number - i * tile.heads) * kTokens + i];
    const int at = vector * E::kVector;
    if (!f.change_nothing())
      E::store(sums, at, f.applied(E::template load<To>(sums, at), E::template load<From>(parts, at)));
  }
  written();
  __syncwarp();
  if (moves) {
    engine_store(out, place, run * sizeof(To));
    finish_stores();
  }
#else
  __trap();  // the host asks for this kernel on newer GPUs alone
#endif
}

#endif

}  // namespace cuda
}  // namespace cp
