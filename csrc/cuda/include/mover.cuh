// Moving rows of any size: the arguments of a launch, and the copies that a tensor is cut into.
//
//     copy   a run of contiguous bytes on both sides: a row, a head of it, or a piece of either
//     tile   the copies of one warp: up to 32, a lane looks up one each
//
// Two kernels take the same job: bulk.cuh lets the copy engine of Hopper and later move each copy, words.cuh moves them
// through registers, for any alignment and any GPU.
#pragma once

#include <type_traits>

#include "row_plan.cuh"

namespace cp {
namespace cuda {

constexpr int kTensors = 4;   // of one launch
constexpr int kGroups = 256;  // head ranges of one launch, of all tensors

struct Part {
  const char* from;
  char* to;
  int64_t from_row, to_row;
  int64_t from_group, to_group;  // an all-to-all's ranks: groups of heads
  int64_t from_head, to_head;
  int64_t head_bytes, piece_bytes;
  int64_t copies;                     // in all
  Divider by_row, by_group, by_head;  // copies of a row, of a group of heads, of a head
  int64_t first_block, tiles;
  int32_t tile_copies;
  int32_t first_group;  // its head ranges in `Heads`
};

struct MoveJob {
  RowPlan plan;
  int32_t parts;
  Part part[kTensors];
};

// Ranges of heads of an all-to-all: group g of a part begins at head first[part.first_group + g] of the whole tensor.
struct Heads {
  int32_t first[kGroups];
};
struct NoHeads {};

// Cut a tensor into copies of at most `piece_bytes`, and tiles of about that size.
inline void cut(Part& part, int64_t rows, int64_t groups, int64_t heads, int64_t piece_bytes) {
  part.piece_bytes = std::min(part.head_bytes, piece_bytes);
  int64_t pieces = part.piece_bytes > 0 ? divide_up(part.head_bytes, part.piece_bytes) : 0;
  part.copies = rows * groups * heads * pieces;
  part.by_head = Divider::by(std::max<int64_t>(pieces, 1));
  part.by_group = Divider::by(std::max<int64_t>(pieces * heads, 1));
  part.by_row = Divider::by(std::max<int64_t>(pieces * heads * groups, 1));
  part.tile_copies =
      static_cast<int32_t>(std::clamp<int64_t>(piece_bytes / std::max<int64_t>(part.piece_bytes, 1), 1, kWarp));
  part.tiles = divide_up(part.copies, part.tile_copies);
}

#if defined(__CUDACC__)

// One lane's copy.
struct Copy {
  const char* from;
  char* to;
  int32_t bytes;  // 0: nothing to do
};

// The copy `tile * tile_copies + lane`; the whole warp asks. kHeads is Heads or NoHeads.
template <bool kFew, MapKind kKind, typename kHeads>
__device__ __forceinline__ Copy copy_of(const RowPlan& plan, const Part& part, const kHeads& heads, int64_t tile,
                                        int lane) {
  // With a known map copies are counted in 32 bits (movers.cu sees to it).
  using Count = std::conditional_t<kKind == MapKind::any, int64_t, int32_t>;
  Count last = static_cast<Count>(part.copies) - 1;
  Count number = static_cast<Count>(tile) * part.tile_copies + min(lane, part.tile_copies - 1);
  bool mine = lane < part.tile_copies && number <= last;
  number = min(number, last);
  Count row = number, rest = 0;
  if (part.by_row.divisor > 1) {
    row = part.by_row.of(number);
    rest = number - row * static_cast<Count>(part.by_row.divisor);
  }
  int64_t mapped = look_up<kFew, kKind>(plan, row, lane).row;
  int64_t from_row = plan.scatter ? row : mapped, to_row = plan.scatter ? mapped : row;
  const char* from = part.from + from_row * part.from_row;
  char* to = part.to + to_row * part.to_row;
  int64_t bytes = part.head_bytes;
  if (part.by_row.divisor > 1) {  // which group, which head in it, which piece of that
    int32_t inside = static_cast<int32_t>(rest), group = part.by_group.of(inside);
    inside -= group * static_cast<int32_t>(part.by_group.divisor);
    int32_t head = part.by_head.of(inside), piece = inside - head * static_cast<int32_t>(part.by_head.divisor);
    int64_t from_head = head, to_head = head, offset = piece * part.piece_bytes;
    if constexpr (sizeof(kHeads) > 1) (plan.scatter ? to_head : from_head) += heads.first[part.first_group + group];
    from += group * part.from_group + from_head * part.from_head + offset;
    to += group * part.to_group + to_head * part.to_head + offset;
    bytes = min(part.piece_bytes, part.head_bytes - offset);
  } else if constexpr (sizeof(kHeads) > 1) {
    const int64_t head = heads.first[part.first_group];
    (plan.scatter ? to : const_cast<char*&>(from)) += head * (plan.scatter ? part.to_head : part.from_head);
  }
  return {from, to, mine && mapped >= 0 ? static_cast<int32_t>(bytes) : 0};
}

// The part that a block works on.
__device__ __forceinline__ const Part& part_of(const MoveJob& job, int64_t block) {
  int which = 0;
  while (which + 1 < job.parts && block >= job.part[which + 1].first_block) ++which;
  return job.part[which];
}

#endif

}  // namespace cuda
}  // namespace cp
