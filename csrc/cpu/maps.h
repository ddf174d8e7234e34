// Row maps on the CPU, run by run (`row_arithmetic.h`). Maps trust lengths, which the binding has checked.
#pragma once

#include <algorithm>

#include "row_arithmetic.h"

namespace cp {
namespace cpu {

// The sequence that a row was found in; the tail ends with the buffer.
struct Place {
  int64_t sequence;
  int64_t begin, end;
  bool tail;
};

// a / b, neither negative. CPUs divide 32 bits several times as fast as 64.
inline int64_t quotient(int64_t a, int64_t b) {
  if ((static_cast<uint64_t>(a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// The last s with lengths[s] <= row: never an empty sequence. -1 for a row in front of the first one.
inline int64_t find(const Lengths& lengths, int64_t row) {
  int64_t low = 0, high = lengths.sequences + 1;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (lengths[middle] <= row)
      low = middle + 1;
    else
      high = middle;
  }
  return low - 1;
}

inline Place place_of(const Lengths& lengths, int64_t s, int64_t tokens) {
  bool tail = s >= lengths.sequences;
  return {s, lengths[s], tail ? tokens : lengths[s + 1], tail};
}

// `tokens` is the size of the buffer that lengths count.
inline Place locate(const Lengths& lengths, int64_t row, int64_t tokens) {
  int64_t s = find(lengths, row);
  return place_of(lengths, s < 0 ? 0 : s, tokens);
}

// The same, for rows that increase: `last` is the answer before this one.
inline Place locate_next(const Lengths& lengths, int64_t row, int64_t tokens, const Place& last) {
  if (last.begin <= row && (row < last.end || last.tail)) return last;
  for (int64_t s = last.sequence + 1; s < last.sequence + 4 && s <= lengths.sequences; ++s) {
    Place next = place_of(lengths, s, tokens);
    if (next.begin <= row && (row < next.end || next.tail)) return next;
  }
  return locate(lengths, row, tokens);
}

struct Divider {
  int64_t divisor;

  int64_t of(int64_t n) const { return cpu::quotient(n, divisor); }
};

// A row map as its arithmetic takes it.
struct Plan : RowRule {
  Divider by_cp_size, by_slice;

  explicit Plan(const RowRule& rows)
      : RowRule(rows), by_cp_size{rows.cp_size}, by_slice{std::max<int64_t>(rows.tokens / rows.cp_size, 1)} {}

  static int64_t quotient(int64_t a, int64_t b) { return cpu::quotient(a, b); }
  template <typename N>
  N real_at(int64_t s) const {
    return real[s];
  }
};

template <MapKind kind, typename F>
void walk_by(const Plan& plan, int64_t begin, int64_t end, F f) {
  if (begin >= end) return;
  Place place = locate(plan.lengths, key_of(plan, kind, begin), plan.end());
  if (kind == MapKind::valid && begin < place.begin) begin = place.begin;  // rows in front of the first sequence
  for (int64_t i = begin; i < end;) {
    place = locate_next(plan.lengths, key_of(plan, kind, i), plan.end(), place);
    int64_t run = 0, row = row_of(plan, kind, i, place, place.tail, run);
    if (row < 0) {
      i = run > 0 ? i + run : place.end;
      continue;
    }
    int64_t count = std::min(run, end - i);
    if (plan.tail || !place.tail) f(i, row, count, place);
    i += count;
  }
}

inline int64_t run_length(const RowRule& rows, int64_t i, int64_t end) {
  if (rows.kind == MapKind::span) return end - i;
  int64_t n = 1;
  while (i + n < end && rows[i + n] == rows[i] + n) ++n;
  return n;
}

// f(row of the part, row of the whole, how many rows continue, place), in order, for the rows begin to end - 1 of the
// part, as far as they have a row in the whole. Rows that the caller gives have no place.
template <typename F>
void walk(const RowRule& rows, int64_t begin, int64_t end, F f) {
  switch (rows.kind) {
    case MapKind::slice:
      return walk_by<MapKind::slice>(Plan(rows), begin, end, f);
    case MapKind::rank_order:
      return walk_by<MapKind::rank_order>(Plan(rows), begin, end, f);
    case MapKind::sequence_order:
      return walk_by<MapKind::sequence_order>(Plan(rows), begin, end, f);
    case MapKind::half:
      return walk_by<MapKind::half>(Plan(rows), begin, end, f);
    case MapKind::in_half:
      return walk_by<MapKind::in_half>(Plan(rows), begin, end, f);
    case MapKind::valid:
      return walk_by<MapKind::valid>(Plan(rows), begin, end, f);
    case MapKind::unpad:
      return walk_by<MapKind::unpad>(Plan(rows), begin, end, f);
    default:
      for (int64_t i = begin, n; i < end; i += n) f(i, rows[i], n = run_length(rows, i, end), Place{});
  }
}

}  // namespace cpu
}  // namespace cp
