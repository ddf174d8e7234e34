// The table of a row map.
#include <algorithm>
#include <type_traits>

#include "entry_points.h"
#include "parallel.h"
#include "maps.h"

namespace cp {
namespace cpu {
namespace {

// The rows `row`, `row + 1`, ... in the places from to stop - 1, as far as these lie within begin to end - 1. Most runs
// are short, and a processor cannot guess how short: the first block is written whole, at once. Later runs
// overwrite its values past `stop`.
template <typename I>
void count_up(I* out, int64_t row, int64_t from, int64_t stop, int64_t begin, int64_t end) {
  using U = std::make_unsigned_t<I>;
  constexpr int64_t block = 64 / sizeof(I);
  int64_t i = std::max(from, begin), last = std::min(stop, end);
  U value = static_cast<U>(row - from + i);
  while (i + block <= end) {
    for (int64_t k = 0; k < block; ++k) out[i + k] = static_cast<I>(value + static_cast<U>(k));
    i += block;
    value += static_cast<U>(block);
    if (i >= last) return;
  }
  for (; i < last; ++i) out[i] = static_cast<I>(value++);
}

// Rows of a slice, sequence by sequence, with one division each, by a shift if possible: with short sequences, divisions
// take most of the time.
template <typename I, typename Halve>
void write_slice(I* out, const RowRule& rows, Halve chunk_of) {
  int64_t rank = rows.cp_rank, late = 2 * int64_t{rows.cp_size} - 1 - rank;
  const I* ends = static_cast<const I*>(rows.lengths.data) + 1;
  parallel(rows.count, sizeof(I), [&](int64_t begin, int64_t end) {
    Place place = locate(rows.lengths, begin * rows.cp_size, rows.tokens);
    int64_t start = place.begin, own = start / rows.cp_size;
    for (int64_t s = place.sequence; s < rows.lengths.sequences && own < end; ++s) {
      int64_t stop = ends[s], chunk = chunk_of(stop - start);
      count_up(out, start + rank * chunk, own, own + chunk, begin, end);
      count_up(out, start + late * chunk, own + chunk, own + 2 * chunk, begin, end);
      own += 2 * chunk;
      start = stop;
    }
    if (own < end) count_up(out, start + rank * (rows.count - own), own, rows.count, begin, end);
  });
}

template <typename I>
void write(I* out, const RowRule& rows) {
  if (rows.kind != MapKind::slice) {
    parallel(rows.count, sizeof(I), [&](int64_t begin, int64_t end) {
      std::fill(out + begin, out + end, I(-1));
      walk(rows, begin, end, [&](int64_t i, int64_t row, int64_t n, const Place&) {
        for (int64_t k = 0; k < n; ++k) out[i + k] = static_cast<I>(row + k);
      });
    });
    return;
  }
  int64_t chunks = 2 * int64_t{rows.cp_size}, shift = 0;
  while ((int64_t{2} << shift) <= chunks) ++shift;
  if (chunks == int64_t{1} << shift)
    write_slice(out, rows, [=](int64_t size) { return size >> shift; });
  else
    write_slice(out, rows, [=](int64_t size) { return quotient(size, chunks); });
}

}  // namespace

void row_indices(void* out, RowRule rows, Stream) {
  if (rows.lengths.wide)
    write(static_cast<int64_t*>(out), rows);
  else
    write(static_cast<int32_t*>(out), rows);
}

}  // namespace cpu
}  // namespace cp
