// The operators as PyTorch sees them: torch.ops.cp_attention_native_cpu and torch.ops.cp_attention_native_cuda, one for
// each method of `Movers` (cp_fast/movers/mover_protocol.py).
#include <torch/csrc/stable/library.h>

#include "operators.h"

#define CP_JOIN_(a, b) a##b
#define CP_JOIN(a, b) CP_JOIN_(a, b)
#define CP_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define CP_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
#define CP_NAME CP_JOIN(cp_attention_native_, CP_DEVICE)
#define MAP "int map, Tensor? table, Tensor? real, int a, int b"

#define CP_OPERATORS(OP)                                                                          \
  OP(row_indices, "(int tokens, " MAP ") -> Tensor")                                              \
  OP(gather, "(Tensor[] xs, " MAP ") -> Tensor[]")                                                \
  OP(scatter_, "(Tensor(a!)[] outs, Tensor[] xs, bool add, " MAP ") -> ()")                       \
  OP(gather_heads, "(Tensor[] xs, int[] first_heads, int[] heads, " MAP ") -> Tensor[]")          \
  OP(scatter_heads_, "(Tensor(a!)[] outs, Tensor[] xs, int[] first_heads, " MAP ") -> ()")        \
  OP(merge_,                                                                                      \
     "(Tensor(a!) out, Tensor(b!) lse, Tensor out_step, Tensor lse_step, bool final, " MAP ") -> ()")

#define CP_DEFINE(name, schema) m.def(#name schema);
#define CP_IMPLEMENT(name, schema) m.impl(#name, TORCH_BOX(&cp::name));

CP_LIBRARY(CP_NAME, m) { CP_OPERATORS(CP_DEFINE) }

// for tensors of any device: the operators check devices themselves and name the error
CP_LIBRARY_IMPL(CP_NAME, CompositeExplicitAutograd, m) { CP_OPERATORS(CP_IMPLEMENT) }
