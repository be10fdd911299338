// A vocabulary: tokens by their bytes. Eight bytes of a table a token, and its bytes.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "utf8.h"

constexpr std::uint64_t kBegins = 0xcbf29ce484222325u, kContinues = 0x84222325cbf29ce4u;

inline std::uint64_t extended(std::uint64_t hash, char byte) { return (hash ^ Byte(byte)) * 0x100000001b3u; }

// A table of 2^(64 - shift) places with hashes in their upper bits.
inline std::uint64_t scattered(std::uint64_t hash) { return hash * 0x9e3779b97f4a7c15u; }

inline int shift_for(std::int64_t entries) {
  int shift = 58;
  while ((std::int64_t(1) << (64 - shift)) < entries + entries / 2) shift--;
  return shift;
}

struct Vocabulary {
  char* bytes;            // of all tokens
  std::uint32_t* ends;    // of each; begins[0] of the first one is 0
  std::int32_t* ids;
  std::uint64_t* places;  // the upper half of a hash, and the token's number + 1; 0: a free place
  std::int64_t count, continuing;
  std::int64_t longest;  // bytes of a token
  int shift;

  // Takes over `bytes`, `ends` and `ids`, of malloc. The tokens from `continuing` on continue a word.
  bool index(std::int64_t tokens, std::int64_t first_continuing) {
    count = tokens, continuing = first_continuing, longest = 1, shift = shift_for(tokens);
    places = (std::uint64_t*)std::calloc(std::size_t(1) << (64 - shift), sizeof(std::uint64_t));
    if (!places) return false;
    for (std::int64_t i = 0; i < count; i++) {
      const std::int64_t length = std::int64_t(ends[i]) - begin(i);
      if (length == 0) continue;
      longest = std::max(longest, length);
      const std::uint64_t hash = hash_of(bytes + begin(i), length, i < continuing ? kBegins : kContinues);
      std::uint64_t place = scattered(hash) >> shift;
      while (places[place]) place = (place + 1) & mask();
      places[place] = (hash >> 32) << 32 | std::uint64_t(i + 1);
    }
    return true;
  }

  void release() {
    std::free(bytes);
    std::free(ends);
    std::free(ids);
    std::free(places);
  }

  std::uint64_t mask() const { return (std::uint64_t(1) << (64 - shift)) - 1; }
  std::int64_t begin(std::int64_t token) const { return token ? ends[token - 1] : 0; }

  static std::uint64_t hash_of(const char* at, std::int64_t length, std::uint64_t hash) {
    for (std::int64_t i = 0; i < length; i++) hash = extended(hash, at[i]);
    return hash;
  }

  // The number of the token of these bytes, or -1.
  std::int64_t find(std::uint64_t hash, const char* at, std::int64_t length, bool continues = false) const {
    for (std::uint64_t place = scattered(hash) >> shift; places[place]; place = (place + 1) & mask()) {
      if (places[place] >> 32 != hash >> 32) continue;
      const std::int64_t token = std::int64_t(places[place] & 0xffffffffu) - 1, first = begin(token);
      if (std::int64_t(ends[token]) - first == length && (token >= continuing) == continues &&
          !std::memcmp(bytes + first, at, std::size_t(length)))
        return token;
    }
    return -1;
  }
};
