// Packs a weight's rows from where a checkpoint's file has them, each by its own address, into units (products.h, int8.h).
// Conversion to the model's precision, concatenation, interleaving and zeros between the numbers need no copy.
#pragma once

#include "int8.h"
#include "plan.h"
#include "products.h"

namespace {

constexpr int64_t kPiece = 32;  // inner numbers that are converted at a time

inline float number_of(uint16_t bits) {
  const uint32_t whole = uint32_t(bits) << 16;
  float number;
  std::memcpy(&number, &whole, sizeof number);
  return number;
}

// To the nearest bfloat16, to the even one of two: as torch does, which keeps denormal numbers.
inline uint16_t rounded(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return number != number ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void convert(const float* from, int64_t count, float* to) { std::memcpy(to, from, count * sizeof *to); }
inline void convert(const uint16_t* from, int64_t count, uint16_t* to) { std::memcpy(to, from, count * sizeof *to); }
inline void convert(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i++) to[i] = number_of(from[i]);
}
inline void convert(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; i++) to[i] = rounded(from[i]);
}

// Inner numbers [from, from + kPiece) of a column, where numbers `from` and later ones are of the same piece.
template <class Stored, class State>
MILLPOND_INLINE void read_piece(const PackRowsCall& call, int64_t column, int64_t from, State* to) {
  const int64_t piece = from / call.padded, at = from % call.padded;
  const char* row = (const char*)call.rows[column];
  const int64_t count = row ? most_of(0, least_of(kPiece, call.piece - at)) : 0;
  alignas(64) Stored numbers[kPiece];
  const int64_t begin = (piece * call.piece + at) * int64_t(sizeof(Stored));
  if (count == kPiece) {
    std::memcpy(numbers, row + begin, sizeof numbers);  // rows of a file may be at odd addresses
    convert(numbers, kPiece, to);
    return;
  }
  if (count > 0) std::memcpy(numbers, row + begin, count * sizeof(Stored));
  convert(numbers, count, to);
  for (int64_t i = count; i < kPiece; i++) to[i] = State{};
}

// [inner numbers][kColumns]
MILLPOND_INLINE void scatter(const float* numbers, int64_t column, float* block) {
  for (int64_t i = 0; i < kPiece; i++) block[i * kColumns + column] = numbers[i];
}
#ifdef __aarch64__
// [8 groups of 4 inner numbers][kColumns][4]
MILLPOND_INLINE void scatter(const uint16_t* numbers, int64_t column, uint16_t* block) {
  for (int64_t i = 0; i < kPiece; i += 4) std::memcpy(block + i * kColumns + 4 * column, numbers + i, 4 * sizeof *block);
}
#else
// [2 halves][16 pairs of inner numbers][16 columns][2]
MILLPOND_INLINE void scatter(const uint16_t* numbers, int64_t column, uint16_t* block) {
  uint16_t* to = block + column / 16 * 512 + column % 16 * 2;
  for (int64_t i = 0; i < kPiece; i += 2) std::memcpy(to + i * 16, numbers + i, 2 * sizeof *to);
}
#endif

template <class Stored, class State>
void pack_numbers(const PackRowsCall& call) {
  for (int64_t u = 0; u < call.out; u += kColumns)
    for (int64_t from = 0; from < call.count; from += kPiece) {
      State* block = (State*)call.units + u * call.in + from * kColumns;
      for (int64_t c = 0; c < kColumns; c++) {
        alignas(64) State numbers[kPiece];
        read_piece<Stored>(call, u + c, from, numbers);
        scatter(numbers, c, block);
      }
    }
}

template <class State>
int64_t pack_rows(const void* argument) {
  const auto& call = *(const PackRowsCall*)argument;
  if (call.stored == kStoredBfloat16)
    pack_numbers<uint16_t, State>(call);
  else
    pack_numbers<float, State>(call);
  return 0;
}

// Rows as they are, in the model's precision: [out][in].
template <class Stored, class State>
void copy_numbers(const PackRowsCall& call) {
  for (int64_t row = 0; row < call.out; row++)
    for (int64_t from = 0; from < call.in; from += kPiece)
      read_piece<Stored>(call, row, from, (State*)call.units + row * call.in + from);
}

template <class State>
int64_t copy_rows(const void* argument) {
  const auto& call = *(const PackRowsCall*)argument;
  if (call.stored == kStoredBfloat16)
    copy_numbers<uint16_t, State>(call);
  else
    copy_numbers<float, State>(call);
  return 0;
}

// Inner numbers as float32 that the model's precision has, times their factors.
template <class Stored>
MILLPOND_INLINE void read_exact(const PackRowsCall& call, int64_t column, int64_t from, float* to) {
  read_piece<Stored>(call, column, from, to);
  for (int64_t i = 0; i < kPiece; i++) {
    if (!call.exact) to[i] = number_of(rounded(to[i]));
    if (call.factors) to[i] *= call.factors[from + i];
  }
}

#if defined(MILLPOND_BYTE_PRODUCTS) || defined(__aarch64__)
MILLPOND_INLINE float least_scale(const float*) { return 0; }
#else
// The least scale by which the weights of one sign that meet in 16 bits stay within kMostOfLane, rounded: of eight inner
// numbers the first two with the fifth and sixth, and the others.
inline float least_scale(const float* numbers) {
  float most = 0;
  for (int64_t i = 0; i < kPiece; i += i % 4 == 2 ? 6 : 2) {
    float above = 0, below = 0;
    const int64_t together[] = {i, i + 1, i + 4, i + 5};
    for (const int64_t j : together) (numbers[j] > 0 ? above : below) += numbers[j];
    most = above > most ? above : most;
    most = -below > most ? -below : most;
  }
  return most / (kMostOfLane - 4 * 0.5f);
}
#endif

// The scale of a column's inner numbers [from, end): their largest magnitude is 127, or less.
template <class Stored>
float scale_of(const PackRowsCall& call, int64_t column, int64_t from, int64_t end) {
  alignas(64) float numbers[kPiece];
  float most = 1e-12f, least = 0;
  for (; from < end; from += kPiece) {
    read_exact<Stored>(call, column, from, numbers);
    for (int64_t i = 0; i < kPiece; i++) {
      const float size = __builtin_fabsf(numbers[i]);
      most = size > most ? size : most;
    }
    const float scale = least_scale(numbers);
    least = scale > least ? scale : least;
  }
  return most / 127.0f > least ? most / 127.0f : least;
}

// The codes of a column, and for each chunk their scale and their sum.
template <class Stored>
void pack_column_codes(const PackRowsCall& call, int64_t column, int8_t* unit) {
  alignas(64) float numbers[kPiece];
  int8_t* to = unit + column % kColumns / kLanes * (kCodePanel * kLanes) + column % kLanes * kCodeGroup;
  for (int64_t start = 0; start < call.in; start += kChunk) {
    const int64_t end = least_of(start + kChunk, call.in);
    const float scale = scale_of<Stored>(call, column, start, end);
    int64_t sum = 0;
    for (int64_t from = start; from < end; from += kPiece) {
      read_exact<Stored>(call, column, from, numbers);
      for (int64_t i = 0; i < kPiece; i += 4) {
        alignas(4) int8_t four[4];
        for (int64_t j = 0; j < 4; j++) sum += four[j] = int8_t(__builtin_rintf(numbers[i + j] / scale));
        const int64_t at = from + i, group = at % kCodePanel / kCodeGroup * (kCodeGroup * kLanes) + at % kCodeGroup;
        std::memcpy(to + at / kCodePanel * (kCodePanel * kColumns) + group, four, sizeof four);
      }
    }
    float* scales = call.scales + 2 * (start / kChunk) * call.out + column;
    scales[0] = scale;
    scales[call.out] = float(sum);
  }
}

// Rows in eight bits into memory that was zeroed; all inner numbers of the weight at once.
inline int64_t pack_rows_int8(const void* argument) {
  const auto& call = *(const PackRowsCall*)argument;
  const int64_t size = code_panels(call.in) * kCodePanel;
  for (int64_t c = 0; c < call.out; c++) {
    int8_t* unit = (int8_t*)call.units + c / kColumns * kColumns * size;
    if (call.stored == kStoredBfloat16)
      pack_column_codes<uint16_t>(call, c, unit);
    else
      pack_column_codes<float>(call, c, unit);
  }
  return 0;
}

}  // namespace
