// The steps of a ring where all sequences are cut into chunks alike and no tile is cut: the keys that go on and
// the gradients that come depend on the farthest query of the units before and behind, which is a running maximum. What
// is computed is said in cp_fast/planning/loops/base.py.
#include "plan_keep.h"
#include "plan_pieces.h"

namespace cp {
namespace plans {
namespace {

constexpr int64_t few = 64;  // sequences at a time, so that what is found out of them stays near

// What is found out of each step.
enum Fact { tiles, block_rows, grad_rows, apart, sent, sent_rows, got, got_rows, in_one_range, facts };

// The arrays of a step, in the order in which they are given.
enum Place { q, rows, k, columns, grad, cu_q, cu_kv, sent_start, sent_count, got_start, got_count, places };

template <typename I>
using Tokens = TwoPieces<I, Chunks<I>>;

// What all steps are about. given: lengths, chunk, the chunks of each unit [count, 4], and how far the units 1 to m
// ahead reach together [count, n], and those from m ahead on; row 0 of the former is the own unit's.
template <typename I>
class Ring {
 public:
  Ring(int64_t n, Object given, int64_t count, int64_t unit, bool writes)
      : n_(n), count_(count), unit_(unit), lengths_(item(given, 0), n), chunk_(item(given, 1), n),
        numbers_(item(given, 2), 4 * count), ahead_(item(given, 3), count * n, writes),
        behind_(item(given, 4), count * n, writes) {}

  Tokens<I> tokens(int64_t unit) const {
    const int64_t* number = numbers_.data() + 4 * ((unit + count_) % count_);
    auto piece = [&](int64_t from, int64_t to) {  // without a second piece: an empty one
      return Chunks<I>{lengths_.data(), chunk_.data(), static_cast<I>(std::max<int64_t>(from, 0)),
                       static_cast<I>(std::max<int64_t>(to, 0))};
    };
    return {piece(number[0], number[1]), piece(number[2], number[3])};
  }

  I* ahead(int64_t m) const { return ahead_.data() + m * n_; }
  I* behind(int64_t m) const { return behind_.data() + m * n_; }
  int64_t unit() const { return unit_; }
  int64_t count() const { return count_; }

 private:
  int64_t n_, count_, unit_;
  Array<I> lengths_, chunk_;
  Array<int64_t> numbers_;
  Array<I> ahead_, behind_;
};

// The numbers of a few sequences in one step: tokens of the block, of the gradients' buffer, that go on, that come; and
// the tile.
template <typename I>
class Look {
 public:
  Look(const Ring<I>& ring, int64_t s, int64_t piece, int64_t other, bool bounded)
      : held_(ring.tokens(ring.unit() - s)), reader_(ring.tokens(ring.unit())), piece_(piece), other_(other),
        bounded_(bounded ? ~I{0} : I{0}), own_(ring.ahead(0)),
        to_visit_(s + 1 < ring.count() ? ring.ahead(ring.count() - 1 - s) : nullptr),
        visited_(s > 1 ? ring.behind(ring.count() - s + 1) : nullptr) {}

  void at(int64_t begin, int64_t here) {
    const I *own = own_ + begin, *to_visit = (to_visit_ ? to_visit_ : own_) + begin;
    const I* visited = (visited_ ? visited_ : own_) + begin;
    I sends = to_visit_ ? ~I{0} : I{0}, gets = visited_ ? ~I{0} : I{0};
    auto seen = [&](int64_t j, I reached) {
      I whole = held_.total(begin + j) & ~(reached >> (8 * sizeof(I) - 1));
      return (held_.below(begin + j, reached) & bounded_) | (whole & ~bounded_);
    };
    for (int64_t j = 0; j < here; ++j) {
      block[j] = seen(j, std::max(own[j], to_visit[j]));
      grads[j] = seen(j, std::max(own[j], visited[j]));
      sent[j] = seen(j, to_visit[j]) & sends;
      got[j] = seen(j, visited[j]) & gets;
    }
    part(reader_, piece_, begin, here, q, rows);
    part(held_, other_, begin, here, k, columns);
    for (int64_t j = 0; j < here; ++j) {
      I there = (rows[j] > 0) & (columns[j] > 0);
      rows[j] *= there;
      columns[j] *= there;
    }
  }

  I block[few], grads[few], sent[few], got[few], q[few], rows[few], k[few], columns[few];

 private:
  static void part(const Tokens<I>& of, int64_t wanted, int64_t begin, int64_t here, I* start, I* count) {
    for (int64_t j = 0; j < here; ++j) {
      I first = of.count(begin + j, 0), second = of.count(begin + j, 1);
      start[j] = wanted == 1 ? first : 0;
      count[j] = wanted == -2 ? 0 : wanted < 0 ? first + second : wanted == 1 ? second : first;
    }
  }

  Tokens<I> held_, reader_;
  int64_t piece_, other_;
  I bounded_;
  const I *own_, *to_visit_, *visited_;
};

}  // namespace

// How far units reach together, into the last two arrays of `given`.
CP_PLAN cp_plan_ring(int64_t wide, int64_t n, Object given, int64_t count, int64_t unit, int64_t hi) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    constexpr I far = I{1} << (8 * sizeof(I) - 2);
    Ring<I> ring(n, given, count, unit, true);
    I by = static_cast<I>(hi);
    for (int64_t m = 0; m < count; ++m) {
      Tokens<I> held = ring.tokens(unit + m);
      const I* before = m > 1 ? ring.ahead(m - 1) : nullptr;
      I *ahead = ring.ahead(m), *behind = ring.behind(m);
      if (before) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) {
          I end = held.end(i, far) + by;
          behind[i] = end;
          ahead[i] = std::max(end, before[i]);
        }
      } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) ahead[i] = behind[i] = held.end(i, far) + by;
      }
    }
    for (int64_t m = count - 2; m > 0; --m) {
      I* behind = ring.behind(m);
      const I* after = ring.behind(m + 1);
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) behind[i] = std::max(behind[i], after[i]);
    }
    return int64_t{0};
  });
}

namespace {

// Where a step is written, into arrays that are long enough for all sequences.
template <typename I>
struct Step {
  std::optional<Array<I>> held[places];
  std::optional<Array<int32_t>> sums[2];
  I* to[places] = {};
  int64_t at_tile = 0, at_sent = 0, at_got = 0;

  Step(Object arrays, int64_t n) {
    for (int place = 0; place < places; ++place) {
      if (place == cu_q || place == cu_kv)
        sums[place - cu_q].emplace(item(arrays, place), n + 1, true);
      else
        to[place] = held[place].emplace(item(arrays, place), n + spare, true).data();
    }
  }

  // Sequences [begin, begin + here), whose keys lie from block_by and grads_by on.
  void put(int64_t begin, int64_t here, const Look<I>& found, const I* q_by, const I* block_by, const I* grads_by) {
    I queries[few], keys[few], of_grads[few];
    for (int64_t j = 0; j < here; ++j) {
      queries[j] = found.q[j] + q_by[begin + j];
      keys[j] = found.k[j] + block_by[j];
      of_grads[j] = found.k[j] + grads_by[j];
    }
    at_tile = keep<I, 5>(found.rows, {queries, found.rows, keys, found.columns, of_grads},
                         {to[q], to[rows], to[k], to[columns], to[grad]}, here, at_tile);
    at_sent = keep<I, 2>(found.sent, {block_by, found.sent}, {to[sent_start], to[sent_count]}, here, at_sent);
    at_got = keep<I, 2>(found.got, {grads_by, found.got}, {to[got_start], to[got_count]}, here, at_got);
  }

  int64_t in_one(int start, int count, int64_t size) const { return contiguous(to[start], to[count], size); }

  void finish(int64_t* fact) const {
    add_up(sums[0]->data(), to[rows], at_tile);
    add_up(sums[1]->data(), to[columns], at_tile);
    fact[tiles] = at_tile, fact[sent] = at_sent, fact[got] = at_got;
    fact[in_one_range] = in_one(q, rows, at_tile) | in_one(k, columns, at_tile) << 1 |
                       in_one(grad, columns, at_tile) << 2 | in_one(sent_start, sent_count, at_sent) << 3 |
                       in_one(got_start, got_count, at_got) << 4;
  }
};

}  // namespace

// A step: `out` are its arrays; `piece` and `other` are the tile's pieces of queries and keys: -1 for all, -2 for none. In
// the first step the keys are the own ones, with rows of their own.
CP_PLAN cp_plan_ring_step(int64_t wide, int64_t n, Object said, Object given, int64_t count, int64_t unit, int64_t s,
                          int64_t piece, int64_t other, int64_t bounded, Object out, Object q_anchor,
                          Object own_anchor) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<int64_t> said_(said, facts, true);
    Array<I> q_by(q_anchor, n), own_by(own_anchor, n);
    Ring<I> ring(n, given, count, unit, false);
    Look<I> found(ring, s, piece, other, bounded);
    Step<I> step(out, n);
    I block = 0, grads = 0, differ = 0, all_sent = 0, all_got = 0;
    for (int64_t begin = 0; begin < n; begin += few) {
      int64_t here = std::min(few, n - begin);
      found.at(begin, here);
      I block_by[few], grads_by[few];
      for (int64_t j = 0; j < here; ++j) {
        differ |= found.block[j] ^ found.grads[j];
        all_sent += found.sent[j];
        all_got += found.got[j];
      }
      for (int64_t j = 0; j < here; ++j) {
        block_by[j] = block;
        grads_by[j] = grads;
        block += found.block[j];
        grads += found.grads[j];
      }
      const I* own = own_by.data() + begin;
      step.put(begin, here, found, q_by.data(), s ? block_by : own, s ? grads_by : own);
    }
    int64_t* fact = said_.data();
    step.finish(fact);
    fact[block_rows] = block;
    fact[grad_rows] = grads;
    fact[apart] = s > 0 && differ;  // some token has its gradient in another row
    fact[sent_rows] = all_sent;
    fact[got_rows] = all_got;
    return int64_t{0};
  });
}

}  // namespace plans
}  // namespace cp
