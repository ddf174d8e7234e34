// Scatters of numbers: rows of one tensor added to, or converted into, rows of another of any float dtype.
#include "entry_points.h"
#include "include/row_plan.cuh"
#include "include/typed.cuh"

namespace cp {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kVectors = kThreads * kUnroll * 2;  // of a block, about
constexpr int kPairs = 4;                         // of one launch

struct PairPart {
  Values to, from;
  Divider by_row, by_head;  // vectors
  int32_t tile_rows;        // rows of a block,
  int64_t columns;          // or blocks of a long row
  int64_t first_block;
};

struct PairJob {
  RowPlan plan;
  bool add;
  int32_t parts;
  PairPart part[kPairs];
};

template <typename E>
__global__ void __launch_bounds__(kThreads) pair_kernel(const __grid_constant__ PairJob job) {
  using Wide = typename E::Wide;
  __shared__ int64_t rows[kWarp];
  int which = 0;
  while (which + 1 < job.parts && blockIdx.x >= job.part[which + 1].first_block) ++which;
  const PairPart& part = job.part[which];
  const int64_t block = blockIdx.x - part.first_block, tile = block / part.columns;
  const int64_t first = tile * part.tile_rows;
  const int count = static_cast<int>(min(static_cast<int64_t>(part.tile_rows), job.plan.count - first));
  if (threadIdx.x < kWarp) {
    rows[threadIdx.x] =
        look_up<false>(job.plan, first + min(static_cast<int>(threadIdx.x), count - 1), threadIdx.x).row;
  }
  __syncthreads();

  constexpr int kVector = E::kVector;
  const int row_vectors = static_cast<int>(part.by_row.divisor), head_vectors = static_cast<int>(part.by_head.divisor);
  const int begin = static_cast<int>(block - tile * part.columns) * (part.columns > 1 ? kVectors : 0);
  const int end = part.columns > 1 ? min(begin + kVectors, row_vectors) : count * row_vectors;
  for (int base = begin + threadIdx.x; base < end; base += kThreads * kUnroll) {
    decltype(E::load_to(part.to, 0)) sum[kUnroll], step[kUnroll];
    int64_t at[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int vector = base + u * kThreads;
      at[u] = -1;
      if (vector < end) {
        const int i = part.by_row.of(vector), inside = vector - i * row_vectors, head = part.by_head.of(inside);
        const int offset = (inside - head * head_vectors) * kVector;
        const int64_t to = rows[i];
        if (to >= 0) {
          at[u] = to * part.to.row_stride + head * part.to.head_stride + offset;
          step[u] = E::load_from(part.from, (first + i) * part.from.row_stride + head * part.from.head_stride + offset);
#pragma unroll
          for (int k = 0; k < kVector; ++k) sum[u].x[k] = -Wide(0);  // x + -0 is x, for every x
          if (job.add) sum[u] = E::load_to(part.to, at[u]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at[u] >= 0) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) sum[u].x[k] += step[u].x[k];
        E::store_to(part.to, at[u], sum[u]);
      }
    }
  }
  check_plan(job.plan);
}

// Launches of up to four pairs that are compiled alike.
void launch(const Pair* pairs, int64_t count, PairJob job, Stream stream, const char* name) {
  if (job.plan.count == 0) return;
  auto same = [](const Pair& a, const Pair& b) {
    return a.to.dtype == b.to.dtype && a.from.dtype == b.from.dtype &&
           (in_fours(a.to) && in_fours(a.from)) == (in_fours(b.to) && in_fours(b.from));
  };
  for (int64_t done = 0; done < count;) {
    int64_t next = done + 1;
    while (next < count && next - done < kPairs && same(pairs[done], pairs[next])) ++next;
    visit_elements(pairs[done].to, pairs[done].from, false, [&](auto elements) {
      using E = decltype(elements);
      int64_t blocks = 0;
      job.parts = 0;
      for (int64_t p = done; p < next; ++p) {
        int64_t head_vectors = pairs[p].to.dim / E::kVector, row_vectors = head_vectors * pairs[p].to.heads;
        if (row_vectors == 0) continue;
        if (row_vectors > INT_MAX / 2) {
          throw std::runtime_error(std::string("ValueError: ") + name + ": a row has too many elements");
        }
        PairPart& part = job.part[job.parts++];
        part.to = pairs[p].to, part.from = pairs[p].from;
        part.by_row = Divider::by(row_vectors), part.by_head = Divider::by(head_vectors);
        part.tile_rows = static_cast<int32_t>(std::clamp<int64_t>(kVectors / row_vectors, 1, kWarp));
        part.columns = divide_up(row_vectors, kVectors);
        part.first_block = blocks;
        blocks += divide_up(job.plan.count, part.tile_rows) * part.columns;
      }
      if (blocks > 0) pair_kernel<E><<<grid_of(blocks, name), kThreads, 0, stream_of(stream)>>>(job);
    });
    check_launch(name);
    done = next;
  }
}

}  // namespace

void put_values(const Pair* pairs, int64_t count, RowRule rows, bool add, Stream stream) {
  PairJob job{};
  job.plan = plan_of(rows, true);
  job.add = add;
  launch(pairs, count, job, stream, rows.helper);
}

}  // namespace cuda
}  // namespace cp
