// The structs between the binding and the kernels, plain and the same for every device. No PyTorch in here.
//
// The binding has checked shapes, dtypes, devices and strides, has allocated the results, and has folded consecutive
// contiguous axes, so that kernels see few shapes. Strides and offsets are 64 bits wide everywhere.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#if defined(__CUDACC__)
#define CP_HD __host__ __device__ __forceinline__
#else
#define CP_HD inline __attribute__((always_inline))
#endif

namespace cp {

// dtypes of arithmetic; movers know bytes only
enum class Dtype : int32_t { f16, bf16, f32, f64 };

// Where a kernel runs: cudaStream_t and device number; on the CPU both are unused.
struct Stream {
  void* handle = nullptr;
  int device = -1;
};

// Cumulative lengths, [sequences + 1], on the kernel's device.
struct Lengths {
  const void* data;
  int64_t sequences;
  bool wide;  // int64, else int32

  CP_HD int64_t operator[](int64_t s) const {
    return wide ? static_cast<const int64_t*>(data)[s] : static_cast<int64_t>(static_cast<const int32_t*>(data)[s]);
  }
  CP_HD int64_t size(int64_t s) const { return (*this)[s + 1] - (*this)[s]; }
};

// The kinds of cp_fast/movers/mover_protocol.py, in its order; `any` is none of them: looked at when a kernel runs.
enum class MapKind : int32_t { span, index, slice, rank_order, sequence_order, half, in_half, valid, unpad, any };

// HELPERS of that file: what a device-side assertion names, the same as the operators.
constexpr const char* kHelpers[] = {"rows",           "partition_indices", "partition",     "reorder",
                                    "read_half",      "read_second_half_lse", "copy_valid_", "pad_sequences",
                                    "lse_correction_", "out_correction_",  "grad_correction_"};

// Which row of a whole tensor each row of a part is. A caller gives the rows (span, index), or lengths that lead to them.
struct RowRule {
  char helper[24];  // the name in a device-side assertion
  MapKind kind;
  bool tail;                         // whether the tail after the last sequence goes along
  bool wide;                         // the index is int64, else int32
  int32_t cp_size, cp_rank, half;    // slice and the two orders; half and in_half
  int64_t count, tokens;             // rows of the part; of the whole
  int64_t first;                     // span: first, first + 1, ...
  const void* index;                 // index: index[0], index[1], ..., distinct
  Lengths lengths, real;             // all others; the real ones of valid and unpad

  CP_HD bool given() const { return kind == MapKind::span || kind == MapKind::index; }
  CP_HD bool has_real() const { return kind == MapKind::valid || kind == MapKind::unpad; }

  // A row that the caller gives.
  CP_HD int64_t operator[](int64_t i) const {
    if (kind == MapKind::span) return first + i;
    return wide ? static_cast<const int64_t*>(index)[i] : static_cast<int64_t>(static_cast<const int32_t*>(index)[i]);
  }

  // Rules for the lengths.
  bool chunked() const {
    return kind == MapKind::slice || kind == MapKind::rank_order || kind == MapKind::sequence_order;
  }
  int64_t divisor() const {
    return chunked() ? int64_t{2} * cp_size : kind == MapKind::half || kind == MapKind::in_half ? 2 : 1;
  }
  int64_t tail_divisor() const { return chunked() ? cp_size : 1; }
  int64_t end() const { return kind == MapKind::unpad ? count : tokens; }
  bool from_zero() const { return kind != MapKind::valid; }
};

// One tensor that is moved: rows of `heads` pieces of `head_bytes` contiguous bytes each. Where both sides have whole
// rows contiguous, heads is 1. Strides are in bytes.
struct Move {
  const char* from;
  char* to;
  int64_t from_row, to_row;
  int64_t heads;
  int64_t from_head, to_head;
  int64_t head_bytes;
};

// A tensor of arithmetic, [rows, heads, dim], dim contiguous. Strides are in elements.
struct Values {
  void* data;
  Dtype dtype;
  int64_t rows, heads, dim;
  int64_t row_stride, head_stride;
};

struct Pair {
  Values to, from;
};

// A log-sum-exp: element (sequence, head, row) at sequence * sequence_stride + head * head_stride + row * row_stride.
// Packed [h, t]: row counts the rows of the buffer, the sequence is not used (sequence_stride is 0).
// Padded [b, h, s]: row counts from the start of its sequence.
struct Lse {
  void* data;
  Dtype dtype;  // f32 or f64
  bool packed;
  int64_t heads;
  int64_t rows;  // t, or s
  int64_t sequence_stride, head_stride, row_stride;
};

// Heads of [t, h, ...] (`whole`) and parts [p, n, heads, ...] (`parts`): part i holds heads first_heads[i] to
// first_heads[i] + heads - 1. head_bytes are contiguous on both sides. Strides in bytes. first_heads lies on the host.
struct HeadMove {
  char* whole;
  int64_t whole_row, whole_head;
  char* parts;
  int64_t part, part_row, part_head;
  int64_t head_bytes;
  int64_t heads;
  int64_t count;  // p
  const int64_t* first_heads;
};

CP_HD int64_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

// The widest power of two, at most 16, by which a move's addresses, strides and sizes can all be divided.
CP_HD int access_bytes(const Move& m) {
  uint64_t all = 16u | reinterpret_cast<uintptr_t>(m.from) | reinterpret_cast<uintptr_t>(m.to) |
                 static_cast<uint64_t>(m.from_row | m.to_row | m.from_head | m.to_head | m.head_bytes);
  return static_cast<int>(all & (~all + 1));
}

// An error of the caller: Python sees a ValueError or a TypeError with this text (cp_fast.movers.native_movers).
[[noreturn]] inline void value_error(const std::string& text) { throw std::runtime_error("ValueError: " + text); }
[[noreturn]] inline void type_error(const std::string& text) { throw std::runtime_error("TypeError: " + text); }

}  // namespace cp
