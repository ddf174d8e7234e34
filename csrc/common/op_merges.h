// The operators of arithmetic: checks, and the call of the entry point.
#pragma once

#include "op_movers.h"

namespace cp {

inline void check_shape(const Operand& x, const Sizes& rule) {
  if (x.sizes != rule) x.refuse(text(rule));
}

// An LSE of a buffer of `rows` rows: [h, rows] if packed, else [b, h, s] with s at least the longest sequence /
// divisor.
inline Lse checked_lse(const Operand& x, bool packed, int64_t heads, int64_t rows, const Lengths& l,
                       int64_t divisor = 1) {
  Lse made = log_sum_exp(x, packed);
  if (packed)
    check_shape(x, {heads, rows});
  else if (x.sizes[0] != l.sequences || x.sizes[1] != heads)
    x.refuse("[b, h, s] with b = " + std::to_string(l.sequences) + " and h = " + std::to_string(heads));
  if (!packed && CP_DEVICE::on_cpu)
    for (int64_t s = 0; s < l.sequences; ++s)
      if (l.size(s) / divisor > x.sizes[2])
        x.refuse("[b, h, s] with room for the " + std::to_string(l.size(s) / divisor) + " rows of sequence " +
                 std::to_string(s));
  return made;
}

inline Tensor read_second_half_lse(Tensor lse, Tensor lengths_, bool lse_packed, int64_t max_seqlen) {
  Call call;
  Operand x = call.operand("lse", lse);
  Lse from = log_sum_exp(x, lse_packed);
  if (max_seqlen < 0) value_error("max_seqlen is " + std::to_string(max_seqlen) + "; it must be at least 0");
  LengthsRule rule{lse_packed ? from.rows : INT64_MAX, 2};
  Lengths l = checked_lengths(call.operand("lengths", lengths_), rule);
  checked_lse(x, lse_packed, from.heads, from.rows, l);
  Sizes sizes = x.sizes;
  sizes.back() = max_seqlen;
  Operand made = call.result(x, sizes);
  Lse to = log_sum_exp(made, lse_packed);
  if (CP_DEVICE::on_cpu) {  // the room that the result has to have
    LengthsRule room{lse_packed ? 2 * max_seqlen : INT64_MAX, 2};
    check_values(call.operand("lengths", lengths_), l, room);
    checked_lse(made, lse_packed, to.heads, to.rows, l, 2);
  }
  device::read_second_half_lse(to, from, l, call.stream());
  return made.tensor;
}

inline void merge_(Tensor out, Tensor lse, Tensor out_step, Tensor lse_step, std::optional<Tensor> index, int64_t first,
                   int64_t count) {
  Call call;
  Operand to = call.written("out", out), to_lse = call.written("lse", lse);
  Operand from = call.operand("out_step", out_step), from_lse = call.operand("lse_step", lse_step);
  Values whole = values(to), step = values(from);
  RowSet rows = row_set(call, index, first, count, whole.rows);
  check_shape(from, {rows.count, whole.heads, whole.dim});
  check_shape(to_lse, {whole.heads, whole.rows});
  check_shape(from_lse, {whole.heads, rows.count});
  device::merge(whole, log_sum_exp(to_lse, true), step, log_sum_exp(from_lse, true), rows, call.stream());
}

inline void add_rows_(Tensors outs, Tensors xs, std::optional<Tensor> index, int64_t first, int64_t count) {
  Call call;
  auto targets = call.operands("outs", outs, true), given = call.operands("xs", xs);
  if (targets.size() != given.size())
    value_error(std::to_string(targets.size()) + " outs and " + std::to_string(given.size()) +
                " xs; they must be pairs");
  RowSet rows = row_set(call, index, first, count, common_tokens(targets));
  std::vector<Pair> pairs;
  for (size_t i = 0; i < given.size(); ++i) {
    add_pairs(pairs, targets[i], given[i]);
    if (given[i].sizes[0] != rows.count) given[i].refuse("[n, ...] with n = " + std::to_string(rows.count) + " rows");
  }
  device::add_rows(pairs.data(), static_cast<int64_t>(pairs.size()), rows, call.stream());
}

inline void lse_correction_(Tensor lse, Tensor lse_step, Tensor lengths_, bool lse_packed) {
  Call call;
  Operand to = call.written("lse", lse), from = call.operand("lse_step", lse_step);
  Lse whole = log_sum_exp(to, lse_packed);
  Lengths l = checked_lengths(call.operand("lengths", lengths_), {lse_packed ? whole.rows : INT64_MAX, 2});
  checked_lse(to, lse_packed, whole.heads, whole.rows, l);
  Lse step = checked_lse(from, lse_packed, whole.heads, whole.rows / 2, l, 2);
  device::lse_correction(whole, step, l, call.stream());
}

inline void out_correction_(Tensor out, Tensor out_step, Tensor lse, Tensor lse_step, Tensor lengths_,
                            bool only_second_half, bool lse_packed) {
  Call call;
  Operand to = call.written("out", out), from = call.operand("out_step", out_step);
  Operand to_lse = call.operand("lse", lse), from_lse = call.operand("lse_step", lse_step);
  Values whole = values(to), step = values(from);
  int64_t divisor = only_second_half ? 2 : 1;
  Lengths l = checked_lengths(call.operand("lengths", lengths_), {whole.rows, divisor});
  check_shape(from, {whole.rows / divisor, whole.heads, whole.dim});
  Lse final = checked_lse(to_lse, lse_packed, whole.heads, whole.rows, l);
  Lse part = checked_lse(from_lse, lse_packed, whole.heads, whole.rows / divisor, l, divisor);
  device::out_correction(whole, step, final, part, l, only_second_half, call.stream());
}

inline Action action(const char* name, int64_t number) {
  if (number < 0 || number > 2)
    value_error(std::string(name) + " is " + std::to_string(number) + "; it must be 0, 1 or 2");
  return static_cast<Action>(number);
}

inline void grad_correction_(Tensor grad, Tensor grad_step, Tensor lengths_, int64_t first_half, int64_t second_half) {
  Call call;
  Operand to = call.written("grad", grad), from = call.operand("grad_step", grad_step);
  Action first = action("first_half", first_half), second = action("second_half", second_half);
  int64_t axis = to.ndim() == 4 ? 1 : 0;
  if (to.ndim() < 1 || to.ndim() > 4 || (axis == 1 && to.sizes[0] != 2))
    to.refuse("[t], [t, d], [t, h, d] or [2, t, h, d]");
  if (from.ndim() != to.ndim()) value_error(from.shape() + ", " + to.shape() + "; they must have as many axes");
  int64_t tokens = to.sizes[axis], idle = (first == Action::none) + (second == Action::none);
  Lengths l = checked_lengths(call.operand("lengths", lengths_), {tokens, 2});
  bool whole = from.sizes[axis] == tokens && idle != 1, half = from.sizes[axis] == tokens / 2 && idle > 0;
  if (!whole && !half)
    from.refuse("of " + std::to_string(idle == 1 ? tokens / 2 : tokens) + " tokens on axis " + std::to_string(axis));
  std::vector<Pair> pairs;
  add_pairs(pairs, to, from, axis);
  if (idle < 2)
    device::grad_correction(pairs.data(), static_cast<int64_t>(pairs.size()), l, first, second, idle == 1,
                            call.stream());
}

}  // namespace cp
