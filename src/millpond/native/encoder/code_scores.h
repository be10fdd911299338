// Scores of queries and keys in eight bits, of heads that attend to the whole of a long text. The product takes half of the
// instructions of one in bfloat16, and a quarter of one in float32.
//
// Keys are signed, each with a scale of its own; queries have 128 added, and each row has a scale:
//   score = (codes of the row * codes of the key - 128 * sum of the key's codes) * scale of the key * scale of the row
// So a score depends on no other row and on no other key.
#pragma once

#include "head_units.h"
#include "int8.h"

namespace {

constexpr int64_t kLeastCodeKeys = 64;  // of fewer, packing takes what is gained
constexpr int64_t kMostCodeDim = 256;

// What an instruction set does not multiply so.
template <class Isa, bool kTiles = Isa::kTiles>
struct CodeScores {
  struct Keys {};
  struct Queries {
    float scales[1];
  };
  static constexpr bool suits(const Step&, int64_t) { return false; }
  static Keys keys_at(void*, int64_t, int64_t) { return {}; }
  static void pack(const States<Isa>&, const KeyRows&, int64_t, int64_t, int64_t, int64_t, const Keys&) {}
  static void quantize(const States<Isa>&, int64_t, int64_t, int64_t, int64_t, Queries*) {}
  static void score(const Queries&, const Keys&, int64_t, int64_t, int64_t, int64_t, float*) {}
};

#ifdef MILLPOND_BYTE_PRODUCTS

template <class Isa>
struct CodeScores<Isa, false> {
  static constexpr int kRows = Isa::kRows;

  struct Keys {
    int8_t* units;  // [keys / kColumns][dim / 64, or half of one][2 halves][groups of 4][kLanes keys][4]
    float* scales;  // [keys]
    float* starts;  // [keys], what a score begins with: -128 * sum of codes * scale
  };

  struct Queries {
    alignas(64) uint8_t codes[kMostCodeDim / kCodePanel * kRows * kCodePanel];
    float scales[kRows];
  };

  static bool suits(const Step& step, int64_t count) {
    const bool whole = step.before >= count && step.after >= count;
    return step.int8 && whole && count >= kLeastCodeKeys && step.dim <= kMostCodeDim &&
           (step.dim == kCodePanel / 2 || step.dim % kCodePanel == 0);
  }

  // In memory for as many keys in the precision of the states.
  static Keys keys_at(void* at, int64_t keys, int64_t dim) {
    auto* units = (int8_t*)at;
    auto* scales = (float*)(units + keys * dim);
    return {units, scales, scales + keys};
  }

  static void pack(const States<Isa>& heads, const KeyRows& rows, int64_t column, int64_t count, int64_t keys, int64_t dim,
                   const Keys& to) {
    const int64_t groups = least_of(dim, kCodePanel) / kCodeGroup;  // of a panel
    for (int64_t k = 0; k < keys; k += kLanes) {
      Floats numbers[kMostCodeDim], most = zeros(), odd = zeros();
      for (int64_t d = 0; d < dim; d += kLanes) {
        Floats lanes[kLanes];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; i++)
          lanes[i] = k + i < count ? Isa::load_state(heads.row(rows.row(k + i), column + d)) : zeros();
        transpose(lanes);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; i++) {
          numbers[d + i] = lanes[i];
          most = maximum(most, magnitude(lanes[i]));
          odd = multiply_add(lanes[i], zeros(), odd);  // NaN from NaN and infinity on
        }
      }
      const Floats codes = quotient(broadcast(127.0f), maximum(most, broadcast(1e-30f)));
      const Floats scale = sum_of(scaled(most, broadcast(1.0f / 127.0f)), odd);
      Ints sum = broadcast_bits(0);
      int8_t* half = to.units + k / kColumns * kColumns * dim + k % kColumns * groups * kCodeGroup;
      for (int64_t g = 0; g < dim / kCodeGroup; g++) {
        const Floats* four = numbers + g * kCodeGroup;
        const Ints bytes = signed_bytes(scaled(four[0], codes), scaled(four[1], codes), scaled(four[2], codes),
                                        scaled(four[3], codes));
        sum = add_byte_products(sum, broadcast_bits(0x01010101), bytes);
        store_bits(half + (g / groups * 2 * groups + g % groups) * kCodeGroup * kLanes, bytes);
      }
      store(to.scales + k, scale);
      store(to.starts + k, scaled(scaled(to_floats(sum), broadcast(-128.0f)), scale));
    }
  }

  static void quantize(const States<Isa>& heads, int64_t row, int64_t column, int64_t rows, int64_t dim, Queries* to) {
    for (int64_t r = 0; r < rows; r++) {
      Floats most = zeros(), odd = zeros();
      for (int64_t d = 0; d < dim; d += kLanes) {
        const Floats x = Isa::load_state(heads.row(row + r, column + d));
        most = maximum(most, magnitude(x));
        odd = multiply_add(x, zeros(), odd);
      }
      const float largest = largest_of(maximum(most, broadcast(1e-30f)));  // a scale of 0 times -infinity would be NaN
      const Floats codes = broadcast(127.0f / largest);
      to->scales[r] = largest / 127.0f + sum_of(odd);
      for (int64_t d = 0; d < dim; d += kLanes)
        store_codes(to->codes + (d / kCodePanel * kRows + r) * kCodePanel + d % kCodePanel,
                    scaled(Isa::load_state(heads.row(row + r, column + d)), codes), broadcast_bits(128));
    }
  }

  // Where the scores of a block go, but for the scales of its rows.
  struct Scores {
    const float *scales, *starts;
    float* to;  // [rows, kColumns]
    MILLPOND_INLINE void add(int64_t row, Ints low, Ints high) const {
      store(to + row * kColumns, multiply_add(to_floats(low), load(scales), load(starts)));
      store(to + row * kColumns + kLanes, multiply_add(to_floats(high), load(scales + kLanes), load(starts + kLanes)));
    }
  };

  struct HalfPanels {
    template <int R>
    static void rows_of(const CodeProduct& p, const Scores& to) {
      VectorCodes::rows_of<R, kCodePanel / 2 / kCodeGroup>(p, to);
    }
  };

  // Scores [keys / kColumns][kRows][kColumns] of rows with keys [from, to).
  static void score(const Queries& queries, const Keys& keys, int64_t rows, int64_t from, int64_t to, int64_t dim,
                    float* scores) {
    CodeProduct p;
    p.rows = queries.codes;
    p.panel = kRows * kCodePanel;
    p.depth = quotient_up(dim, kCodePanel);
    p.ahead = nullptr;
    p.ahead_lines = 0;
    for (int64_t k = from; k < to; k += kColumns) {
      p.unit = keys.units + k * dim;
      const Scores sums{keys.scales + k, keys.starts + k, scores + (k - from) * kRows};
      if (dim < kCodePanel)
        some_rows<HalfPanels, kRows>(p, sums, rows);
      else
        some_rows<VectorCodes, kRows>(p, sums, rows);
    }
  }
};

#endif

}  // namespace
