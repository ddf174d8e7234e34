// Leaving out what is not there, without a branch that a processor could guess wrong.
#pragma once

#include <cstdint>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace cp {
namespace plans {

// How many elements more than are kept an array must have room for: what is kept is written in whole vectors.
constexpr int64_t spare = 16;

// Of N arrays of `size` elements those where `wanted` is above zero, from to[.][at] on. The place behind the last.
template <typename I, int N>
inline int64_t keep(const I* wanted, const I* const (&from)[N], I* const (&to)[N], int64_t size, int64_t at) {
#ifdef __AVX512F__
  if constexpr (sizeof(I) == 4) {
    for (int64_t i = 0; i < size; i += 16) {
      __mmask16 here = size - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (size - i)) - 1);
      __mmask16 kept = _mm512_mask_cmpgt_epi32_mask(here, _mm512_maskz_loadu_epi32(here, wanted + i), _mm512_setzero_si512());
      for (int n = 0; n < N; ++n)
        _mm512_storeu_si512(to[n] + at, _mm512_maskz_compress_epi32(kept, _mm512_maskz_loadu_epi32(here, from[n] + i)));
      at += __builtin_popcount(kept);
    }
    return at;
  }
#endif
  for (int64_t i = 0; i < size; ++i) {
    for (int n = 0; n < N; ++n) to[n][at] = from[n][i];
    at += wanted[i] > 0;
  }
  return at;
}

}  // namespace plans
}  // namespace cp
