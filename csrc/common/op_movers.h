// The operators that move: checks, results, and the call of the entry point.
#pragma once

#include <algorithm>

#include "entry_points.h"
#include "lengths.h"

namespace cp {

namespace device = CP_DEVICE;

using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

// Results of xs' dtypes and row shapes, with `rows` rows, and the moves into them.
struct Moved {
  Tensors results;
  std::vector<Move> moves;

  Moved(Call& call, const std::vector<Operand>& xs, int64_t rows) {
    for (const Operand& x : xs) {
      Sizes sizes = x.sizes;
      sizes[0] = rows;
      Operand made = call.result(x, sizes);
      add_moves(moves, x, made);
      results.push_back(made.tensor);
    }
  }
  int64_t count() const { return static_cast<int64_t>(moves.size()); }
};

inline Tensor partition_indices(Tensor lengths_, int64_t total_tokens, int64_t cp_size, int64_t cp_rank) {
  Call call;
  Operand given = call.operand("lengths", lengths_);
  check_ranks(cp_size, cp_rank);
  if (total_tokens < 0) value_error("total_tokens is " + std::to_string(total_tokens) + "; it must be at least 0");
  Lengths l = checked_lengths(given, {total_tokens, 2 * cp_size, cp_size});
  if (!l.wide && total_tokens > INT32_MAX)
    value_error("total_tokens is " + std::to_string(total_tokens) + "; int32 lengths cannot count so many");
  Operand made = call.result(given, {total_tokens / cp_size});
  device::partition_indices(made.data, l, total_tokens, cp_size, cp_rank, call.stream());
  return made.tensor;
}

inline Tensor rank_lengths(Tensor real_lengths, Tensor lengths_, int64_t cp_size, int64_t cp_rank, bool first_half,
                           bool second_half) {
  Call call;
  Operand real = call.operand("real_lengths", real_lengths), padded = call.operand("lengths", lengths_);
  check_ranks(cp_size, cp_rank);
  Lengths l = checked_lengths(padded, {INT64_MAX, 2 * cp_size});
  Lengths r = checked_real(real, padded, l);
  Operand made = call.result(real, real.sizes);
  device::rank_lengths(made.data, r, l, cp_size, cp_rank, first_half, second_half, call.stream());
  return made.tensor;
}

inline Tensors partition(Tensors xs, Tensor lengths_, int64_t cp_size, int64_t cp_rank) {
  Call call;
  auto given = call.operands("xs", xs);
  check_ranks(cp_size, cp_rank);
  int64_t tokens = common_tokens(given);
  Lengths l = checked_lengths(call.operand("lengths", lengths_), {tokens, 2 * cp_size, cp_size});
  Moved moved(call, given, tokens / cp_size);
  device::partition(moved.moves.data(), moved.count(), l, tokens, cp_size, cp_rank, call.stream());
  return moved.results;
}

inline Tensors reorder(Tensors xs, Tensor lengths_, int64_t cp_size, bool to_rank_order) {
  Call call;
  auto given = call.operands("xs", xs);
  check_ranks(cp_size, 0);
  int64_t tokens = common_tokens(given);
  Lengths l = checked_lengths(call.operand("lengths", lengths_), {tokens, 2 * cp_size, cp_size});
  if (tokens % cp_size)
    value_error("xs have " + std::to_string(tokens) + " tokens; they must be a multiple of cp_size " +
                std::to_string(cp_size));
  Moved moved(call, given, tokens);
  device::reorder(moved.moves.data(), moved.count(), l, tokens, cp_size, to_rank_order, call.stream());
  return moved.results;
}

inline Tensors read_half(Tensors xs, Tensor lengths_, int64_t half) {
  Call call;
  auto given = call.operands("xs", xs);
  int64_t tokens = common_tokens(given);
  if (half != 0 && half != 1) value_error("half is " + std::to_string(half) + "; it must be 0 or 1");
  Lengths l = checked_lengths(call.operand("lengths", lengths_), {tokens, 2, 2});
  if (tokens % 2) given[0].refuse("[t, ...] with an even number of tokens");
  Moved moved(call, given, tokens / 2);
  device::read_half(moved.moves.data(), moved.count(), l, tokens, half, call.stream());
  return moved.results;
}

inline Tensors take_rows(Tensors xs, std::optional<Tensor> index, int64_t first, int64_t count) {
  Call call;
  auto given = call.operands("xs", xs);
  RowSet rows = row_set(call, index, first, count, common_tokens(given));
  Moved moved(call, given, rows.count);
  device::take_rows(moved.moves.data(), moved.count(), rows, call.stream());
  return moved.results;
}

inline void put_rows_(Tensors outs, Tensors xs, std::optional<Tensor> index, int64_t first, int64_t count) {
  Call call;
  auto targets = call.operands("outs", outs, true), given = call.operands("xs", xs);
  if (targets.size() != given.size())
    value_error(std::to_string(targets.size()) + " outs and " + std::to_string(given.size()) +
                " xs; they must be pairs");
  RowSet rows = row_set(call, index, first, count, common_tokens(targets));
  std::vector<Move> moves;
  for (size_t i = 0; i < given.size(); ++i) {
    add_moves(moves, given[i], targets[i]);
    if (given[i].sizes[0] != rows.count) given[i].refuse("[n, ...] with n = " + std::to_string(rows.count) + " rows");
  }
  device::put_rows(moves.data(), static_cast<int64_t>(moves.size()), rows, call.stream());
}

inline void copy_valid_(Tensor out, Tensor inp, Tensor lengths_, Tensor real_lengths) {
  Call call;
  Operand to = call.written("out", out), from = call.operand("inp", inp);
  Operand padded = call.operand("lengths", lengths_), real = call.operand("real_lengths", real_lengths);
  if (to.ndim() < 1 || to.sizes != from.sizes)
    value_error(to.shape() + ", " + from.shape() + "; both must be [t, ...]");
  int64_t tokens = to.sizes[0];
  LengthsRule rule{tokens};
  rule.from_zero = false;
  Lengths l = checked_lengths(padded, rule), r = checked_real(real, padded, l);
  if (to.dtype == from.dtype) {
    std::vector<Move> moves;
    add_moves(moves, from, to);
    device::copy_valid(moves.data(), static_cast<int64_t>(moves.size()), l, r, tokens, call.stream());
  } else {
    std::vector<Pair> pairs;
    add_pairs(pairs, to, from);
    device::convert_valid(pairs.data(), static_cast<int64_t>(pairs.size()), l, r, tokens, call.stream());
  }
}

inline Tensor pad_sequences(Tensor x_, Tensor real_lengths, Tensor lengths_, int64_t padded_tokens, int64_t fill) {
  Call call;
  Operand x = call.operand("x", x_), padded = call.operand("lengths", lengths_);
  Operand real = call.operand("real_lengths", real_lengths);
  if (x.ndim() != 1) x.refuse("[t]");
  if (x.item > 8) type_error(x.shape() + " of " + std::to_string(x.item) + " bytes an element; it must be of integers");
  if (padded_tokens < 0) value_error("padded_tokens is " + std::to_string(padded_tokens) + "; it must be at least 0");
  Lengths l = checked_lengths(padded, {padded_tokens}), r = checked_real(real, padded, l);
  check_values(real, r, {x.sizes[0]});
  Operand made = call.result(x, {padded_tokens});
  device::pad_sequences(made.data, x.data, x.item, x.strides[0], x.sizes[0], r, l, padded_tokens, fill, call.stream());
  return made.tensor;
}

// Heads of `whole` [t, h, ...] and parts [p, n, heads, ...]; the axes after the heads are contiguous on both sides.
inline HeadMove head_move(const Operand& whole, const Operand& parts, const Ints& first_heads) {
  int64_t dim = 1, heads = parts.sizes[2];
  for (int64_t i = whole.ndim() - 1; i >= 2; --i) {
    for (auto* x : {&whole, &parts}) {
      size_t axis = i + (x == &parts);
      bool empty = std::find(x->sizes.begin(), x->sizes.end(), 0) != x->sizes.end();  // whose strides mean nothing
      if (!empty && x->sizes[axis] > 1 && x->strides[axis] != dim)
        value_error(x->shape() + " and strides " + text(x->strides) + "; the axes behind the heads must be contiguous");
    }
    dim *= whole.sizes[i];
  }
  for (int64_t first : first_heads)
    if (first < 0 || first > whole.sizes[1] - heads)
      value_error("first_heads are " + text(first_heads) + "; each plus " + std::to_string(heads) +
                  " heads must be at most the " + std::to_string(whole.sizes[1]) + " heads of " + whole.name);
  return HeadMove{whole.data,
                  whole.strides[0] * whole.item,
                  whole.strides[1] * whole.item,
                  parts.data,
                  parts.strides[0] * parts.item,
                  parts.strides[1] * parts.item,
                  parts.strides[2] * parts.item,
                  dim * whole.item,
                  heads,
                  static_cast<int64_t>(first_heads.size()),
                  first_heads.data()};
}

inline Tensor heads_to_front(Tensor x_, std::optional<Tensor> index, int64_t first, int64_t count, Ints first_heads,
                             int64_t heads) {
  Call call;
  Operand x = call.operand("x", x_);
  if (x.ndim() < 2) x.refuse("[t, h, ...]");
  if (heads < 0) value_error("heads is " + std::to_string(heads) + "; it must be at least 0");
  RowSet rows = row_set(call, index, first, count, x.sizes[0]);
  Sizes sizes{static_cast<int64_t>(first_heads.size()), rows.count, heads};
  sizes.insert(sizes.end(), x.sizes.begin() + 2, x.sizes.end());
  Operand made = call.result(x, sizes);
  HeadMove move = head_move(x, made, first_heads);
  if (!made.empty()) device::heads_to_front(move, rows, call.stream());
  return made.tensor;
}

inline void heads_to_back_(Tensor out_, Tensor x_, std::optional<Tensor> index, int64_t first, int64_t count,
                           Ints first_heads, bool add) {
  Call call;
  Operand out = call.written("out", out_), x = call.operand("x", x_);
  if (out.ndim() < 2) out.refuse("[t, h, ...]");
  RowSet rows = row_set(call, index, first, count, out.sizes[0]);
  Sizes rule{static_cast<int64_t>(first_heads.size()), rows.count, x.ndim() > 2 ? x.sizes[2] : 0};
  rule.insert(rule.end(), out.sizes.begin() + 2, out.sizes.end());
  if (x.sizes != rule)
    value_error(x.shape() + "; with " + out.shape() + " it must be " + text(rule) + ", [p, n, heads, ...]");
  if (add) {
    out.accumulator();
    x.floating();
  } else {
    if (x.dtype != out.dtype) type_error(x.shape() + ", " + out.shape() + "; they must have the same dtype");
    Ints sorted = first_heads;
    std::sort(sorted.begin(), sorted.end());
    for (size_t i = 1; i < sorted.size(); ++i)
      if (sorted[i] < sorted[i - 1] + x.sizes[2])
        value_error("first_heads are " + text(first_heads) + " with " + std::to_string(x.sizes[2]) +
                    " heads each; without add they must not overlap");
  }
  HeadMove move = head_move(out, x, first_heads);
  if (x.empty()) return;
  if (!add) return device::heads_to_back(move, rows, call.stream());
  int64_t dim = 1;
  for (int64_t i = 2; i < out.ndim(); ++i) dim *= out.sizes[i];
  Values to{out.data, out.floating(), out.sizes[0], out.sizes[1], dim, out.strides[0], out.strides[1]};
  Values from{x.data, x.floating(), x.sizes[1], x.sizes[2], dim, x.strides[1], x.strides[2]};
  device::add_heads(to, from, x.strides[0], first_heads.data(), move.count, rows, call.stream());
}

}  // namespace cp
