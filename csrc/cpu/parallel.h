// PyTorch's own threads (torch.set_num_threads), through the one C function that is needed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                      void* context);

namespace cp {
namespace cpu {

// Call f(begin, end) for parts of 0 to n, on several threads where the work, `bytes` for each of the n, is worth it.
// f must not throw. Every element of a result belongs to one of the n, so the number of threads changes no bit.
template <typename F>
void parallel(int64_t n, int64_t bytes, F f) {
  constexpr int64_t worthwhile = 1 << 18;  // bytes for a thread: copied in about the time that waking it takes
  if (n <= 0) return;
  int64_t grain = std::max<int64_t>(1, worthwhile / std::max<int64_t>(1, bytes));
  if (n <= grain) return f(int64_t{0}, n);
  auto body = [](int64_t begin, int64_t end, void* context) { (*static_cast<F*>(context))(begin, end); };
  if (torch_parallel_for(0, n, grain, body, &f)) throw std::runtime_error("torch_parallel_for failed");
}

}  // namespace cpu
}  // namespace cp
