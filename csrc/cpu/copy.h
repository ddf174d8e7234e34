// Copying rows: whole runs in one go where they are contiguous, else piece by piece.
#pragma once

#include <algorithm>
#include <cstring>

#include "stream.h"
#include "types.h"

namespace cp {
namespace cpu {

// Pieces through the caches. Sizes that are a machine word are copied without a call.
struct Cached {
  static void copy(char* to, const char* from, int64_t bytes) {
    switch (bytes) {
      case 1:
        *to = *from;
        break;
      case 2:
        std::memcpy(to, from, 2);
        break;
      case 4:
        std::memcpy(to, from, 4);
        break;
      case 8:
        std::memcpy(to, from, 8);
        break;
      case 16:
        std::memcpy(to, from, 16);
        break;
      default:
        std::memcpy(to, from, static_cast<size_t>(bytes));
    }
  }
  static void end() {}
};

// Pieces past the caches.
struct Streamed {
  static constexpr int64_t least = 256;  // bytes of a piece: of smaller ones, too many lines are not written whole

  static void copy(char* to, const char* from, int64_t bytes) { stream_bytes(to, from, bytes); }
  static void end() { end_of_streams(); }
};

// Call f(Cached or Streamed) for `bytes` in all, in pieces of `piece` bytes. Who copies calls end() at last.
template <typename F>
void with_stores(int64_t bytes, int64_t piece, F f) {
  if (bytes > cached_bytes && piece >= Streamed::least)
    f(Streamed{});
  else
    f(Cached{});
}

// `count` rows from row `from` of the source to row `to` of the destination.
template <typename Stores>
inline void copy_rows(const Move& m, int64_t to, int64_t from, int64_t count) {
  char* target = m.to + to * m.to_row;
  const char* source = m.from + from * m.from_row;
  if (m.heads == 1) {
    if (m.from_row == m.head_bytes && m.to_row == m.head_bytes)
      return Stores::copy(target, source, count * m.head_bytes);
    for (int64_t i = 0; i < count; ++i) Stores::copy(target + i * m.to_row, source + i * m.from_row, m.head_bytes);
    return;
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t h = 0; h < m.heads; ++h)
      Stores::copy(target + i * m.to_row + h * m.to_head, source + i * m.from_row + h * m.from_head, m.head_bytes);
}

// Ask for the beginning of row `from`, which is copied soon: no prefetcher sees where the next run begins.
inline void expect_row(const Move& m, int64_t from) {
  const char* source = m.from + from * m.from_row;
  int64_t bytes = std::min<int64_t>(m.heads == 1 ? m.head_bytes : 64, 512);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(source + at);
}

// Bytes of a row of all moves together.
inline int64_t row_bytes(const Move* moves, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += moves[i].heads * moves[i].head_bytes;
  return sum;
}

// Call f(Cached or Streamed) for `rows` rows of all moves.
template <typename F>
void with_stores(const Move* moves, int64_t count, int64_t rows, F f) {
  int64_t smallest = Streamed::least;
  for (int64_t i = 0; i < count; ++i) smallest = std::min(smallest, moves[i].head_bytes);
  with_stores(rows * row_bytes(moves, count), smallest, f);
}

}  // namespace cpu
}  // namespace cp
