// Copying rows: whole runs in one go where they are contiguous, else piece by piece.
#pragma once

#include <algorithm>
#include <cstring>

#include "types.h"

namespace cp {
namespace cpu {

// Sizes that are a machine word are copied without a call.
inline void copy_bytes(char* to, const char* from, int64_t bytes) {
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

// `count` rows from row `from` of the source to row `to` of the destination.
inline void copy_rows(const Move& m, int64_t to, int64_t from, int64_t count) {
  char* target = m.to + to * m.to_row;
  const char* source = m.from + from * m.from_row;
  if (m.heads == 1) {
    if (m.from_row == m.head_bytes && m.to_row == m.head_bytes) return copy_bytes(target, source, count * m.head_bytes);
    for (int64_t i = 0; i < count; ++i) copy_bytes(target + i * m.to_row, source + i * m.from_row, m.head_bytes);
    return;
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t h = 0; h < m.heads; ++h)
      copy_bytes(target + i * m.to_row + h * m.to_head, source + i * m.from_row + h * m.from_head, m.head_bytes);
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

}  // namespace cpu
}  // namespace cp
