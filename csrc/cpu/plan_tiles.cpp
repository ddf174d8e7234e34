// Rectangles cut along the edges of the bands, and tiles placed on rows. What each loop computes is said in
// cp_fast/planning/loops/base.py.
#include "plan_pieces.h"

namespace cp {
namespace plans {
namespace {

// The bits of the answer of `cp_plan_cut`, and the order of its tiles.
enum Kind { natural, right, full, left, own };

// Comparisons as arithmetic: all bits set, or none. From conditions the compiler makes branches, and then no vectors.
// Differences of positions, and of edges beyond all positions, do not overflow.
template <typename I>
I less(I a, I b) {
  return (a - b) >> (8 * sizeof(I) - 1);
}

template <typename I>
I choose(I mask, I a, I b) {
  return (a & mask) | (b & ~mask);
}

template <typename I>
I larger(I a, I b) {
  return a > b ? a : b;
}

template <typename I>
I smaller(I a, I b) {
  return a < b ? a : b;
}

// One rectangle of positions and where the band crosses it: see `cut` of loops/by_numpy.py, which has the same names.
// Flags have all bits set, or none.
template <typename I>
struct Crossing {
  I row0, row1, begin, end, split, start, edge;
  I cut_right, cut_left, has_natural, has_right, has_full, has_left, has_own;
};

template <typename I>
struct Rectangles {
  const I *q0, *rows, *k0, *columns, *lo, *hi, *shift;
  I bounded, large;  // all bits set where the band has an edge; the rows from which a tile keeps a window of its own

  __attribute__((always_inline)) Crossing<I> operator[](int64_t i) const {
    Crossing<I> c;
    I q_begin = q0[i], q_end = q_begin + rows[i], k_begin = k0[i], k_end = k_begin + columns[i], l = lo[i], h = hi[i];
    c.row0 = larger<I>(q_begin, k_begin - h);
    c.row1 = smaller<I>(q_end, k_end - l);
    c.end = smaller<I>(k_end, q_end + h);
    c.begin = larger<I>(k_begin, q_begin + l);
    I there = less(q_begin, q_end) & less(k_begin, k_end) & less(c.row0, c.row1) & less(c.begin, c.end);
    c.cut_right = there & less<I>(h, c.end - 1 - c.row0);
    c.cut_left = there & less<I>(c.begin - (c.row1 - 1), l);
    I corner = c.end - c.row1 - shift[i];
    c.has_natural = bounded & there & ~(less(corner, I{0}) | less(I{0}, corner));
    I rest = there & ~c.has_natural;
    c.split = choose<I>(c.cut_right, c.end - h, c.row0);  // rows from here on see every key on the right
    I below = rest & less(c.split, c.row1);
    c.start = larger<I>(c.begin, c.split + l);
    c.edge = choose<I>(less<I>(c.start - (c.row1 - 1), l), c.row1 + l, c.start);
    I right = rest & c.cut_right, left = below & less(c.start, c.edge), full = below & less(c.edge, c.end);
    I several = (right & left) | (right & full) | (left & full);
    c.has_own = several & ~less<I>(c.row1 - c.row0, large);
    c.has_right = right & ~c.has_own;
    c.has_left = left & ~c.has_own;
    c.has_full = full & ~c.has_own;
    return c;
  }
};

// The tiles of one kind: edges(crossing, ...) gives their rows, their columns, and whether they are there.
template <typename I, typename Edges>
void write_tiles(Object out, int64_t n, const Rectangles<I>& all, const I* q_offset, const I* k_offset, Edges edges) {
  Columns<I, 4> to(out, n);
  I *q = to[0], *rows = to[1], *k = to[2], *columns = to[3];
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    Crossing<I> c = all[i];
    I row, stop, column, end, there;
    edges(c, row, stop, column, end, there);
    q[i] = (row + q_offset[i]) & there;
    rows[i] = (stop - row) & there;
    k[i] = (column + k_offset[i]) & there;
    columns[i] = (end - column) & there;
  }
}

// The rectangles of a call.
template <typename I>
class Given {
 public:
  Given(int64_t n, Object q, Object k, Object band, int64_t bounded, int64_t large)
      : q_(q, n), k_(k, n), band_(band, n), bounded_(bounded ? ~I{0} : I{0}), large_(static_cast<I>(large)) {}
  Rectangles<I> rectangles() const {
    return {q_.start.data(),  q_.count.data(),  k_.start.data(),     k_.count.data(), band_.lo.data(),
            band_.hi.data(), band_.shift.data(), bounded_, large_};
  }

 private:
  Range<I> q_, k_;
  Band<I> band_;
  I bounded_, large_;
};

}  // namespace

// Which kinds of tile there are.
CP_PLAN cp_plan_crossings(int64_t wide, int64_t n, Object q, Object k, Object band, int64_t bounded, int64_t large) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Given<I> given(n, q, k, band, bounded, large);
    Rectangles<I> all = given.rectangles();
    I any_natural = 0, any_right = 0, any_full = 0, any_left = 0, any_own = 0;
    for (int64_t i = 0; i < n; ++i) {
      Crossing<I> c = all[i];
      any_natural |= c.has_natural;
      any_right |= c.has_right;
      any_full |= c.has_full;
      any_left |= c.has_left;
      any_own |= c.has_own;
    }
    return (any_natural & 1 << natural) | (any_right & 1 << right) | (any_full & 1 << full) | (any_left & 1 << left) |
           (any_own & int64_t{1} << own);
  });
}

// The tiles of one kind.
CP_PLAN cp_plan_cut(int64_t wide, int64_t n, Object out, int64_t kind, Object q, Object k, Object band, int64_t bounded,
                    int64_t large, Object q_offset, Object k_offset) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Given<I> given(n, q, k, band, bounded, large);
    Rectangles<I> all = given.rectangles();
    Array<I> q_by(q_offset, n), k_by(k_offset, n);
    auto write = [&](auto edges) {
      write_tiles(out, n, all, q_by.data(), k_by.data(), edges);
      return int64_t{0};
    };
    using C = const Crossing<I>&;
    switch (kind) {
      case natural:
        return write([](C c, I& row, I& stop, I& column, I& end, I& there) {
          row = c.row0, stop = c.row1, column = c.begin, end = c.end, there = c.has_natural;
        });
      case right:
        return write([](C c, I& row, I& stop, I& column, I& end, I& there) {
          row = c.row0, stop = c.split, column = c.begin, end = c.end, there = c.has_right;
        });
      case full:
        return write([](C c, I& row, I& stop, I& column, I& end, I& there) {
          row = c.split, stop = c.row1, column = c.edge, end = c.end, there = c.has_full;
        });
      case left:
        return write([](C c, I& row, I& stop, I& column, I& end, I& there) {
          row = c.split, stop = c.row1, column = c.start, end = c.edge, there = c.has_left;
        });
      default:
        return write([](C c, I& row, I& stop, I& column, I& end, I& there) {
          row = c.row0, stop = c.row1, column = c.begin, end = c.end, there = c.has_own;
        });
    }
  });
}

// The windows that large tiles have for themselves: left and right, -1 where unbounded.
CP_PLAN cp_plan_windows(int64_t wide, int64_t n, Object out, Object q, Object k, Object band, int64_t bounded,
                        int64_t large) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Given<I> given(n, q, k, band, bounded, large);
    Rectangles<I> all = given.rectangles();
    Columns<I, 2> to(out, n);
    for (int64_t i = 0; i < n; ++i) {
      Crossing<I> c = all[i];
      to[0][i] = c.cut_left ? c.end - c.row1 - all.lo[i] : -1;
      to[1][i] = c.cut_right ? all.hi[i] + c.row1 - c.end : -1;
    }
    return int64_t{0};
  });
}

// One rectangle a sequence, of one piece of queries and of keys or of all (-1).
CP_PLAN cp_plan_plain(int64_t wide, int64_t n, Object out, Object queries, int64_t piece, Object keys, int64_t other) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 4> to(out, n);
    I *q = to[0], *rows = to[1], *k = to[2], *columns = to[3];
    return Owned<I>(queries, n).visit([&](auto reader) {
      return Owned<I>(keys, n).visit([&](auto owner) {
        auto write = [&](auto tokens, int64_t wanted, I* start, I* count) {
          auto each = [&](auto size, auto offset) {
#pragma GCC ivdep
            for (int64_t i = 0; i < n; ++i) {
              count[i] = size(i);
              start[i] = offset(i);
            }
          };
          auto none = [](int64_t) { return I{0}; };
          if (wanted < 0)
            each([=](int64_t i) { return tokens.total(i); }, none);
          else if (wanted == 0)
            each([=](int64_t i) { return tokens.count(i, 0); }, none);
          else
            each([=](int64_t i) { return tokens.count(i, 1); }, [=](int64_t i) { return tokens.count(i, 0); });
        };
        write(reader, piece, q, rows);
        write(owner, other, k, columns);
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) {
          I there = (rows[i] > 0) & (columns[i] > 0);
          q[i] *= there;
          rows[i] *= there;
          k[i] *= there;
          columns[i] *= there;
        }
        return int64_t{0};
      });
    });
  });
}

CP_PLAN cp_plan_meet(int64_t wide, int64_t n, Object slots) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Slots<I> given(slots, n);
    if (given.number != 2) throw Wrong{};
    auto meet = [](const I* a, const I* size, const I* b, const I* other, int64_t i) -> I {
      return (a[i] < b[i] + other[i]) & (b[i] < a[i] + size[i]);
    };
    const I *q = given.q(0), *rows = given.rows(0), *k = given.k(0), *columns = given.columns(0);
    const I *q2 = given.q(1), *rows2 = given.rows(1), *k2 = given.k(1), *columns2 = given.columns(1);
    I any = 0;
    for (int64_t i = 0; i < n; ++i) any |= meet(q, rows, q2, rows2, i) | meet(k, columns, k2, columns2, i);
    return int64_t{any};
  });
}

namespace {

template <typename I>
int64_t count_tiles(const Slots<I>& slots, int64_t n) {
  int64_t found = 0;
  for (int64_t s = 0; s < slots.number; ++s) {
    const I* rows = slots.rows(s);
    I here = 0;
    for (int64_t i = 0; i < n; ++i) here += rows[i] > 0;
    found += here;
  }
  return found;
}

template <typename I>
int64_t in_one(const I* start, const I* count, int64_t size) {
  I breaks = 0;
  for (int64_t i = 0; i + 1 < size; ++i) breaks |= start[i + 1] ^ (start[i] + count[i]);
  return breaks == 0;
}

template <typename I>
void add_up(Object out, const I* count, int64_t size) {
  Array<int32_t> sums(out, size + 1, true);
  int32_t *sum = sums.data(), total = 0;
  sum[0] = 0;
  for (int64_t i = 0; i < size; ++i) sum[i + 1] = total += static_cast<int32_t>(count[i]);
}

template <typename I, int columns>
void place(const Columns<I, columns>& to, int64_t room, const Slots<I>& slots, const I* q_by, const I* const* k_by,
           const I* const* grad_by, int64_t n) {
  I *to_q = to[0], *to_rows = to[1], *to_k = to[2], *to_columns = to[3], *to_grad = to[columns - 1];
  int64_t at = 0;
  auto put = [&](int64_t i, const I* q, const I* rows, const I* k, const I* size, const I* by, const I* grad) {
    to_q[at] = q[i] + q_by[i];
    to_rows[at] = rows[i];
    to_k[at] = k[i] + by[i];
    to_columns[at] = size[i];
    if constexpr (columns == 5) to_grad[at] = k[i] + grad[i];
  };
  if (slots.number == 1) {
    const I *q = slots.q(0), *rows = slots.rows(0), *k = slots.k(0), *size = slots.columns(0);
    const I *by = k_by[0], *grad = grad_by[0];
    if (room == n + 1) {
#pragma GCC ivdep
      for (at = 0; at < n; ++at) put(at, q, rows, k, size, by, grad);
      return;
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      put(i, q, rows, k, size, by, grad);
      at += rows[i] > 0;
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t s = 0; s < slots.number; ++s) {
      put(i, slots.q(s), slots.rows(s), slots.k(s), slots.columns(s), k_by[s], grad_by[s]);
      at += slots.rows(s)[i] > 0;
    }
}

}  // namespace

// How many tiles there are.
CP_PLAN cp_plan_count_tiles(int64_t wide, int64_t n, Object slots) {
  return typed(wide, [&](auto zero) { return count_tiles(Slots<decltype(zero)>(slots, n), n); });
}

// The tiles of all slots, all of one sequence and then of the next: first query rows, rows, first key rows, columns, and
// the first rows of the gradients where `grad_anchors` has any. There is room for one more: every slot is written, and
// the next one over it where it has no tile. `sums`: the cumulative rows and columns. The answer has a bit each where the
// rows of queries, of keys, of gradients are one range.
CP_PLAN cp_plan_tiles(int64_t wide, int64_t n, Object out, int64_t room, Object sums, Object slots, Object q_anchor,
                      Object k_anchors, Object grad_anchors) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Slots<I> given(slots, n);
    int64_t number = room - 1;
    if (count_tiles(given, n) != number) throw Wrong{};
    Array<I> q_by(q_anchor, n);
    bool grads = size_of(grad_anchors) > 0;
    std::optional<Array<I>> held[most_slots], held_grads[most_slots];
    const I *k_by[most_slots], *grad_by[most_slots];
    for (int64_t s = 0; s < given.number; ++s) {
      k_by[s] = held[s].emplace(item(k_anchors, s), n).data();
      grad_by[s] = grads ? held_grads[s].emplace(item(grad_anchors, s), n).data() : nullptr;
    }
    auto write = [&](auto& to) {
      place(to, room, given, q_by.data(), k_by, grad_by, n);
      add_up(item(sums, 0), to[1], number);
      add_up(item(sums, 1), to[3], number);
      return in_one(to[0], to[1], number) | in_one(to[2], to[3], number) << 1;
    };
    if (!grads) {
      Columns<I, 4> to(out, room);
      return write(to);
    }
    Columns<I, 5> to(out, room);
    return write(to) | in_one(to[4], to[3], number) << 2;
  });
}

}  // namespace plans
}  // namespace cp
