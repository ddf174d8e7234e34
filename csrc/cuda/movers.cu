// Gathers and scatters of bytes: a plan of rows and a list of tensors; one launch moves up to four of them.
#include "include/bulk.cuh"
#include "entry_points.h"
#include "include/words.cuh"

#include <type_traits>

namespace cp {
namespace cuda {
namespace {

template <typename kHeads>
void launch_words(const MoveJob& job, const kHeads& heads, int64_t blocks, int access, Stream stream,
                  const char* name) {
  void (*kernel)(MoveJob, kHeads) = nullptr;
  switch (access) {
    case 16:
      kernel = word_kernel<16, kHeads>;
      break;
    case 8:
      kernel = word_kernel<8, kHeads>;
      break;
    case 4:
      kernel = word_kernel<4, kHeads>;
      break;
    case 2:
      kernel = word_kernel<2, kHeads>;
      break;
    default:
      kernel = word_kernel<1, kHeads>;
  }
  kernel<<<grid_of(blocks, name), kWordWarps * kWarp, 0, stream_of(stream)>>>(job, heads);
}

using BulkKernel = void (*)(MoveJob, NoHeads);

BulkKernel bulk_of_lengths(MapKind kind) {
  switch (kind) {
    case MapKind::slice:
      return bulk_kernel<MapKind::slice, NoHeads>;
    case MapKind::rank_order:
      return bulk_kernel<MapKind::rank_order, NoHeads>;
    case MapKind::sequence_order:
      return bulk_kernel<MapKind::sequence_order, NoHeads>;
    case MapKind::half:
      return bulk_kernel<MapKind::half, NoHeads>;
    case MapKind::valid:
      return bulk_kernel<MapKind::valid, NoHeads>;
    default:
      return bulk_kernel<MapKind::any, NoHeads>;
  }
}

template <typename kHeads>
void launch_bulk(const MoveJob& job, const kHeads& heads, int64_t blocks, Stream stream, const char* name) {
  void (*kernel)(MoveJob, kHeads) = bulk_kernel<MapKind::any, kHeads>;
  bool narrow = job.plan.given() || job.plan.narrow;
  for (int p = 0; p < job.parts; ++p) narrow = narrow && job.part[p].copies < INT_MAX - kWarp;
  if (narrow) {
    switch (job.plan.kind) {
      case MapKind::span:
        kernel = bulk_kernel<MapKind::span, kHeads>;
        break;
      case MapKind::index:
        kernel = bulk_kernel<MapKind::index, kHeads>;
        break;
      default:
        if constexpr (std::is_same_v<kHeads, NoHeads>) kernel = bulk_of_lengths(job.plan.kind);
    }
  }
  kernel<<<grid_of(blocks, name), kWarp, 0, stream_of(stream)>>>(job, heads);
}

// The parts' pointers, strides and head_bytes are set; `shape` is rows, groups and heads of each.
struct Shape {
  int64_t rows, groups, heads;
};

template <typename kHeads>
void launch(MoveJob& job, const Shape* shapes, int access, const kHeads& heads, Stream stream, const char* name) {
  int64_t shortest = INT64_MAX;
  for (int p = 0; p < job.parts; ++p) shortest = std::min(shortest, job.part[p].head_bytes);
  bool bulk = access == 16 && shortest >= kBulkLeast && has_engine(stream);
  int64_t blocks = 0;
  for (int p = 0; p < job.parts; ++p) {
    Part& part = job.part[p];
    cut(part, shapes[p].rows, shapes[p].groups, shapes[p].heads, bulk ? kBulkTile : kWordTile);
    part.first_block = blocks;
    blocks += bulk ? part.tiles : divide_up(part.tiles, kWordWarps);
  }
  if (blocks == 0) return;
  if (bulk)
    launch_bulk(job, heads, blocks, stream, name);
  else
    launch_words(job, heads, blocks, access, stream, name);
  check_launch(name);
}

}  // namespace

void move_rows(const Move* moves, int64_t count, RowRule rows, bool scatter, Stream stream) {
  const RowPlan plan = plan_of(rows, scatter);
  for (int64_t done = 0; done < count; done += kTensors) {
    MoveJob job{};
    Shape shapes[kTensors];
    job.plan = plan;
    job.parts = static_cast<int32_t>(std::min<int64_t>(kTensors, count - done));
    int access = 16;
    for (int p = 0; p < job.parts; ++p) {
      const Move& m = moves[done + p];
      job.part[p] = Part{};
      job.part[p].from = m.from, job.part[p].to = m.to;
      job.part[p].from_row = m.from_row, job.part[p].to_row = m.to_row;
      job.part[p].from_head = m.from_head, job.part[p].to_head = m.to_head;
      job.part[p].head_bytes = m.head_bytes;
      shapes[p] = {plan.count, 1, m.heads};
      access = std::min(access, access_bytes(m));
    }
    launch(job, shapes, access, NoHeads{}, stream, rows.helper);
  }
}

void move_heads(const HeadMove* moves, int64_t count, RowRule rows, bool scatter, Stream stream) {
  for (int64_t i = 0, done = 0; i < count;) {  // `done`: the head ranges of move i in earlier launches
    MoveJob job{};
    Heads heads{};
    Shape shapes[kTensors];
    job.plan = plan_of(rows, scatter);
    int access = 16, ranges = 0;
    while (i < count && job.parts < kTensors && ranges < kGroups) {
      HeadMove m = moves[i];
      int64_t whole_head = m.whole_head;  // the head ranges begin at multiples of it
      if (m.whole_head == m.head_bytes && m.part_head == m.head_bytes) m.head_bytes *= m.heads, m.heads = 1;
      access = std::min(access, access_bytes(Move{m.whole, m.parts, m.whole_row, m.part_row, 1, m.whole_head,
                                                  m.part_head, m.head_bytes}));
      while (m.part % access != 0 || whole_head % access != 0) access /= 2;
      const int64_t here = std::min<int64_t>(kGroups - ranges, m.count - done);
      char* parts = m.parts + done * m.part;
      Part& part = job.part[job.parts];
      part = Part{};
      part.from = scatter ? parts : m.whole;
      part.to = scatter ? m.whole : parts;
      part.from_row = scatter ? m.part_row : m.whole_row;
      part.to_row = scatter ? m.whole_row : m.part_row;
      part.from_group = scatter ? m.part : 0;
      part.to_group = scatter ? 0 : m.part;
      part.from_head = scatter ? m.part_head : m.whole_head;
      part.to_head = scatter ? m.whole_head : m.part_head;
      part.head_bytes = m.head_bytes;
      part.first_group = ranges;
      shapes[job.parts++] = {rows.count, here, m.heads};
      for (int64_t g = 0; g < here; ++g) heads.first[ranges++] = static_cast<int32_t>(m.first_heads[done + g]);
      done += here;
      if (done == m.count) ++i, done = 0;
    }
    launch(job, shapes, access, heads, stream, rows.helper);
  }
}

}  // namespace cuda
}  // namespace cp
