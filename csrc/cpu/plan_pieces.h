// What the planner's loops are given and give, as cp_fast/planning/columns.py has it: one number a sequence.
#pragma once

#include <algorithm>
#include <optional>

#include "plan_arrays.h"

namespace cp {
namespace plans {

// A tuple of N arrays that a loop writes.
template <typename I, int N>
class Columns {
 public:
  Columns(Object tuple, int64_t size) {
    if (size_of(tuple) != N) throw Wrong{};
    for (int n = 0; n < N; ++n) data_[n] = held_[n].emplace(item(tuple, n), size, true).data();
  }
  I* operator[](int n) const { return data_[n]; }

 private:
  std::optional<Array<I>> held_[N];
  I* data_[N];
};

// The real tokens of a unit, in one or two pieces a sequence (`Chunked`, or `Spanned`). A piece has the positions
// first(i) to stop(i) - 1 of sequence i; first and stop are computed where they are needed, which is cheaper than
// reading them.
template <typename I>
struct Span {
  const I *from, *to;

  I first(int64_t i) const { return from[i]; }
  I stop(int64_t i) const { return to[i]; }
};

template <typename I>
struct Chunks {
  const I *lengths, *chunk;
  I from, to;

  I first(int64_t i) const { return chunk[i] * from; }
  I stop(int64_t i) const { return std::max(std::min(static_cast<I>(chunk[i] * to), lengths[i]), first(i)); }
};

template <typename I, typename Piece>
struct OnePiece {
  Piece one;
  static constexpr int pieces = 1;

  I below(int64_t i, I position) const { return below(one, i, position); }
  I end(int64_t i, I far) const { return one.stop(i) > one.first(i) ? one.stop(i) : -far; }
  I count(int64_t i, int64_t) const { return one.stop(i) - one.first(i); }
  I total(int64_t i) const { return count(i, 0); }
  // what is added to a token of a piece for its position
  I position(int64_t i, int64_t) const { return one.first(i); }

  static I below(const Piece& piece, int64_t i, I position) {
    return std::min(std::max(position, piece.first(i)), piece.stop(i)) - piece.first(i);
  }
};

template <typename I, typename Piece>
struct TwoPieces {
  Piece one, two;
  static constexpr int pieces = 2;
  using Single = OnePiece<I, Piece>;

  I below(int64_t i, I position) const {
    return Single::below(one, i, position) + Single::below(two, i, position);
  }
  I end(int64_t i, I far) const { return two.stop(i) > two.first(i) ? two.stop(i) : Single{one}.end(i, far); }
  I count(int64_t i, int64_t piece) const { return Single{piece ? two : one}.total(i); }
  I total(int64_t i) const { return count(i, 0) + count(i, 1); }
  I position(int64_t i, int64_t piece) const { return piece ? two.first(i) - count(i, 0) : one.first(i); }
};

template <typename I>
class Owned {
 public:
  Owned(Object tokens, int64_t n) : a_(item(tokens, 0), n), b_(item(tokens, 1), n) {
    if (size_of(tokens) == 3) numbers_.emplace(item(tokens, 2), 4);
  }

  // f(tokens), where `tokens` is of the kind that these are, so that no loop asks.
  template <typename F>
  auto visit(F f) const {
    if (!numbers_) return f(OnePiece<I, Span<I>>{{a_.data(), b_.data()}});
    Chunks<I> one = chunks(0), two = chunks(2);
    return two.from < 0 ? f(OnePiece<I, Chunks<I>>{one}) : f(TwoPieces<I, Chunks<I>>{one, two});
  }

 private:
  Chunks<I> chunks(int64_t n) const {
    return {a_.data(), b_.data(), static_cast<I>((*numbers_)[n]), static_cast<I>((*numbers_)[n + 1])};
  }

  Array<I> a_, b_;  // lengths and chunks, or first and stop
  std::optional<Array<int64_t>> numbers_;
};

// Ranges [start, start + count).
template <typename I>
struct Range {
  Range(Object range, int64_t n) : start(item(range, 0), n), count(item(range, 1), n) {}
  Array<I> start, count;
};

// Whether spans of rows, none of them empty, are one range.
template <typename I>
bool contiguous(const I* start, const I* count, int64_t n) {
  I apart = 0;
  for (int64_t i = 0; i + 1 < n; ++i) apart |= start[i + 1] ^ (start[i] + count[i]);
  return apart == 0;
}

// Cumulative lengths, n + 1 of them.
template <typename I>
void add_up(int32_t* sum, const I* count, int64_t n) {
  int32_t total = 0;
  sum[0] = 0;
  for (int64_t i = 0; i < n; ++i) sum[i + 1] = total += static_cast<int32_t>(count[i]);
}

// f(offset, size): where a piece begins on its token axis, and its length, as functions of the sequence; -1 for all pieces.
template <typename I, typename Tokens, typename F>
void visit_part(const Tokens& tokens, int64_t piece, F f) {
  auto none = [](int64_t) { return I{0}; };
  auto first = [=](int64_t i) { return tokens.count(i, 0); };
  if (piece < 0)
    f(none, [=](int64_t i) { return tokens.total(i); });
  else if (piece == 0)
    f(none, first);
  else
    f(first, [=](int64_t i) { return tokens.count(i, 1); });
}

// Key j is seen by query i if lo <= j - i <= hi, for every sequence; beyond all positions where a side is unbounded.
template <typename I>
struct Band {
  Band(Object band, int64_t n) : lo(item(band, 0), n), hi(item(band, 1), n), shift(item(band, 2), n) {}
  Array<I> lo, hi, shift;
};

// A tuple of `Slot`: one tile a sequence each.
constexpr int64_t most_slots = 16;

template <typename I>
class Slots {
 public:
  Slots(Object slots, int64_t n) : number(size_of(slots)) {
    if (number > most_slots) throw Wrong{};
    for (int64_t s = 0; s < number; ++s)
      for (int64_t column = 0; column < 4; ++column)
        data_[s][column] = held_[s][column].emplace(item(item(slots, s), column), n).data();
  }
  const I* q(int64_t slot) const { return data_[slot][0]; }
  const I* rows(int64_t slot) const { return data_[slot][1]; }
  const I* k(int64_t slot) const { return data_[slot][2]; }
  const I* columns(int64_t slot) const { return data_[slot][3]; }
  const int64_t number;

 private:
  std::optional<Array<I>> held_[most_slots][4];
  const I* data_[most_slots][4];
};

}  // namespace plans
}  // namespace cp
