// Spans of rows: without empty ones, their cumulative lengths, and the spans of gathered keys. What each loop computes
// is said in cp_fast/planning/loops/base.py.
#include <cstring>
#include <deque>

#include "plan_pieces.h"

namespace cp {
namespace plans {
namespace {

template <typename I>
bool contiguous(const I* start, const I* count, int64_t n) {
  I apart = 0;
  for (int64_t i = 0; i + 1 < n; ++i) apart |= start[i + 1] ^ (start[i] + count[i]);
  return apart == 0;
}

// f(first row, number of rows) for what every piece of a sequence has of the positions [begin, end); `pieces` is `Pieces` of cp_fast/planning/columns.py.
template <typename I>
class Gathered {
 public:
  Gathered(int64_t n, int64_t total, Object pieces)
      : ends_(item(pieces, 0), n), first_(item(pieces, 1), total), stop_(item(pieces, 2), total),
        anchor_(item(pieces, 3), total) {}

  template <typename F>
  void each(int64_t seq, I begin, I end, F f) const {
    for (I p = seq ? ends_[seq - 1] : 0; p < ends_[seq]; ++p) {
      I from = std::max(first_[p], begin), size = std::min(stop_[p], end) - from;
      if (size > 0) f(from + anchor_[p], size);
    }
  }

 private:
  Array<I> ends_, first_, stop_, anchor_;
};

}  // namespace

// `said`: how many spans are not empty; the sum of all; where none is empty, whether they are one range of rows.
CP_PLAN cp_plan_look(int64_t wide, int64_t n, Object said, Object start, Object count) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<int64_t> said_(said, 3, true);
    Array<I> start_(start, n), count_(count, n);
    const I* size = count_.data();
    I total = 0, kept = 0;
    for (int64_t i = 0; i < n; ++i) total += size[i], kept += size[i] > 0;
    said_[0] = kept;
    said_[1] = total;
    said_[2] = kept == n && contiguous(start_.data(), size, n);
    return int64_t{0};
  });
}

// Those that are not empty, with room for one more; whether they are one range of rows.
CP_PLAN cp_plan_drop_empty(int64_t wide, int64_t n, Object out, int64_t room, Object start, Object count) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 2> to(out, room);
    Array<I> start_(start, n), count_(count, n);
    I *to_start = to[0], *to_count = to[1];
    const I *from = start_.data(), *size = count_.data();
    int64_t kept = 0, at = 0;
    for (int64_t i = 0; i < n; ++i) kept += size[i] > 0;
    if (kept != room - 1) throw Wrong{};
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      to_start[at] = from[i];
      to_count[at] = size[i];
      at += size[i] > 0;
    }
    return int64_t{contiguous(to_start, to_count, at)};
  });
}

CP_PLAN cp_plan_cumulative(int64_t wide, int64_t n, Object out, Object count) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<int32_t> out_(out, n + 1, true);
    Array<I> count_(count, n);
    int32_t* sum = out_.data();
    const I* size = count_.data();
    int32_t total = 0;
    sum[0] = 0;
    for (int64_t i = 0; i < n; ++i) sum[i + 1] = total += static_cast<int32_t>(size[i]);
    return int64_t{0};
  });
}

CP_PLAN cp_plan_same(int64_t wide, int64_t n, Object one, Object other) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> a(one, n), b(other, n);
    return int64_t{n == 0 || std::memcmp(a.data(), b.data(), n * sizeof(I)) == 0};
  });
}

// ---- keys that were gathered

namespace {

// f(i, first token, number of tokens) for what a piece of the keys has of a range of their token axis.
template <typename I, typename F>
void each_held(int64_t n, const Range<I>& range, const Owned<I>& owned, int64_t piece, F f) {
  const I *start = range.start.data(), *count = range.count.data();
  owned.visit([&](auto keys) {
    for (int64_t i = 0; i < n; ++i) {
      I offset = piece ? keys.count(i, 0) : 0, begin = std::max(start[i], offset);
      f(keys, i, begin, std::min(static_cast<I>(start[i] + count[i]), static_cast<I>(offset + keys.count(i, piece))) - begin);
    }
  });
}

}  // namespace

// The part of a range of a token axis that a piece of it has, for the sequences in which that is something: how many.
CP_PLAN cp_plan_count_held(int64_t wide, int64_t n, Object range, Object keys, int64_t piece) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    I found = 0;
    each_held(n, Range<I>(range, n), Owned<I>(keys, n), piece, [&](auto, int64_t, I, I size) { found += size > 0; });
    return int64_t{found};
  });
}

// The same: the number of the sequence (`numbers` has them, or they count up), the first position, the length, the
// row. With room for one more.
CP_PLAN cp_plan_held(int64_t wide, int64_t n, Object out, int64_t room, Object range, Object keys, int64_t piece,
                     Object anchor, int64_t base, Object numbers) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 4> to(out, room);
    Array<I> anchor_(anchor, n);
    std::optional<Array<int64_t>> numbers_;
    if (size_of(numbers)) numbers_.emplace(item(numbers, 0), n);
    int64_t at = 0;
    each_held(n, Range<I>(range, n), Owned<I>(keys, n), piece, [&](auto tokens, int64_t i, I begin, I size) {
      if (size <= 0) return;
      if (at >= room) throw Wrong{};
      to[0][at] = static_cast<I>(numbers_ ? (*numbers_)[i] : i);
      to[1][at] = begin + tokens.position(i, piece);
      to[2][at] = size;
      to[3][at++] = begin + anchor_[i] + static_cast<I>(base);
    });
    return at;
  });
}

// Pieces sorted by sequence, those of each in the order given: `ends` counts them up to the end of each sequence; then
// first and stop positions, and what is to be added to a position for its row.
CP_PLAN cp_plan_by_sequence(int64_t wide, int64_t n, Object ends, int64_t total, Object out, int64_t groups,
                            Object sizes, Object pieces) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> ends_(ends, n, true);
    Columns<I, 3> to(out, total);
    Array<int64_t> size(sizes, groups);
    I* end = ends_.data();
    std::fill(end, end + n, I{0});
    for (int64_t g = 0; g < groups; ++g) {
      Array<I> seqs(item(item(pieces, g), 0), size[g]);
      const I* seq = seqs.data();
      for (int64_t i = 0; i < size[g]; ++i) {
        if (seq[i] < 0 || seq[i] >= n) throw Wrong{};
        ++end[seq[i]];
      }
    }
    I sum = 0;
    for (int64_t i = 0; i < n; ++i) {  // where the next one goes; `end` again when all have been put
      I here = end[i];
      end[i] = sum;
      sum += here;
    }
    if (sum != total) throw Wrong{};
    I *to_first = to[0], *to_stop = to[1], *to_anchor = to[2];
    for (int64_t g = 0; g < groups; ++g) {
      Object piece = item(pieces, g);
      Array<I> seqs(item(piece, 0), size[g]), firsts(item(piece, 1), size[g]);
      Array<I> counts(item(piece, 2), size[g]), rows(item(piece, 3), size[g]);
      const I *seq = seqs.data(), *first = firsts.data(), *count = counts.data(), *row = rows.data();
      for (int64_t i = 0; i < size[g]; ++i) {
        I at = end[seq[i]]++;
        to_first[at] = first[i];
        to_stop[at] = first[i] + count[i];
        to_anchor[at] = row[i] - first[i];
      }
    }
    return int64_t{0};
  });
}

// How many pieces the tiles' keys meet.
CP_PLAN cp_plan_count_gathered(int64_t wide, int64_t n, Object slots, int64_t total, Object pieces) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Slots<I> given(slots, n);
    Gathered<I> gathered(n, total, pieces);
    int64_t found = 0;
    for (int64_t s = 0; s < given.number; ++s) {
      const I *rows = given.rows(s), *k = given.k(s), *columns = given.columns(s);
      for (int64_t i = 0; i < n; ++i)
        if (rows[i] > 0) gathered.each(i, k[i], k[i] + columns[i], [&](I, I) { ++found; });
    }
    return found;
  });
}

// The spans of their rows; and of every tile, all of one sequence and then of the next, the query rows (first and
// number) and how many rows of keys there are.
CP_PLAN cp_plan_gathered(int64_t wide, int64_t n, Object out, int64_t room, Object tiles, int64_t tile_room,
                         Object q_anchor, Object slots, int64_t total, Object pieces) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Slots<I> given(slots, n);
    Gathered<I> gathered(n, total, pieces);
    Columns<I, 2> spans(out, room);
    Columns<I, 3> found(tiles, tile_room);
    Array<I> anchor(q_anchor, n);
    I *start = spans[0], *length = spans[1], *to_q = found[0], *to_rows = found[1], *to_columns = found[2];
    int64_t at = 0, tile = 0;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t s = 0; s < given.number; ++s) {
        I rows = given.rows(s)[i], k = given.k(s)[i], sum = 0;
        if (rows <= 0) continue;
        if (tile >= tile_room) throw Wrong{};
        gathered.each(i, k, k + given.columns(s)[i], [&](I row, I size) {
          if (at >= room) throw Wrong{};
          start[at] = row;
          length[at++] = size;
          sum += size;
        });
        to_q[tile] = given.q(s)[i] + anchor[i];
        to_rows[tile] = rows;
        to_columns[tile++] = sum;
      }
    return at;
  });
}

// ---- whole pieces of gathered keys

namespace {

// Pieces of chunked tokens, all of one problem; `numbers` [pieces, 5]: the chunks [first, stop) of a piece, those of the
// piece before it, and the row of its peer's block.
template <typename I>
class WholePieces {
 public:
  struct Piece {
    Chunks<I> here, before;
    I base;
  };

  WholePieces(int64_t n, Object tokens, int64_t pieces, Object numbers)
      : lengths_(item(tokens, 0), n), chunk_(item(tokens, 1), n), numbers_(numbers, 5 * pieces) {}

  Piece operator[](int64_t p) const {
    auto number = [&](int64_t k) { return static_cast<I>(numbers_[5 * p + k]); };
    return {{lengths_.data(), chunk_.data(), number(0), number(1)}, {lengths_.data(), chunk_.data(), number(2), number(3)},
            number(4)};
  }

 private:
  Array<I> lengths_, chunk_;
  Array<int64_t> numbers_;
};

template <typename I>
I tokens_of(const Chunks<I>& chunks, int64_t i) {
  return chunks.stop(i) - chunks.first(i);
}

}  // namespace

// For tiles of `rows` queries over all pieces of keys: their columns and numbers of pieces, and how many pieces all
// tiles have together.
CP_PLAN cp_plan_count_whole(int64_t wide, int64_t n, Object out, Object tokens, int64_t pieces, Object numbers,
                            Object rows) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 2> to(out, n);
    Array<I> rows_(rows, n);
    WholePieces<I> all(n, tokens, pieces, numbers);
    I *sum = to[0], *number = to[1];
    std::fill(sum, sum + n, I{0});
    std::fill(number, number + n, I{0});
    for (int64_t p = 0; p < pieces; ++p) {
      auto piece = all[p];
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        I count = tokens_of(piece.here, i);
        sum[i] += count;
        number[i] += count > 0;
      }
    }
    int64_t together = 0;
    for (int64_t i = 0; i < n; ++i) together += rows_[i] > 0 ? number[i] : 0;
    return together;
  });
}

// The pieces, sequence after sequence. A few sequences at a time, so that what is read lies side by side.
CP_PLAN cp_plan_whole(int64_t wide, int64_t n, Object out, int64_t room, Object tokens, int64_t pieces, Object numbers,
                      Object rows, Object number, Object anchors) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 2> spans(out, room);
    Array<I> rows_(rows, n), number_(number, n);
    WholePieces<I> all(n, tokens, pieces, numbers);
    std::deque<Array<I>> held;
    for (int64_t p = 0; p < pieces; ++p) held.emplace_back(item(anchors, p), n);
    I *start = spans[0], *length = spans[1];
    constexpr int64_t few = 64;
    int64_t at = 0;
    for (int64_t from = 0; from < n; from += few) {
      int64_t here = std::min(few, n - from), next[few];
      for (int64_t j = 0; j < here; ++j) {
        next[j] = at;
        at += rows_[from + j] > 0 ? number_[from + j] : 0;
      }
      if (at > room) throw Wrong{};
      for (int64_t p = 0; p < pieces; ++p) {
        auto piece = all[p];
        const I* anchor = held[p].data() + from;
        I first[few], count[few];
        for (int64_t j = 0; j < here; ++j) {
          first[j] = anchor[j] + tokens_of(piece.before, from + j) + piece.base;
          count[j] = rows_[from + j] > 0 ? tokens_of(piece.here, from + j) : 0;
        }
        for (int64_t j = 0; j < here; ++j) {
          if (count[j] <= 0) continue;
          start[next[j]] = first[j];
          length[next[j]++] = count[j];
        }
      }
    }
    return at;
  });
}

}  // namespace plans
}  // namespace cp
