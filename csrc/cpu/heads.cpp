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
void each_piece(const HeadMove& m, const RowMap& rows, int64_t begin, int64_t end, F f) {
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
void each_head(const HeadMove& m, const RowMap& rows, F f) {
  bool joined = m.whole_head == m.head_bytes && m.part_head == m.head_bytes;
  int64_t bytes = m.count * m.heads * m.head_bytes;
  with_stores(rows.count * bytes, joined ? m.heads * m.head_bytes : m.head_bytes, [&](auto stores) {
    parallel(rows.count, bytes, [&](int64_t begin, int64_t end) {
      each_piece(m, rows, begin, end, [&](char* whole, char* own, int64_t n) { f(stores, whole, own, n); });
      stores.end();
    });
  });
}

// out + x[i] + ... in order of i, over the parts that hold a head.
template <typename Out, typename Part>
struct Addition {
  Values out, parts;
  int64_t part_stride;
  const int64_t* first_heads;
  int64_t count;

  const Part* part_at(int64_t part, int64_t i, int64_t head) const {
    return static_cast<const Part*>(parts.data) + part * part_stride + i * parts.row_stride + head * parts.head_stride;
  }

  // One row. Where sums have out's own type, they are formed in place.
  void add(Out* row, int64_t i) const {
    for (int64_t p = 0; p < count; ++p)
      for (int64_t h = 0; h < parts.heads; ++h) {
        Out* to = row + (first_heads[p] + h) * out.head_stride;
        const Part* x = part_at(p, i, h);
        for (int64_t k = 0; k < out.dim; ++k) to[k] += load<Out>(x[k]);
      }
  }

  // One row, float64 into float32: rounded once, at the end.
  void add_wide(Out* row, int64_t i) const {
    for (int64_t h = 0; h < out.heads; ++h)
      for (int64_t k = 0; k < out.dim; ++k) {
        double sum = row[h * out.head_stride + k];
        for (int64_t p = 0; p < count; ++p) {
          int64_t local = h - first_heads[p];
          if (local >= 0 && local < parts.heads) sum += load<double>(part_at(p, i, local)[k]);
        }
        row[h * out.head_stride + k] = static_cast<Out>(sum);
      }
  }
};

}  // namespace

void move_heads(HeadMove move, RowMap rows, bool scatter, Stream) {
  if (!scatter)
    return each_head(move, rows,
                     [](auto stores, char* whole, char* own, int64_t bytes) { stores.copy(own, whole, bytes); });
  each_head(move, rows, [&](auto stores, char* whole, char* own, int64_t bytes) {
    // the same piece two rows on: too many streams for the prefetchers
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(own + 2 * move.part_row + at);
    stores.copy(whole, own, bytes);
  });
}

void add_heads(Values out, Values parts, int64_t part_stride, const int64_t* first_heads, int64_t count, RowMap rows,
               Stream) {
  visit_accumulator(out.dtype, [&](auto* out_type) {
    visit(parts.dtype, [&](auto* part_type) {
      using Out = std::remove_pointer_t<decltype(out_type)>;
      using Part = std::remove_pointer_t<decltype(part_type)>;
      Addition<Out, Part> addition{out, parts, part_stride, first_heads, count};
      parallel(rows.count, out.heads * out.dim * size_of(out.dtype), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          Out* row = static_cast<Out*>(out.data) + rows[i] * out.row_stride;
          if constexpr (std::is_same_v<Out, Wide<Out, Part>>)
            addition.add(row, i);
          else
            addition.add_wide(row, i);
        }
      });
    });
  });
}

}  // namespace cpu
}  // namespace cp
