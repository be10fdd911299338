// WordPiece, with the normalizer and the words of BERT's tokenizers. Called by wordpiece.py, for every processor.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "characters.h"
#include "texts.h"
#include "vocabulary.h"

namespace {

// What the texts go through. kFirstLower: lower case before all else; kLoose: added tokens may be found in what becomes
// of a text; kPlain: only texts of printable ASCII are split here.
enum Option : int { kClean = 1, kChinese = 2, kStrip = 4, kLower = 8, kFirstLower = 16, kLoose = 32, kPlain = 64 };

// What becomes of a character: nothing, the end of a word, a word by itself, or a letter. kUnusual: it takes a while.
enum Kind : std::uint32_t { kUnusual, kDropped, kBlank, kSign, kLetter };

constexpr Character kQuick = 0x3000;  // characters before this one are looked up
constexpr std::int64_t kMostLetters = 256;

char lower_ascii(char byte) { return byte >= 'A' && byte <= 'Z' ? char(byte + 32) : byte; }

struct Word {
  char bytes[4 * kMostLetters];
  std::int64_t length, letters;
  std::uint64_t hash;

  void clear() { length = letters = 0, hash = kBegins; }
  void add(Character character) {
    if (letters++ >= kMostLetters) return;  // it is unknown
    char* const from = bytes + length;
    length = put_character(character, from) - bytes;
    for (const char* at = from; at < bytes + length; at++) hash = extended(hash, *at);
  }
};

struct WordPieces {
  Vocabulary words;
  Around around;
  const BertCharacters* characters;
  std::uint32_t* quick;  // [kQuick] a kind, and above it a character
  char* added_bytes;     // of the added tokens, in lower case
  std::int64_t* added_ends;
  std::int64_t added;
  bool marked[256];  // what one of them begins with
  std::int64_t most;  // letters of a word
  std::int32_t unknown;
  int options;

  // Whether an added token is in the text.
  bool has_added(const char* at, const char* end) const {
    for (; at < end; at++) {
      if (!marked[Byte(lower_ascii(*at))]) continue;
      for (std::int64_t k = 0; k < added; k++) {
        const char *mark = added_bytes + (k ? added_ends[k - 1] : 0), *last = added_bytes + added_ends[k];
        if (last - mark <= end - at && std::equal(mark, last, at, [](char a, char b) { return a == lower_ascii(b); }))
          return true;
      }
    }
    return false;
  }

  // What becomes of a character, by parts of which each is given to `take`; false: it is not known here.
  template <class Take>
  bool fold(Character character, const Take& take) const {
    Character firsts[2] = {character, 0x307};
    int count = 1;
    if (options & kFirstLower) count = lowered(firsts);
    for (int i = 0; i < count; i++) {
      const Byte flags = characters->flags[firsts[i]];
      if (options & kClean && flags & kIsRemoved) continue;
      const bool apart = options & kChinese && flags & kIsChinese;
      if (options & kStrip && flags & kIsMoving) return false;
      if (options & kStrip && flags & kIsMark) continue;
      Character parts[kMostParts] = {firsts[i]};
      const int pieces = options & kStrip && flags & kHasStripped ? characters->strip(firsts[i], parts) : 1;
      for (int k = 0; k < pieces; k++) {
        Character cases[2] = {parts[k], 0x307};
        const int last = options & kLower ? lowered(cases) : 1;
        for (int j = 0; j < last; j++) {
          const Byte found = characters->flags[cases[j]];
          take(found & kIsSpace ? kBlank : apart || found & kIsSign ? kSign : kLetter, cases[j]);
        }
      }
    }
    return true;
  }

  int lowered(Character* cases) const {
    if (*cases == 0x130) return *cases = 'i', 2;
    if (characters->flags[*cases] & kHasLower) *cases = characters->lower(*cases);
    return 1;
  }

  void make_quick() {
    for (Character character = 0; character < kQuick; character++) {
      int parts = 0;
      std::uint32_t found = kDropped;
      const bool known = fold(character, [&](Kind kind, Character part) { parts++, found = kind | part << 3; });
      quick[character] = known && parts < 2 ? found : std::uint32_t(kUnusual);
    }
  }

  // Writes the tokens of a word, and returns the place after them.
  std::int32_t* split(const Word& word, std::int32_t* to) const {
    if (word.letters > most) return *to = unknown, to + 1;
    std::int64_t found = words.find(word.hash, word.bytes, word.length);
    if (found >= 0) return *to = words.ids[found], to + 1;
    std::uint64_t hashes[4 * kMostLetters];
    std::int32_t* const first = to;
    for (std::int64_t start = 0; start < word.length;) {
      const char* const at = word.bytes + start;
      std::uint64_t sum = start ? kContinues : kBegins;
      std::int64_t size = std::min(words.longest, word.length - start);
      for (std::int64_t i = 0; i < size; i++) hashes[i] = sum = extended(sum, at[i]);
      for (found = -1; size > 0 && found < 0; size--) found = words.find(hashes[size - 1], at, size, start > 0);
      if (found < 0) return *first = unknown, first + 1;
      *to++ = words.ids[found];
      start += size + 1;
    }
    return to;
  }

  std::int32_t* end_word(Word& word, std::int32_t* to) const {
    if (word.letters) to = split(word, to);
    word.clear();
    return to;
  }

  // Writes the tokens of a text, and returns the place after them; null: it is not split here.
  std::int32_t* read(const char* at, const char* end, std::int32_t* to) const {
    if (has_added(at, end)) return nullptr;
    const bool loose = options & kLoose && !is_plain(at, end);
    if ((options & kPlain && !is_plain(at, end)) || (loose && may_add(at, end))) return nullptr;
    Word word;
    word.clear();
    const auto take = [&](Kind kind, Character part) {
      if (kind == kLetter) return word.add(part);
      to = end_word(word, to);
      if (kind == kSign) word.add(part), to = end_word(word, to);
    };
    while (at < end) {
      const Character character = next_character(at);
      const std::uint32_t found = character < kQuick ? quick[character] : std::uint32_t(kUnusual);
      if (found != kUnusual) {
        if ((found & 7) != kDropped) take(Kind(found & 7), found >> 3);
      } else if (is_surrogate(character) || !fold(character, take)) {
        return nullptr;
      }
    }
    return end_word(word, to);
  }

  static bool is_plain(const char* at, const char* end) {
    return std::all_of(at, end, [](char c) { return (c >= ' ' && c < 127) || c == '\t' || c == '\n' || c == '\r'; });
  }

  // Whether what becomes of a text has a character that an added token begins with.
  bool may_add(const char* at, const char* end) const {
    bool found = false;
    while (at < end && !found) {
      const Character character = next_character(at);
      if (is_surrogate(character)) return true;
      fold(character, [&](Kind, Character part) { found |= part < 128 && marked[Byte(lower_ascii(char(part)))]; });
    }
    return found;
  }
};

template <class T>
T* copied(const T* from, std::int64_t count) {
  auto* made = (T*)std::malloc(std::size_t(count + 1) * sizeof(T));
  if (made && count) std::memcpy(made, from, std::size_t(count) * sizeof(T));
  return made;
}

}  // namespace

extern "C" void millpond_wordpiece_free(void* pieces) {
  auto* made = (WordPieces*)pieces;
  made->words.release();
  made->around.release();
  std::free(made->quick);
  std::free(made->added_bytes);
  std::free(made->added_ends);
  std::free(made);
}

// `bytes`: the tokens one after another, each up to its end in `ends`. Those from `continuing` on continue a word, their
// mark left out. `added`: the added tokens in lower case; `around`: the special tokens before a text and after it.
// Returns null if there is no memory.
extern "C" void* millpond_wordpiece(const char* bytes, const std::uint32_t* ends, const std::int32_t* ids,
                                    std::int64_t continuing, std::int64_t tokens, const char* added,
                                    const std::int64_t* added_ends, std::int64_t added_tokens, std::int64_t most,
                                    std::int32_t unknown, int options, const std::int32_t* around, std::int64_t before,
                                    std::int64_t after) {
  auto* made = (WordPieces*)std::calloc(1, sizeof(WordPieces));
  if (!made) return nullptr;
  made->words.bytes = copied(bytes, tokens ? ends[tokens - 1] : 0);
  made->words.ends = copied(ends, tokens), made->words.ids = copied(ids, tokens);
  made->added_bytes = copied(added, added_tokens ? added_ends[added_tokens - 1] : 0);
  made->added_ends = copied(added_ends, added_tokens);
  made->quick = (std::uint32_t*)std::malloc(kQuick * sizeof(std::uint32_t));
  made->characters = bert_characters();
  if (!made->words.bytes || !made->words.ends || !made->words.ids || !made->words.index(tokens, continuing) ||
      !made->added_bytes || !made->added_ends || !made->quick || !made->characters ||
      !made->around.copy(around, before, after)) {
    millpond_wordpiece_free(made);
    return nullptr;
  }
  made->most = most, made->unknown = unknown, made->added = added_tokens, made->options = options;
  for (std::int64_t k = 0; k < added_tokens; k++) made->marked[Byte(added[k ? added_ends[k - 1] : 0])] = true;
  made->make_quick();
  return made;
}

extern "C" void millpond_wordpiece_split(const void* made, const char* text, const std::int64_t* ends,
                                         std::int64_t texts, std::int32_t* to, std::int64_t* counts) {
  split_texts(*(const WordPieces*)made, text, ends, texts, to, counts);
}
