// Copies by the copy engine of Hopper and later: global memory -> shared memory -> global memory, a few instructions
// for kilobytes. Blocks of one warp and 4 KiB; many are in flight on a multiprocessor, and as they begin in order the
// memory sees one narrow front move through the tensor. README.md has what else was tried.
#pragma once

#include "mover.cuh"

namespace cp {
namespace cuda {

constexpr int kBulkTile = 4096;  // bytes of a block
constexpr int kBulkLeast = 256;  // bytes of a copy below which words are faster

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// kKind: the map, for rows that are counted in 32 bits; or any.
template <MapKind kKind, typename kHeads>
__global__ void __launch_bounds__(kWarp)
    bulk_kernel(const __grid_constant__ MoveJob job, const __grid_constant__ kHeads heads) {
#if __CUDA_ARCH__ >= 900
  __shared__ __align__(128) char buffer[kBulkTile];
  __shared__ __align__(8) uint64_t arrival;
  const int lane = threadIdx.x;
  prefetch_lengths(job.plan);
  const uint32_t barrier = shared_address(&arrival);
  if (lane == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  const Part& part = part_of(job, blockIdx.x);
  const Copy copy = copy_of<true, kKind>(job.plan, part, heads, blockIdx.x - part.first_block, lane);
  const uint32_t place = shared_address(buffer) + lane * static_cast<uint32_t>(part.piece_bytes);
  const uint32_t expected = __reduce_add_sync(kAllLanes, copy.bytes);
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(expected) : "memory");
  __syncwarp();
  if (copy.bytes != 0) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(place),
                 "l"(copy.from), "r"(copy.bytes), "r"(barrier)
                 : "memory");
  }
  check_plan(job.plan);
  uint32_t arrived = 0;
  while (arrived == 0) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(arrived)
                 : "r"(barrier)
                 : "memory");
  }
  if (copy.bytes != 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(copy.to), "r"(place),
                 "r"(copy.bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the buffer lives until it is read
  }
#else
  __trap();  // the host asks for this kernel on newer GPUs alone
#endif
}

#endif

}  // namespace cuda
}  // namespace cp
