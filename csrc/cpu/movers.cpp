// Movers: rows of bytes.
#include "convert.h"
#include "copy.h"
#include "entry_points.h"
#include "parallel.h"
#include "runs.h"

namespace cp {
namespace cpu {
namespace {

// Copies runs in order; each is prefetched before the previous one is copied.
class Runs {
 public:
  explicit Runs(const Move& move) : move_(move) {}

  void next(int64_t to, int64_t from, int64_t rows) {
    expect_row(move_, from);
    end();
    to_ = to;
    from_ = from;
    rows_ = rows;
  }
  void end() const { copy_rows(move_, to_, from_, rows_); }

 private:
  const Move& move_;
  int64_t to_ = 0, from_ = 0, rows_ = 0;
};

// Every move, on threads: walk(begin, end, f) calls f(destination row, source row, how many) for rows begin to end - 1.
template <typename Walk>
void move_by(const Move* moves, int64_t count, int64_t rows, const Walk& walk) {
  parallel(rows, row_bytes(moves, count), [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < count; ++m) {
      Runs runs(moves[m]);
      walk(begin, end, [&](int64_t to, int64_t from, int64_t n) { runs.next(to, from, n); });
      runs.end();
    }
  });
}

template <typename Map>
void move_by_map(const Map& map, const Move* moves, int64_t count, const Lengths& lengths) {
  move_by(moves, count, map.rows(), [&](int64_t begin, int64_t end, auto f) {
    each_run(map, lengths, begin, end,
             [&](int64_t to, int64_t from, int64_t rows, const Place&) { f(to, from, rows); });
  });
}

}  // namespace

void partition(const Move* moves, int64_t count, Lengths lengths, int64_t tokens, int64_t cp_size, int64_t cp_rank,
               Stream) {
  move_by_map(PartitionMap{tokens, cp_size, cp_rank}, moves, count, lengths);
}

void reorder(const Move* moves, int64_t count, Lengths lengths, int64_t tokens, int64_t cp_size, bool to_rank_order,
             Stream) {
  if (to_rank_order)
    move_by_map(ToRankOrderMap{tokens, cp_size}, moves, count, lengths);
  else
    move_by_map(ToSequenceOrderMap{tokens, cp_size}, moves, count, lengths);
}

void read_half(const Move* moves, int64_t count, Lengths lengths, int64_t tokens, int64_t half, Stream) {
  move_by_map(HalfMap{tokens, half}, moves, count, lengths);
}

void take_rows(const Move* moves, int64_t count, RowSet rows, Stream) {
  move_by(moves, count, rows.count, [&](int64_t begin, int64_t end, auto f) {
    each_run(rows, begin, end, [&](int64_t i, int64_t row, int64_t n) { f(i, row, n); });
  });
}

void put_rows(const Move* moves, int64_t count, RowSet rows, Stream) {
  move_by(moves, count, rows.count, [&](int64_t begin, int64_t end, auto f) {
    each_run(rows, begin, end, [&](int64_t i, int64_t row, int64_t n) { f(row, i, n); });
  });
}

void copy_valid(const Move* moves, int64_t count, Lengths lengths, Lengths real, int64_t, Stream) {
  int64_t first = lengths[0];
  move_by(moves, count, lengths[lengths.sequences] - first, [&](int64_t begin, int64_t end, auto f) {
    each_valid(lengths, real, first + begin, first + end, [&](int64_t row, int64_t rows) { f(row, row, rows); });
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
