// Heads of [t, h, ...] and parts [p, n, heads, ...]: the operands of an all-to-all.
#include <type_traits>

#include "convert.h"
#include "entry_points.h"
#include "parallel.h"
#include "stream.h"

namespace cp {
namespace cpu {
namespace {

// f(address in whole, address in the part, bytes) for every piece, row by row: the whole is one stream, and each part
// is another.
template <typename F>
void each_piece(const HeadMove& m, const RowRule& rows, int64_t begin, int64_t end, F f) {
  bool joined = m.whole_head == m.head_bytes && m.part_head == m.head_bytes;
  int64_t pieces = joined ? 1 : m.heads, bytes = joined ? m.heads * m.head_bytes : m.head_bytes;
  for (int64_t i = begin; i < end; ++i) {
    char* row = m.whole + rows[i] * m.whole_row;
    for (int64_t part = 0; part < m.count; ++part) {
      char* whole = row + m.first_heads[part] * m.whole_head;
      char* own = m.parts + part * m.part + i * m.part_row;
      for (int64_t h = 0; h < pieces; ++h) f(whole + h * m.whole_head, own + h * m.part_head, bytes);
    }
  }
}

// f(Cached or Streamed, address in whole, address in the part, bytes) for every piece, on threads.
template <typename F>
void each_head(const HeadMove& m, const RowRule& rows, F f) {
  bool joined = m.whole_head == m.head_bytes && m.part_head == m.head_bytes;
  int64_t bytes = m.count * m.heads * m.head_bytes;
  with_stores(rows.count * bytes, joined ? m.heads * m.head_bytes : m.head_bytes, [&](auto stores) {
    parallel(rows.count, bytes, [&](int64_t begin, int64_t end) {
      each_piece(m, rows, begin, end, [&](char* whole, char* own, int64_t n) { f(stores, whole, own, n); });
      stores.end();
    });
  });
}

}  // namespace

void move_heads(const HeadMove* moves, int64_t count, RowRule rows, bool scatter, Stream) {
  for (const HeadMove* one = moves; one < moves + count; ++one) {
    const HeadMove& move = *one;
    if (!scatter) {
      each_head(move, rows,
                [](auto stores, char* whole, char* own, int64_t bytes) { stores.copy(own, whole, bytes); });
      continue;
    }
    each_head(move, rows, [&](auto stores, char* whole, char* own, int64_t bytes) {
      // the same piece two rows on: too many streams for the prefetchers
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(own + 2 * move.part_row + at);
      stores.copy(whole, own, bytes);
    });
  }
}

}  // namespace cpu
}  // namespace cp
