// Spans of rows: without empty ones, and their cumulative lengths. What each loop computes is said in
// cp_fast/planning/loops/base.py.
#include <cstring>

#include "plan_keep.h"
#include "plan_pieces.h"

namespace cp {
namespace plans {

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

// Those that are not empty, with room to spare; whether they are one range of rows.
CP_PLAN cp_plan_drop_empty(int64_t wide, int64_t n, Object out, int64_t room, Object start, Object count) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Columns<I, 2> to(out, room);
    Array<I> start_(start, n), count_(count, n);
    const I *from = start_.data(), *size = count_.data();
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) kept += size[i] > 0;
    if (kept != room - spare) throw Wrong{};
    keep<I, 2>(size, {from, size}, {to[0], to[1]}, n, 0);
    return int64_t{contiguous(to[0], to[1], kept)};
  });
}

// `said`: how many ranges are not empty, and the sum of all.
CP_PLAN cp_plan_tokens(int64_t wide, int64_t n, Object said, Object ranges) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<int64_t> said_(said, 3, true);
    int64_t number = size_of(ranges), total = 0, kept = 0;
    for (int64_t r = 0; r < number; ++r) {
      Range<I> range(item(ranges, r), n);
      const I* count = range.count.data();
      I sum = 0, some = 0;
      for (int64_t i = 0; i < n; ++i) sum += count[i], some += count[i] > 0;
      total += sum;
      kept += some;
    }
    said_[0] = kept;
    said_[1] = total;
    return int64_t{0};
  });
}

// The ranges that are not empty as spans of rows, with room to spare; whether they are one range of rows.
CP_PLAN cp_plan_rows(int64_t wide, int64_t n, Object out, int64_t room, Object ranges, Object anchor) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    constexpr int64_t most = 2, few = 64;
    Columns<I, 2> to(out, room);
    Array<I> anchor_(anchor, n);
    std::optional<Range<I>> held[most];
    int64_t number = size_of(ranges), kept = 0, at = 0;
    if (number < 1 || number > most) throw Wrong{};
    for (int64_t r = 0; r < number; ++r) {
      const I* count = held[r].emplace(item(ranges, r), n).count.data();
      for (int64_t i = 0; i < n; ++i) kept += count[i] > 0;
    }
    if (kept != room - spare) throw Wrong{};
    I start[most * few], size[most * few];
    for (int64_t begin = 0; begin < n; begin += few) {
      int64_t here = std::min(few, n - begin);
      const I* by = anchor_.data() + begin;
      const I *from = held[0]->start.data() + begin, *count = held[0]->count.data() + begin;
      if (number == 1) {
        for (int64_t j = 0; j < here; ++j) {
          start[j] = from[j] + by[j];
          size[j] = count[j];
        }
      } else {
        const I *second = held[1]->start.data() + begin, *second_count = held[1]->count.data() + begin;
        for (int64_t j = 0; j < here; ++j) {
          start[2 * j] = from[j] + by[j];
          start[2 * j + 1] = second[j] + by[j];
          size[2 * j] = count[j];
          size[2 * j + 1] = second_count[j];
        }
      }
      at = keep<I, 2>(size, {start, size}, {to[0], to[1]}, here * number, at);
    }
    return int64_t{contiguous(to[0], to[1], at)};
  });
}

CP_PLAN cp_plan_cumulative(int64_t wide, int64_t n, Object out, Object count) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<int32_t> out_(out, n + 1, true);
    Array<I> count_(count, n);
    add_up(out_.data(), count_.data(), n);
    return int64_t{0};
  });
}

// Of cumulative lengths, which have 32 bits.
CP_PLAN cp_plan_longest(int64_t wide, int64_t n, Object cumulative) {
  return typed(wide, [&](auto) {
    Array<int32_t> sums(cumulative, n);
    const int32_t* sum = sums.data();
    int32_t found = 0;
    for (int64_t i = 0; i + 1 < n; ++i) found = std::max(found, sum[i + 1] - sum[i]);
    return int64_t{found};
  });
}

CP_PLAN cp_plan_same(int64_t wide, int64_t n, Object one, Object other) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> a(one, n), b(other, n);
    return int64_t{n == 0 || std::memcmp(a.data(), b.data(), n * sizeof(I)) == 0};
  });
}

}  // namespace plans
}  // namespace cp
