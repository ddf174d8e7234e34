// Copying rows: whole runs in one go where they are contiguous, else piece by piece.
#pragma once

#include <cstring>

#include "types.h"

namespace cp {
namespace cpu {

// Sizes that are a machine word are copied without a call.
inline void copy_piece(char* to, const char* from, int64_t bytes) {
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
    if (m.from_row == m.head_bytes && m.to_row == m.head_bytes) return copy_piece(target, source, count * m.head_bytes);
    for (int64_t i = 0; i < count; ++i) copy_piece(target + i * m.to_row, source + i * m.from_row, m.head_bytes);
    return;
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t h = 0; h < m.heads; ++h)
      copy_piece(target + i * m.to_row + h * m.to_head, source + i * m.from_row + h * m.from_head, m.head_bytes);
}

// Bytes of a row of all moves together.
inline int64_t row_bytes(const Move* moves, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += moves[i].heads * moves[i].head_bytes;
  return sum;
}

}  // namespace cpu
}  // namespace cp
