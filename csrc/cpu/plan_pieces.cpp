// Which tokens a unit has of every sequence, which of them are seen, and where they lie in a buffer. What each loop
// computes is said in cp_fast/planning/loops/base.py.
#include "plan_pieces.h"

#include <deque>

namespace cp {
namespace plans {

Python python;

CP_PLAN cp_plan_python(decltype(Python::get_buffer) get_buffer, decltype(Python::release_buffer) release_buffer,
                       decltype(Python::tuple_size) tuple_size, decltype(Python::tuple_item) tuple_item,
                       decltype(Python::set_error) set_error, Object kind_of_error) {
  python = {get_buffer, release_buffer, tuple_size, tuple_item, set_error, kind_of_error};
  return 0;
}

// One piece: first, stop, count. Two pieces: first and second of each, and the total.
CP_PLAN cp_plan_columns(int64_t wide, int64_t n, Object out, Object tokens) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    return Owned<I>(tokens, n).visit([&](auto held) {
      constexpr int pieces = decltype(held)::pieces;
      Columns<I, pieces == 1 ? 3 : 7> to(out, n);
      auto write = [&](auto piece, int p) {
        I *first = to[p], *stop = to[pieces + p], *count = to[2 * pieces + p];
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) {
          first[i] = piece.first(i);
          stop[i] = piece.stop(i);
          count[i] = piece.stop(i) - piece.first(i);
        }
      };
      write(held.one, 0);
      if constexpr (pieces == 2) {
        write(held.two, 1);
        I* total = to[6];
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) total[i] = held.total(i);
      }
      return int64_t{0};
    });
  });
}

CP_PLAN cp_plan_ends(int64_t wide, int64_t n, Object out, Object tokens, int64_t far) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> out_(out, n, true);
    I *end = out_.data(), none = static_cast<I>(far);
    return Owned<I>(tokens, n).visit([&](auto held) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) end[i] = held.end(i, none);
      return int64_t{0};
    });
  });
}

CP_PLAN cp_plan_below(int64_t wide, int64_t n, Object out, Object tokens, Object position) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> out_(out, n, true), position_(position, n);
    I* found = out_.data();
    const I* at = position_.data();
    return Owned<I>(tokens, n).visit([&](auto held) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) found[i] = held.below(i, at[i]);
      return int64_t{0};
    });
  });
}

namespace {

// What a piece of queries sees: what the window of each of its queries has of the keys together.
template <typename I, typename Piece, typename Keys>
void through_window(I* start, I* count, int64_t n, Piece piece, Keys keys, const I* lo, const I* hi) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    I first = piece.first(i), stop = piece.stop(i), there = stop > first;
    I begin = keys.below(i, first + lo[i]), end = keys.below(i, stop + hi[i]);
    start[i] = begin * there;
    count[i] = (end - begin) * there;
  }
}

// The same where it is one piece of the keys, or all of them (-1).
template <typename I, typename Piece, typename Keys>
void see_whole(I* start, I* count, int64_t n, Piece piece, Keys keys, int64_t other) {
  visit_part<I>(keys, other, [=](auto offset, auto size) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      I there = piece.stop(i) > piece.first(i);
      start[i] = offset(i) * there;
      count[i] = size(i) * there;
    }
  });
}

}  // namespace

// Of every piece of queries, what it sees of the keys, without what the piece before it sees: of one piece of them, of
// all (-1), through its window (-2), or nothing, which is not written (-3).
CP_PLAN cp_plan_seen(int64_t wide, int64_t n, Object out, Object queries, int64_t one, int64_t two, Object band,
                     Object keys) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Band<I> band_(band, n);
    const I *lo = band_.lo.data(), *hi = band_.hi.data();
    Owned<I> owner_(keys, n);
    return Owned<I>(queries, n).visit([&](auto reader) {
      return owner_.visit([&](auto owner) {
        auto write = [&](auto piece, int64_t how, Object range) {
          if (how == -3) return;
          Columns<I, 2> to(range, n);
          if (how == -2)
            through_window(to[0], to[1], n, piece, owner, lo, hi);
          else
            see_whole(to[0], to[1], n, piece, owner, how);
        };
        write(reader.one, one, item(out, 0));
        if constexpr (decltype(reader)::pieces == 2) {
          write(reader.two, two, item(out, 1));
          if (one != -3 && two != -3) {
            Columns<I, 2> first(item(out, 0), n), second(item(out, 1), n);
            const I *before = first[0], *size = first[1];
            I *start = second[0], *count = second[1];
#pragma GCC ivdep
            for (int64_t i = 0; i < n; ++i) {
              I begin = std::max(start[i], static_cast<I>(before[i] + size[i]));
              count[i] = std::max(static_cast<I>(start[i] + count[i] - begin), I{0});
              start[i] = begin;
            }
          }
        }
        return int64_t{0};
      });
    });
  });
}

CP_PLAN cp_plan_packed_one(int64_t wide, int64_t n, Object anchor, Object range) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> anchor_(anchor, n, true);
    Range<I> given(range, n);
    I *to = anchor_.data(), row = 0;
    const I *start = given.start.data(), *count = given.count.data();
    for (int64_t i = 0; i < n; ++i) {
      to[i] = row - start[i];
      row += count[i];
    }
    return int64_t{row};
  });
}

CP_PLAN cp_plan_packed_two(int64_t wide, int64_t n, Object anchors, Object one, Object two) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 2> to(anchors, n);
    Range<I> first(one, n), second(two, n);
    I row = 0;
    for (int64_t i = 0; i < n; ++i) {
      to[0][i] = row - first.start[i];
      row += first.count[i];
      to[1][i] = row - second.start[i];
      row += second.count[i];
    }
    return int64_t{row};
  });
}

namespace {

// Every rank's share of a unit's tokens, as far as it takes part.
template <typename I>
class Shares {
 public:
  Shares(int64_t n, int64_t ranks, Object shares, Object positions)
      : n_(n), start_(item(positions, 0), n), stop_(item(positions, 1), n) {
    for (int64_t rank = 0; rank < ranks; ++rank) shares_.emplace_back(item(shares, rank), n);
  }

  // f(rank, sequence, first position, number of positions): empty ones too
  template <typename F>
  void each(F f) const {
    const I *start = start_.data(), *stop = stop_.data();
    int64_t rank = 0;
    for (const Owned<I>& share : shares_) {
      share.visit([&](auto held) {
        auto put = [&](int64_t i, auto piece) {
          I first = std::max(piece.first(i), start[i]);
          f(rank, i, first, static_cast<I>(std::min(piece.stop(i), stop[i]) - first));
        };
        for (int64_t i = 0; i < n_; ++i) {
          put(i, held.one);
          if constexpr (decltype(held)::pieces == 2) put(i, held.two);
        }
      });
      ++rank;
    }
  }

 private:
  int64_t n_;
  Array<I> start_, stop_;
  std::deque<Owned<I>> shares_;
};

}  // namespace

// How many spans there are that are not empty; `sizes`: the rows of each rank.
CP_PLAN cp_plan_count_exchanged(int64_t wide, int64_t n, Object sizes, int64_t ranks, Object shares,
                                Object positions) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<int64_t> sizes_(sizes, ranks, true);
    int64_t* size = sizes_.data();
    std::fill(size, size + ranks, 0);
    int64_t found = 0;
    Shares<I>(n, ranks, shares, positions).each([&](int64_t rank, int64_t, I, I count) {
      found += count > 0;
      size[rank] += std::max(count, I{0});
    });
    return found;
  });
}

CP_PLAN cp_plan_exchanged(int64_t wide, int64_t n, Object out, int64_t room, Object row, Object tokens, int64_t ranks,
                          Object shares, Object positions) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 2> to(out, room);
    Array<I> row_(row, n);
    const I* by = row_.data();
    I *start = to[0], *length = to[1];
    return Owned<I>(tokens, n).visit([&](auto held) {
      int64_t at = 0;
      Shares<I>(n, ranks, shares, positions).each([&](int64_t, int64_t i, I first, I count) {
        if (count <= 0) return;
        if (at >= room) throw Wrong{};
        start[at] = held.below(i, first) + by[i];
        length[at++] = count;
      });
      return at;
    });
  });
}

}  // namespace plans
}  // namespace cp
