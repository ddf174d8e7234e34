// Row maps: which row of the source lands in a row of the destination. Written once, used by every device.
//
// A map is two pure steps around one search, so that threads can share the search:
//
//     place = locate(lengths, map.key(i), map.tokens)     the sequence that holds row i of the destination
//     run   = map.run(i, place)                           its source row, and how many rows go on from there
//
// The tail after the last sequence is one more sequence, number `sequences`. Maps trust that lengths do not decrease
// and that they divide. On a GPU this is unchecked: compare `run.row` with the tensor's rows before its use.
// Searches stay inside `lengths` for any values.
#pragma once

#include "types.h"

namespace cp {

// The sequence that a row was found in.
struct Place {
  int64_t sequence;
  int64_t start, stop;
  bool tail;
};

struct Run {
  int64_t row;    // of the source
  int64_t count;  // rows that go on from there, this one included; at least 1
};

// a / b, neither negative. CPUs divide 32 bits several times as fast as 64.
CP_HD int64_t quotient(int64_t a, int64_t b) {
#if !defined(__CUDA_ARCH__)
  if ((static_cast<uint64_t>(a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
#endif
  return a / b;
}

// The last s with lengths[s] <= row: never an empty sequence. -1 for a row in front of the first one.
CP_HD int64_t find(const Lengths& lengths, int64_t row) {
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

CP_HD Place place_of(const Lengths& lengths, int64_t s, int64_t tokens) {
  bool tail = s >= lengths.sequences;
  return {s, lengths[s], tail ? tokens : lengths[s + 1], tail};
}

// `tokens` is the size of the buffer that lengths count.
CP_HD Place locate(const Lengths& lengths, int64_t row, int64_t tokens) {
  int64_t s = find(lengths, row);
  return place_of(lengths, s < 0 ? 0 : s, tokens);
}

// The same, for rows that increase: `last` is the answer before this one.
CP_HD Place locate_next(const Lengths& lengths, int64_t row, int64_t tokens, const Place& last) {
  if (last.start <= row && (row < last.stop || last.tail)) return last;
  for (int64_t s = last.sequence + 1; s < last.sequence + 4 && s <= lengths.sequences; ++s) {
    Place next = place_of(lengths, s, tokens);
    if (next.start <= row && (row < next.stop || next.tail)) return next;
  }
  return locate(lengths, row, tokens);
}

// Row i of a rank's slice -> its row in the whole buffer (layout dual_chunk).
struct PartitionMap {
  int64_t tokens;
  int64_t cp_size, cp_rank;

  CP_HD int64_t rows() const { return tokens / cp_size; }
  CP_HD int64_t key(int64_t i) const { return i * cp_size; }

  CP_HD Run run(int64_t i, const Place& in) const {
    int64_t offset = i - quotient(in.start, cp_size);
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
struct ToRankOrderMap {
  int64_t tokens;
  int64_t cp_size;

  CP_HD int64_t rows() const { return tokens; }
  CP_HD int64_t slice() const { return quotient(tokens, cp_size); }
  CP_HD int64_t key(int64_t i) const { return (i - quotient(i, slice()) * slice()) * cp_size; }

  CP_HD Run run(int64_t i, const Place& in) const {
    int64_t rank = quotient(i, slice());
    return PartitionMap{tokens, cp_size, rank}.run(i - rank * slice(), in);
  }
};

// Row i of sequence order -> its row in CP rank order.
struct ToSequenceOrderMap {
  int64_t tokens;
  int64_t cp_size;

  CP_HD int64_t rows() const { return tokens; }
  CP_HD int64_t key(int64_t i) const { return i; }

  CP_HD Run run(int64_t i, const Place& in) const {
    int64_t offset = i - in.start, slice = quotient(tokens, cp_size), own = quotient(in.start, cp_size);
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

// Row i of a half tensor -> its row in the slice (local lengths); the tail is halved as well.
struct HalfMap {
  int64_t tokens;
  int64_t half;

  CP_HD int64_t rows() const { return tokens / 2; }
  CP_HD int64_t key(int64_t i) const { return 2 * i; }

  CP_HD Run run(int64_t i, const Place& in) const {
    int64_t offset = i - in.start / 2, size = (in.stop - in.start) / 2;
    return {in.start + half * size + offset, size - offset};
  }
};

}  // namespace cp
