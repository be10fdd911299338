// A checksum of memory, for every processor. Called by library.py.

#include <cstdint>
#include <cstring>

// Of words of 8 bytes: eight sums in turn, each multiplied by an odd number, which no change of one word leaves alone.
extern "C" std::uint64_t millpond_checksum(const void* from, std::int64_t words) {
  constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15u;
  std::uint64_t sums[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const auto* at = (const char*)from;
  std::int64_t word = 0;
  for (; word + 8 <= words; word += 8, at += 64)
    for (int i = 0; i < 8; i++) {
      std::uint64_t next;
      std::memcpy(&next, at + 8 * i, sizeof next);
      sums[i] = (sums[i] ^ next) * kFactor;
    }
  for (; word < words; word++, at += 8) {
    std::uint64_t next;
    std::memcpy(&next, at, sizeof next);
    sums[0] = (sums[0] ^ next) * kFactor;
  }
  std::uint64_t whole = std::uint64_t(words);
  for (int i = 0; i < 8; i++) whole = (whole ^ (sums[i] >> 32) ^ sums[i]) * kFactor;
  return whole ^ whole >> 32;
}
