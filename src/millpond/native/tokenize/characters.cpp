// Reads unicode_tables.h. Its tables have a byte for each code point: only the pages of those in use take memory.

#include "characters.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "unicode_tables.h"

namespace {

struct Digits {
  const char* at;
  bool over() const { return !*at; }
  std::uint32_t next() {
    std::uint32_t number = 0;
    for (int shift = 0;; shift += 5) {
      const char digit = *at++;
      const int value = digit >= 'a'   ? digit - 'a' + 26
                        : digit >= 'A' ? digit - 'A'
                        : digit >= '0' ? digit - '0' + 52
                                       : 62 + (digit == '-');
      number |= std::uint32_t(value & 31) << shift;
      if (value < 32) return number;
    }
  }
};

struct Mapping {
  Character *codes, *values;
  std::int64_t count;

  bool read(const char* digits) {
    const std::size_t most = std::strlen(digits) / 2 + 1;
    codes = (Character*)std::malloc(2 * most * sizeof(Character));
    if (!codes) return false;
    values = codes + most;
    Character code = 0;
    std::int32_t change = 0;
    for (Digits numbers{digits}; !numbers.over(); count++) {
      code += numbers.next();
      const std::uint32_t step = numbers.next();
      change += step & 1 ? -std::int32_t(step / 2) - 1 : std::int32_t(step / 2);
      codes[count] = code, values[count] = Character(std::int32_t(code) + change);
    }
    return true;
  }

  Character find(Character code) const {
    const Character* found = std::lower_bound(codes, codes + count, code);
    return found < codes + count && *found == code ? values[found - codes] : code;
  }
};

Byte *bert_flags, *word_classes, *combining_classes;
Mapping lower_cases, stripped;
Character longer[4096];  // code, number of parts, parts ...
int longer_numbers;
BertCharacters bert;
WordCharacters words;
bool bert_made, words_made;

constexpr Character kChinese[][2] = {{0x3400, 0x4dbf},   {0x4e00, 0x9fff},   {0xf900, 0xfaff},   {0x20000, 0x2a6df},
                                     {0x2a700, 0x2b81f}, {0x2b920, 0x2ceaf}, {0x2f800, 0x2fa1f}};
constexpr Character kHangul = 0xac00, kHangulEnd = 0xd7a4;
constexpr Character kSpaces[][2] = {{0x09, 0x0d},     {0x20, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},
                                    {0x1680, 0x1680}, {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f},
                                    {0x205f, 0x205f}, {0x3000, 0x3000}};

void mark(Byte* flags, Character first, Character end, Byte flag) {
  for (Character code = first; code < end; code++) flags[code] |= flag;
}

void mark_all(Byte* flags, const char* digits, Byte flag) {
  Character end = 0;
  for (Digits numbers{digits}; !numbers.over();) {
    const Character first = end + numbers.next();
    end = first + numbers.next();
    mark(flags, first, end, flag);
  }
}

void make_bert() {
  bert_flags = (Byte*)std::calloc(kCharacters, 1);
  if (!bert_flags || !lower_cases.read(kLower) || !stripped.read(kStrip)) return;
  mark_all(bert_flags, kRemoved, kIsRemoved);
  mark_all(bert_flags, kMarks, kIsMark);
  mark_all(bert_flags, kMoving, kIsMoving);
  mark_all(bert_flags, kPunctuation, kIsSign);
  for (const auto& range : kSpaces) mark(bert_flags, range[0], range[1] + 1, kIsSpace);
  for (const auto& range : kChinese) mark(bert_flags, range[0], range[1] + 1, kIsChinese);
  for (std::int64_t i = 0; i < lower_cases.count; i++) bert_flags[lower_cases.codes[i]] |= kHasLower;
  bert_flags[0x130] |= kHasLower;
  for (std::int64_t i = 0; i < stripped.count; i++) bert_flags[stripped.codes[i]] |= kHasStripped;
  mark(bert_flags, kHangul, kHangulEnd, kHasStripped);
  for (Digits numbers{kLonger}; !numbers.over();) longer[longer_numbers++] = numbers.next();
  for (int i = 0; i < longer_numbers; i += 2 + int(longer[i + 1])) bert_flags[longer[i]] |= kHasStripped;
  bert.flags = bert_flags;
  bert_made = true;
}

void make_words() {
  Mapping classes{};
  word_classes = (Byte*)std::calloc(kCharacters, 1);
  combining_classes = (Byte*)std::calloc(kCharacters, 1);
  if (!word_classes || !combining_classes || !classes.read(kClasses)) return;
  for (const auto& range : kSpaces) mark(word_classes, range[0], range[1] + 1, kSpace);
  mark_all(word_classes, kLetters, kLetter);
  mark_all(word_classes, kNumbers, kNumber);
  mark_all(word_classes, kAccents, kAccent);
  mark_all(word_classes, kComposing, kMayCompose);
  for (std::int64_t i = 0; i < classes.count; i++) {
    word_classes[classes.codes[i]] |= kHasClass;
    combining_classes[classes.codes[i]] = Byte(classes.values[i]);
  }
  std::free(classes.codes);
  words = {word_classes, combining_classes};
  words_made = true;
}

}  // namespace

Character BertCharacters::lower(Character character) const { return lower_cases.find(character); }

int BertCharacters::strip(Character character, Character* parts) const {
  if (character >= kHangul && character < kHangulEnd) {
    const Character index = character - kHangul, tail = index % 28;
    parts[0] = 0x1100 + index / 588, parts[1] = 0x1161 + index % 588 / 28, parts[2] = 0x11a7 + tail;
    return tail ? 3 : 2;
  }
  for (int i = 0; i < longer_numbers; i += 2 + int(longer[i + 1])) {
    if (longer[i] != character) continue;
    std::copy_n(longer + i + 2, longer[i + 1], parts);
    return int(longer[i + 1]);
  }
  return *parts = stripped.find(character), 1;
}

const BertCharacters* bert_characters() {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_bert);
  return bert_made ? &bert : nullptr;
}

const WordCharacters* word_characters() {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_words);
  return words_made ? &words : nullptr;
}
