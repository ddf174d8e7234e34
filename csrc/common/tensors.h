// From PyTorch's tensors to the structs of types.h. Everything that a wrong caller could break is checked here, and the
// error names the tensor, its shape and the rule.
#pragma once

// PyTorch's stable ABI: a library built against one release loads in later ones, and its headers compile in a second
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "types.h"

namespace cp {

using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

namespace cpu {
constexpr bool on_cpu = true;
}
namespace cuda {
constexpr bool on_cpu = false;
}

inline std::string text(const Sizes& sizes) {
  std::string out = "[";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i ? ", " : "") + std::to_string(sizes[i]);
  return out + "]";
}

// No memory for a result: Python raises PyTorch's own exception (cp_fast/movers/native_movers.py).
[[noreturn]] inline void allocation_error(int64_t item, const Sizes& sizes) {
  throw std::runtime_error("AllocationError: " + text(sizes) + " of " + std::to_string(item) + " bytes");
}

// A tensor and the name it has in errors.
struct Operand {
  std::string name;
  Tensor tensor;
  char* data;
  int32_t dtype;  // as libtorch counts them
  int64_t item;   // bytes of an element
  Sizes sizes, strides;

  Operand(std::string name_, const Tensor& x) : name(std::move(name_)), tensor(x) {
    data = static_cast<char*>(x.data_ptr());
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
    item = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
    auto shape = x.sizes(), steps = x.strides();
    sizes.assign(shape.begin(), shape.end());
    strides.assign(steps.begin(), steps.end());
  }

  int64_t ndim() const { return static_cast<int64_t>(sizes.size()); }
  bool empty() const {
    for (int64_t n : sizes)
      if (n == 0) return true;
    return false;
  }
  std::string shape() const { return name + " has shape " + text(sizes); }
  [[noreturn]] void refuse(const std::string& rule) const { value_error(shape() + "; it must be " + rule); }

  // The arithmetic dtype, or an error.
  Dtype floating() const {
    if (dtype == aoti_torch_dtype_float16()) return Dtype::f16;
    if (dtype == aoti_torch_dtype_bfloat16()) return Dtype::bf16;
    if (dtype == aoti_torch_dtype_float32()) return Dtype::f32;
    if (dtype == aoti_torch_dtype_float64()) return Dtype::f64;
    type_error(shape() + " and a dtype of no arithmetic; it must be float16, bfloat16, float32 or float64");
  }

  Dtype accumulator() const {
    Dtype found = floating();
    if (found != Dtype::f32 && found != Dtype::f64) type_error(shape() + " in 16 bits; it must be float32 or float64");
    return found;
  }

  // Whether the integers are int64; an error unless they are int32 or int64, [n], contiguous.
  bool wide_integers(const char* rule) const {
    bool wide = dtype == aoti_torch_dtype_int64();
    if (!wide && dtype != aoti_torch_dtype_int32()) type_error(shape() + " and another dtype than int32 and int64");
    if (ndim() != 1) refuse(rule);
    if (sizes[0] > 1 && strides[0] != 1)
      value_error(shape() + " and stride " + std::to_string(strides[0]) + "; it must be contiguous");
    return wide;
  }

  // Every element has a separate address, as far as a stride shows.
  void check_writable() const {
    for (size_t i = 0; i < sizes.size(); ++i)
      if (sizes[i] > 1 && strides[i] == 0 && !empty())
        value_error(shape() + " and strides " + text(strides) + "; it is written, so no stride may be 0");
  }
};

// The device of one call: all operands lie on it, and it is the current one until the call ends.
class Call {
 public:
  Operand operand(std::string name, const Tensor& x) {
    int32_t type, index;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &index));
    Operand made(std::move(name), x);
    if (type != (CP_DEVICE::on_cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda()))
      value_error(made.shape() + " on another kind of device; it must be on " +
                  (CP_DEVICE::on_cpu ? "a CPU" : "a GPU"));
    if (!CP_DEVICE::on_cpu) {
      if (device_ < 0) {
        device_ = index;
        guard_.emplace(index);
      }
      if (index != device_)
        value_error(made.shape() + " on GPU " + std::to_string(index) + ", but the tensors before it lie on GPU " +
                    std::to_string(device_));
    }
    return made;
  }

  Operand written(std::string name, const Tensor& x) {
    Operand made = operand(std::move(name), x);
    made.check_writable();
    return made;
  }

  std::vector<Operand> operands(const std::string& name, const std::vector<Tensor>& xs, bool written = false) {
    std::vector<Operand> made;
    for (size_t i = 0; i < xs.size(); ++i) {
      made.push_back(operand(name + "[" + std::to_string(i) + "]", xs[i]));
      if (written) made.back().check_writable();
    }
    return made;
  }

  // A new contiguous tensor of like's dtype. (new_empty goes through the dispatcher once more: half a microsecond.)
  Operand result(const Operand& like, const Sizes& sizes) {
    int32_t type, index;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.tensor.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.tensor.get(), &index));
    Sizes steps(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) steps[i - 1] = steps[i] * std::max<int64_t>(sizes[i], 1);
    AtenTensorHandle made;
    if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), steps.data(), like.dtype, type,
                                 index, &made) != AOTI_TORCH_SUCCESS)
      allocation_error(like.item, sizes);
    return Operand("the result", Tensor(made));
  }

  Stream stream() const {
    Stream made;
    made.device = device_;
#if defined(USE_CUDA)
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &made.handle));
#endif
    return made;
  }

 private:
  int32_t device_ = -1;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace cp
