// All steps of a ring at once, where all sequences are cut into chunks alike and no tile is cut: the keys that go on and
// the gradients that come depend on the farthest query of the units before and behind, which is a running maximum. What
// is computed is said in cp_fast/planning/loops/base.py.
#include <vector>

#include "plan_pieces.h"

namespace cp {
namespace plans {
namespace {

constexpr int64_t few = 64;  // sequences at a time, so that what all steps need of them stays near

// What is found out of each step.
enum Fact { tiles, block_rows, grad_rows, apart, sent, sent_rows, got, got_rows, contiguous, facts };

// The arrays of a step, in the order in which they are given; empty tuples where nothing is wanted.
enum Place { q, rows, k, columns, grad, cu_q, cu_kv, sent_start, sent_count, got_start, got_count, places };

template <typename I>
class Ring {
 public:
  // given: lengths, chunk, the chunks of each unit [count, 4], the pieces of queries and of keys that each step's tile
  // has [count, 2] (-1 for all, -2 for no tile), and what is added to tokens for rows: of the queries, of the own keys
  Ring(int64_t n, Object given, int64_t count, int64_t unit, int64_t bounded, int64_t hi)
      : n_(n), count_(count), unit_(unit), bounded_(bounded), hi_(static_cast<I>(hi)), lengths_(item(given, 0), n),
        chunk_(item(given, 1), n), numbers_(item(given, 2), 4 * count), pieces_(item(given, 3), 2 * count),
        q_anchor_(item(given, 4), n), own_anchor_(item(given, 5), n), ahead_(count * few), behind_(count * few) {}

  // f(step, first sequence, how many, their numbers) for all sequences of a step, a few at a time
  template <typename F>
  void each(F f) {
    Numbers found;
    for (int64_t begin = 0; begin < n_; begin += few) {
      int64_t here = std::min(few, n_ - begin);
      reach(begin, here);
      for (int64_t s = 0; s < count_; ++s) {
        look(s, begin, here, found);
        f(s, begin, here, found);
      }
    }
  }

  struct Numbers {
    I block[few], grads[few], sent[few], got[few], q[few], rows[few], k[few], columns[few];
  };

  const I* q_anchor() const { return q_anchor_.data(); }
  const I* own_anchor() const { return own_anchor_.data(); }

 private:
  using Tokens = TwoPieces<I, Chunks<I>>;

  Tokens tokens(int64_t unit) const {
    const int64_t* number = numbers_.data() + 4 * unit;
    auto piece = [&](int64_t from, int64_t to) {  // without a second piece: an empty one
      return Chunks<I>{lengths_.data(), chunk_.data(), static_cast<I>(std::max<int64_t>(from, 0)),
                       static_cast<I>(std::max<int64_t>(to, 0))};
    };
    return {piece(number[0], number[1]), piece(number[2], number[3])};
  }

  // ahead[m]: how far the units 1 to m ahead reach together; behind[m]: those from m ahead on; ahead[0]: the own unit
  void reach(int64_t begin, int64_t here) {
    const I none = lowest();
    for (int64_t m = 0; m < count_; ++m) {
      Tokens held = tokens((unit_ + m) % count_);
      I* to = &ahead_[m * few];
      for (int64_t j = 0; j < here; ++j) to[j] = held.end(begin + j, -none) + hi_;
    }
    std::copy(ahead_.begin() + few, ahead_.end(), behind_.begin() + few);
    for (int64_t m = 2; m < count_; ++m)
      for (int64_t j = 0; j < here; ++j)
        ahead_[m * few + j] = std::max(ahead_[m * few + j], ahead_[(m - 1) * few + j]);
    for (int64_t m = count_ - 2; m > 0; --m)
      for (int64_t j = 0; j < here; ++j)
        behind_[m * few + j] = std::max(behind_[m * few + j], behind_[(m + 1) * few + j]);
  }

  static I lowest() { return -(I{1} << (8 * sizeof(I) - 2)); }

  void look(int64_t s, int64_t begin, int64_t here, Numbers& found) const {
    Tokens held = tokens((unit_ - s + count_) % count_), reader = tokens(unit_);
    const I* own = &ahead_[0];
    const I* to_visit = s + 1 < count_ ? &ahead_[(count_ - 1 - s) * few] : nullptr;
    const I* visited = s > 1 ? &behind_[(count_ - s + 1) * few] : nullptr;
    I bounded = bounded_ ? ~I{0} : I{0};
    auto seen = [&](int64_t j, I reached) {
      I whole = held.total(begin + j) & ~(reached >> (8 * sizeof(I) - 1));
      return (held.below(begin + j, reached) & bounded) | (whole & ~bounded);
    };
    for (int64_t j = 0; j < here; ++j) {
      I ahead = to_visit ? to_visit[j] : own[j], before = visited ? visited[j] : own[j];
      found.block[j] = seen(j, std::max(own[j], ahead));
      found.grads[j] = seen(j, std::max(own[j], before));
      found.sent[j] = to_visit ? seen(j, ahead) : 0;
      found.got[j] = visited ? seen(j, before) : 0;
    }
    int64_t piece = pieces_[2 * s], other = pieces_[2 * s + 1];
    auto part = [&](Tokens of, int64_t wanted, I* start, I* count) {
      for (int64_t j = 0; j < here; ++j) {
        I first = of.count(begin + j, 0), second = of.count(begin + j, 1);
        start[j] = wanted == 1 ? first : 0;
        count[j] = wanted == -2 ? 0 : wanted < 0 ? first + second : wanted == 1 ? second : first;
      }
    };
    part(reader, piece, found.q, found.rows);
    part(held, other, found.k, found.columns);
    for (int64_t j = 0; j < here; ++j) {
      I there = (found.rows[j] > 0) & (found.columns[j] > 0);
      found.rows[j] *= there;
      found.columns[j] *= there;
    }
  }

  int64_t n_, count_, unit_, bounded_;
  I hi_;
  Array<I> lengths_, chunk_;
  Array<int64_t> numbers_, pieces_;
  Array<I> q_anchor_, own_anchor_;
  std::vector<I> ahead_, behind_;
};

}  // namespace

CP_PLAN cp_plan_ring_facts(int64_t wide, int64_t n, Object said, Object given, int64_t count, int64_t unit,
                           int64_t bounded, int64_t hi) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<int64_t> said_(said, facts * count, true);
    std::fill(said_.data(), said_.data() + facts * count, 0);
    Ring<I> ring(n, given, count, unit, bounded, hi);
    ring.each([&](int64_t s, int64_t, int64_t here, const typename Ring<I>::Numbers& found) {
      int64_t* fact = said_.data() + facts * s;
      I with_tile = 0, block = 0, grads = 0, differ = 0, with_sent = 0, all_sent = 0, with_got = 0, all_got = 0;
      for (int64_t j = 0; j < here; ++j) {
        with_tile += found.rows[j] > 0;
        block += found.block[j];
        grads += found.grads[j];
        differ |= found.block[j] ^ found.grads[j];
        with_sent += found.sent[j] > 0;
        all_sent += found.sent[j];
        with_got += found.got[j] > 0;
        all_got += found.got[j];
      }
      fact[tiles] += with_tile;
      fact[block_rows] += block;
      fact[grad_rows] += grads;
      fact[apart] |= s > 0 && differ;  // some token has its gradient in another row
      fact[sent] += with_sent;
      fact[sent_rows] += all_sent;
      fact[got] += with_got;
      fact[got_rows] += all_got;
    });
    return int64_t{0};
  });
}

namespace {

// Where a step is written. Every array has room for one more: each sequence is written, and the next one over it where
// it has nothing.
template <typename I>
struct Step {
  std::optional<Array<I>> held[places];
  std::optional<Array<int32_t>> sums[2];
  I *to[places] = {}, block = 0, grads = 0;
  int64_t at_tile = 0, at_sent = 0, at_got = 0;

  void take(Object arrays, const int64_t* fact) {
    for (int place = 0; place < places; ++place) {
      int64_t size = 1 + (place < sent_start ? fact[tiles] : place < got_start ? fact[sent] : fact[got]);
      if (place == cu_q || place == cu_kv)
        sums[place - cu_q].emplace(item(arrays, place), size, true);
      else if (place != grad || fact[apart])
        to[place] = held[place].emplace(item(arrays, place), size, true).data();
    }
  }

  // Sequences [begin, begin + here), whose keys lie from block_by and grads_by on.
  void put(int64_t begin, int64_t here, const typename Ring<I>::Numbers& found, const I* q_by, const I* block_by,
           const I* grads_by) {
    int64_t tile = at_tile, out = at_sent, in = at_got;
    for (int64_t j = 0; j < here; ++j) {
      to[q][tile] = found.q[j] + q_by[begin + j];
      to[rows][tile] = found.rows[j];
      to[k][tile] = found.k[j] + block_by[j];
      to[columns][tile] = found.columns[j];
      if (to[grad]) to[grad][tile] = found.k[j] + grads_by[j];
      tile += found.rows[j] > 0;
    }
    for (int64_t j = 0; j < here; ++j) {
      to[sent_start][out] = block_by[j];
      to[sent_count][out] = found.sent[j];
      out += found.sent[j] > 0;
    }
    for (int64_t j = 0; j < here; ++j) {
      to[got_start][in] = grads_by[j];
      to[got_count][in] = found.got[j];
      in += found.got[j] > 0;
    }
    at_tile = tile, at_sent = out, at_got = in;
  }

  int64_t in_one(int start, int count, int64_t size) const {
    I breaks = 0;
    for (int64_t i = 0; i + 1 < size; ++i) breaks |= to[start][i + 1] ^ (to[start][i] + to[count][i]);
    return breaks == 0;
  }

  void finish(int64_t* fact) {
    for (int side = 0; side < 2; ++side) {
      int32_t *sum = sums[side]->data(), total = 0;
      const I* size = to[side ? columns : rows];
      sum[0] = 0;
      for (int64_t i = 0; i < at_tile; ++i) sum[i + 1] = total += static_cast<int32_t>(size[i]);
    }
    fact[contiguous] = in_one(q, rows, at_tile) | in_one(k, columns, at_tile) << 1 |
                       (to[grad] ? in_one(grad, columns, at_tile) << 2 : 0) |
                       in_one(sent_start, sent_count, at_sent) << 3 | in_one(got_start, got_count, at_got) << 4;
  }
};

}  // namespace

// `out`: a tuple of the arrays of each step.
CP_PLAN cp_plan_ring(int64_t wide, int64_t n, Object said, Object out, Object given, int64_t count, int64_t unit,
                     int64_t bounded, int64_t hi) {
  return typed(wide, [&](auto zero) {
    using I = decltype(zero);
    Array<int64_t> said_(said, facts * count, true);
    Ring<I> ring(n, given, count, unit, bounded, hi);
    std::vector<Step<I>> steps(count);
    for (int64_t s = 0; s < count; ++s) steps[s].take(item(out, s), said_.data() + facts * s);
    ring.each([&](int64_t s, int64_t begin, int64_t here, const typename Ring<I>::Numbers& found) {
      Step<I>& step = steps[s];
      if (s == 0) {
        const I* own = ring.own_anchor() + begin;
        return step.put(begin, here, found, ring.q_anchor(), own, own);
      }
      I block_by[few], grads_by[few];
      for (int64_t j = 0; j < here; ++j) {
        block_by[j] = step.block;
        grads_by[j] = step.grads;
        step.block += found.block[j];
        step.grads += found.grads[j];
      }
      step.put(begin, here, found, ring.q_anchor(), block_by, grads_by);
    });
    for (int64_t s = 0; s < count; ++s) steps[s].finish(said_.data() + facts * s);
    return int64_t{0};
  });
}

}  // namespace plans
}  // namespace cp
