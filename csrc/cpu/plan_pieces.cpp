// Which tokens a unit has of every sequence, which of them are seen, and where they lie in a buffer. What each loop
// computes is said in cp_fast/planning/loops/base.py.
#include "plan_pieces.h"

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

CP_PLAN cp_plan_through_window(int64_t wide, int64_t n, Object out, Object first, Object count, Object band,
                               Object tokens) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 2> to(out, n);
    Array<I> first_(first, n), count_(count, n);
    Band<I> band_(band, n);
    I *start = to[0], *size = to[1];
    const I *from = first_.data(), *rows = count_.data(), *lo = band_.lo.data(), *hi = band_.hi.data();
    return Owned<I>(tokens, n).visit([&](auto held) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        I there = rows[i] > 0, begin = held.below(i, from[i] + lo[i]);
        I end = held.below(i, from[i] + rows[i] + hi[i]);
        start[i] = begin * there;
        size[i] = (end - begin) * there;
      }
      return int64_t{0};
    });
  });
}

CP_PLAN cp_plan_only(int64_t wide, int64_t n, Object out, Object there, Object range) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 2> to(out, n);
    Array<I> there_(there, n);
    Range<I> given(range, n);
    I *start = to[0], *count = to[1];
    const I *rows = there_.data(), *from = given.start.data(), *all = given.count.data();
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      I any = rows[i] > 0;
      start[i] = from[i] * any;
      count[i] = all[i] * any;
    }
    return int64_t{0};
  });
}

CP_PLAN cp_plan_behind(int64_t wide, int64_t n, Object out, Object range, Object before) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 2> to(out, n);
    Range<I> given(range, n), earlier(before, n);
    I *begin = to[0], *left = to[1];
    const I *start = given.start.data(), *count = given.count.data();
    const I *first = earlier.start.data(), *size = earlier.count.data();
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      begin[i] = std::max(start[i], static_cast<I>(first[i] + size[i]));
      left[i] = std::max(static_cast<I>(start[i] + count[i] - begin[i]), I{0});
    }
    return int64_t{0};
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

CP_PLAN cp_plan_exchanged(int64_t wide, int64_t n, Object rows, Object counts, int64_t pieces, int64_t piece,
                          Object tokens, Object share, Object positions, Object anchor) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> rows_(rows, n * pieces, true), counts_(counts, n * pieces, true), anchor_(anchor, n);
    Array<I> begin(item(share, 0), n), end(item(share, 1), n), start(item(positions, 0), n), stop(item(positions, 1), n);
    I *row = rows_.data() + piece, *count = counts_.data() + piece;
    const I *from = begin.data(), *to = end.data(), *first = start.data(), *last = stop.data(), *by = anchor_.data();
    return Owned<I>(tokens, n).visit([&](auto held) {
      int64_t total = 0;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        I taken = std::max(from[i], first[i]), size = std::max(static_cast<I>(std::min(to[i], last[i]) - taken), I{0});
        row[i * pieces] = held.below(i, taken) + by[i];
        count[i * pieces] = size;
        total += size;
      }
      return total;
    });
  });
}

}  // namespace plans
}  // namespace cp
