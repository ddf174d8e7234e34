// Merging partial results, out = out * kept + step * weight with weights from two log-sum-exps: the arguments of a
// launch, the places of a token's rows, and its weights.
//
// Two kernels take the same job, a tile of 8 tokens and a few heads a block: merge_bulk.cuh lets the copy engine of
// Hopper and later bring the rows, merges.cu has the one that loads them to registers, for any shape and any GPU. An
// LSE is [h, t], so both read it with the tokens side by side (8 floats are a sector of memory), one thread a token and
// head: it alone reads that LSE and writes the merged one.
#pragma once

#include "lse_math.h"
#include "row_plan.cuh"
#include "typed.cuh"

namespace cp {
namespace cuda {

constexpr int kTokens = 8;  // of a tile

struct MergeJob {
  RowPlan plan;
  bool final;  // the LSE is that of all parts, and stays
  Values out, step;
  Lse lse, step_lse;
  int32_t head_blocks, heads;  // of a tile
  Divider by_heads, by_vectors;

  int64_t tiles() const { return divide_up(plan.count, kTokens) * head_blocks; }

  // At most `most` heads a tile, all tiles about the same.
  void cut(int64_t most) {
    head_blocks = static_cast<int32_t>(divide_up(out.heads, most));
    heads = static_cast<int32_t>(divide_up(out.heads, head_blocks));
    head_blocks = static_cast<int32_t>(divide_up(out.heads, heads));
    by_heads = Divider::by(heads);
  }
};

#if defined(__CUDACC__)

// A block's tokens and heads.
struct Tile {
  int64_t first_row;
  int first_head, heads;

  __device__ __forceinline__ Tile(const MergeJob& job, int64_t number) {
    const int64_t tile = number / job.head_blocks;
    first_row = tile * kTokens;
    first_head = static_cast<int>(number - tile * job.head_blocks) * job.heads;
    heads = min(job.heads, static_cast<int>(job.out.heads) - first_head);
  }
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

// The offsets of a token's rows, in elements; out is -1 if there is no such token.
struct Token {
  int64_t out, step, lse, step_lse;
};

// For row `row` of the step, whose row of out is target.row.
__device__ __forceinline__ Token token_of(const MergeJob& job, int64_t row, const Target& target) {
  if (target.row < 0) return {-1, 0, 0, 0};
  int64_t lse_row = target.row, step_row = row, sequence = 0;
  if (!job.lse.packed) {
    sequence = target.sequence;
    lse_row -= target.begin;
    step_row -= job.plan.kind == MapKind::half ? target.begin / 2 : target.begin;
    if (lse_row < 0 || lse_row >= job.lse.rows || step_row < 0 || step_row >= job.step_lse.rows) return {-1, 0, 0, 0};
  }
  return {target.row * job.out.row_stride, row * job.step.row_stride,
          sequence * job.lse.sequence_stride + lse_row * job.lse.row_stride,
          sequence * job.step_lse.sequence_stride + step_row * job.step_lse.row_stride};
}

// For a whole warp: lane i has token i of the tile; lanes past the last token have any valid one.
__device__ __forceinline__ Token token_of_lane(const MergeJob& job, const Tile& tile, int lane) {
  const int64_t row = min(tile.first_row + min(lane, kTokens - 1), job.plan.count - 1);
  Token token = token_of(job, row, look_up<false>(job.plan, row, lane));
  if (tile.first_row + lane >= job.plan.count) token.out = -1;
  return token;
}

// The factors of a token's head. kUnread: count the value as 0 without reading it, since it may be NaN.
template <typename Wide>
struct Factors {
  static constexpr Wide kUnread = -1;
  Wide keep, take;

  __device__ __forceinline__ bool change_nothing() const { return keep == Wide(1) && take == kUnread; }

  template <typename V>
  __device__ __forceinline__ V applied(const V& sum, const V& part) const {
    V result;
#pragma unroll
    for (size_t k = 0; k < sizeof(sum.x) / sizeof(sum.x[0]); ++k) {
      Wide x = keep != kUnread ? keep * sum.x[k] : Wide(0);
      if (take != kUnread) x += take * part.x[k];
      result.x[k] = x;
    }
    return result;
  }
};

// The factors, and the merged lse written.
template <typename Wide>
__device__ __forceinline__ Factors<Wide> factors_of(const MergeJob& job, const Token& token, int64_t head) {
  Factors<Wide> result{Wide(1), Factors<Wide>::kUnread};
  if (token.out < 0) return result;
  const int64_t at = token.lse + head * job.lse.head_stride;
  const Wide lse = load_lse<Wide>(job.lse, at);
  const Wide step = load_lse<Wide>(job.step_lse, token.step_lse + head * job.step_lse.head_stride);
  if (!job.final) {
    const Weights<Wide> w = merge_weights<Wide>(lse, step);
    store_lse<Wide>(job.lse, at, w.lse);
    result.keep = w.reads_out ? w.kept : Factors<Wide>::kUnread;
    if (w.reads_step) result.take = w.step;
  } else if (!is_empty(step)) {
    result.take = correction_weight<Wide>(lse, step);
  }
  return result;
}

#endif

}  // namespace cuda
}  // namespace cp
