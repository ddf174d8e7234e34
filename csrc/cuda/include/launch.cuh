// Launching: the stream, errors that name the kernel, and how many blocks a GPU takes at once.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "types.h"

namespace cp {
namespace cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

inline cudaStream_t stream_of(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

// After every launch: throw its error, with the name of the kernel.
inline void check_launch(const char* kernel) {
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string(kernel) + ": CUDA: " + cudaGetErrorString(error));
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// An attribute of a device, asked for once. Devices past the table are asked every time.
template <cudaDeviceAttr kAttribute>
int device_attribute(int device) {
  static std::array<std::atomic<int>, 64> known{};  // value + 1; 0 is unknown
  bool in_table = device >= 0 && device < static_cast<int>(known.size());
  if (in_table) {
    if (int value = known[device].load(std::memory_order_relaxed); value != 0) return value - 1;
  }
  int value = 0;
  if (cudaDeviceGetAttribute(&value, kAttribute, device) != cudaSuccess) {
    check_launch("cudaDeviceGetAttribute");
    throw std::runtime_error("cudaDeviceGetAttribute: the device does not answer");
  }
  if (in_table) known[device].store(value + 1, std::memory_order_relaxed);
  return value;
}

inline int multiprocessors(const Stream& stream) {
  return device_attribute<cudaDevAttrMultiProcessorCount>(stream.device);
}

// Blocks of a one-dimensional grid; more than a grid can have is an error, not a wrong answer.
inline unsigned grid_of(int64_t blocks, const char* kernel) {
  if (blocks > 0x7fffffff) throw std::runtime_error(std::string(kernel) + ": more work than a grid has blocks");
  return static_cast<unsigned>(blocks);
}

}  // namespace cuda
}  // namespace cp
