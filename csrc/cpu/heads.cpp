// Heads of [t, h, ...] and parts [p, n, heads, ...]: what an all-to-all sends and gets.
#include <algorithm>

#include "convert.h"
#include "copy.h"
#include "entry_points.h"
#include "parallel.h"

namespace cp {
namespace cpu {
namespace {

// f(address in whole, address in parts, bytes) for every contiguous piece. A few rows at a time, part by part: whole rows
// stay in the cache while they are cut up, and each part is read or written in stretches.
template <typename F>
void each_piece(const HeadMove& m, const RowSet& rows, F f) {
  constexpr int64_t together = 16;
  bool joined = m.whole_head == m.head_bytes && m.part_head == m.head_bytes;
  int64_t pieces = joined ? 1 : m.heads, bytes = joined ? m.heads * m.head_bytes : m.head_bytes;
  parallel(rows.count, m.count * m.heads * m.head_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += together)
      for (int64_t i = 0; i < m.count; ++i) {
        char* whole = m.whole + m.first_heads[i] * m.whole_head;
        char* part = m.parts + i * m.part;
        for (int64_t j = at; j < std::min(at + together, end); ++j)
          for (int64_t h = 0; h < pieces; ++h)
            f(whole + rows[j] * m.whole_row + h * m.whole_head, part + j * m.part_row + h * m.part_head, bytes);
      }
  });
}

// One row and head: out + x[i] + ... in order of i, over the parts that hold the head.
template <typename Out, typename Part>
void add_head(Out* out, const Part* part, const Values& parts, int64_t part_stride, const int64_t* first_heads, int64_t count,
              int64_t head) {
  using W = Wide<Out, Part>;
  constexpr int64_t block = 256;
  W sum[block];
  for (int64_t k = 0; k < parts.dim; k += block) {
    int64_t n = std::min(block, parts.dim - k);
    for (int64_t j = 0; j < n; ++j) sum[j] = load<W>(out[k + j]);
    for (int64_t i = 0; i < count; ++i) {
      int64_t local = head - first_heads[i];
      if (local < 0 || local >= parts.heads) continue;
      const Part* x = part + i * part_stride + local * parts.head_stride + k;
      for (int64_t j = 0; j < n; ++j) sum[j] += load<W>(x[j]);
    }
    for (int64_t j = 0; j < n; ++j) store(out[k + j], sum[j]);
  }
}

}  // namespace

void heads_to_front(HeadMove move, RowSet rows, Stream) {
  each_piece(move, rows, [](char* whole, char* part, int64_t bytes) { copy_piece(part, whole, bytes); });
}

void heads_to_back(HeadMove move, RowSet rows, Stream) {
  each_piece(move, rows, [](char* whole, char* part, int64_t bytes) { copy_piece(whole, part, bytes); });
}

void add_heads(Values out, Values parts, int64_t part_stride, const int64_t* first_heads, int64_t count, RowSet rows, Stream) {
  auto held = [&](int64_t head) {
    return std::any_of(first_heads, first_heads + count,
                       [&](int64_t first) { return first <= head && head < first + parts.heads; });
  };
  visit_accumulator(out.dtype, [&](auto* out_type) {
    visit(parts.dtype, [&](auto* part_type) {
      auto* to = static_cast<decltype(out_type)>(out.data);
      auto* from = static_cast<decltype(part_type)>(parts.data);
      parallel(rows.count, out.heads * out.dim * 8, [&](int64_t begin, int64_t end) {
        for (int64_t h = 0; h < out.heads; ++h) {
          if (!held(h)) continue;
          for (int64_t j = begin; j < end; ++j)
            add_head(to + rows[j] * out.row_stride + h * out.head_stride, from + j * parts.row_stride, parts, part_stride,
                     first_heads, count, h);
        }
      });
    });
  });
}

}  // namespace cpu
}  // namespace cp
