// The operators as PyTorch sees them: torch.ops.cp_attention_native_cpu and torch.ops.cp_attention_native_cuda, one for
// each method of `Kernels` and `ThdKernels` (cp_fast/kernels/base.py, base_thd.py). Rows are (index, first, count): an
// index, or a span where it is None.
#include <torch/csrc/stable/library.h>

#include "op_merges.h"

#define CP_JOIN_(a, b) a##b
#define CP_JOIN(a, b) CP_JOIN_(a, b)
#define CP_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define CP_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
#define CP_NAME CP_JOIN(cp_attention_native_, CP_DEVICE)
#define ROWS "Tensor? index, int first, int count"

CP_LIBRARY(CP_NAME, m) {
  m.def("partition_indices(Tensor lengths, int total_tokens, int cp_size, int cp_rank) -> Tensor");
  m.def(
      "rank_lengths(Tensor real_lengths, Tensor lengths, int cp_size, int cp_rank, bool first_half, bool second_half) "
      "-> Tensor");
  m.def("partition(Tensor[] xs, Tensor lengths, int cp_size, int cp_rank) -> Tensor[]");
  m.def("reorder(Tensor[] xs, Tensor lengths, int cp_size, bool to_rank_order) -> Tensor[]");
  m.def("read_half(Tensor[] xs, Tensor lengths, int half) -> Tensor[]");
  m.def("read_second_half_lse(Tensor lse, Tensor lengths, bool lse_packed, int max_seqlen) -> Tensor");
  m.def("copy_valid_(Tensor(a!) out, Tensor inp, Tensor lengths, Tensor real_lengths) -> ()");
  m.def("pad_sequences(Tensor x, Tensor real_lengths, Tensor lengths, int padded_tokens, int fill) -> Tensor");
  m.def("take_rows(Tensor[] xs, " ROWS ") -> Tensor[]");
  m.def("put_rows_(Tensor(a!)[] outs, Tensor[] xs, " ROWS ") -> ()");
  m.def("heads_to_front(Tensor x, " ROWS ", int[] first_heads, int heads) -> Tensor");
  m.def("heads_to_back_(Tensor(a!) out, Tensor x, " ROWS ", int[] first_heads, bool add) -> ()");
  m.def("merge_(Tensor(a!) out, Tensor(b!) lse, Tensor out_step, Tensor lse_step, " ROWS ") -> ()");
  m.def("add_rows_(Tensor(a!)[] outs, Tensor[] xs, " ROWS ") -> ()");
  m.def("lse_correction_(Tensor(a!) lse, Tensor lse_step, Tensor lengths, bool lse_packed) -> ()");
  m.def(
      "out_correction_(Tensor(a!) out, Tensor out_step, Tensor lse, Tensor lse_step, Tensor lengths, "
      "bool only_second_half, bool lse_packed) -> ()");
  m.def("grad_correction_(Tensor(a!) grad, Tensor grad_step, Tensor lengths, int first_half, int second_half) -> ()");
}

// for tensors of any device: the operators check devices themselves, and say what is wrong
CP_LIBRARY_IMPL(CP_NAME, CompositeExplicitAutograd, m) {
#define CP_IMPL(name) m.impl(#name, TORCH_BOX(&cp::name))
  CP_IMPL(partition_indices);
  CP_IMPL(rank_lengths);
  CP_IMPL(partition);
  CP_IMPL(reorder);
  CP_IMPL(read_half);
  CP_IMPL(read_second_half_lse);
  CP_IMPL(copy_valid_);
  CP_IMPL(pad_sequences);
  CP_IMPL(take_rows);
  CP_IMPL(put_rows_);
  CP_IMPL(heads_to_front);
  CP_IMPL(heads_to_back_);
  CP_IMPL(merge_);
  CP_IMPL(add_rows_);
  CP_IMPL(lse_correction_);
  CP_IMPL(out_correction_);
  CP_IMPL(grad_correction_);
#undef CP_IMPL
}
