// Row maps: which row of the source lands in a row of the destination. Written once, used by every device.
//
// A map is a function `source row = map(destination row)`; `map.run(row, hint)` also says how many rows continue from
// there on both sides, which lets a CPU copy chunks. `hint` is a sequence number to start looking from: pass the same
// variable while rows increase, and the binary search falls away.
//
// Maps trust that lengths do not decrease and that they divide. On a GPU nobody has looked: check the row that comes out
// against the tensor before it is used. Searches stay inside `lengths` whatever it holds.
#pragma once

#include "types.h"

namespace cp {

template <typename I>
struct Cumulative {
  const I* data;
  int64_t sequences;

  CP_HD int64_t operator[](int64_t s) const { return static_cast<int64_t>(data[s]); }
  CP_HD int64_t size(int64_t s) const { return (*this)[s + 1] - (*this)[s]; }
  CP_HD int64_t end() const { return (*this)[sequences]; }

  // The last s with (*this)[s] <= row: the sequence that holds the row, never an empty one; `sequences` for a row of the
  // tail; -1 for a row in front of the first sequence.
  CP_HD int64_t find(int64_t row) const {
    int64_t low = 0, high = sequences + 1;
    while (low < high) {
      int64_t middle = (low + high) / 2;
      if ((*this)[middle] <= row) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  CP_HD int64_t find(int64_t row, int64_t hint) const {
    for (int64_t s = hint; s >= 0 && s < hint + 3 && s <= sequences; ++s) {
      if ((*this)[s] > row) break;
      if (s == sequences || row < (*this)[s + 1]) return s;
    }
    return find(row);
  }
};

// Call f with the lengths' own type.
template <typename F>
void visit(const Lengths& lengths, F f) {
  if (lengths.wide) f(Cumulative<int64_t>{static_cast<const int64_t*>(lengths.data), lengths.sequences});
  else f(Cumulative<int32_t>{static_cast<const int32_t*>(lengths.data), lengths.sequences});
}

struct Run {
  int64_t row;    // of the source
  int64_t count;  // rows that continue from it, itself included; at least 1
};

// Row i of a rank's slice -> its row in the whole buffer of `tokens` rows (layout dual_chunk).
template <typename I>
struct PartitionMap {
  Cumulative<I> lengths;
  int64_t tokens, cp_size, cp_rank;

  CP_HD int64_t rows() const { return tokens / cp_size; }
  CP_HD int64_t operator()(int64_t i) const { int64_t hint = -1; return run(i, hint).row; }

  CP_HD Run run(int64_t i, int64_t& hint) const {
    int64_t s = hint = hint < 0 ? lengths.find(i * cp_size) : lengths.find(i * cp_size, hint);
    int64_t start = lengths[s], offset = i - start / cp_size;
    if (s == lengths.sequences) {
      int64_t tail = (tokens - start) / cp_size;
      return {start + cp_rank * tail + offset, tail - offset};
    }
    int64_t chunk = lengths.size(s) / (2 * cp_size);
    if (offset < chunk) return {start + cp_rank * chunk + offset, chunk - offset};
    return {start + (2 * cp_size - 1 - cp_rank) * chunk + (offset - chunk), 2 * chunk - offset};
  }
};

// Row i of CP rank order (the ranks' slices one behind the other) -> its row in sequence order.
template <typename I>
struct ToRankOrderMap {
  Cumulative<I> lengths;
  int64_t tokens, cp_size;

  CP_HD int64_t rows() const { return tokens; }
  CP_HD int64_t operator()(int64_t i) const { int64_t hint = -1; return run(i, hint).row; }

  CP_HD Run run(int64_t i, int64_t& hint) const {
    int64_t slice = tokens / cp_size, rank = i / slice;
    return PartitionMap<I>{lengths, tokens, cp_size, rank}.run(i - rank * slice, hint);
  }
};

// Row i of sequence order -> its row in CP rank order.
template <typename I>
struct ToSequenceOrderMap {
  Cumulative<I> lengths;
  int64_t tokens, cp_size;

  CP_HD int64_t rows() const { return tokens; }
  CP_HD int64_t operator()(int64_t i) const { int64_t hint = -1; return run(i, hint).row; }

  CP_HD Run run(int64_t i, int64_t& hint) const {
    int64_t s = hint = hint < 0 ? lengths.find(i) : lengths.find(i, hint);
    int64_t start = lengths[s], offset = i - start, slice = tokens / cp_size;
    if (s == lengths.sequences) {
      int64_t tail = (tokens - start) / cp_size, rank = offset / tail, rest = offset - rank * tail;
      return {rank * slice + start / cp_size + rest, tail - rest};
    }
    int64_t chunk = lengths.size(s) / (2 * cp_size), number = offset / chunk, rest = offset - number * chunk;
    int64_t late = number < cp_size ? 0 : 1, rank = late ? 2 * cp_size - 1 - number : number;
    return {rank * slice + start / cp_size + late * chunk + rest, chunk - rest};
  }
};

// Row i of a half tensor -> its row in the slice of `tokens` rows (local lengths); the tail is halved as well.
template <typename I>
struct HalfMap {
  Cumulative<I> lengths;
  int64_t tokens;
  int64_t half;

  CP_HD int64_t rows() const { return tokens / 2; }
  CP_HD int64_t operator()(int64_t i) const { int64_t hint = -1; return run(i, hint).row; }

  CP_HD Run run(int64_t i, int64_t& hint) const {
    int64_t s = hint = hint < 0 ? lengths.find(2 * i) : lengths.find(2 * i, hint);
    int64_t start = lengths[s], offset = i - start / 2;
    int64_t size = (s == lengths.sequences ? tokens - start : lengths.size(s)) / 2;
    return {start + half * size + offset, size - offset};
  }
};

// Row i of a row set.
template <typename I>
struct IndexMap {
  const I* index;
  int64_t count;

  CP_HD int64_t rows() const { return count; }
  CP_HD int64_t operator()(int64_t i) const { return static_cast<int64_t>(index[i]); }

  CP_HD Run run(int64_t i, int64_t&) const {
    int64_t first = (*this)(i), n = 1;
    while (i + n < count && (*this)(i + n) == first + n) ++n;
    return {first, n};
  }
};

struct SpanMap {
  int64_t first, count;

  CP_HD int64_t rows() const { return count; }
  CP_HD int64_t operator()(int64_t i) const { return first + i; }
  CP_HD Run run(int64_t i, int64_t&) const { return {first + i, count - i}; }
};

// Call f with the map of a row set.
template <typename F>
void visit(const RowSet& rows, F f) {
  if (rows.index == nullptr) f(SpanMap{rows.first, rows.count});
  else if (rows.wide) f(IndexMap<int64_t>{static_cast<const int64_t*>(rows.index), rows.count});
  else f(IndexMap<int32_t>{static_cast<const int32_t*>(rows.index), rows.count});
}

}  // namespace cp
