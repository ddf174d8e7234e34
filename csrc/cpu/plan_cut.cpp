// Rectangles cut along the edges of the bands. What each loop computes is said in cp_fast/planning/loops/base.py.
#include "plan_pieces.h"

namespace cp {
namespace plans {
namespace {

// The bits of the answer of `cp_plan_crossings`, and the kinds of `cp_plan_cut`.
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

// The tiles of one kind: rows and columns between edges of the crossing, where `there` says that there is one.
template <auto row, auto stop, auto column, auto end, auto there, typename I>
int64_t write_tiles(Object out, int64_t n, const Rectangles<I>& all, const I* q_offset, const I* k_offset) {
  Columns<I, 4> to(out, n);
  I *q = to[0], *rows = to[1], *k = to[2], *columns = to[3];
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    Crossing<I> c = all[i];
    q[i] = (c.*row + q_offset[i]) & c.*there;
    rows[i] = (c.*stop - c.*row) & c.*there;
    k[i] = (c.*column + k_offset[i]) & c.*there;
    columns[i] = (c.*end - c.*column) & c.*there;
  }
  return 0;
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
    const I *q_to = q_by.data(), *k_to = k_by.data();
    using C = Crossing<I>;
    switch (kind) {
      case natural:
        return write_tiles<&C::row0, &C::row1, &C::begin, &C::end, &C::has_natural>(out, n, all, q_to, k_to);
      case right:
        return write_tiles<&C::row0, &C::split, &C::begin, &C::end, &C::has_right>(out, n, all, q_to, k_to);
      case full:
        return write_tiles<&C::split, &C::row1, &C::edge, &C::end, &C::has_full>(out, n, all, q_to, k_to);
      case left:
        return write_tiles<&C::split, &C::row1, &C::start, &C::edge, &C::has_left>(out, n, all, q_to, k_to);
      default:
        return write_tiles<&C::row0, &C::row1, &C::begin, &C::end, &C::has_own>(out, n, all, q_to, k_to);
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

}  // namespace plans
}  // namespace cp
