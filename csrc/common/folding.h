// Consecutive contiguous axes become one, so that kernels see rows, pieces ("heads") and contiguous elements.
#pragma once

#include <vector>

#include "tensors.h"

namespace cp {

constexpr size_t most_blocks = 64;

// A tensor's rows on two sides, `a` and `b`: the same axes with other strides, in elements. One block for every index
// of the axes in front that could not be folded.
struct Folded {
  int64_t heads = 1, head_a = 0, head_b = 0;
  int64_t dim = 1;                                  // contiguous on both sides
  std::vector<std::pair<int64_t, int64_t>> blocks;  // offsets on both sides
};

// Fold all axes but `token_axis`. Empty tensors have no blocks.
inline Folded fold(const Operand& a, const Operand& b, int64_t token_axis) {
  struct Axis {
    int64_t size, a, b;
  };
  std::vector<Axis> axes;  // the inner ones first
  Folded made;
  if (a.empty() || b.empty()) return made;
  for (int64_t i = a.ndim() - 1; i >= 0; --i) {
    if (i == token_axis || a.sizes[i] == 1) continue;
    Axis next{a.sizes[i], a.strides[i], b.strides[i]};
    if (axes.empty() && made.dim == 1 && next.a == 1 && next.b == 1)
      made.dim = next.size;
    else if (axes.empty() && made.dim > 1 && next.a == made.dim && next.b == made.dim)
      made.dim *= next.size;
    else if (!axes.empty() && next.a == axes.back().size * axes.back().a && next.b == axes.back().size * axes.back().b)
      axes.back().size *= next.size;
    else
      axes.push_back(next);
  }
  if (!axes.empty()) {
    made.heads = axes[0].size;
    made.head_a = axes[0].a;
    made.head_b = axes[0].b;
  }
  made.blocks.emplace_back(0, 0);
  for (size_t i = 1; i < axes.size(); ++i) {
    std::vector<std::pair<int64_t, int64_t>> more;
    for (int64_t j = 0; j < axes[i].size; ++j)
      for (auto& [at_a, at_b] : made.blocks) more.emplace_back(at_a + j * axes[i].a, at_b + j * axes[i].b);
    made.blocks = std::move(more);
    if (made.blocks.size() > most_blocks)
      value_error(a.shape() + " and strides " + text(a.strides) + ", " + b.name + " strides " + text(b.strides) +
                  "; rows must be contiguous but for one axis, or two of which the outer is at most " +
                  std::to_string(most_blocks));
  }
  return made;
}

// An error unless both have the same axes but the token axis.
inline void check_same_rows(const Operand& a, const Operand& b, int64_t token_axis) {
  Sizes left = a.sizes, right = b.sizes;
  if (token_axis < a.ndim()) left[token_axis] = 0;
  if (token_axis < b.ndim()) right[token_axis] = 0;
  if (left != right || a.ndim() <= token_axis)
    value_error(a.shape() + " and " + b.shape() + "; they must agree in all axes but axis " +
                std::to_string(token_axis) + ", the tokens");
}

inline void add_moves(std::vector<Move>& moves, const Operand& from, const Operand& to, int64_t token_axis = 0) {
  check_same_rows(from, to, token_axis);
  if (from.dtype != to.dtype) type_error(from.shape() + ", " + to.shape() + "; they must have the same dtype");
  Folded folded = fold(from, to, token_axis);
  int64_t item = from.item;
  for (auto& [at_from, at_to] : folded.blocks)
    moves.push_back(Move{from.data + at_from * item, to.data + at_to * item, from.strides[token_axis] * item,
                         to.strides[token_axis] * item, folded.heads, folded.head_a * item, folded.head_b * item,
                         folded.dim * item});
}

inline void add_pairs(std::vector<Pair>& pairs, const Operand& to, const Operand& from, int64_t token_axis = 0) {
  check_same_rows(to, from, token_axis);
  Dtype to_dtype = to.floating(), from_dtype = from.floating();
  Folded folded = fold(to, from, token_axis);
  for (auto& [at_to, at_from] : folded.blocks)
    pairs.push_back(Pair{Values{to.data + at_to * to.item, to_dtype, to.sizes[token_axis], folded.heads, folded.dim,
                                to.strides[token_axis], folded.head_a},
                         Values{from.data + at_from * from.item, from_dtype, from.sizes[token_axis], folded.heads,
                                folded.dim, from.strides[token_axis], folded.head_b}});
}

// [t, h, d] unchanged; d contiguous.
inline Values values(const Operand& x) {
  if (x.ndim() != 3) x.refuse("[t, h, d]");
  if (x.sizes[2] > 1 && x.strides[2] != 1 && !x.empty())
    value_error(x.shape() + " and strides " + text(x.strides) + "; its last axis must have stride 1");
  return Values{x.data, x.floating(), x.sizes[0], x.sizes[1], x.sizes[2], x.strides[0], x.strides[1]};
}

// [h, t] if packed, else [b, h, s]; float32 or float64.
inline Lse log_sum_exp(const Operand& x, bool packed) {
  if (x.ndim() != (packed ? 2 : 3)) x.refuse(packed ? "[h, t]" : "[b, h, s]");
  Dtype dtype = x.accumulator();
  size_t head = packed ? 0 : 1;
  return Lse{x.data,
             dtype,
             packed,
             x.sizes[head],
             x.sizes[head + 1],
             packed ? 0 : x.strides[0],
             x.strides[head],
             x.strides[head + 1]};
}

}  // namespace cp
