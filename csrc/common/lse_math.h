// How two partial results meet: the same formulas for every device. T is float or double.
#pragma once

#include <cmath>

#include "types.h"

namespace cp {

template <typename T>
struct Weights {
  T lse;   // the merged one
  T kept;  // what the accumulator is multiplied by; 0: do not read it
  T step;  // what the step is multiplied by; 0: do not read it
};

template <typename T>
CP_HD bool is_empty(T lse) { return lse == -static_cast<T>(INFINITY); }

// new = log(exp(lse) + exp(step)) and the shares exp(lse - new), exp(step - new), with one exp and one log1p.
template <typename T>
CP_HD Weights<T> merge_weights(T lse, T step) {
  if (is_empty(step)) return {lse, is_empty(lse) ? T(0) : T(1), T(0)};
  if (is_empty(lse)) return {step, T(0), T(1)};
  bool larger = lse > step;
  T ratio = exp(larger ? step - lse : lse - step);  // of the smaller to the larger, at most 1
  T share = T(1) / (T(1) + ratio);
  return {(larger ? lse : step) + log1p(ratio), larger ? share : ratio * share, larger ? ratio * share : share};
}

template <typename T>
CP_HD T merge_lse(T lse, T step) {
  if (is_empty(step)) return lse;
  if (is_empty(lse)) return step;
  bool larger = lse > step;
  return (larger ? lse : step) + log1p(exp(larger ? step - lse : lse - step));
}

// A step's share of the final denominator.
template <typename T>
CP_HD T correction_weight(T lse, T step) { return is_empty(step) ? T(0) : exp(step - lse); }

}  // namespace cp
