// Elements of four dtypes, alone or in vectors of four, and the two ways in which an arithmetic kernel is compiled:
//
//     Fast<To, From>   both dtypes known, four elements at a time, float arithmetic
//     Any<Wide>        dtypes looked at where they are used, one element at a time: odd sizes, rare pairs, float64
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "launch.cuh"

namespace cp {
namespace cuda {

#if defined(__CUDACC__)

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T x[4];
};

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}
template <>
__device__ __forceinline__ float to_float(__half x) {
  return __half2float(x);
}
template <>
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  return static_cast<T>(x);
}
template <>
__device__ __forceinline__ __half from_float(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}

template <typename Wide>
__device__ __forceinline__ Wide load_any(const void* data, Dtype dtype, int64_t i) {
  switch (dtype) {
    case Dtype::f16:
      return static_cast<Wide>(__half2float(static_cast<const __half*>(data)[i]));
    case Dtype::bf16:
      return static_cast<Wide>(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]));
    case Dtype::f32:
      return static_cast<Wide>(static_cast<const float*>(data)[i]);
    default:
      return static_cast<Wide>(static_cast<const double*>(data)[i]);
  }
}

template <typename Wide>
__device__ __forceinline__ void store_any(void* data, Dtype dtype, int64_t i, Wide x) {
  switch (dtype) {
    case Dtype::f16:
      if constexpr (sizeof(Wide) == 8)
        static_cast<__half*>(data)[i] = __double2half(x);
      else
        static_cast<__half*>(data)[i] = __float2half_rn(x);
      break;
    case Dtype::bf16:
      if constexpr (sizeof(Wide) == 8)
        static_cast<__nv_bfloat16*>(data)[i] = __double2bfloat16(x);
      else
        static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(x);
      break;
    case Dtype::f32:
      static_cast<float*>(data)[i] = static_cast<float>(x);
      break;
    default:
      static_cast<double*>(data)[i] = static_cast<double>(x);
  }
}

// A kernel's elements: loads and stores of kVector elements at once, as Wide.
template <typename Written, typename Read>
struct Fast {
  using To = Written;
  using From = Read;
  using Wide = float;
  static constexpr int kVector = 4;

  __device__ __forceinline__ static Four<float> load_to(const Values& v, int64_t i) { return load<To>(v.data, i); }
  __device__ __forceinline__ static Four<float> load_from(const Values& v, int64_t i) { return load<From>(v.data, i); }
  __device__ __forceinline__ static void store_to(const Values& v, int64_t i, Four<float> x) { store(v.data, i, x); }

  __device__ __forceinline__ static void store(void* data, int64_t i, Four<float> x) {
    Four<To> packed;
#pragma unroll
    for (int k = 0; k < 4; ++k) packed.x[k] = from_float<To>(x.x[k]);
    *reinterpret_cast<Four<To>*>(static_cast<To*>(data) + i) = packed;
  }

  template <typename T>
  __device__ __forceinline__ static Four<float> load(const void* data, int64_t i) {
    Four<T> packed = *reinterpret_cast<const Four<T>*>(static_cast<const T*>(data) + i);
    Four<float> x;
#pragma unroll
    for (int k = 0; k < 4; ++k) x.x[k] = to_float(packed.x[k]);
    return x;
  }
};

template <typename T>
struct One {
  T x[1];
};

template <typename kWide>
struct Any {
  using Wide = kWide;
  static constexpr int kVector = 1;

  __device__ __forceinline__ static One<Wide> load_to(const Values& v, int64_t i) {
    return {{load_any<Wide>(v.data, v.dtype, i)}};
  }
  __device__ __forceinline__ static One<Wide> load_from(const Values& v, int64_t i) { return load_to(v, i); }
  __device__ __forceinline__ static void store_to(const Values& v, int64_t i, One<Wide> x) {
    store_any<Wide>(v.data, v.dtype, i, x.x[0]);
  }
};

#endif

// Whether vectors of four lie where vectors may: in address, strides and size.
inline bool in_fours(const Values& v) {
  uint64_t bytes = reinterpret_cast<uintptr_t>(v.data) |
                   static_cast<uint64_t>((v.dim | v.row_stride | v.head_stride) * size_of(v.dtype));
  return v.dim % 4 == 0 && bytes % static_cast<uint64_t>(4 * size_of(v.dtype)) == 0;
}

// Call f with an instance of the way to compile it: f(Fast<float, __half>{}).
template <typename F>
void visit_elements(const Values& to, const Values& from, bool doubles, F f) {
  if (doubles || to.dtype == Dtype::f64 || from.dtype == Dtype::f64) return f(Any<double>{});
  if (in_fours(to) && in_fours(from)) {
    if (to.dtype == Dtype::f32) {
      if (from.dtype == Dtype::f32) return f(Fast<float, float>{});
      if (from.dtype == Dtype::bf16) return f(Fast<float, __nv_bfloat16>{});
      return f(Fast<float, __half>{});
    }
    if (to.dtype == Dtype::bf16 && from.dtype == Dtype::bf16) return f(Fast<__nv_bfloat16, __nv_bfloat16>{});
    if (to.dtype == Dtype::f16 && from.dtype == Dtype::f16) return f(Fast<__half, __half>{});
  }
  return f(Any<float>{});
}

}  // namespace cuda
}  // namespace cp
