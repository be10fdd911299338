// The words of byte-level BPE: what the published patterns match, from the first character on.

#pragma once

#include "characters.h"

// kGpt2: of ByteLevel itself. The others are of Split: letters with one sign before them, and signs with the line ends
// behind them. kDigits1 and kDigits3 differ in how many digits are a word, and in kAccents marks are letters.
enum Pattern : int { kGpt2, kDigits1, kDigits3, kAccents1, kPatterns };

struct Words {
  const Byte* classes;
  Pattern pattern;

  Byte kind(Character character) const { return classes[character] & kClass; }
  Byte kind_at(const char* at) const { return kind(next_character(at)); }
  bool is_letter(Byte found) const { return found == kLetter || (pattern == kAccents1 && found == kAccent); }
  bool is_other(Byte found) const { return !is_letter(found) && found != kSpace && found != kNumber; }

  template <class Is>
  const char* run(const char* at, const char* end, const Is& is) const {
    for (const char* next = at; at < end; at = next)
      if (!is(kind(next_character(next)))) break;
    return at;
  }
  const char* letters(const char* at, const char* end) const {
    return run(at, end, [this](Byte found) { return is_letter(found); });
  }
  const char* others(const char* at, const char* end) const {
    return run(at, end, [this](Byte found) { return is_other(found); });
  }

  // The end of the word at `at`, which is before `end`.
  const char* end_of(const char* at, const char* end) const {
    if (const char* last = contraction(at, end)) return last;
    return pattern == kGpt2 ? gpt2(at, end) : split(at, end);
  }

 private:
  const char* gpt2(const char* at, const char* end) const {
    const char* first = *at == ' ' && at + 1 < end && kind_at(at + 1) != kSpace ? at + 1 : at;
    const Byte found = kind_at(first);
    if (found == kSpace) return spaces(at, end);
    if (found == kLetter) return letters(first, end);
    if (found == kNumber) return run(first, end, [](Byte other) { return other == kNumber; });
    return others(first, end);
  }

  const char* split(const char* at, const char* end) const {
    const char* next = at;
    const Character first = next_character(next);
    const Byte found = kind(first);
    const bool breaks = first == '\r' || first == '\n';
    if (is_letter(found) || (!breaks && found != kNumber && next < end && is_letter(kind_at(next))))
      return letters(next, end);
    if (found == kNumber) {
      for (int more = pattern == kDigits3 ? 2 : 0; more > 0 && next < end && kind_at(next) == kNumber; more--)
        next_character(next);
      return next;
    }
    const char* const sign = first == ' ' ? next : at;
    if (sign < end && is_other(kind_at(sign))) {
      for (next = others(sign, end); next < end && (*next == '\r' || *next == '\n');) next++;
      return next;
    }
    const char* const last = run(at, end, [](Byte other) { return other == kSpace; });
    for (next = last; next > at; next--)
      if (next[-1] == '\r' || next[-1] == '\n') return next;
    return spaces(at, end);
  }

  // White space up to the last before another word, which may take it.
  const char* spaces(const char* at, const char* end) const {
    const char *last = at, *before = at;
    for (const char* next = at; last < end; last = next) {
      if (kind(next_character(next)) != kSpace) return before > at ? before : last;
      before = last;
    }
    return last;
  }

  // The end of a contraction, or null.
  const char* contraction(const char* at, const char* end) const {
    if (*at != '\'' || end - at < 2) return nullptr;
    const bool folds = pattern != kGpt2;
    if (folds && end - at > 2 && at[1] == '\xc5' && at[2] == '\xbf') return at + 3;  // a long s
    const char first = folds ? char(at[1] | 32) : at[1];
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
    if (end - at < 3) return nullptr;
    const char second = folds ? char(at[2] | 32) : at[2];
    const bool known = (second == 'e' && (first == 'r' || first == 'v')) || (second == 'l' && first == 'l');
    return known ? at + 3 : nullptr;
  }
};
