// `Owned` of cp_fast/planning/columns.py: the real tokens of a unit, in one or two pieces a sequence.
#pragma once

#include <algorithm>
#include <optional>

#include "plan_arrays.h"

namespace cp {
namespace plans {

template <typename I>
class Owned {
 public:
  Owned(Object owned, int64_t n)
      : first_(item(item(owned, 0), 0), n), stop_(item(item(owned, 1), 0), n), count_(item(item(owned, 2), 0), n) {
    if (size_of(item(owned, 0)) == 1) return;
    second_.emplace(item(item(owned, 0), 1), n);
    second_stop_.emplace(item(item(owned, 1), 1), n);
    second_count_.emplace(item(item(owned, 2), 1), n);
  }

  // f(pieces), with what the loops read: one kind for one piece, another for two, so that neither asks in the loop.
  template <typename F>
  void visit(F f) const {
    if (second_)
      f(Two{{first_.data(), stop_.data(), count_.data()}, {second_->data(), second_stop_->data(), second_count_->data()}});
    else
      f(One{first_.data(), stop_.data(), count_.data()});
  }

 private:
  struct One {
    const I *first, *stop, *count;
    // how many of the tokens lie before a position
    I below(int64_t i, I position) const { return std::min(std::max(position, first[i]), stop[i]) - first[i]; }
    // behind the last token; -far without one
    I end(int64_t i, I far) const { return count[i] > 0 ? stop[i] : -far; }
  };
  struct Two {
    One one, two;
    I below(int64_t i, I position) const { return one.below(i, position) + two.below(i, position); }
    I end(int64_t i, I far) const { return two.count[i] > 0 ? two.stop[i] : one.end(i, far); }
  };

  Array<I> first_, stop_, count_;
  std::optional<Array<I>> second_, second_stop_, second_count_;
};

// `Band` of the same file: key j is seen by query i if lo <= j - i <= hi, for every sequence; beyond all positions where
// a side is unbounded.
template <typename I>
struct Band {
  Band(Object band, int64_t n) : lo(item(band, 0), n), hi(item(band, 1), n), shift(item(band, 2), n) {}
  Array<I> lo, hi, shift;
};

// A tuple of `Slot` of the same file: one tile a sequence each.
constexpr int64_t most_slots = 16;

template <typename I>
class Slots {
 public:
  Slots(Object slots, int64_t n) : number(size_of(slots)) {
    if (number > most_slots) throw Wrong{};
    for (int64_t s = 0; s < number; ++s)
      for (int64_t column = 0; column < 4; ++column) held_[s][column].emplace(item(item(slots, s), column), n);
  }
  const I* q(int64_t slot) const { return held_[slot][0]->data(); }
  const I* rows(int64_t slot) const { return held_[slot][1]->data(); }
  const I* k(int64_t slot) const { return held_[slot][2]->data(); }
  const I* columns(int64_t slot) const { return held_[slot][3]->data(); }
  const int64_t number;

 private:
  std::optional<Array<I>> held_[most_slots][4];
};

}  // namespace plans
}  // namespace cp
