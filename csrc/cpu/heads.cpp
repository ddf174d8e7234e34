// Heads of [t, h, ...] and parts [p, n, heads, ...]: what an all-to-all sends and gets.
#include <type_traits>

#include "convert.h"
#include "copy.h"
#include "entry_points.h"
#include "parallel.h"

namespace cp {
namespace cpu {
namespace {

// The pieces of one row of one part.
struct Pieces {
  const HeadMove& m;
  bool joined;  // heads are contiguous on both sides: one piece

  explicit Pieces(const HeadMove& move)
      : m(move), joined(m.whole_head == m.head_bytes && m.part_head == m.head_bytes) {}

  // f(address in whole, address in the part, bytes) for every piece
  template <typename F>
  void each(int64_t part, int64_t row, int64_t i, F f) const {
    char* whole = m.whole + row * m.whole_row + m.first_heads[part] * m.whole_head;
    char* own = m.parts + part * m.part + i * m.part_row;
    if (joined) return f(whole, own, m.heads * m.head_bytes);
    for (int64_t h = 0; h < m.heads; ++h) f(whole + h * m.whole_head, own + h * m.part_head, m.head_bytes);
  }
};

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

// Part by part, both ways: one stream on one side, pieces of whole rows on the other.
void heads_to_front(HeadMove move, RowSet rows, Stream) {
  Pieces pieces(move);
  parallel(move.count * rows.count, move.heads * move.head_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      int64_t part = at / rows.count, i = at - part * rows.count;
      pieces.each(part, rows[i], i, [](char* whole, char* own, int64_t bytes) { copy_piece(own, whole, bytes); });
    }
  });
}

void heads_to_back(HeadMove move, RowSet rows, Stream) {
  Pieces pieces(move);
  parallel(move.count * rows.count, move.heads * move.head_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      int64_t part = at / rows.count, i = at - part * rows.count;
      pieces.each(part, rows[i], i, [](char* whole, char* own, int64_t bytes) { copy_piece(whole, own, bytes); });
    }
  });
}

void add_heads(Values out, Values parts, int64_t part_stride, const int64_t* first_heads, int64_t count, RowSet rows,
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
