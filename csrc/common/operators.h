// The operators: checks, results, and the call of the entry point.
#pragma once

#include <algorithm>

#include "entry_points.h"
#include "row_map.h"

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

inline void refuse_map(const char* what) { value_error(std::string("this kind of row map has ") + what); }

inline Tensor row_indices(int64_t tokens, CP_MAP) {
  Call call;
  if (tokens < 0) value_error("total_tokens is " + std::to_string(tokens) + "; it must be at least 0");
  RowRule rows = row_map(call, CP_MAP_ARGUMENTS, tokens, true);
  if (rows.given()) refuse_map("no lengths");
  if (!rows.lengths.wide && tokens > INT32_MAX)
    value_error("total_tokens is " + std::to_string(tokens) + "; int32 lengths cannot count so many");
  Operand made = call.result(call.operand("lengths", *table), {rows.count});
  device::row_indices(made.data, rows, call.stream());
  return made.tensor;
}

inline Tensors gather(Tensors xs, CP_MAP) {
  Call call;
  auto given = call.operands("xs", xs);
  RowRule rows = row_map(call, CP_MAP_ARGUMENTS, common_tokens(given), true);
  if (rows.has_real() || rows.kind == MapKind::in_half) refuse_map("rows without a source");
  Moved moved(call, given, rows.count);
  device::move_rows(moved.moves.data(), moved.count(), rows, false, call.stream());
  return moved.results;
}

inline void check_part(const Operand& x, int64_t axis, const RowRule& rows) {
  if (x.sizes[axis] != rows.count) x.refuse("[n, ...] with n = " + std::to_string(rows.count) + " rows");
}

// Where several rows of the part could have one target.
inline void check_scatters(const RowRule& rows) {
  if (rows.chunked() || rows.kind == MapKind::unpad) refuse_map("no scatter");
}

inline void scatter_(Tensors outs, Tensors xs, bool add, CP_MAP) {
  Call call;
  auto targets = call.operands("outs", outs, true), given = call.operands("xs", xs);
  if (targets.size() != given.size())
    value_error(std::to_string(targets.size()) + " outs and " + std::to_string(given.size()) +
                " xs; they must be pairs");
  RowRule rows = row_map(call, CP_MAP_ARGUMENTS, common_tokens(targets), false);
  check_scatters(rows);
  std::vector<Move> moves;
  std::vector<Pair> pairs;
  for (size_t i = 0; i < given.size(); ++i) {
    if (!add && given[i].dtype == targets[i].dtype)
      add_moves(moves, given[i], targets[i]);
    else
      add_pairs(pairs, targets[i], given[i]);
    check_part(given[i], 0, rows);
  }
  if (!moves.empty()) device::move_rows(moves.data(), static_cast<int64_t>(moves.size()), rows, true, call.stream());
  if (!pairs.empty()) device::put_values(pairs.data(), static_cast<int64_t>(pairs.size()), rows, add, call.stream());
}

// Heads of `whole` [t, h, ...] and parts [p, n, heads, ...]; the axes after the heads are contiguous on both sides.
inline HeadMove head_move(const Operand& whole, const Operand& parts, const int64_t* first_heads) {
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
  for (int64_t i = 0; i < parts.sizes[0]; ++i)
    if (first_heads[i] < 0 || first_heads[i] > whole.sizes[1] - heads)
      value_error("first_heads are " + text(Ints(first_heads, first_heads + parts.sizes[0])) + "; each plus " +
                  std::to_string(heads) + " heads must be at most the " + std::to_string(whole.sizes[1]) +
                  " heads of " + whole.name);
  return HeadMove{whole.data,
                  whole.strides[0] * whole.item,
                  whole.strides[1] * whole.item,
                  parts.data,
                  parts.strides[0] * parts.item,
                  parts.strides[1] * parts.item,
                  parts.strides[2] * parts.item,
                  dim * whole.item,
                  heads,
                  parts.sizes[0],
                  first_heads};
}

// The rows of tensors [t, h, ...] whose heads are moved.
inline RowRule rows_of_heads(Call& call, const std::vector<Operand>& xs, const MapArguments& given) {
  for (const Operand& x : xs)
    if (x.ndim() < 2) x.refuse("[t, h, ...]");
  RowRule rows = row_map(call, given, common_tokens(xs), true);
  if (!rows.given()) refuse_map("lengths; rows of heads must be given");
  return rows;
}

// How many ranges of heads each of `tensors` tensors has.
inline int64_t ranges_of(const Ints& first_heads, size_t tensors) {
  if (tensors == 0 || first_heads.size() % tensors)
    value_error(std::to_string(first_heads.size()) + " first_heads of " + std::to_string(tensors) +
                " tensors; there must be tensors, each with as many");
  return static_cast<int64_t>(first_heads.size() / tensors);
}

inline Tensors gather_heads(Tensors xs, Ints first_heads, Ints heads, CP_MAP) {
  Call call;
  auto given = call.operands("xs", xs);
  RowRule rows = rows_of_heads(call, given, CP_MAP_ARGUMENTS);
  const int64_t ranges = ranges_of(first_heads, given.size());
  if (heads.size() != given.size())
    value_error(std::to_string(heads.size()) + " heads for " + std::to_string(given.size()) + " xs; one for each");
  Tensors results;
  std::vector<HeadMove> moves;
  for (size_t i = 0; i < given.size(); ++i) {
    if (heads[i] < 0) value_error("heads is " + std::to_string(heads[i]) + "; it must be at least 0");
    Sizes sizes{ranges, rows.count, heads[i]};
    sizes.insert(sizes.end(), given[i].sizes.begin() + 2, given[i].sizes.end());
    Operand made = call.result(given[i], sizes);
    HeadMove move = head_move(given[i], made, first_heads.data() + i * ranges);
    if (!made.empty()) moves.push_back(move);
    results.push_back(made.tensor);
  }
  device::move_heads(moves.data(), static_cast<int64_t>(moves.size()), rows, false, call.stream());
  return results;
}

inline void scatter_heads_(Tensors outs, Tensors xs, Ints first_heads, CP_MAP) {
  Call call;
  auto targets = call.operands("outs", outs, true), given = call.operands("xs", xs);
  if (targets.size() != given.size())
    value_error(std::to_string(targets.size()) + " outs and " + std::to_string(given.size()) +
                " xs; there must be as many");
  RowRule rows = rows_of_heads(call, targets, CP_MAP_ARGUMENTS);
  const int64_t ranges = ranges_of(first_heads, given.size());
  std::vector<HeadMove> moves;
  for (size_t i = 0; i < given.size(); ++i) {
    const Operand &out = targets[i], &x = given[i];
    Sizes rule{ranges, rows.count, x.ndim() > 2 ? x.sizes[2] : 0};
    rule.insert(rule.end(), out.sizes.begin() + 2, out.sizes.end());
    if (x.sizes != rule)
      value_error(x.shape() + "; with " + out.shape() + " it must be " + text(rule) + ", [p, n, heads, ...]");
    if (x.dtype != out.dtype) type_error(x.shape() + ", " + out.shape() + "; they must have the same dtype");
    Ints sorted(first_heads.begin() + i * ranges, first_heads.begin() + (i + 1) * ranges), firsts = sorted;
    std::sort(sorted.begin(), sorted.end());
    for (size_t n = 1; n < sorted.size(); ++n)
      if (sorted[n] < sorted[n - 1] + x.sizes[2])
        value_error("first_heads are " + text(firsts) + " with " + std::to_string(x.sizes[2]) +
                    " heads each; they must not overlap");
    HeadMove move = head_move(out, x, first_heads.data() + i * ranges);
    if (!x.empty()) moves.push_back(move);
  }
  device::move_heads(moves.data(), static_cast<int64_t>(moves.size()), rows, true, call.stream());
}

inline void check_shape(const Operand& x, const Sizes& rule) {
  if (x.sizes != rule) x.refuse(text(rule));
}

// An LSE of a buffer of `rows` rows: [h, rows] if packed, else [b, h, s] with s at least the longest sequence /
// divisor.
inline Lse checked_lse(const Operand& x, int64_t heads, int64_t rows, const Lengths& l, int64_t divisor) {
  Lse made = log_sum_exp(x, x.ndim() == 2);
  if (made.packed)
    check_shape(x, {heads, rows});
  else if (x.sizes[0] != l.sequences || x.sizes[1] != heads)
    x.refuse("[b, h, s] with b = " + std::to_string(l.sequences) + " and h = " + std::to_string(heads));
  if (!made.packed && CP_DEVICE::on_cpu)
    for (int64_t s = 0; s < l.sequences; ++s)
      if (l.size(s) / divisor > x.sizes[2])
        x.refuse("[b, h, s] with room for the " + std::to_string(l.size(s) / divisor) + " rows of sequence " +
                 std::to_string(s));
  return made;
}

inline void merge_(Tensor out, Tensor lse, Tensor out_step, Tensor lse_step, bool final, CP_MAP) {
  Call call;
  Operand to = call.written("out", out), to_lse = final ? call.operand("lse", lse) : call.written("lse", lse);
  Operand from = call.operand("out_step", out_step), from_lse = call.operand("lse_step", lse_step);
  Values whole = values(to), step = values(from);
  RowRule rows = row_map(call, CP_MAP_ARGUMENTS, whole.rows, false);
  check_scatters(rows);
  if (rows.given() && (to_lse.ndim() != 2 || from_lse.ndim() != 2)) to_lse.refuse("[h, t]: the rows are given");
  if (to_lse.ndim() != from_lse.ndim()) value_error(to_lse.shape() + ", " + from_lse.shape() + "; of as many axes");
  check_shape(from, {rows.count, whole.heads, whole.dim});
  Lse total = checked_lse(to_lse, whole.heads, whole.rows, rows.lengths, 1);
  Lse part = checked_lse(from_lse, whole.heads, rows.count, rows.lengths, rows.kind == MapKind::half ? 2 : 1);
  device::merge(whole, total, step, part, rows, final, call.stream());
}

}  // namespace cp
