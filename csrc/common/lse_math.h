// How two partial results meet: the same formulas for every device. T is float or double.
#pragma once

#include <cmath>

#include "types.h"

namespace cp {

template <typename T>
struct Weights {
  T lse;            // the merged one
  T kept, step;     // the factors of the accumulator and of the step
  bool reads_out;   // false: the accumulator holds nothing yet, and may be NaN: count it as 0
  bool reads_step;  // false: the step saw nothing, and may be NaN: count it as 0
};

// log(1 + x), x from 0 to 1. In a CPU's libm the one in double is the faster.
CP_HD double log_of_one_and(double x) { return log1p(x); }
CP_HD float log_of_one_and(float x) {
#if defined(__CUDA_ARCH__)
  return log1pf(x);
#else
  return static_cast<float>(log1p(static_cast<double>(x)));
#endif
}

template <typename T>
CP_HD bool is_empty(T lse) {
  return lse == -static_cast<T>(INFINITY);
}

// new = log(exp(lse) + exp(step)) and the shares exp(lse - new), exp(step - new), with one exp and one log1p.
template <typename T>
CP_HD Weights<T> merge_weights(T lse, T step) {
  if (is_empty(step)) return {lse, T(1), T(0), !is_empty(lse), false};
  if (is_empty(lse)) return {step, T(0), T(1), false, true};
  using std::exp;
  bool larger = lse > step;
  T ratio = exp(larger ? step - lse : lse - step);  // of the smaller to the larger, at most 1
  T share = T(1) / (T(1) + ratio);
  T rest = ratio * share;
  return {(larger ? lse : step) + log_of_one_and(ratio), larger ? share : rest, larger ? rest : share, true, true};
}

// A step's share of the final denominator.
template <typename T>
CP_HD T correction_weight(T lse, T step) {
  using std::exp;
  return is_empty(step) ? T(0) : exp(step - lse);
}

}  // namespace cp
