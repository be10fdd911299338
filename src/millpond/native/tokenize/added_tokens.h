// The tokens that are found in a text before it is split: the longest of the first ones.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "utf8.h"

struct AddedTokens {
  // Of a token: kNormalized: found in the normalized text; kSpecial: it takes what is beside it, or only whole words.
  enum Flag : std::int32_t { kNormalized = 1, kSided = 2 };
  struct Found {
    const char *at, *end;
    std::int64_t token;  // -1: none, and both places are the end of the text
  };

  char* bytes;
  std::int64_t *ends, *next;  // next: the next shorter one that begins with the same byte
  std::int32_t *ids, *flags;
  std::int64_t heads[2][256];  // of those that are found in the text itself, and in the normalized one
  bool any[2];

  // The tokens come by their lengths, the longest first.
  bool copy(const char* from, const std::int64_t* to, const std::int32_t* numbers, const std::int32_t* kinds,
            std::int64_t count) {
    std::fill_n(heads[0], 512, std::int64_t(-1));
    const std::int64_t length = count ? to[count - 1] : 0;
    bytes = (char*)std::malloc(std::size_t(length) + 1);
    ends = (std::int64_t*)std::malloc(std::size_t(count + 1) * (2 * sizeof(std::int64_t) + 2 * sizeof(std::int32_t)));
    if (!bytes || !ends) return false;
    next = ends + count, ids = (std::int32_t*)(next + count), flags = ids + count;
    std::copy_n(from, length, bytes);
    std::copy_n(to, count, ends), std::copy_n(numbers, count, ids), std::copy_n(kinds, count, flags);
    for (std::int64_t token = count - 1; token >= 0; token--) {
      const int kind = flags[token] & kNormalized;
      std::int64_t& head = heads[kind][Byte(bytes[begin(token)])];
      next[token] = head, head = token, any[kind] = true;
    }
    return true;
  }
  void release() {
    std::free(bytes);
    std::free(ends);
  }

  std::int64_t begin(std::int64_t token) const { return token ? ends[token - 1] : 0; }

  Found find(int kind, const char* at, const char* end) const {
    for (; any[kind] && at < end; at++) {
      for (std::int64_t token = heads[kind][Byte(*at)]; token >= 0; token = next[token]) {
        const std::int64_t first = begin(token), length = ends[token] - first;
        if (length <= end - at && !std::memcmp(bytes + first, at, std::size_t(length))) return {at, at + length, token};
      }
    }
    return {end, end, -1};
  }
};
