// Walking through a map: f(destination row, source row, how many rows continue), in order, for the rows begin to end
// - 1.
#pragma once

#include <algorithm>

#include "maps.h"

namespace cp {
namespace cpu {

template <typename Map, typename F>
void each_run(const Map& map, const Lengths& lengths, int64_t begin, int64_t end, F f) {
  Place place = locate(lengths, map.key(begin), map.tokens);
  for (int64_t i = begin; i < end;) {
    place = locate_next(lengths, map.key(i), map.tokens, place);
    Run run = map.run(i, place);
    int64_t count = std::min(run.count, end - i);
    f(i, run.row, count, place);
    i += count;
  }
}

// Every row of every sequence onto itself.
struct WholeMap {
  int64_t tokens;

  int64_t rows() const { return tokens; }
  int64_t key(int64_t i) const { return i; }
  Run run(int64_t i, const Place& in) const { return {i, in.stop - i}; }
};

// f(first row, how many) for the real tokens among the rows begin to end - 1, which lie in sequences.
template <typename F>
void each_valid(const Lengths& lengths, const Lengths& real, int64_t begin, int64_t end, F f) {
  each_run(WholeMap{lengths[lengths.sequences]}, lengths, begin, end,
           [&](int64_t row, int64_t, int64_t count, const Place& place) {
             int64_t valid = std::min(place.start + real.size(place.sequence), row + count) - row;
             if (valid > 0) f(row, valid);
           });
}

inline int64_t run_length(const RowSet& rows, int64_t i, int64_t end) {
  if (rows.index == nullptr) return end - i;
  int64_t n = 1;
  while (i + n < end && rows[i + n] == rows[i] + n) ++n;
  return n;
}

// f(place in the set, row, how many rows continue), in order, for the places begin to end - 1.
template <typename F>
void each_run(const RowSet& rows, int64_t begin, int64_t end, F f) {
  for (int64_t i = begin, n; i < end; i += n) f(i, rows[i], n = run_length(rows, i, end));
}

}  // namespace cpu
}  // namespace cp
