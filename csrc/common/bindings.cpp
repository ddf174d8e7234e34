// The operators as PyTorch sees them: torch.ops.cp_attention_native_cpu and torch.ops.cp_attention_native_cuda, one for
// each method of `Kernels` and `ThdKernels` (cp_fast/movers/base.py, base_thd.py). Rows are (index, first, count): an
// index, or a span where it is None.
#include <torch/csrc/stable/library.h>

#include "op_merges.h"

#define CP_JOIN_(a, b) a##b
#define CP_JOIN(a, b) CP_JOIN_(a, b)
#define CP_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define CP_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
#define CP_NAME CP_JOIN(cp_attention_native_, CP_DEVICE)
#define ROWS "Tensor? index, int first, int count"

#define CP_OPERATORS(OP)                                                                                             \
  OP(partition_indices, "(Tensor lengths, int total_tokens, int cp_size, int cp_rank) -> Tensor")                    \
  OP(rank_lengths,                                                                                                   \
     "(Tensor real_lengths, Tensor lengths, int cp_size, int cp_rank, bool first_half, bool second_half) -> Tensor") \
  OP(partition, "(Tensor[] xs, Tensor lengths, int cp_size, int cp_rank) -> Tensor[]")                               \
  OP(reorder, "(Tensor[] xs, Tensor lengths, int cp_size, bool to_rank_order) -> Tensor[]")                          \
  OP(read_half, "(Tensor[] xs, Tensor lengths, int half) -> Tensor[]")                                               \
  OP(read_second_half_lse, "(Tensor lse, Tensor lengths, bool lse_packed, int max_seqlen) -> Tensor")                \
  OP(copy_valid_, "(Tensor(a!) out, Tensor inp, Tensor lengths, Tensor real_lengths) -> ()")                         \
  OP(pad_sequences, "(Tensor x, Tensor real_lengths, Tensor lengths, int padded_tokens, int fill) -> Tensor")        \
  OP(take_rows, "(Tensor[] xs, " ROWS ") -> Tensor[]")                                                               \
  OP(put_rows_, "(Tensor(a!)[] outs, Tensor[] xs, " ROWS ") -> ()")                                                  \
  OP(heads_to_front, "(Tensor x, " ROWS ", int[] first_heads, int heads) -> Tensor")                                 \
  OP(heads_to_back_, "(Tensor(a!) out, Tensor x, " ROWS ", int[] first_heads, bool add) -> ()")                      \
  OP(merge_, "(Tensor(a!) out, Tensor(b!) lse, Tensor out_step, Tensor lse_step, " ROWS ") -> ()")                   \
  OP(add_rows_, "(Tensor(a!)[] outs, Tensor[] xs, " ROWS ") -> ()")                                                  \
  OP(lse_correction_, "(Tensor(a!) lse, Tensor lse_step, Tensor lengths, bool lse_packed) -> ()")                    \
  OP(out_correction_,                                                                                                \
     "(Tensor(a!) out, Tensor out_step, Tensor lse, Tensor lse_step, Tensor lengths, bool only_second_half, "        \
     "bool lse_packed) -> ()")                                                                                       \
  OP(grad_correction_, "(Tensor(a!) grad, Tensor grad_step, Tensor lengths, int first_half, int second_half) -> ()")

#define CP_DEFINE(name, schema) m.def(#name schema);
#define CP_IMPLEMENT(name, schema) m.impl(#name, TORCH_BOX(&cp::name));

CP_LIBRARY(CP_NAME, m) { CP_OPERATORS(CP_DEFINE) }

// for tensors of any device: the operators check devices themselves and name the error
CP_LIBRARY_IMPL(CP_NAME, CompositeExplicitAutograd, m) { CP_OPERATORS(CP_IMPLEMENT) }
