// Movers: rows of bytes.
#include "convert.h"
#include "copy.h"
#include "entry_points.h"
#include "parallel.h"
#include "runs.h"

namespace cp {
namespace cpu {
namespace {

template <typename Map>
void move_by(const Map& map, const Move* moves, int64_t count, const Lengths& lengths) {
  parallel(map.rows(), row_bytes(moves, count), [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < count; ++m)
      each_run(map, lengths, begin, end,
               [&](int64_t to, int64_t from, int64_t rows, const Place&) { copy_rows(moves[m], to, from, rows); });
  });
}

}  // namespace

void partition(const Move* moves, int64_t count, Lengths lengths, int64_t tokens, int64_t cp_size, int64_t cp_rank,
               Stream) {
  move_by(PartitionMap{tokens, cp_size, cp_rank}, moves, count, lengths);
}

void reorder(const Move* moves, int64_t count, Lengths lengths, int64_t tokens, int64_t cp_size, bool to_rank_order,
             Stream) {
  if (to_rank_order)
    move_by(ToRankOrderMap{tokens, cp_size}, moves, count, lengths);
  else
    move_by(ToSequenceOrderMap{tokens, cp_size}, moves, count, lengths);
}

void read_half(const Move* moves, int64_t count, Lengths lengths, int64_t tokens, int64_t half, Stream) {
  move_by(HalfMap{tokens, half}, moves, count, lengths);
}

void take_rows(const Move* moves, int64_t count, RowSet rows, Stream) {
  parallel(rows.count, row_bytes(moves, count), [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < count; ++m)
      for (int64_t i = begin, n; i < end; i += n) {
        n = run_length(rows, i, end);
        if (i + n < end) __builtin_prefetch(moves[m].from + rows[i + n] * moves[m].from_row);
        copy_rows(moves[m], i, rows[i], n);
      }
  });
}

void put_rows(const Move* moves, int64_t count, RowSet rows, Stream) {
  parallel(rows.count, row_bytes(moves, count), [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < count; ++m)
      for (int64_t i = begin, n; i < end; i += n) copy_rows(moves[m], rows[i], i, n = run_length(rows, i, end));
  });
}

void copy_valid(const Move* moves, int64_t count, Lengths lengths, Lengths real, int64_t, Stream) {
  parallel(lengths[lengths.sequences] - lengths[0], row_bytes(moves, count), [&](int64_t begin, int64_t end) {
    int64_t first = lengths[0];
    each_valid(lengths, real, first + begin, first + end, [&](int64_t row, int64_t rows) {
      for (int64_t m = 0; m < count; ++m) copy_rows(moves[m], row, row, rows);
    });
  });
}

void read_second_half_lse(Lse out, Lse lse, Lengths lengths, Stream) {
  LseRows<double> to{out}, from{lse};  // both of one dtype: the way through double changes nothing
  auto put = [&](int64_t sequence, int64_t head, int64_t row, int64_t source) {
    to.set(to.at(sequence, head, row), source < 0 ? 0.0 : from.get(from.at(sequence, head, source)));
  };
  int64_t sequences = out.packed ? 1 : lengths.sequences;
  parallel(sequences * out.heads, out.rows * size_of(out.dtype), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t s = i / out.heads, h = i % out.heads, row = 0;
      if (out.packed) {
        for (int64_t t = 0; t < lengths.sequences; ++t)
          for (int64_t half = lengths.size(t) / 2, j = 0; j < half; ++j, ++row) put(0, h, row, lengths[t] + half + j);
      } else {
        for (int64_t half = lengths.size(s) / 2; row < half; ++row) put(s, h, row, half + row);
      }
      for (; row < out.rows; ++row) put(s, h, row, -1);
    }
  });
}

}  // namespace cpu
}  // namespace cp
