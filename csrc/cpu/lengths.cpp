// Indices, lengths and other integers.
#include <algorithm>
#include <type_traits>

#include "convert.h"
#include "entry_points.h"
#include "parallel.h"
#include "runs.h"

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

// Sequence by sequence, with one division each, by a shift if possible: with short sequences, divisions take most of
// the time.
template <typename I, typename Halve>
void write_indices(I* out, const PartitionMap& map, const Lengths& lengths, Halve chunk_of) {
  int64_t cp_size = map.cp_size, rank = map.cp_rank, late = 2 * cp_size - 1 - rank;
  const I* ends = static_cast<const I*>(lengths.data) + 1;
  parallel(map.rows(), sizeof(I), [&](int64_t begin, int64_t end) {
    Place place = locate(lengths, map.key(begin), map.tokens);
    int64_t start = place.start, own = start / cp_size;
    for (int64_t s = place.sequence; s < lengths.sequences && own < end; ++s) {
      int64_t stop = ends[s], chunk = chunk_of(stop - start);
      count_up(out, start + rank * chunk, own, own + chunk, begin, end);
      count_up(out, start + late * chunk, own + chunk, own + 2 * chunk, begin, end);
      own += 2 * chunk;
      start = stop;
    }
    if (own < end) count_up(out, start + rank * (map.rows() - own), own, map.rows(), begin, end);
  });
}

template <typename I>
void write_indices(I* out, const PartitionMap& map, const Lengths& lengths) {
  int64_t chunks = 2 * map.cp_size, shift = 0;
  while ((int64_t{2} << shift) <= chunks) ++shift;
  if (chunks == int64_t{1} << shift)
    write_indices(out, map, lengths, [=](int64_t size) { return size >> shift; });
  else
    write_indices(out, map, lengths, [=](int64_t size) { return quotient(size, chunks); });
}

int64_t held(int64_t real, int64_t first, int64_t chunk) { return std::min(std::max<int64_t>(real - first, 0), chunk); }

template <typename I>
void pad(I* out, const I* x, int64_t stride, int64_t tokens, const Lengths& real, const Lengths& lengths,
         int64_t padded_tokens, I fill) {
  parallel(padded_tokens, sizeof(I), [&](int64_t begin, int64_t end) {
    Place place = locate(lengths, begin, padded_tokens);
    for (int64_t i = begin; i < end;) {
      place = locate_next(lengths, i, padded_tokens, place);
      int64_t first = real[place.sequence], stop = place.tail ? tokens : real[place.sequence + 1];
      int64_t last = std::min(place.stop, end), row = first + (i - place.start);
      for (; i < last && row < stop; ++i, ++row) out[i] = x[row * stride];
      for (; i < last; ++i) out[i] = fill;
    }
  });
}

}  // namespace

void partition_indices(void* out, Lengths lengths, int64_t total_tokens, int64_t cp_size, int64_t cp_rank, Stream) {
  PartitionMap map{total_tokens, cp_size, cp_rank};
  if (lengths.wide)
    write_indices(static_cast<int64_t*>(out), map, lengths);
  else
    write_indices(static_cast<int32_t*>(out), map, lengths);
}

void rank_lengths(void* out, Lengths real, Lengths lengths, int64_t cp_size, int64_t cp_rank, bool first_half,
                  bool second_half, Stream) {
  int64_t sum = 0;
  auto put = [&](int64_t s) {
    if (real.wide)
      static_cast<int64_t*>(out)[s] = sum;
    else
      static_cast<int32_t*>(out)[s] = static_cast<int32_t>(sum);
  };
  put(0);
  for (int64_t s = 0; s < real.sequences; ++s) {
    int64_t chunk = lengths.size(s) / (2 * cp_size), tokens = real.size(s);
    if (first_half) sum += held(tokens, cp_rank * chunk, chunk);
    if (second_half) sum += held(tokens, (2 * cp_size - 1 - cp_rank) * chunk, chunk);
    put(s + 1);
  }
}

void pad_sequences(void* out, const void* x, int64_t item, int64_t stride, int64_t tokens, Lengths real,
                   Lengths lengths, int64_t padded_tokens, int64_t fill, Stream) {
  auto run = [&](auto zero) {
    using I = decltype(zero);
    pad(static_cast<I*>(out), static_cast<const I*>(x), stride, tokens, real, lengths, padded_tokens,
        static_cast<I>(fill));
  };
  switch (item) {
    case 1:
      return run(uint8_t{});
    case 2:
      return run(uint16_t{});
    case 4:
      return run(uint32_t{});
    default:
      return run(uint64_t{});
  }
}

}  // namespace cpu
}  // namespace cp
