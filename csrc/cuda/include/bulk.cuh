// Copies by the copy engine of Hopper and later. Blocks of one warp and 4 KiB; many are in flight on a multiprocessor,
// and as they begin in order the memory sees one narrow front move through the tensor. README.md lists other
// variants.
#pragma once

#include "engine.cuh"
#include "mover.cuh"

namespace cp {
namespace cuda {

constexpr int kBulkTile = 4096;  // bytes of a block

#if defined(__CUDACC__)

// kKind: the map, for rows that are counted in 32 bits; or any.
template <MapKind kKind, typename kHeads>
__global__ void __launch_bounds__(kWarp)
    bulk_kernel(const __grid_constant__ MoveJob job, const __grid_constant__ kHeads heads) {
#if __CUDA_ARCH__ >= 900
  __shared__ __align__(128) char buffer[kBulkTile];
  __shared__ __align__(8) uint64_t counted;
  const int lane = threadIdx.x;
  prefetch_lengths(job.plan);
  const Arrival arrival(&counted);
  if (lane == 0) arrival.make();

  const Part& part = part_of(job, blockIdx.x);
  const Copy copy = copy_of<true, kKind>(job.plan, part, heads, blockIdx.x - part.first_block, lane);
  const uint32_t place = shared_address(buffer) + lane * static_cast<uint32_t>(part.piece_bytes);
  const uint32_t expected = __reduce_add_sync(kAllLanes, copy.bytes);
  if (lane == 0) arrival.expect(expected);
  __syncwarp();
  if (copy.bytes != 0) engine_load(place, copy.from, copy.bytes, arrival);
  check_plan(job.plan);
  arrival.wait();
  if (copy.bytes != 0) {
    engine_store(copy.to, place, copy.bytes);
    finish_stores();
  }
#else
  __trap();  // the host asks for this kernel on newer GPUs alone
#endif
}

#endif

}  // namespace cuda
}  // namespace cp
