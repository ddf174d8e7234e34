// Rectangles cut along the edges of the bands, and tiles placed on rows. What each loop computes is said in
// cp_fast/planning/loops/base.py.
#include "plan_pieces.h"

namespace cp {
namespace plans {
namespace {

// The bits of the answer of `cp_plan_cut`, and the order of its tiles.
enum Kind { natural, right, full, left, own, kinds };

// One rectangle of positions and where the band crosses it: see `cut` of loops/by_numpy.py, which has the same names.
// Flags are numbers, 0 or 1, so that loops over this have no branch.
template <typename I>
struct Crossing {
  I row0, row1, begin, end, split, start, edge;
  I cut_right, cut_left, has[kinds];
};

template <typename I>
struct Rectangles {
  const I *q0, *rows, *k0, *columns, *lo, *hi, *shift;
  I bounded, large;  // whether the band has an edge; the rows from which a tile keeps a window of its own

  Crossing<I> operator[](int64_t i) const {
    Crossing<I> c;
    I q_begin = q0[i], q_end = q_begin + rows[i], k_begin = k0[i], k_end = k_begin + columns[i], l = lo[i], h = hi[i];
    c.row0 = std::max(q_begin, static_cast<I>(k_begin - h));
    c.row1 = std::min(q_end, static_cast<I>(k_end - l));
    c.end = std::min(k_end, static_cast<I>(q_end + h));
    c.begin = std::max(k_begin, static_cast<I>(q_begin + l));
    I there = (q_begin < q_end) & (k_begin < k_end) & (c.row0 < c.row1) & (c.begin < c.end);
    c.cut_right = there & (c.end - 1 - c.row0 > h);
    c.cut_left = there & (c.begin - (c.row1 - 1) < l);
    c.has[natural] = bounded & there & (c.end - c.row1 == shift[i]);
    I rest = there & (c.has[natural] ^ 1);
    c.split = c.cut_right ? c.end - h : c.row0;  // rows from here on see every key on the right
    I below = rest & (c.split < c.row1);
    c.start = std::max(c.begin, static_cast<I>(c.split + l));
    c.edge = c.start - (c.row1 - 1) < l ? c.row1 + l : c.start;
    c.has[right] = rest & c.cut_right;
    c.has[left] = below & (c.start < c.edge);
    c.has[full] = below & (c.edge < c.end);
    I several = (c.has[right] + c.has[left] + c.has[full] > 1) & (c.row1 - c.row0 >= large);
    c.has[own] = several;
    for (Kind kind : {right, left, full}) c.has[kind] &= several ^ 1;
    return c;
  }
};

// The tiles of one kind: rows [a, b) and columns [c, d) of the crossing.
template <typename I, typename Corners>
void write_tiles(I* out, int64_t n, const Rectangles<I>& all, Kind kind, const I* q_offset, const I* k_offset,
                 Corners corners) {
  I *q = out, *rows = out + n, *k = out + 2 * n, *columns = out + 3 * n;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    Crossing<I> c = all[i];
    I a, b, from, to, there = c.has[kind];
    corners(c, a, b, from, to);
    q[i] = (a + q_offset[i]) * there;
    rows[i] = (b - a) * there;
    k[i] = (from + k_offset[i]) * there;
    columns[i] = (to - from) * there;
  }
}

}  // namespace

// Which kinds of tile there are.
CP_PLAN cp_plan_crossings(int64_t wide, int64_t n, Object q0, Object rows, Object k0, Object columns, Object band,
                          int64_t bounded, int64_t large) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> q(q0, n), r(rows, n), k(k0, n), c(columns, n);
    Band<I> b(band, n);
    Rectangles<I> all{q.data(),    r.data(),  k.data(),        c.data(), b.lo.data(),
                      b.hi.data(), b.shift.data(), static_cast<I>(bounded), static_cast<I>(large)};
    I any[kinds] = {};
    for (int64_t i = 0; i < n; ++i) {
      Crossing<I> crossing = all[i];
      for (int kind = 0; kind < kinds; ++kind) any[kind] |= crossing.has[kind];
    }
    int64_t bits = 0;
    for (int kind = 0; kind < kinds; ++kind) bits |= int64_t{any[kind] != 0} << kind;
    return bits;
  });
}

// The tiles of the kinds in `wanted`, four arrays each, one kind behind the other; of `own` two more: left and right.
CP_PLAN cp_plan_cut(int64_t wide, int64_t n, Object out, int64_t wanted, Object q0, Object rows, Object k0,
                    Object columns, Object band, int64_t bounded, int64_t large, Object q_offset, Object k_offset) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> q(q0, n), r(rows, n), k(k0, n), c(columns, n), q_by(q_offset, n), k_by(k_offset, n);
    Band<I> b(band, n);
    Rectangles<I> all{q.data(),    r.data(),  k.data(),        c.data(), b.lo.data(),
                      b.hi.data(), b.shift.data(), static_cast<I>(bounded), static_cast<I>(large)};
    int64_t arrays = wanted >> own & 1 ? 2 : 0;
    for (int kind = 0; kind < kinds; ++kind) arrays += wanted >> kind & 1 ? 4 : 0;
    Out<I> out_(out, arrays * n);
    I* next = out_.data();
    auto write = [&](Kind kind, auto corners) {
      if (!(wanted >> kind & 1)) return;
      write_tiles(next, n, all, kind, q_by.data(), k_by.data(), corners);
      next += 4 * n;
    };
    auto whole = [](const Crossing<I>& c, I& a, I& b, I& from, I& to) {
      a = c.row0, b = c.row1, from = c.begin, to = c.end;
    };
    write(natural, whole);
    write(right, [](const Crossing<I>& c, I& a, I& b, I& from, I& to) {
      a = c.row0, b = c.split, from = c.begin, to = c.end;
    });
    write(full, [](const Crossing<I>& c, I& a, I& b, I& from, I& to) {
      a = c.split, b = c.row1, from = c.edge, to = c.end;
    });
    write(left, [](const Crossing<I>& c, I& a, I& b, I& from, I& to) {
      a = c.split, b = c.row1, from = c.start, to = c.edge;
    });
    write(own, whole);
    if (wanted >> own & 1) {
      I *to_left = next, *to_right = next + n;
      for (int64_t i = 0; i < n; ++i) {
        Crossing<I> c = all[i];
        to_left[i] = c.cut_left ? c.end - c.row1 - all.lo[i] : -1;
        to_right[i] = c.cut_right ? all.hi[i] + c.row1 - c.end : -1;
      }
    }
    return int64_t{0};
  });
}

CP_PLAN cp_plan_meet(int64_t wide, int64_t n, Object one, Object other) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> q(item(one, 0), n), rows(item(one, 1), n), k(item(one, 2), n), columns(item(one, 3), n);
    Array<I> q2(item(other, 0), n), rows2(item(other, 1), n), k2(item(other, 2), n), columns2(item(other, 3), n);
    auto meet = [](I a, I size, I b, I other_size) -> I { return (a < b + other_size) & (b < a + size); };
    I any = 0;
    for (int64_t i = 0; i < n; ++i)
      any |= meet(q[i], rows[i], q2[i], rows2[i]) | meet(k[i], columns[i], k2[i], columns2[i]);
    return int64_t{any};
  });
}

// How many tiles there are.
CP_PLAN cp_plan_count_tiles(int64_t wide, int64_t n, Object slots) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Slots<I> given(slots, n);
    int64_t found = 0;
    for (int64_t s = 0; s < given.number; ++s) {
      const I* rows = given.rows(s);
      I here = 0;
      for (int64_t i = 0; i < n; ++i) here += rows[i] > 0;
      found += here;
    }
    return found;
  });
}

// The tiles of all slots, all of one sequence and then of the next: four arrays, or five where the gradients' rows are
// others. Each has room for one more: every slot is written, and the next one over it where it has no tile.
CP_PLAN cp_plan_tiles(int64_t wide, int64_t n, Object out, int64_t room, int64_t arrays, Object slots, Object q_anchor,
                      Object k_anchors, Object grad_anchors) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Slots<I> given(slots, n);
    Out<I> out_(out, arrays * room);
    Array<I> q_by(q_anchor, n);
    std::optional<Array<I>> k_by[most_slots], grad_by[most_slots];
    const I *q[most_slots], *rows[most_slots], *k[most_slots], *columns[most_slots], *by[most_slots], *grad[most_slots];
    bool both = arrays == 5;
    for (int64_t s = 0; s < given.number; ++s) {
      q[s] = given.q(s), rows[s] = given.rows(s), k[s] = given.k(s);
      columns[s] = given.columns(s);
      by[s] = k_by[s].emplace(item(k_anchors, s), n).data();
      grad[s] = both ? grad_by[s].emplace(item(grad_anchors, s), n).data() : by[s];
    }
    I *to_q = out_.data(), *to_rows = to_q + room, *to_k = to_rows + room, *to_columns = to_k + room;
    I* to_grad = both ? to_columns + room : to_k;
    int64_t at = 0;
    const I* anchor = q_by.data();
    for (int64_t i = 0; i < n; ++i)
      for (int64_t s = 0; s < given.number; ++s) {
        if (at >= room) throw Wrong{};
        to_q[at] = q[s][i] + anchor[i];
        to_rows[at] = rows[s][i];
        to_columns[at] = columns[s][i];
        to_grad[at] = k[s][i] + grad[s][i];
        to_k[at] = k[s][i] + by[s][i];
        at += rows[s][i] > 0;
      }
    return at;
  });
}

}  // namespace plans
}  // namespace cp
