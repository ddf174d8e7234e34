// Stores that bypass the caches. A plain store to an uncached line reads it first, a third of all bytes of a large
// copy; and the written bytes leave the caches before their first read. Bypassing pays for head exchanges, with many
// streams at once; the movers of whole rows are faster with plain stores.
#pragma once

#include <cstdint>
#include <cstring>

#include "copy.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace cp {
namespace cpu {

// More bytes than this, written by one call, do not stay in a core's caches anyway.
constexpr int64_t cached_bytes = 2 << 20;

#if defined(__AVX512F__)
using Lane = __m512i;
inline Lane load_lane(const char* from) { return _mm512_loadu_si512(from); }
inline void stream_lane(char* to, Lane lane) { _mm512_stream_si512(reinterpret_cast<Lane*>(to), lane); }
#elif defined(__AVX__)
using Lane = __m256i;
inline Lane load_lane(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const Lane*>(from)); }
inline void stream_lane(char* to, Lane lane) { _mm256_stream_si256(reinterpret_cast<Lane*>(to), lane); }
#elif defined(__SSE2__)
using Lane = __m128i;
inline Lane load_lane(const char* from) { return _mm_loadu_si128(reinterpret_cast<const Lane*>(from)); }
inline void stream_lane(char* to, Lane lane) { _mm_stream_si128(reinterpret_cast<Lane*>(to), lane); }
#endif

// From here on libc's own copy, which has instructions for it, is faster yet.
constexpr int64_t long_copy = 16 << 10;

// A copy past the caches. Lines that are not written whole go through them, as all does on other machines.
inline void stream_bytes(char* to, const char* from, int64_t bytes) {
#if defined(__SSE2__)
  constexpr int64_t line = 64, lane = sizeof(Lane);
  int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & (line - 1));
  if (bytes >= head + line && bytes < long_copy) {
    std::memcpy(to, from, static_cast<size_t>(head));
    int64_t at = head;
    for (; at + line <= bytes; at += line)
      for (int64_t k = 0; k < line; k += lane) stream_lane(to + at + k, load_lane(from + at + k));
    to += at;
    from += at;
    bytes -= at;
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Called after the last of a thread's streams: a thread that sees later writes of this thread sees the streams too.
inline void end_of_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Pieces through the caches.
struct Cached {
  static void copy(char* to, const char* from, int64_t bytes) { copy_bytes(to, from, bytes); }
  static void end() {}
};

// Pieces past the caches.
struct Streamed {
  static constexpr int64_t least = 256;  // bytes of a piece: of smaller ones, too many lines are not written whole

  static void copy(char* to, const char* from, int64_t bytes) { stream_bytes(to, from, bytes); }
  static void end() { end_of_streams(); }
};

// Call f(Cached or Streamed) for `bytes` in all, in pieces of `piece` bytes. Who copies calls end() at last.
template <typename F>
void with_stores(int64_t bytes, int64_t piece, F f) {
  if (bytes > cached_bytes && piece >= Streamed::least)
    f(Streamed{});
  else
    f(Cached{});
}

}  // namespace cpu
}  // namespace cp
