// Row maps on the CPU: the row of each row of a part, run by run. A kind of map is two pure steps around one search:
//
//     place = locate(lengths, map.key(i), ...)     the sequence that holds row i of the part
//     run   = map.run(i, place)                    its row in the whole, and how many rows go on from there
//
// The tail after the last sequence is one more sequence, number `sequences`. Maps trust lengths, which the binding has
// checked.
#pragma once

#include <algorithm>

#include "types.h"

namespace cp {
namespace cpu {

// The sequence that a row was found in.
struct Place {
  int64_t sequence;
  int64_t start, stop;
  bool tail;
};

struct Run {
  int64_t row;    // of the whole; -1 for none
  int64_t count;  // rows that go on from there, this one included; at least 1
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
  if (last.start <= row && (row < last.stop || last.tail)) return last;
  for (int64_t s = last.sequence + 1; s < last.sequence + 4 && s <= lengths.sequences; ++s) {
    Place next = place_of(lengths, s, tokens);
    if (next.start <= row && (row < next.stop || next.tail)) return next;
  }
  return locate(lengths, row, tokens);
}

// Row i of a rank's slice (layout dual_chunk).
struct SliceMap {
  const RowMap& rows;
  int64_t cp_rank;

  int64_t key(int64_t i) const { return i * rows.cp_size; }

  Run run(int64_t i, const Place& in) const {
    int64_t cp_size = rows.cp_size, offset = i - quotient(in.start, cp_size);
    if (in.tail) {
      int64_t part = quotient(in.stop - in.start, cp_size);
      return {in.start + cp_rank * part + offset, part - offset};
    }
    int64_t chunk = quotient(in.stop - in.start, 2 * cp_size);
    if (offset < chunk) return {in.start + cp_rank * chunk + offset, chunk - offset};
    return {in.start + (2 * cp_size - 1 - cp_rank) * chunk + (offset - chunk), 2 * chunk - offset};
  }
};

// Row i of CP rank order (the ranks' slices in order) -> its row in sequence order.
struct RankOrderMap {
  const RowMap& rows;

  int64_t slice() const { return quotient(rows.tokens, rows.cp_size); }
  int64_t key(int64_t i) const { return (i - quotient(i, slice()) * slice()) * rows.cp_size; }

  Run run(int64_t i, const Place& in) const {
    int64_t rank = quotient(i, slice());
    return SliceMap{rows, rank}.run(i - rank * slice(), in);
  }
};

// Row i of sequence order -> its row in CP rank order.
struct SequenceOrderMap {
  const RowMap& rows;

  int64_t key(int64_t i) const { return i; }

  Run run(int64_t i, const Place& in) const {
    int64_t cp_size = rows.cp_size, offset = i - in.start;
    int64_t slice = quotient(rows.tokens, cp_size), own = quotient(in.start, cp_size);
    if (in.tail) {
      int64_t part = quotient(in.stop - in.start, cp_size), rank = quotient(offset, part), rest = offset - rank * part;
      return {rank * slice + own + rest, part - rest};
    }
    int64_t chunk = quotient(in.stop - in.start, 2 * cp_size);
    int64_t number = quotient(offset, chunk), rest = offset - number * chunk;
    int64_t late = number < cp_size ? 0 : 1, rank = late ? 2 * cp_size - 1 - number : number;
    return {rank * slice + own + late * chunk + rest, chunk - rest};
  }
};

// Row i of a half tensor; the tail is halved as well.
struct HalfMap {
  const RowMap& rows;

  int64_t key(int64_t i) const { return 2 * i; }

  Run run(int64_t i, const Place& in) const {
    int64_t offset = i - in.start / 2, size = (in.stop - in.start) / 2;
    return {in.start + rows.half * size + offset, size - offset};
  }
};

// Row i, if it lies in this half.
struct InHalfMap {
  const RowMap& rows;

  int64_t key(int64_t i) const { return i; }

  Run run(int64_t i, const Place& in) const {
    if (in.tail) return {-1, in.stop - i};
    int64_t size = (in.stop - in.start) / 2, offset = i - in.start, late = offset < size ? 0 : 1;
    return {late == rows.half ? i : -1, (1 + late) * size - offset};
  }
};

// Row i, if it is a real one. The first sequence may begin past row 0.
struct ValidMap {
  const RowMap& rows;

  int64_t key(int64_t i) const { return i; }

  Run run(int64_t i, const Place& in) const {
    if (i < in.start) return {-1, in.start - i};
    int64_t left = in.tail ? 0 : rows.real.size(in.sequence) - (i - in.start);
    return left > 0 ? Run{i, left} : Run{-1, in.stop - i};
  }
};

// Row i of a buffer with padding -> its row in one without.
struct UnpadMap {
  const RowMap& rows;

  int64_t key(int64_t i) const { return i; }

  Run run(int64_t i, const Place& in) const {
    int64_t row = rows.real[in.sequence] + i - in.start, stop = in.tail ? rows.tokens : rows.real[in.sequence + 1];
    return row < stop ? Run{row, stop - row} : Run{-1, in.stop - i};
  }
};

template <typename Map, typename F>
void walk_by(const Map& map, const RowMap& rows, int64_t begin, int64_t end, F f) {
  if (begin >= end) return;
  Place place = locate(rows.lengths, map.key(begin), rows.end());
  for (int64_t i = begin; i < end;) {
    place = locate_next(rows.lengths, map.key(i), rows.end(), place);
    Run run = map.run(i, place);
    int64_t count = std::min(run.count, end - i);
    if (run.row >= 0 && (rows.tail || !place.tail)) f(i, run.row, count, place);
    i += count;
  }
}

inline int64_t run_length(const RowMap& rows, int64_t i, int64_t end) {
  if (rows.kind == MapKind::span) return end - i;
  int64_t n = 1;
  while (i + n < end && rows[i + n] == rows[i] + n) ++n;
  return n;
}

// f(row of the part, row of the whole, how many rows continue, place), in order, for the rows begin to end - 1 of the
// part, as far as they have a row in the whole. Rows that the caller gives have no place.
template <typename F>
void walk(const RowMap& rows, int64_t begin, int64_t end, F f) {
  switch (rows.kind) {
    case MapKind::slice:
      return walk_by(SliceMap{rows, rows.cp_rank}, rows, begin, end, f);
    case MapKind::rank_order:
      return walk_by(RankOrderMap{rows}, rows, begin, end, f);
    case MapKind::sequence_order:
      return walk_by(SequenceOrderMap{rows}, rows, begin, end, f);
    case MapKind::half:
      return walk_by(HalfMap{rows}, rows, begin, end, f);
    case MapKind::in_half:
      return walk_by(InHalfMap{rows}, rows, begin, end, f);
    case MapKind::valid:
      return walk_by(ValidMap{rows}, rows, begin, end, f);
    case MapKind::unpad:
      return walk_by(UnpadMap{rows}, rows, begin, end, f);
    default:
      for (int64_t i = begin, n; i < end; i += n) f(i, rows[i], n = run_length(rows, i, end), Place{});
  }
}

}  // namespace cpu
}  // namespace cp
