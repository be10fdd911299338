// The tile instructions of AMX in plain C++, for processors without them. Included before a source that uses them; it
// stops the process at what the processor would refuse: no configuration, tiles larger than it has, shapes that do not
// go together.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx_emulation {

struct Tile {
  int rows, row_bytes;
  unsigned char bytes[16][64];
};

thread_local Tile tiles[8];
thread_local bool configured = false;

inline void require(bool condition, const char* message) {
  if (condition) return;
  std::fprintf(stderr, "AMX: %s\n", message);
  std::abort();
}

inline Tile& tile(int n) {
  require(configured, "no tile configuration is loaded");
  require(n >= 0 && n < 8, "no such tile");
  return tiles[n];
}

inline void load_config(const void* from) {
  unsigned char config[64];
  std::memcpy(config, from, sizeof config);
  require(config[0] == 1 && config[1] == 0, "the palette must be 1, and the start row 0");
  for (int i = 2; i < 16; i++) require(config[i] == 0, "a reserved byte is set");
  for (int n = 0; n < 16; n++) {
    std::uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * n, 2);
    const int rows = config[48 + n];
    require(n < 8 || (rows == 0 && row_bytes == 0), "palette 1 has 8 tiles");
    require(rows <= 16 && row_bytes <= 64, "a tile has 16 rows of 64 bytes at most");
    require((rows == 0) == (row_bytes == 0), "rows without bytes");
    if (n < 8) {
      std::memset(&tiles[n], 0, sizeof tiles[n]);
      tiles[n].rows = rows;
      tiles[n].row_bytes = row_bytes;
    }
  }
  configured = true;
}

inline void release() { configured = false; }

inline void zero(int n) { std::memset(tile(n).bytes, 0, sizeof tile(n).bytes); }

inline void load(int n, const void* from, long stride) {
  Tile& to = tile(n);
  require(to.rows > 0, "a tile without rows is loaded");
  std::memset(to.bytes, 0, sizeof to.bytes);
  for (int r = 0; r < to.rows; r++) std::memcpy(to.bytes[r], (const char*)from + r * stride, to.row_bytes);
}

inline void store(int n, void* to, long stride) {
  const Tile& from = tile(n);
  require(from.rows > 0, "a tile without rows is stored");
  for (int r = 0; r < from.rows; r++) std::memcpy((char*)to + r * stride, from.bytes[r], from.row_bytes);
}

inline void check_shapes(const Tile& sums, const Tile& a, const Tile& b) {
  require(sums.rows == a.rows, "sums and the first operand have other rows");
  require(sums.row_bytes == b.row_bytes, "sums and the second operand have other columns");
  require(a.row_bytes == 4 * b.rows, "the operands do not go together");
}

// Sums of four products of integers, of bytes that have a sign or none.
template <class Left>
inline void multiply_bytes(int n, int left, int right) {
  Tile& sums = tile(n);
  const Tile &a = tile(left), &b = tile(right);
  check_shapes(sums, a, b);
  for (int r = 0; r < sums.rows; r++) {
    std::int32_t of_row[16];
    std::memcpy(of_row, sums.bytes[r], 64);
    for (int k = 0; k < a.row_bytes; k++)
      for (int c = 0; c < 16; c++) of_row[c] += int(Left(a.bytes[r][k])) * int((signed char)b.bytes[k / 4][4 * c + k % 4]);
    std::memcpy(sums.bytes[r], of_row, sums.row_bytes);
  }
}
inline void dpbssd(int n, int left, int right) { multiply_bytes<signed char>(n, left, right); }
inline void dpbusd(int n, int left, int right) { multiply_bytes<unsigned char>(n, left, right); }

// The even and the odd numbers of a row of 16 pairs, as float32.
inline void pairs_of(const unsigned char* row, float* even, float* odd) {
  std::uint32_t words[16], low[16], high[16];
  std::memcpy(words, row, 64);
  for (int i = 0; i < 16; i++) {
    low[i] = words[i] << 16;
    high[i] = words[i] & 0xffff0000u;
  }
  std::memcpy(even, low, 64);
  std::memcpy(odd, high, 64);
}

inline void dpbf16ps(int n, int left, int right) {
  Tile& sums = tile(n);
  const Tile &a = tile(left), &b = tile(right);
  check_shapes(sums, a, b);
  float even[16][16], odd[16][16];
  for (int k = 0; k < b.rows; k++) pairs_of(b.bytes[k], even[k], odd[k]);
  for (int r = 0; r < sums.rows; r++) {
    float of_row[16], first[16], second[16];
    std::memcpy(of_row, sums.bytes[r], 64);
    pairs_of(a.bytes[r], first, second);
    for (int k = 0; k < b.rows; k++)
      for (int c = 0; c < 16; c++) {  // in the order of the numbers of a row
        of_row[c] += first[k] * even[k][c];
        of_row[c] += second[k] * odd[k][c];
      }
    std::memcpy(sums.bytes[r], of_row, sums.row_bytes);
  }
}

}  // namespace amx_emulation

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbusd
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) amx_emulation::load_config(from)
#define _tile_release() amx_emulation::release()
#define _tile_zero(n) amx_emulation::zero(n)
#define _tile_loadd(n, from, stride) amx_emulation::load(n, from, stride)
#define _tile_stream_loadd(n, from, stride) amx_emulation::load(n, from, stride)
#define _tile_stored(n, to, stride) amx_emulation::store(n, to, stride)
#define _tile_dpbssd(n, left, right) amx_emulation::dpbssd(n, left, right)
#define _tile_dpbusd(n, left, right) amx_emulation::dpbusd(n, left, right)
#define _tile_dpbf16ps(n, left, right) amx_emulation::dpbf16ps(n, left, right)
