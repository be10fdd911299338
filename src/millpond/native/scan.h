// Approximate MaxSim of documents from the centroid codes of their tokens, and the best documents.
// Called by late_interaction/kernels/scan.py.
#pragma once

#include "kernel_table.h"
#include "products.h"

#ifdef __aarch64__
#include "arm_neon/cells.h"
#endif

namespace {
namespace approximate {

struct ScanCall {
  const uint8_t* cells;    // [centroids, columns]; columns: a multiple of 16
  const uint16_t* codes;   // [tokens]
  const int64_t* offsets;  // [count + 1]
  const uint8_t* allowed;  // a bit for each document; null allows all
  uint32_t* scores;        // [count], all 0
  int64_t count, columns, threads, next;
};

struct BestCall {
  const uint32_t* scores;  // [count]
  int64_t* found;          // [keep]
  int64_t count, keep;     // keep: 1 to count
  int64_t largest;         // no score is larger
};

constexpr int64_t kScanned = 512;           // documents that a thread takes at once
constexpr int64_t kThreadTokens = 1 << 17;  // tokens that are worth a thread

#ifdef __AVX512F__
struct Cells64 {
  static constexpr int kBytes = 64;
  __m512i v;
  static Cells64 zero() { return {_mm512_setzero_si512()}; }
  void raise(const uint8_t* row) { v = _mm512_max_epu8(v, _mm512_loadu_si512(row)); }
  void raise(Cells64 other) { v = _mm512_max_epu8(v, other.v); }
  uint32_t total() const { return uint32_t(_mm512_reduce_add_epi64(_mm512_sad_epu8(v, _mm512_setzero_si512()))); }
};
#endif

#ifdef __AVX2__
struct Cells32 {
  static constexpr int kBytes = 32;
  __m256i v;
  static Cells32 zero() { return {_mm256_setzero_si256()}; }
  void raise(const uint8_t* row) { v = _mm256_max_epu8(v, _mm256_loadu_si256((const __m256i*)row)); }
  void raise(Cells32 other) { v = _mm256_max_epu8(v, other.v); }
  uint32_t total() const {
    const __m256i sums = _mm256_sad_epu8(v, _mm256_setzero_si256());
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return uint32_t(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1));
  }
};

struct Cells16 {
  static constexpr int kBytes = 16;
  __m128i v;
  static Cells16 zero() { return {_mm_setzero_si128()}; }
  void raise(const uint8_t* row) { v = _mm_max_epu8(v, _mm_loadu_si128((const __m128i*)row)); }
  void raise(Cells16 other) { v = _mm_max_epu8(v, other.v); }
  uint32_t total() const {
    const __m128i sums = _mm_sad_epu8(v, _mm_setzero_si128());
    return uint32_t(_mm_cvtsi128_si64(sums) + _mm_extract_epi64(sums, 1));
  }
};
#endif

// The largest cells of a document. `stride`: bytes from a centroid to the next.
template <class Cells>
inline Cells best_cells(const uint8_t* cells, int64_t stride, const uint16_t* code, const uint16_t* stop) {
  Cells best[4] = {Cells::zero(), Cells::zero(), Cells::zero(), Cells::zero()};
  if (stop - code < 8) {
    for (; code < stop; code++) best[0].raise(cells + *code * stride);
    return best[0];
  }
  // Eight tokens at a time; the last eight overlap the ones before them, which changes no maximum.
  for (const uint16_t* last = stop - 8;; code += 8) {
    if (code > last) code = last;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) best[i % 4].raise(cells + code[i] * stride);
    if (code == last) break;
  }
  best[0].raise(best[1]);
  best[2].raise(best[3]);
  best[0].raise(best[2]);
  return best[0];
}

// Adds the best cells of some columns to the scores of documents. The score of a candidate is 1 more than their sum.
template <class Cells>
inline void scan_columns(const ScanCall& call, int64_t begin, int64_t end, int64_t column) {
  const uint8_t *cells = call.cells + column, *allowed = call.allowed;
  const uint16_t* codes = call.codes;
  const int64_t *offsets = call.offsets, columns = call.columns;
  uint32_t* scores = call.scores;
  for (int64_t i = begin; i < end; i++) {
    if (allowed && !(allowed[i >> 3] >> (i & 7) & 1)) continue;
    const uint16_t *first = codes + offsets[i], *stop = codes + offsets[i + 1];
    if (first == stop) continue;
    // A stride that the compiler knows saves a multiplication for each token.
    const Cells best = columns == Cells::kBytes ? best_cells<Cells>(cells, Cells::kBytes, first, stop)
                                                : best_cells<Cells>(cells, columns, first, stop);
    scores[i] = (column == 0 ? 1 : scores[i]) + best.total();
  }
}

inline void scan_work(void* job) {
  auto& call = *(ScanCall*)job;
  for (int64_t begin; (begin = take(&call.next, kScanned)) < call.count;) {
    const int64_t end = smaller(begin + kScanned, call.count);
    for (int64_t column = 0; column < call.columns;) {
      const int64_t left = call.columns - column;
#ifdef __AVX512F__
      if (left >= Cells64::kBytes) {
        scan_columns<Cells64>(call, begin, end, column);
        column += Cells64::kBytes;
        continue;
      }
#endif
      if (left >= Cells32::kBytes) {
        scan_columns<Cells32>(call, begin, end, column);
        column += Cells32::kBytes;
      } else {
        scan_columns<Cells16>(call, begin, end, column);
        column += Cells16::kBytes;
      }
    }
  }
}

int64_t scan_codes(const void* arguments) {
  auto call = *(const ScanCall*)arguments;
  run(scan_work, &call, call.threads, call.offsets[call.count] - call.offsets[0], kThreadTokens);
  return 0;
}

// Returns how many documents were written, in ascending order: the best, and of equal ones the first.
int64_t best_documents(const void* arguments) {
  const auto& call = *(const BestCall*)arguments;
  uint32_t* counts = (uint32_t*)std::calloc(call.largest + 1, sizeof(uint32_t));
  if (!counts) return -1;
  for (int64_t i = 0; i < call.count; i++) counts[call.scores[i]]++;
  int64_t cut = call.largest, above = 0;  // documents with a score above the cut
  while (cut > 0 && above + counts[cut] < call.keep) above += counts[cut--];
  std::free(counts);
  int64_t room = cut > 0 ? call.keep - above : 0, written = 0;
  for (int64_t i = 0; i < call.count; i++) {
    const uint32_t score = call.scores[i];
    if (score > cut || (score == cut && room-- > 0)) call.found[written++] = i;
  }
  return written;
}

}  // namespace approximate
}  // namespace
