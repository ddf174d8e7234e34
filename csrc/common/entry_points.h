// The kernels, one function each, the same list for every device: csrc/cpu defines them in namespace cp::cpu, csrc/cuda
// in cp::cuda, and the binding calls those of the device it is compiled for (-DCP_DEVICE=cpu or cuda).
//
// The method of the same name in cp_fast/movers/base.py or base_thd.py defines the result of each; this file has only
// the form of its arguments. Nothing here allocates, waits, or uses another stream. Any size may be 0: then a function
// does nothing.
#pragma once

#include "types.h"

#ifndef CP_DEVICE
#error "compile with -DCP_DEVICE=cpu or -DCP_DEVICE=cuda"
#endif

namespace cp {
namespace CP_DEVICE {

// ---- lengths and indices

// out [total_tokens / cp_size], contiguous, of lengths' dtype
void partition_indices(void* out, Lengths lengths, int64_t total_tokens, int64_t cp_size, int64_t cp_rank, Stream);

// out [b + 1], contiguous, of real's dtype
void rank_lengths(void* out, Lengths real, Lengths lengths, int64_t cp_size, int64_t cp_rank, bool first_half,
                  bool second_half, Stream);

// ---- movers: `count` moves share one launch

// from [tokens, ...], to [tokens / cp_size, ...]
void partition(const Move* moves, int64_t count, Lengths lengths, int64_t tokens, int64_t cp_size, int64_t cp_rank,
               Stream);

// from and to [tokens, ...]
void reorder(const Move* moves, int64_t count, Lengths lengths, int64_t tokens, int64_t cp_size, bool to_rank_order,
             Stream);

// from [tokens, ...], to [tokens / 2, ...]; lengths are local
void read_half(const Move* moves, int64_t count, Lengths lengths, int64_t tokens, int64_t half, Stream);

// to[i] = from[rows[i]]
void take_rows(const Move* moves, int64_t count, RowSet rows, Stream);

// to[rows[i]] = from[i]
void put_rows(const Move* moves, int64_t count, RowSet rows, Stream);

// every element of out is written: 0 where there is no token; out.dtype == lse.dtype
void read_second_half_lse(Lse out, Lse lse, Lengths lengths, Stream);

// from and to [tokens, ...]: rows lengths[s] to lengths[s] + real[s + 1] - real[s] - 1
void copy_valid(const Move* moves, int64_t count, Lengths lengths, Lengths real, int64_t tokens, Stream);

// the same for two different dtypes
void convert_valid(const Pair* pairs, int64_t count, Lengths lengths, Lengths real, int64_t tokens, Stream);

// out [padded_tokens] contiguous, x [tokens] with a stride in elements, both of `item` bytes (1, 2, 4 or 8); `fill` is
// cut to its lowest `item` bytes
void pad_sequences(void* out, const void* x, int64_t item, int64_t stride, int64_t tokens, Lengths real,
                   Lengths lengths, int64_t padded_tokens, int64_t fill, Stream);

// parts[i][j] = whole[rows[j]], heads first_heads[i] to first_heads[i] + heads - 1
void heads_to_front(HeadMove move, RowSet rows, Stream);

// the inverse
void heads_to_back(HeadMove move, RowSet rows, Stream);

// out [t, h, d] (f32 or f64); parts[i], i < count, are [n, heads, d] at parts.data + i * part_stride elements. For
// every head, out + x[i] + x[i'] + ... in order of i, in `wide`, rounded once.
void add_heads(Values out, Values parts, int64_t part_stride, const int64_t* first_heads, int64_t count, RowSet rows,
               Stream);

// ---- arithmetic

// lse and step_lse are packed; out.dtype is f32 or f64
void merge(Values out, Lse lse, Values step, Lse step_lse, RowSet rows, Stream);

// to[rows[i]] += from[i]
void add_rows(const Pair* pairs, int64_t count, RowSet rows, Stream);

// lse.packed == step_lse.packed; lengths are local, those of lse
void lse_correction(Lse lse, Lse step_lse, Lengths lengths, Stream);

void out_correction(Values out, Values step, Lse lse, Lse step_lse, Lengths lengths, bool only_second_half, Stream);

// `step_is_half`: from has t / 2 rows, those of the half that is not `none` (one of them is); else t rows.
void grad_correction(const Pair* pairs, int64_t count, Lengths lengths, Action first_half, Action second_half,
                     bool step_is_half, Stream);

}  // namespace CP_DEVICE
}  // namespace cp
