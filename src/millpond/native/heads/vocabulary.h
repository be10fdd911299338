// The head of a masked language model, pooled over each text: no logits of a token are ever in memory.
//
// The rows are in blocks whose states stay in the second cache while the vocabulary passes by. First the threads share the
// rows of all blocks up to the norm, then units of the vocabulary, each for all rows: so a thread writes columns of its own.
#pragma once

#include "product.h"

namespace {

constexpr int64_t kVocabularyBytes = 768 << 10;  // of a block's states
constexpr int64_t kMostUnits = 64;               // of the vocabulary, that a thread takes at a time

#if defined(__AVX512F__)
MILLPOND_INLINE Floats exponent_of(Floats x) { return _mm512_getexp_ps(x); }
#elif defined(__AVX2__)
// Of normal positive numbers.
MILLPOND_INLINE Floats exponent_of(Floats x) {
  const __m256i biased = _mm256_srli_epi32(_mm256_castps_si256(x), 23);
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(biased, _mm256_set1_epi32(127)));
}
#endif

// log(1 + x) for x >= 0, to the last digits of float32: 1 + x = 2^k (1 + f) with f within [-1/4, 1/2], and log(1 + f) is
// f + f^2 P(f) with a polynomial that was fitted to 5e-9.
MILLPOND_INLINE Floats log1p_of(Floats x) {
  const Floats one = broadcast(1.0f);
  const Floats power = exponent_of(scaled(sum_of(x, one), broadcast(1.33333333f)));
  const Floats scale = scale_by_power(one, difference(zeros(), power));
  const Floats f = multiply_add(x, scale, difference(scale, one));
  Floats p = multiply_add(broadcast(-0.0461905849f), f, broadcast(0.10591042f));
  p = multiply_add(p, f, broadcast(-0.13193002f));
  p = multiply_add(p, f, broadcast(0.144680562f));
  p = multiply_add(p, f, broadcast(-0.16642945f));
  p = multiply_add(p, f, broadcast(0.199909746f));
  p = multiply_add(p, f, broadcast(-0.2500023f));
  p = multiply_add(p, f, broadcast(0.33333452f));
  p = multiply_add(p, f, broadcast(-0.499999994f));
  return multiply_add(power, broadcast(0.693147181f), multiply_add(scaled(f, f), p, f));
}

// Normalizes `columns` numbers in place; zeros follow them up to `padded`, and stay zeros.
inline void normalize_padded(float* row, int64_t columns, int64_t padded, const NormWeights& norm) {
  for (int64_t c = columns; c < padded; c++) row[c] = 0;
  Floats sum = zeros(), squares = zeros();
  for (int64_t c = 0; c < padded; c += kLanes) sum = sum_of(sum, load(row + c));
  const float mean = sum_of(sum) / float(columns);
  const Floats center = broadcast(mean);
  for (int64_t c = 0; c < padded; c += kLanes) {
    const Floats off = difference(load(row + c), center);
    squares = multiply_add(off, off, squares);
  }
  const float variance = (sum_of(squares) - float(padded - columns) * mean * mean) / float(columns);
  const Floats scale = broadcast(1.0f / __builtin_sqrtf(variance + float(norm.epsilon)));
  for (int64_t c = 0; c < padded; c += kLanes) {
    const Floats x = scaled(scaled(difference(load(row + c), center), scale), load(norm.weight + c));
    store(row + c, norm.bias ? sum_of(x, load(norm.bias + c)) : x);
  }
}

template <class Isa>
struct Vocabulary {
  using State = typename Isa::State;

  struct Job {
    const VocabularyCall* call;
    const Parts* parts;   // of each thread: the states and the numbers of a piece
    State* blocks;        // [blocks][block_size]
    int32_t* owners;      // [rows] text of each row
    int32_t* unknown;     // [texts] whether a row of it is NaN
    int64_t first, rows;  // of all texts
    int64_t block, block_size;  // rows of a block, and numbers of its states
    int64_t units;        // of the vocabulary, that a thread takes at a time
    int64_t next;         // row or unit

    // A block has a multiple of 64 rows: with 32 more, which whole tiles may read, its panels are an odd number of 32 apart.
    int64_t panel_rows() const { return block + 32; }
    States<Isa> states(int64_t index) const { return {blocks + index * block_size, panel_rows() * Isa::kPanel}; }
  };

  static void transform_rows(const Job& job, int64_t from, int64_t count, const States<Isa>& states, float* numbers) {
    const VocabularyCall& call = *job.call;
    const int64_t width = call.dense.out, depth = call.dense.in / Isa::kPanel;
    rows_to_states(call.rows + (job.first + from) * call.width, count, call.width, call.dense.in, states);
    product<Isa>(states, count, (const State*)call.dense.units, unit_size<Isa>(depth), depth, 0, width / kColumns,
                 call.dense.bias, [&](int64_t unit, int64_t row, int64_t several, const float* sums) {
                   float* to = numbers + row * width + unit * kColumns;
                   for (int64_t r = 0; r < several; r++, to += width, sums += kColumns) {
                     store(to, activated<Isa>(load(sums), call.activation));
                     store(to + kLanes, activated<Isa>(load(sums + kLanes), call.activation));
                   }
                 });
    const States<Isa> block = job.states(from / job.block);
    for (int64_t r = 0; r < count; r++, numbers += width) {
      normalize_padded(numbers, call.columns, width, call.norm);
      // A norm makes all of a row NaN, if any of it is.
      if (numbers[0] != numbers[0]) __atomic_store_n(job.unknown + job.owners[from + r], 1, __ATOMIC_RELAXED);
      for (int64_t c = 0; c < width; c += kLanes)
        Isa::store_state(block.row(from % job.block + r, c), load(numbers + c));
    }
  }

  static void transform(void* argument, int64_t member) {
    auto& job = *(Job*)argument;
    const FlushDenormals flush;
    Isa::begin();
    char* room = job.parts->of(member);
    const States<Isa> states{(State*)room, kPanelRows * Isa::kPanel};
    auto* numbers = (float*)(room + job.call->dense.in * kPanelRows * int64_t(sizeof(State)));
    for (;;) {
      const int64_t from = __atomic_fetch_add(&job.next, kPieceRows, __ATOMIC_RELAXED);
      if (from >= job.rows) break;
      transform_rows(job, from, least_of(kPieceRows, job.rows - from), states, numbers);
    }
    Isa::end();
  }

  template <int kLogarithms>
  static MILLPOND_INLINE Floats pooled(Floats before, Floats logits) {
    if (kLogarithms == 0) return maximum(logits, before);
    const Floats once = log1p_of(maximum(zeros(), logits));
    return sum_of(before, kLogarithms == 1 ? once : log1p_of(once));
  }

  // Adds the sums of some rows and one unit to their texts.
  template <int kLogarithms>
  static MILLPOND_INLINE void pool(const Job& job, int64_t first, int64_t unit, int64_t count, const float* sums) {
    const VocabularyCall& call = *job.call;
    for (int64_t r = 0; r < count;) {
      const int64_t text = job.owners[first + r], begin = call.bounds[text] - job.first;
      const int64_t end = least_of(count, call.bounds[text + 1] - job.first - first);
      float* to = call.out + text * call.decoder.out + unit * kColumns;
      const Floats none = broadcast(kLogarithms == 0 ? -__builtin_inff() : 0.0f);
      const bool begun = first + r > begin;
      Floats low = begun ? load(to) : none, high = begun ? load(to + kLanes) : none;
      for (; r < end; r++, sums += kColumns) {
        low = pooled<kLogarithms>(low, load(sums));
        high = pooled<kLogarithms>(high, load(sums + kLanes));
      }
      store(to, low);
      store(to + kLanes, high);
    }
  }

  template <int kLogarithms>
  static void decode(void* argument, int64_t) {
    auto& job = *(Job*)argument;
    const VocabularyCall& call = *job.call;
    const FlushDenormals flush;
    Isa::begin();
    const int64_t depth = call.decoder.in / Isa::kPanel, units = call.decoder.out / kColumns;
    for (;;) {
      const int64_t from = __atomic_fetch_add(&job.next, job.units, __ATOMIC_RELAXED);
      if (from >= units) break;
      for (int64_t first = 0, i = 0; first < job.rows; first += job.block, i++)
        product<Isa>(job.states(i), least_of(job.block, job.rows - first), (const State*)call.decoder.units,
                     unit_size<Isa>(depth), depth, from, least_of(from + job.units, units), call.decoder.bias,
                     [&](int64_t unit, int64_t row, int64_t count, const float* sums) {
                       pool<kLogarithms>(job, first + row, unit, count, sums);
                     });
    }
    Isa::end();
  }

  static void run_all(Job& job) {
    const VocabularyCall& call = *job.call;
    run_team(transform, &job, least_of(call.threads, quotient_up(job.rows, kPieceRows)));
    job.next = 0;
    const auto decode_rows = call.logarithms == 0 ? decode<0> : call.logarithms == 1 ? decode<1> : decode<2>;
    run_team(decode_rows, &job, call.threads);
    for (int64_t t = 0; t < call.texts; t++)
      for (int64_t c = 0; job.unknown[t] && c < call.decoder.out; c += kLanes)
        store(call.out + t * call.decoder.out + c, broadcast(__builtin_nanf("")));
  }

  static int64_t run(const void* argument) {
    const auto& call = *(const VocabularyCall*)argument;
    Job job{&call, nullptr, nullptr, nullptr, nullptr, call.bounds[0], call.bounds[call.texts] - call.bounds[0], 0, 0, 0, 0};
    const int64_t width = call.decoder.in, fit = kVocabularyBytes / (width * int64_t(sizeof(State)));
    // Whole pieces: of 64 rows and more, but no more than there are.
    job.block = least_of(least_of(most_of(fit, 64), 512), job.rows + 63) / 64 * 64;
    job.block_size = job.panel_rows() * width;
    job.units = most_of(1, least_of(kMostUnits, call.decoder.out / kColumns / (4 * call.threads)));
    const Parts parts((call.dense.in * int64_t(sizeof(State)) + width * 4) * kPanelRows, call.threads);
    const Parts blocks(job.block_size * int64_t(sizeof(State)), quotient_up(job.rows, job.block));
    const Parts marks((job.rows + call.texts) * int64_t(sizeof(int32_t)), 1);
    if (!parts.at || !blocks.at || !marks.at) return -1;
    job.parts = &parts;
    job.blocks = (State*)blocks.at;
    job.owners = (int32_t*)marks.at;
    job.unknown = job.owners + job.rows;
    for (int64_t t = 0; t < call.texts; t++) {
      job.unknown[t] = 0;
      for (int64_t r = call.bounds[t]; r < call.bounds[t + 1]; r++) job.owners[r - job.first] = int32_t(t);
    }
    run_all(job);
    return 0;
  }
};

}  // namespace
