// Row maps in the form for kernels. On the CPU the values of lengths and row numbers are checked too. On a GPU the host
// cannot read them without waiting, so the kernels check them.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>

#include "folding.h"

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
    if (rule.divisor > 1 && size % rule.divisor)
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

// Real lengths for lengths with padding: an equal number, and none above its padded length.
inline Lengths checked_real(const Operand& x, const Operand& padded, const Lengths& room, int64_t tokens) {
  Lengths made = lengths(x);
  check_values(x, made, {tokens});
  if (made.sequences != room.sequences) value_error(x.shape() + " and " + padded.shape() + "; they must be as long");
  if (CP_DEVICE::on_cpu)
    for (int64_t s = 0; s < made.sequences; ++s)
      if (made.size(s) > room.size(s))
        value_error(x.name + " gives sequence " + std::to_string(s) + " " + std::to_string(made.size(s)) +
                    " tokens, but " + padded.name + " has room for " + std::to_string(room.size(s)));
  return made;
}

inline void check_ranks(int64_t cp_size, int64_t cp_rank) {
  if (cp_size < 1 || cp_size > INT32_MAX)
    value_error("cp_size is " + std::to_string(cp_size) + "; it must be from 1 to " + std::to_string(INT32_MAX));
  if (cp_rank < 0 || cp_rank >= cp_size)
    value_error("cp_rank is " + std::to_string(cp_rank) + "; it must be from 0 to " + std::to_string(cp_size - 1));
}

// A row map as operators get it: see `RowRule` (cp_fast/movers/mover_protocol.py); a span has its first row in a and its
// count in b, an index its rows in the table.
struct MapArguments {
  int64_t map;  // kind + 16 * helper
  const std::optional<Tensor>&table, &real;
  int64_t a, b;
};
#define CP_MAP int64_t map, std::optional<Tensor> table, std::optional<Tensor> real, int64_t a, int64_t b
#define CP_MAP_ARGUMENTS MapArguments{map, table, real, a, b}

// Rows of a tensor of `tokens` rows that the caller gives.
inline void set_given(RowRule& rows, Call& call, const MapArguments& given) {
  if (rows.kind == MapKind::span) {
    rows.first = given.a, rows.count = given.b;
    if (rows.first < 0 || rows.count < 0 || rows.first > rows.tokens - rows.count)
      value_error("rows are " + std::to_string(rows.first) + " to " + std::to_string(rows.first + rows.count) +
                  " of a tensor of " + std::to_string(rows.tokens) + " rows; they must lie inside it");
    return;
  }
  Operand x = call.operand("rows", *given.table);
  rows.wide = x.wide_integers("[n], row numbers");
  rows.index = x.data, rows.count = x.sizes[0];
  if (CP_DEVICE::on_cpu)
    for (int64_t i = 0; i < rows.count; ++i)
      if (rows[i] < 0 || rows[i] >= rows.tokens)
        value_error("rows[" + std::to_string(i) + "] is " + std::to_string(rows[i]) +
                    "; it must be a row of a tensor of " + std::to_string(rows.tokens));
}

// The numbers of a map by lengths, and of its part's rows.
inline void set_numbers(RowRule& rows, int64_t a, int64_t b) {
  rows.count = rows.tokens;
  if (rows.chunked()) {
    check_ranks(a, rows.kind == MapKind::slice ? b : 0);
    rows.cp_size = static_cast<int32_t>(a), rows.cp_rank = static_cast<int32_t>(b);
    if (rows.kind == MapKind::slice) rows.count = rows.tokens / a;
  } else if (rows.kind == MapKind::half || rows.kind == MapKind::in_half) {
    if (a != 0 && a != 1) value_error("half is " + std::to_string(a) + "; it must be 0 or 1");
    rows.half = static_cast<int32_t>(a);
    if (rows.kind == MapKind::half) rows.count = rows.tokens / 2;
  } else if (rows.kind == MapKind::unpad) {
    if (a < 0) value_error("padded_tokens is " + std::to_string(a) + "; it must be at least 0");
    rows.count = a;
  }
}

// A map into a tensor of `tokens` rows; `tail`: whether the tail goes along.
inline RowRule row_map(Call& call, const MapArguments& given, int64_t tokens, bool tail) {
  const int64_t kind = given.map % 16, helper = given.map / 16;
  if (given.map < 0 || kind >= static_cast<int64_t>(MapKind::any) ||
      helper >= static_cast<int64_t>(std::size(kHelpers)))
    value_error("map is " + std::to_string(given.map) + "; it must be that of a row map");
  RowRule rows{};
  std::strncpy(rows.helper, kHelpers[helper], sizeof(rows.helper) - 1);
  rows.kind = static_cast<MapKind>(kind);
  rows.tail = tail, rows.tokens = tokens, rows.cp_size = 1;
  if (rows.kind != MapKind::span && !given.table) value_error("the table is None; this kind of row map needs one");
  if (rows.given()) {
    set_given(rows, call, given);
    return rows;
  }
  set_numbers(rows, given.a, given.b);
  Operand padded = call.operand("lengths", *given.table);
  rows.lengths = lengths(padded);
  check_values(padded, rows.lengths, {rows.end(), rows.divisor(), rows.tail_divisor(), rows.from_zero()});
  if (rows.has_real()) {
    if (!given.real) value_error("real_lengths is None; this kind of row map needs them");
    rows.real = checked_real(call.operand("real_lengths", *given.real), padded, rows.lengths, tokens);
  }
  if (rows.chunked() && tokens % rows.cp_size)
    value_error("xs have " + std::to_string(tokens) + " tokens; they must be a multiple of cp_size " +
                std::to_string(rows.cp_size));
  if (rows.kind == MapKind::half && tokens % 2)
    value_error("xs have " + std::to_string(tokens) + " tokens; they must be an even number");
  return rows;
}

// All tensors of one call have the same number of tokens; none has no axis.
inline int64_t common_tokens(const std::vector<Operand>& xs) {
  for (const Operand& x : xs) {
    if (x.ndim() < 1) x.refuse("[t, ...]");
    if (x.sizes[0] != xs[0].sizes[0]) value_error(xs[0].shape() + ", " + x.shape() + "; they must have as many tokens");
  }
  return xs.empty() ? 0 : xs[0].sizes[0];
}

}  // namespace cp
