// The copy engine of Hopper and later: global memory -> shared memory -> global memory, a few instructions for
// kilobytes. Addresses and sizes are multiples of 16 bytes.
//
// One lane makes an Arrival and says how many bytes will come; after a __syncwarp any lane may load towards it, and
// all wait. A load that was waited for is seen by ordinary reads of shared memory; ordinary writes are seen by a store
// only after `written`.
#pragma once

#include "launch.cuh"

namespace cp {
namespace cuda {

constexpr int kBulkLeast = 256;  // bytes of a copy below which words are faster

inline bool has_engine(const Stream& stream) {
  return device_attribute<cudaDevAttrComputeCapabilityMajor>(stream.device) >= 9;
}

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#if __CUDA_ARCH__ >= 900

// Bytes that loads bring, counted in a word of shared memory; used once.
struct Arrival {
  uint32_t word;

  __device__ __forceinline__ explicit Arrival(const uint64_t* place) : word(shared_address(place)) {}

  __device__ __forceinline__ void make() const {  // by one lane
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(word));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ void expect(uint32_t bytes) const {  // by the same lane
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(word), "r"(bytes) : "memory");
  }
  __device__ __forceinline__ void wait() const {
    uint32_t arrived = 0;
    while (arrived == 0) {
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                   : "=r"(arrived)
                   : "r"(word)
                   : "memory");
    }
  }
};

__device__ __forceinline__ void engine_load(uint32_t shared, const void* global, uint32_t bytes, const Arrival& to) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(to.word)
               : "memory");
}

__device__ __forceinline__ void engine_store(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

// By every lane that stored, last: shared memory lives until it is read.
__device__ __forceinline__ void finish_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Called by every lane that wrote to shared memory, before the __syncwarp that precedes a lane's store.
__device__ __forceinline__ void written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif

#endif

}  // namespace cuda
}  // namespace cp
