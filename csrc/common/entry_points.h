// The kernels, one function each, the same list for every device: csrc/cpu defines them in namespace cp::cpu, csrc/cuda
// in cp::cuda, and the binding calls those of the device it is compiled for (-DCP_DEVICE=cpu or cuda).
//
// The methods of cp_fast/movers/mover_protocol.py define the results; this file has only the form of the arguments.
// Nothing here allocates, waits, or uses another stream. Any size may be 0: then a function does nothing.
#pragma once

#include "types.h"

#ifndef CP_DEVICE
#error "compile with -DCP_DEVICE=cpu or -DCP_DEVICE=cuda"
#endif

namespace cp {
namespace CP_DEVICE {

// out [rows.count], contiguous, of the lengths' dtype; -1 for none
void row_indices(void* out, RowRule rows, Stream);

// ---- gather and scatter: `count` moves share one launch

// to[i] = from[rows[i]], or with `scatter` to[rows[i]] = from[i]
void move_rows(const Move* moves, int64_t count, RowRule rows, bool scatter, Stream);

// parts[i][j] = whole[rows[j]], heads first_heads[i] to first_heads[i] + heads - 1; with `scatter` the inverse. The rows
// are given.
void move_heads(const HeadMove* moves, int64_t count, RowRule rows, bool scatter, Stream);

// to[rows[i]] = from[i] of another dtype, or += with `add`
void put_values(const Pair* pairs, int64_t count, RowRule rows, bool add, Stream);

// ---- merge

// out.dim may be 0. `final`: lse stays, and is that of all parts. lse.packed == step_lse.packed; packed, if rows are
// given
void merge(Values out, Lse lse, Values step, Lse step_lse, RowRule rows, bool final, Stream);

}  // namespace CP_DEVICE
}  // namespace cp
