// Tiles of whole pieces, and tiles placed on rows. What each loop computes is said in cp_fast/planning/loops/base.py.
#include <type_traits>

#include "plan_keep.h"
#include "plan_pieces.h"

namespace cp {
namespace plans {

// One rectangle a sequence, of one piece of queries and of keys or of all (-1).
CP_PLAN cp_plan_plain(int64_t wide, int64_t n, Object out, Object queries, int64_t piece, Object keys, int64_t other) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 4> to(out, n);
    I *q = to[0], *rows = to[1], *k = to[2], *columns = to[3];
    return Owned<I>(queries, n).visit([&](auto reader) {
      return Owned<I>(keys, n).visit([&](auto owner) {
        auto write = [&](auto tokens, int64_t wanted, I* start, I* count) {
          visit_part<I>(tokens, wanted, [=](auto offset, auto size) {
#pragma GCC ivdep
            for (int64_t i = 0; i < n; ++i) {
              count[i] = size(i);
              start[i] = offset(i);
            }
          });
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

// A few sequences at a time: their tiles, all of one sequence and then of the next, and then those that there are.
template <typename I, int columns>
int64_t place(const Columns<I, columns>& to, const Slots<I>& slots, const I* q_by, const I* const* k_by,
              const I* const* grad_by, int64_t n) {
  constexpr int64_t few = 64;
  int64_t at = 0, number = slots.number;
  I q[few * most_slots], rows[few * most_slots], k[few * most_slots], size[few * most_slots], grad[few * most_slots];
  for (int64_t begin = 0; begin < n; begin += few) {
    int64_t here = std::min(few, n - begin);
    auto write = [&](auto stride) {  // a constant where there is one slot, as in most launches: then it is vectors
      for (int64_t s = 0; s < number; ++s) {
        const I *from = slots.q(s) + begin, *count = slots.rows(s) + begin, *key = slots.k(s) + begin;
        const I *width = slots.columns(s) + begin, *by = k_by[s] + begin, *to_grads = grad_by[s] + begin;
        for (int64_t j = 0; j < here; ++j) {
          int64_t place = j * stride + s;
          q[place] = from[j] + q_by[begin + j];
          rows[place] = count[j];
          k[place] = key[j] + by[j];
          size[place] = width[j];
          if constexpr (columns == 5) grad[place] = key[j] + to_grads[j];
        }
      }
    };
    if (number == 1)
      write(std::integral_constant<int64_t, 1>());
    else
      write(number);
    if constexpr (columns == 5)
      at = keep<I, 5>(rows, {q, rows, k, size, grad}, {to[0], to[1], to[2], to[3], to[4]}, here * number, at);
    else
      at = keep<I, 4>(rows, {q, rows, k, size}, {to[0], to[1], to[2], to[3]}, here * number, at);
  }
  return at;
}

}  // namespace

// How many tiles there are.
CP_PLAN cp_plan_count_tiles(int64_t wide, int64_t n, Object slots) {
  return typed(wide, [&](auto zero) { return count_tiles(Slots<decltype(zero)>(slots, n), n); });
}

// The tiles of all slots, all of one sequence and then of the next: first query rows, rows, first key rows, columns, and
// the first rows of the gradients where `grad_anchors` has any; with room to spare. `sums`: the cumulative rows and
// columns. The answer has a bit each where the rows of queries, of keys, of gradients are one range.
CP_PLAN cp_plan_tiles(int64_t wide, int64_t n, Object out, int64_t room, Object sums, Object slots, Object q_anchor,
                      Object k_anchors, Object grad_anchors) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Slots<I> given(slots, n);
    int64_t number = room - spare;
    if (count_tiles(given, n) != number) throw Wrong{};
    Array<I> q_by(q_anchor, n);
    bool grads = size_of(grad_anchors) > 0;
    std::optional<Array<I>> held[most_slots], held_grads[most_slots];
    const I *k_by[most_slots], *grad_by[most_slots];
    for (int64_t s = 0; s < given.number; ++s) {
      k_by[s] = held[s].emplace(item(k_anchors, s), n).data();
      grad_by[s] = grads ? held_grads[s].emplace(item(grad_anchors, s), n).data() : k_by[s];
    }
    Array<int32_t> cu_q(item(sums, 0), number + 1, true), cu_kv(item(sums, 1), number + 1, true);
    auto write = [&](auto& to) {
      place(to, given, q_by.data(), k_by, grad_by, n);
      add_up(cu_q.data(), to[1], number);
      add_up(cu_kv.data(), to[3], number);
      return int64_t{contiguous(to[0], to[1], number)} | int64_t{contiguous(to[2], to[3], number)} << 1;
    };
    if (!grads) {
      Columns<I, 4> to(out, room);
      return write(to);
    }
    Columns<I, 5> to(out, room);
    int64_t others = write(to);
    return others | int64_t{contiguous(to[4], to[3], number)} << 2;
  });
}

}  // namespace plans
}  // namespace cp
