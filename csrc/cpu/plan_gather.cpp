// Keys that were gathered: their pieces by sequence, and which of these each tile sees. What each loop computes is said
// in cp_fast/planning/loops/base.py.
#include <deque>

#include "plan_pieces.h"

namespace cp {
namespace plans {
namespace {

// f(first row, number of rows) for what every piece of a sequence has of the positions [begin, end); `pieces` is `Pieces` of cp_fast/planning/columns.py.
template <typename I>
class Gathered {
 public:
  Gathered(int64_t n, int64_t total, Object pieces) : ends_(item(pieces, 0), n), pieces_(item(pieces, 1), 3 * total) {}

  template <typename F>
  void each(int64_t seq, I begin, I end, F f) const {
    const I* pieces = pieces_.data();
    for (I p = seq ? ends_[seq - 1] : 0; p < ends_[seq]; ++p) {
      I from = std::max(pieces[3 * p], begin), size = std::min(pieces[3 * p + 1], end) - from;
      if (size > 0) f(from + pieces[3 * p + 2], size);
    }
  }

 private:
  Array<I> ends_, pieces_;
};

}  // namespace

namespace {

// What has arrived of pieces of keys: `Arrived` of cp_fast/planning/columns.py; `numbers` [groups, 3]: how many sequences
// each has, the number of its piece, and the row of its peer's block.
template <typename I>
class Groups {
 public:
  Groups(int64_t groups, Object numbers, Object arrived) : groups_(groups), numbers_(numbers, 3 * groups), arrived_(arrived) {}

  // f(sequence, first position, number of positions, what is added for the row), in the order given
  template <typename F>
  void each(int64_t sequences, F f) const {
    for (int64_t g = 0; g < groups_; ++g) {
      int64_t n = numbers_[3 * g], piece = numbers_[3 * g + 1];
      I base = static_cast<I>(numbers_[3 * g + 2]);
      Object group = item(arrived_, g), numbers = item(group, 3);
      Range<I> range(item(group, 0), n);
      Array<I> anchor(item(group, 2), n);
      std::optional<Array<int64_t>> held;
      if (size_of(numbers)) held.emplace(item(numbers, 0), n);
      const I *start = range.start.data(), *count = range.count.data(), *by = anchor.data();
      const int64_t* number = held ? held->data() : nullptr;
      Owned<I>(item(group, 1), n).visit([&](auto keys) {
        for (int64_t i = 0; i < n; ++i) {
          I offset = piece ? keys.count(i, 0) : 0, begin = std::max(start[i], offset);
          I end = std::min(static_cast<I>(start[i] + count[i]), static_cast<I>(offset + keys.count(i, piece)));
          if (end <= begin) continue;
          int64_t seq = number ? number[i] : i;
          if (seq < 0 || seq >= sequences) throw Wrong{};
          I position = keys.position(i, piece);
          f(seq, begin + position, end - begin, by[i] + base - position);
        }
      });
    }
  }

 private:
  int64_t groups_;
  Array<int64_t> numbers_;
  Object arrived_;
};

}  // namespace

// How many pieces there are; `ends`: where those of each sequence begin.
CP_PLAN cp_plan_count_pieces(int64_t wide, int64_t n, Object ends, int64_t groups, Object numbers, Object arrived) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> ends_(ends, n, true);
    I *end = ends_.data(), sum = 0;
    std::fill(end, end + n, I{0});
    Groups<I>(groups, numbers, arrived).each(n, [&](int64_t seq, I, I, I) { ++end[seq]; });
    for (int64_t i = 0; i < n; ++i) {
      I here = end[i];
      end[i] = sum;
      sum += here;
    }
    return int64_t{sum};
  });
}

// The pieces; `ends`: where those of each sequence end.
CP_PLAN cp_plan_pieces(int64_t wide, int64_t n, Object out, Object ends, int64_t total, int64_t groups, Object numbers,
                       Object arrived) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> ends_(ends, n, true), out_(out, 3 * total, true);
    I *end = ends_.data(), *to = out_.data();
    Groups<I>(groups, numbers, arrived).each(n, [&](int64_t seq, I first, I count, I anchor) {
      I at = end[seq]++;
      if (at >= total) throw Wrong{};
      to[3 * at] = first;
      to[3 * at + 1] = first + count;
      to[3 * at + 2] = anchor;
    });
    return int64_t{0};
  });
}

// How many pieces the tiles' keys meet at most: all that their sequences have.
CP_PLAN cp_plan_most_gathered(int64_t wide, int64_t n, Object slots, Object ends) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Slots<I> given(slots, n);
    Array<I> ends_(ends, n);
    const I* end = ends_.data();
    int64_t most = 0;
    for (int64_t s = 0; s < given.number; ++s) {
      const I* rows = given.rows(s);
      if (n) most += rows[0] > 0 ? end[0] : 0;
      for (int64_t i = 1; i < n; ++i) most += rows[i] > 0 ? end[i] - end[i - 1] : 0;
    }
    return most;
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
