// Characters of texts in UTF-8, which Python wrote: only lone surrogates may be in them that are no characters.

#pragma once

#include <cstdint>

using Byte = unsigned char;
using Character = std::uint32_t;

inline bool is_surrogate(Character character) { return character >= 0xd800 && character < 0xe000; }

// The character at `at`, which then is behind it.
inline Character next_character(const char*& at) {
  const Character first = Byte(*at++);
  if (first < 0x80) return first;
  const int more = first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
  Character character = first & (0x3f >> more);
  for (int i = 0; i < more; i++) character = character << 6 | (Byte(*at++) & 0x3f);
  return character;
}

// Writes a character, and returns the place after it.
inline char* put_character(Character character, char* to) {
  if (character < 0x80) return *to = char(character), to + 1;
  const int more = character < 0x800 ? 1 : character < 0x10000 ? 2 : 3;
  *to++ = char((0xff00 >> (more + 1) & 0xff) | character >> (6 * more));
  for (int shift = 6 * (more - 1); shift >= 0; shift -= 6) *to++ = char(0x80 | (character >> shift & 0x3f));
  return to;
}
