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
    Out<int64_t> said_(said, 3);
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
    Out<I> out_(out, 2 * room);
    Array<I> start_(start, n), count_(count, n);
    I *to_start = out_.data(), *to_count = to_start + room;
    const I *from = start_.data(), *size = count_.data();
    int64_t at = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (at >= room) throw Wrong{};
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
    Out<int32_t> out_(out, n + 1);
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

// The part of a range of a token axis that a piece of it has, for the sequences in which that is something: how many.
CP_PLAN cp_plan_count_held(int64_t wide, int64_t n, Object range, Object offset, Object length) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<I> start_(item(range, 0), n), count_(item(range, 1), n), offset_(offset, n), length_(length, n);
    const I *start = start_.data(), *count = count_.data(), *from = offset_.data(), *size = length_.data();
    I found = 0;
    for (int64_t i = 0; i < n; ++i) {
      I begin = std::max(start[i], from[i]);
      I end = std::min(static_cast<I>(start[i] + count[i]), static_cast<I>(from[i] + size[i]));
      found += end > begin;
    }
    return int64_t{found};
  });
}

// The same: the number of the sequence (`numbers` has them, or they count up), the first position, the length, the
// row. With room for one more.
CP_PLAN cp_plan_held(int64_t wide, int64_t n, Object out, int64_t room, Object range, Object offset, Object first,
                     Object length, Object anchor, int64_t base, int64_t numbered, Object numbers) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Out<I> out_(out, 4 * room);
    Array<I> start_(item(range, 0), n), count_(item(range, 1), n), offset_(offset, n), length_(length, n);
    Array<I> first_(first, n), anchor_(anchor, n);
    std::optional<Array<int64_t>> numbers_;
    if (numbered) numbers_.emplace(numbers, n);
    I *seq = out_.data(), *position = seq + room, *length_out = position + room, *row = length_out + room;
    int64_t at = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (at >= room) throw Wrong{};
      I begin = std::max(start_[i], offset_[i]);
      I end = std::min(static_cast<I>(start_[i] + count_[i]), static_cast<I>(offset_[i] + length_[i]));
      seq[at] = static_cast<I>(numbered ? (*numbers_)[i] : i);
      position[at] = begin + first_[i] - offset_[i];
      length_out[at] = end - begin;
      row[at] = begin + anchor_[i] + static_cast<I>(base);
      at += end > begin;
    }
    return at;
  });
}

// Pieces sorted by sequence, those of each in the order given: `ends` counts them up to the end of each sequence; then
// first and stop positions, and what is to be added to a position for its row.
CP_PLAN cp_plan_by_sequence(int64_t wide, int64_t n, Object ends, int64_t total, Object out, int64_t groups,
                            Object sizes, Object pieces) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Out<I> ends_(ends, n), out_(out, 3 * total);
    Array<int64_t> size(sizes, groups);
    I* end = ends_.data();
    std::fill(end, end + n, I{0});
    auto each = [&](auto f) {
      for (int64_t g = 0; g < groups; ++g) {
        Array<I> seq(item(item(pieces, g), 0), size[g]), first(item(item(pieces, g), 1), size[g]);
        Array<I> count(item(item(pieces, g), 2), size[g]), row(item(item(pieces, g), 3), size[g]);
        for (int64_t i = 0; i < size[g]; ++i) {
          if (seq[i] < 0 || seq[i] >= n) throw Wrong{};
          f(seq[i], first[i], count[i], row[i]);
        }
      }
    };
    each([&](I seq, I, I, I) { ++end[seq]; });
    I sum = 0;
    for (int64_t i = 0; i < n; ++i) {  // where the next one goes; `end` again when all have been put
      I here = end[i];
      end[i] = sum;
      sum += here;
    }
    if (sum != total) throw Wrong{};
    I *to_first = out_.data(), *to_stop = to_first + total, *to_anchor = to_stop + total;
    each([&](I seq, I first, I count, I row) {
      I at = end[seq]++;
      to_first[at] = first;
      to_stop[at] = first + count;
      to_anchor[at] = row - first;
    });
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
    Out<I> out_(out, 2 * room), tiles_(tiles, 3 * tile_room);
    Array<I> anchor(q_anchor, n);
    I *start = out_.data(), *length = start + room;
    I *to_q = tiles_.data(), *to_rows = to_q + tile_room, *to_columns = to_rows + tile_room;
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

// For tiles of `rows` queries over all pieces of keys: their columns, and how many pieces all tiles have.
CP_PLAN cp_plan_count_whole(int64_t wide, int64_t n, Object columns, int64_t pieces, Object counts, Object rows) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Out<I> columns_(columns, 2 * n);  // columns, and numbers of pieces
    Array<I> rows_(rows, n);
    I *sum = columns_.data(), *number = sum + n;
    std::fill(sum, number + n, I{0});
    for (int64_t p = 0; p < pieces; ++p) {
      Array<I> count_(item(counts, p), n);
      const I* count = count_.data();
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) {
        sum[i] += count[i];
        number[i] += count[i] > 0;
      }
    }
    int64_t all = 0;
    for (int64_t i = 0; i < n; ++i) all += rows_[i] > 0 ? number[i] : 0;
    return all;
  });
}

// The pieces, sequence after sequence. A few sequences at a time, so that what is read lies side by side.
CP_PLAN cp_plan_whole(int64_t wide, int64_t n, Object out, int64_t room, Object numbers, int64_t pieces, Object counts,
                      Object anchors, Object offsets, Object bases, Object rows) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Out<I> out_(out, 2 * room);
    Array<I> rows_(rows, n), number(numbers, n);
    Array<int64_t> base(bases, pieces);
    std::deque<Array<I>> count, anchor, offset;
    for (int64_t p = 0; p < pieces; ++p) {
      count.emplace_back(item(counts, p), n);
      anchor.emplace_back(item(anchors, p), n);
      offset.emplace_back(item(offsets, p), n);
    }
    I *start = out_.data(), *length = start + room;
    constexpr int64_t few = 64;
    int64_t at = 0;
    for (int64_t from = 0; from < n; from += few) {
      int64_t here = std::min(few, n - from), next[few];
      for (int64_t j = 0; j < here; ++j) {
        next[j] = at;
        at += rows_[from + j] > 0 ? number[from + j] : 0;
      }
      if (at > room) throw Wrong{};
      for (int64_t p = 0; p < pieces; ++p) {
        const I *size = count[p].data() + from, *to = anchor[p].data() + from, *by = offset[p].data() + from;
        I first = static_cast<I>(base[p]);
        for (int64_t j = 0; j < here; ++j) {
          if (rows_[from + j] <= 0 || size[j] <= 0) continue;
          start[next[j]] = to[j] + by[j] + first;
          length[next[j]++] = size[j];
        }
      }
    }
    return at;
  });
}

}  // namespace plans
}  // namespace cp
