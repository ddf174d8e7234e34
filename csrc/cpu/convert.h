// Elements in 16 bits, and the dispatch on dtypes. Conversions have no branches, so that compilers vectorise loops of
// them; they round to nearest even and keep NaN, like PyTorch's.
#pragma once

#include <cstring>

#include "types.h"

namespace cp {
namespace cpu {

template <typename To, typename From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Half {
  uint16_t raw;

  float get() const {
    uint32_t shifted = uint32_t(raw & 0x7fff) << 13, exponent = shifted & (0x1fu << 23);
    uint32_t normal = shifted + (112u << 23) + (exponent == (0x1fu << 23) ? 112u << 23 : 0);
    float subnormal = bits<float>(shifted + (113u << 23)) - bits<float>(113u << 23);
    return bits<float>((exponent == 0 ? bits<uint32_t>(subnormal) : normal) | uint32_t(raw & 0x8000) << 16);
  }

  void set(float value) {
    uint32_t f = bits<uint32_t>(value), sign = f & 0x80000000u;
    f ^= sign;
    uint32_t special = f > (255u << 23) ? 0x7e00 : 0x7c00;
    uint32_t subnormal = bits<uint32_t>(bits<float>(f) + bits<float>(126u << 23)) - (126u << 23);
    uint32_t normal = (f - (112u << 23) + 0xfff + ((f >> 13) & 1)) >> 13;
    uint32_t small = f < (113u << 23) ? subnormal : normal;
    raw = uint16_t((f >= (143u << 23) ? special : small) | sign >> 16);
  }
};

struct Brain {
  uint16_t raw;

  float get() const { return bits<float>(uint32_t(raw) << 16); }

  void set(float value) {
    uint32_t f = bits<uint32_t>(value), rounded = (f + 0x7fff + ((f >> 16) & 1)) >> 16;
    raw = uint16_t((f & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

// T is a type of elements, W float or double; 16 bits are reached by way of float, as PyTorch does.
template <typename W>
inline W load(const float& x) {
  return W(x);
}
template <typename W>
inline W load(const double& x) {
  return W(x);
}
template <typename W>
inline W load(const Half& x) {
  return W(x.get());
}
template <typename W>
inline W load(const Brain& x) {
  return W(x.get());
}
template <typename W>
inline void store(float& x, W value) {
  x = float(value);
}
template <typename W>
inline void store(double& x, W value) {
  x = double(value);
}
template <typename W>
inline void store(Half& x, W value) {
  x.set(float(value));
}
template <typename W>
inline void store(Brain& x, W value) {
  x.set(float(value));
}

template <typename A, typename B>
struct WideOf {
  using type = float;
};
template <typename A>
struct WideOf<A, double> {
  using type = double;
};
template <typename B>
struct WideOf<double, B> {
  using type = double;
};
template <>
struct WideOf<double, double> {
  using type = double;
};
template <typename A, typename B>
using Wide = typename WideOf<A, B>::type;

// Call f(a null pointer of the element type).
template <typename F>
void visit(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f16:
      return f(static_cast<Half*>(nullptr));
    case Dtype::bf16:
      return f(static_cast<Brain*>(nullptr));
    case Dtype::f32:
      return f(static_cast<float*>(nullptr));
    case Dtype::f64:
      return f(static_cast<double*>(nullptr));
  }
}

template <typename F>
void visit_accumulator(Dtype dtype, F f) {
  if (dtype == Dtype::f64)
    f(static_cast<double*>(nullptr));
  else
    f(static_cast<float*>(nullptr));
}

// Element access to an LSE of either dtype.
template <typename W>
struct LseRows {
  Lse lse;

  int64_t at(int64_t sequence, int64_t head, int64_t row) const {
    return sequence * lse.sequence_stride + head * lse.head_stride + row * lse.row_stride;
  }
  W get(int64_t i) const {
    return lse.dtype == Dtype::f64 ? W(static_cast<const double*>(lse.data)[i])
                                   : W(static_cast<const float*>(lse.data)[i]);
  }
  void set(int64_t i, W value) const {
    if (lse.dtype == Dtype::f64)
      static_cast<double*>(lse.data)[i] = double(value);
    else
      static_cast<float*>(lse.data)[i] = float(value);
  }
};

}  // namespace cpu
}  // namespace cp
