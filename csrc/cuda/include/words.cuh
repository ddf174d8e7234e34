// Copies through registers, in words of 16, 8, 4, 2 or 1 bytes: any alignment, any GPU.
#pragma once

#include "mover.cuh"

namespace cp {
namespace cuda {

constexpr int kWordTile = 8192;  // bytes of a warp
constexpr int kWordWarps = 8;    // of a block
constexpr int kUnroll = 4;       // independent loads of a thread

#if defined(__CUDACC__)

template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<1> {
  using type = uint8_t;
};

// Copies of a tile one after the other, several side by side where they are shorter than a warp is wide.
template <int kBytes, typename kHeads>
__global__ void __launch_bounds__(kWordWarps* kWarp)
    word_kernel(const __grid_constant__ MoveJob job, const __grid_constant__ kHeads heads) {
  using Word = typename WordOf<kBytes>::type;
  const int lane = threadIdx.x % kWarp;
  const Part& part = part_of(job, blockIdx.x);
  const int64_t tile = (blockIdx.x - part.first_block) * kWordWarps + threadIdx.x / kWarp;
  if (tile < part.tiles) {
    const Copy copy = copy_of<false, MapKind::any>(job.plan, part, heads, tile, lane);
    const int most = static_cast<int>(part.piece_bytes / kBytes);
    const int width = most >= kWarp ? kWarp : 1 << (kWarp - __clz(most - 1));  // lanes of a copy
    const int side_by_side = kWarp / width, column = lane % width;
    int first = 0, word = column;
    while (first < part.tile_copies) {
      Word value[kUnroll];
      Word* to[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int number = first + lane / width;
        const int words = __shfl_sync(kAllLanes, copy.bytes, number) / kBytes;
        const auto* from = reinterpret_cast<const Word*>(
            __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(copy.from), number));
        auto* target =
            reinterpret_cast<Word*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(copy.to), number));
        to[u] = nullptr;
        if (number < part.tile_copies && word < words) {
          to[u] = target + word;
          value[u] = from[word];
        }
        word += width;
        if (word - column >= most) {
          word = column;
          first += side_by_side;
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (to[u] != nullptr) *to[u] = value[u];
      }
    }
  }
  check_plan(job.plan);
}

#endif

}  // namespace cuda
}  // namespace cp
