// Lengths and row sets in the form for kernels. On the CPU their values are checked too. On a GPU the host cannot read
// them without waiting, so the kernels check them.
#pragma once

#include "folding.h"
#include "maps.h"

namespace cp {

inline Lengths lengths(const Operand& x) {
  bool wide = x.wide_integers("[b + 1], cumulative lengths");
  if (x.sizes[0] < 1) x.refuse("[b + 1], cumulative lengths: at least one entry");
  return Lengths{x.data, x.sizes[0] - 1, wide};
}

// Rules for the values, checked if the CPU can read them.
struct LengthsRule {
  int64_t tokens = INT64_MAX;  // of the buffer that holds the sequences
  int64_t divisor = 1;         // of every length
  int64_t tail_divisor = 1;    // of the tail after the last sequence
  bool from_zero = true;
};

// Whether all of them are as they should be, without a branch, so that compilers vectorise it; a divisor that is no
// power of two is left to the loop that finds the error.
template <typename I>
bool are_right(const I* values, int64_t sequences, const LengthsRule& rule) {
  I mask = static_cast<I>(rule.divisor - 1), wrong = 0;
  if ((rule.divisor & (rule.divisor - 1)) || values[0] != 0 || rule.divisor > INT32_MAX) return false;
  for (int64_t s = 0; s < sequences; ++s)
    wrong |= static_cast<I>(values[s + 1] < values[s]) | ((values[s + 1] ^ values[s]) & mask);
  return wrong == 0 && values[sequences] <= rule.tokens && (rule.tokens - values[sequences]) % rule.tail_divisor == 0;
}

inline void check_values(const Operand& x, const Lengths& l, const LengthsRule& rule) {
  if (!CP_DEVICE::on_cpu) return;
  if (l.wide ? are_right(static_cast<const int64_t*>(l.data), l.sequences, rule)
             : are_right(static_cast<const int32_t*>(l.data), l.sequences, rule))
    return;
  int64_t last = l[0];
  if (last < 0 || (rule.from_zero && last != 0))
    value_error(x.name + "[0] is " + std::to_string(last) + "; it must be " + (rule.from_zero ? "0" : "at least 0"));
  for (int64_t s = 0; s < l.sequences; ++s) {
    int64_t next = l[s + 1];
    if (next < last)  // compared before they are subtracted: a difference of any two may not fit
      value_error(x.name + "[" + std::to_string(s + 1) + "] is " + std::to_string(next) + " after " +
                  std::to_string(last) + "; cumulative lengths must not decrease");
    int64_t size = next - last;
    if (rule.divisor > 1 && quotient(size, rule.divisor) * rule.divisor != size)
      value_error(x.name + " gives sequence " + std::to_string(s) + " the length " + std::to_string(size) +
                  "; it must be a multiple of " + std::to_string(rule.divisor));
    last = next;
  }
  if (last > rule.tokens)
    value_error(x.name + " ends at " + std::to_string(last) + ", past the buffer's " + std::to_string(rule.tokens) +
                " tokens");
  if (rule.tail_divisor > 1 && (rule.tokens - last) % rule.tail_divisor)
    value_error(x.name + " ends at " + std::to_string(last) + " in a buffer of " + std::to_string(rule.tokens) +
                " tokens; the tail must be a multiple of " + std::to_string(rule.tail_divisor));
}

inline Lengths checked_lengths(const Operand& x, const LengthsRule& rule) {
  Lengths made = lengths(x);
  check_values(x, made, rule);
  return made;
}

// Real lengths for lengths with padding: an equal number, and none above its padded length.
inline Lengths checked_real(const Operand& x, const Operand& padded, const Lengths& room) {
  Lengths made = checked_lengths(x, {});
  if (made.sequences != room.sequences) value_error(x.shape() + " and " + padded.shape() + "; they must be as long");
  if (CP_DEVICE::on_cpu)
    for (int64_t s = 0; s < made.sequences; ++s)
      if (made.size(s) > room.size(s))
        value_error(x.name + " gives sequence " + std::to_string(s) + " " + std::to_string(made.size(s)) +
                    " tokens, but " + padded.name + " has room for " + std::to_string(room.size(s)));
  return made;
}

// The rows of a tensor of `bound` rows: `index`, or first, first + 1, ...
inline RowSet row_set(Call& call, const std::optional<Tensor>& index, int64_t first, int64_t count, int64_t bound) {
  if (!index) {
    if (first < 0 || count < 0 || first > bound - count)
      value_error("rows are " + std::to_string(first) + " to " + std::to_string(first + count) + " of a tensor of " +
                  std::to_string(bound) + " rows; they must lie inside it");
    return RowSet{nullptr, false, first, count, bound};
  }
  Operand x = call.operand("rows", *index);
  bool wide = x.wide_integers("[n], row numbers");
  RowSet made{x.data, wide, 0, x.sizes[0], bound};
  if (CP_DEVICE::on_cpu)
    for (int64_t i = 0; i < made.count; ++i)
      if (made[i] < 0 || made[i] >= bound)
        value_error("rows[" + std::to_string(i) + "] is " + std::to_string(made[i]) +
                    "; it must be a row of a tensor of " + std::to_string(bound));
  if (made.count == 0) made.index = nullptr;
  return made;
}

// All tensors of one call have the same number of tokens; none has no axis.
inline int64_t common_tokens(const std::vector<Operand>& xs) {
  for (const Operand& x : xs) {
    if (x.ndim() < 1) x.refuse("[t, ...]");
    if (x.sizes[0] != xs[0].sizes[0]) value_error(xs[0].shape() + ", " + x.shape() + "; they must have as many tokens");
  }
  return xs.empty() ? 0 : xs[0].sizes[0];
}

inline void check_ranks(int64_t cp_size, int64_t cp_rank) {
  if (cp_size < 1 || cp_size > INT32_MAX)
    value_error("cp_size is " + std::to_string(cp_size) + "; it must be from 1 to " + std::to_string(INT32_MAX));
  if (cp_rank < 0 || cp_rank >= cp_size)
    value_error("cp_rank is " + std::to_string(cp_rank) + "; it must be from 0 to " + std::to_string(cp_size - 1));
}

}  // namespace cp
