// Which tokens a unit has of every sequence, which of them are seen, and where they lie in a buffer. What each loop
// computes is said in cp_fast/planning/loops/base.py.
#include "plan_pieces.h"

#include <cstring>

namespace cp {
namespace plans {

Python python;

namespace {

// Every range's anchors in the buffer that holds the ranges sequence after sequence.
template <typename I, int ranges>
int64_t pack(I* const* anchors, const I* const* starts, const I* const* counts, int64_t n) {
  I row = 0;
  for (int64_t i = 0; i < n; ++i)
    for (int r = 0; r < ranges; ++r) {
      anchors[r][i] = row - starts[r][i];
      row += counts[r][i];
    }
  return row;
}

}  // namespace

CP_PLAN cp_plan_python(decltype(Python::get_buffer) get_buffer, decltype(Python::release_buffer) release_buffer,
                       decltype(Python::tuple_size) tuple_size, decltype(Python::tuple_item) tuple_item,
                       decltype(Python::set_error) set_error, Object kind_of_error) {
  python = {get_buffer, release_buffer, tuple_size, tuple_item, set_error, kind_of_error};
  return 0;
}

CP_PLAN cp_plan_pieces(int64_t wide, int64_t n, Object out, Object lengths, Object chunk, int64_t pieces,
                       int64_t first0, int64_t stop0, int64_t first1, int64_t stop1) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    const int64_t edges[2][2] = {{first0, stop0}, {first1, stop1}};
    Out<I> all(out, (pieces == 1 ? 3 : 7) * n);
    Array<I> length(lengths, n), size(chunk, n);
    const I *real = length.data(), *slots = size.data();
    for (int64_t p = 0; p < pieces; ++p) {
      I *first = all.data() + p * n, *stop = first + pieces * n, *count = stop + pieces * n;
      I from = static_cast<I>(edges[p][0]), to = static_cast<I>(edges[p][1]);
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        I start = slots[i] * from, end = std::max(std::min(slots[i] * to, real[i]), start);
        first[i] = start;
        stop[i] = end;
        count[i] = end - start;
      }
    }
    if (pieces == 2) {
      const I *one = all.data() + 4 * n, *two = one + n;
      I* total = all.data() + 6 * n;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) total[i] = one[i] + two[i];
    }
    return int64_t{0};
  });
}

CP_PLAN cp_plan_ends(int64_t wide, int64_t n, Object out, Object owned, int64_t far) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Out<I> ends(out, n);
    I *end = ends.data(), none = static_cast<I>(far);
    Owned<I>(owned, n).visit([&](auto pieces) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) end[i] = pieces.end(i, none);
    });
    return int64_t{0};
  });
}

CP_PLAN cp_plan_below(int64_t wide, int64_t n, Object out, Object owned, Object position) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Out<I> out_(out, n);
    Array<I> position_(position, n);
    I* found = out_.data();
    const I* at = position_.data();
    Owned<I>(owned, n).visit([&](auto pieces) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) found[i] = pieces.below(i, at[i]);
    });
    return int64_t{0};
  });
}

CP_PLAN cp_plan_through_window(int64_t wide, int64_t n, Object out, Object first, Object count, Object band,
                               Object owned) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Out<I> out_(out, 2 * n);
    Array<I> first_(first, n), count_(count, n);
    Band<I> band_(band, n);
    I *start = out_.data(), *size = start + n;
    const I *from = first_.data(), *rows = count_.data(), *lo = band_.lo.data(), *hi = band_.hi.data();
    Owned<I>(owned, n).visit([&](auto pieces) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        I there = rows[i] > 0, begin = pieces.below(i, from[i] + lo[i]);
        I end = pieces.below(i, from[i] + rows[i] + hi[i]);
        start[i] = begin * there;
        size[i] = (end - begin) * there;
      }
    });
    return int64_t{0};
  });
}

CP_PLAN cp_plan_only(int64_t wide, int64_t n, Object out, Object there, Object start, Object count) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Out<I> out_(out, 2 * n);
    Array<I> there_(there, n), start_(start, n), count_(count, n);
    I *begin = out_.data(), *size = begin + n;
    const I *rows = there_.data(), *from = start_.data(), *all = count_.data();
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      I any = rows[i] > 0;
      begin[i] = from[i] * any;
      size[i] = all[i] * any;
    }
    return int64_t{0};
  });
}

CP_PLAN cp_plan_behind(int64_t wide, int64_t n, Object out, Object range, Object before) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Out<I> out_(out, 2 * n);
    Array<I> start_(item(range, 0), n), count_(item(range, 1), n), first_(item(before, 0), n), size_(item(before, 1), n);
    I *begin = out_.data(), *left = begin + n;
    const I *start = start_.data(), *count = count_.data(), *first = first_.data(), *size = size_.data();
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      begin[i] = std::max(start[i], static_cast<I>(first[i] + size[i]));
      left[i] = std::max(static_cast<I>(start[i] + count[i] - begin[i]), I{0});
    }
    return int64_t{0};
  });
}

CP_PLAN cp_plan_packed(int64_t wide, int64_t n, Object out, Object ranges) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    int64_t number = size_of(ranges);
    Out<I> out_(out, number * n);
    Array<I> start0(item(item(ranges, 0), 0), n), count0(item(item(ranges, 0), 1), n);
    I* anchors[2] = {out_.data(), out_.data() + n};
    if (number == 1) {
      const I *starts[1] = {start0.data()}, *counts[1] = {count0.data()};
      return pack<I, 1>(anchors, starts, counts, n);
    }
    if (number != 2) throw Wrong{};
    Array<I> start1(item(item(ranges, 1), 0), n), count1(item(item(ranges, 1), 1), n);
    const I *starts[2] = {start0.data(), start1.data()}, *counts[2] = {count0.data(), count1.data()};
    return pack<I, 2>(anchors, starts, counts, n);
  });
}

CP_PLAN cp_plan_exchanged(int64_t wide, int64_t n, Object rows, Object counts, int64_t pieces, int64_t piece,
                          Object owned, Object begin, Object end, Object start, Object stop, Object anchor) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Out<I> rows_(rows, n * pieces), counts_(counts, n * pieces);
    Array<I> begin_(begin, n), end_(end, n), start_(start, n), stop_(stop, n), anchor_(anchor, n);
    I *row = rows_.data() + piece, *count = counts_.data() + piece;
    const I *from = begin_.data(), *to = end_.data(), *first = start_.data(), *last = stop_.data();
    const I* where = anchor_.data();
    int64_t total = 0;
    Owned<I>(owned, n).visit([&](auto held) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        I taken = std::max(from[i], first[i]), size = std::max(static_cast<I>(std::min(to[i], last[i]) - taken), I{0});
        row[i * pieces] = held.below(i, taken) + where[i];
        count[i * pieces] = size;
        total += size;
      }
    });
    return total;
  });
}

}  // namespace plans
}  // namespace cp
