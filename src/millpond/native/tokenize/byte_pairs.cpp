// Byte-level BPE, with the words of the published patterns. Called by byte_pairs.py, for every processor.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "added_tokens.h"
#include "characters.h"
#include "json.h"
#include "merges.h"
#include "texts.h"
#include "vocabulary.h"
#include "words.h"

namespace {

// kComposed: texts go through NFC, and others than those that it certainly leaves are not split here. kWhole: a word
// that is a token is not merged. kSpaced: a space is put before what has none. kPlain: only ASCII is split here.
enum Option : int { kComposed = 1, kWhole = 2, kSpaced = 4, kPlain = 8 };

// Whether a token is what the merges of its bytes yield: found out when it is first looked up.
enum Merged : Byte { kUnknown, kYes, kNo };

struct BytePairs {
  Vocabulary tokens;
  Merges merges;
  AddedTokens added;
  Around around;
  Words words;
  const WordCharacters* characters;
  Byte* merged;  // [tokens.count] Merged
  std::int32_t bytes[256];
  int options;

  // Whether a text has only characters, and is in NFC if it goes through that.
  bool is_certain(const char* at, const char* end) const {
    Byte last = 0;
    while (at < end) {
      if (Byte(*at) < 0x80) {
        last = 0, at++;
        continue;
      }
      const Character character = next_character(at);
      if (is_surrogate(character) || options & kPlain) return false;
      if (!(options & kComposed)) continue;
      const Byte found = characters->classes[character];
      if (found & kMayCompose) return false;
      const Byte combining = found & kHasClass ? characters->combining[character] : Byte(0);
      if (combining && combining < last) return false;
      last = combining;
    }
    return true;
  }

  // Each of these writes tokens, and returns the place after them; null: they are not found here.
  std::int32_t* read(const char* at, const char* end, std::int32_t* to) const {
    return is_certain(at, end) ? sections(0, at, end, to) : nullptr;
  }

  // Between the added tokens of the text itself, those of the normalized text are looked for.
  std::int32_t* sections(int kind, const char* at, const char* end, std::int32_t* to) const {
    while (to && at < end) {
      const AddedTokens::Found found = added.find(kind, at, end);
      if (found.at > at) to = kind == 0 ? sections(1, at, found.at, to) : section(at, found.at, to);
      if (!to || found.token < 0) break;
      if (added.flags[found.token] & AddedTokens::kSided) return nullptr;
      *to++ = added.ids[found.token];
      at = found.end;
    }
    return to;
  }

  std::int32_t* section(const char* at, const char* end, std::int32_t* to) const {
    if (!(options & kSpaced) || *at == ' ') return split(at, end, to);
    auto* const spaced = (char*)std::malloc(std::size_t(end - at) + 1);
    if (!spaced) return nullptr;
    *spaced = ' ';
    char* const last = std::copy(at, end, spaced + 1);
    to = split(spaced, last, to);
    std::free(spaced);
    return to;
  }

  std::int32_t* split(const char* at, const char* end, std::int32_t* to) const {
    while (to && at < end) {
      const char* const last = words.end_of(at, end);
      to = word(at, last - at, to);
      at = last;
    }
    return to;
  }

  std::int32_t* word(const char* at, std::int64_t length, std::int32_t* to) const {
    const std::int64_t token = tokens.find(Vocabulary::hash_of(at, length, kBegins), at, length);
    Byte known = kNo;
    if (token >= 0) {
      known = options & kWhole ? Byte(kYes) : __atomic_load_n(merged + token, __ATOMIC_RELAXED);
      if (known == kYes) return *to = tokens.ids[token], to + 1;
    }
    for (std::int64_t i = 0; i < length; i++) to[i] = bytes[Byte(at[i])];
    const std::int64_t count = merges.apply(to, length);
    if (count < 0) return nullptr;
    if (token >= 0 && known == kUnknown) {
      const bool whole = count == 1 && *to == tokens.ids[token];
      __atomic_store_n(merged + token, Byte(whole ? kYes : kNo), __ATOMIC_RELAXED);
    }
    return to + count;
  }
};

template <class T>
struct Grown {
  T* at;
  std::int64_t count, room;

  bool add(T value) {
    if (count == room) {
      room = std::max<std::int64_t>(1 << 16, 2 * room);
      T* const more = (T*)std::realloc(at, std::size_t(room) * sizeof(T));
      if (!more) return std::free(at), at = nullptr, false;
      at = more;
    }
    return at[count++] = value, true;
  }
};

// The byte that a character of ByteLevel stands for, or -1.
int byte_of(Character character) {
  static constexpr Byte kFirst = 33, kLast = 126;
  const auto shown = [](int byte) {
    return (byte >= kFirst && byte <= kLast) || (byte >= 161 && byte <= 172) || byte >= 174;
  };
  if (character < 256) return shown(int(character)) ? int(character) : -1;
  int hidden = int(character) - 256;
  for (int byte = 0; byte < 256; byte++)
    if (!shown(byte) && hidden-- == 0) return byte;
  return -1;
}

struct Reader {
  BytePairs& made;
  int alphabet[512];

  explicit Reader(BytePairs& pairs) : made(pairs) {
    for (int character = 0; character < 512; character++) alphabet[character] = byte_of(Character(character));
  }

  int byte(Character character) const { return character < 512 ? alphabet[character] : -1; }

  // Tokens with other characters are no words of bytes, and left out.
  bool vocabulary(Json& json) const {
    Grown<char> bytes{};
    Grown<std::uint32_t> ends{};
    Grown<std::int32_t> ids{};
    if (!json.expect('{')) return false;
    bool good = bytes.add('\0');
    bytes.count = 0;
    while (good && json.peek() == '"') {
      const std::int64_t start = bytes.count;
      bool known = true;
      json.string([&](Character character) {
        known &= byte(character) >= 0;
        good = good && bytes.add(char(byte(character)));
      });
      json.expect(':');
      const std::int64_t id = json.number();
      good = good && !json.broken && id < Merges::kMostTokens && bytes.count < 0x7fffffff;
      if (!known) bytes.count = start;
      if (known && good) good = ends.add(std::uint32_t(bytes.count)) && ids.add(std::int32_t(id));
      json.take(',');
    }
    made.tokens.bytes = bytes.at, made.tokens.ends = ends.at, made.tokens.ids = ids.at;
    if (!good || !json.expect('}') || !made.tokens.index(ids.count, ids.count)) return false;
    made.merged = (Byte*)std::calloc(std::size_t(ids.count) + 1, 1);
    for (int value = 0; value < 256; value++) {
      const char single = char(value);
      const std::int64_t token = find(&single, 1);
      if (token < 0) return false;
      made.bytes[value] = made.tokens.ids[token];
    }
    return made.merged;
  }

  std::int64_t find(const char* at, std::int64_t length) const {
    return made.tokens.find(Vocabulary::hash_of(at, length, kBegins), at, length);
  }

  bool is_token(std::int64_t token, const char* at, std::int64_t length) const {
    if (token >= made.tokens.count) return false;
    const std::int64_t first = made.tokens.begin(token);
    return made.tokens.ends[token] - first == length && !std::memcmp(made.tokens.bytes + first, at, std::size_t(length));
  }

  // Each pair is an array of two strings, or one string with a space between the two.
  bool merges(Json& json) const {
    Grown<std::int32_t> triples{};
    Grown<char> pair{};
    if (!json.expect('[') || !pair.add('\0') || !triples.add(0)) return false;
    triples.count = 0;
    bool good = true;
    std::int64_t whole = -1;
    while (good && (json.peek() == '[' || *json.at == '"')) {
      std::int64_t middle = -1;
      const auto add = [&](Character character) {
        if (character == ' ') return void(middle = pair.count);
        good = good && byte(character) >= 0 && pair.add(char(byte(character)));
      };
      pair.count = 0;
      const bool apart = json.take('[');
      json.string(add);
      if (apart) {
        middle = pair.count;
        json.expect(',');
        json.string(add);
        json.expect(']');
      }
      good = good && !json.broken && middle > 0 && middle < pair.count;
      if (!good) break;
      // What a merge yields most often is the token after that of the merge before it.
      whole = is_token(whole + 1, pair.at, pair.count) ? whole + 1 : find(pair.at, pair.count);
      for (const std::int64_t token : {find(pair.at, middle), find(pair.at + middle, pair.count - middle), whole})
        good = good && token >= 0 && triples.add(made.tokens.ids[token]);
      json.take(',');
    }
    const std::int64_t ranks = triples.count / 3;
    good = good && json.expect(']') && ranks <= Merges::kMostRanks && made.merges.reserve(ranks);
    for (std::int64_t i = 0; good && i < ranks; i++)
      made.merges.add(triples.at[3 * i], triples.at[3 * i + 1], i, triples.at[3 * i + 2]);
    std::free(triples.at);
    std::free(pair.at);
    return good;
  }

  // The model of a tokenizer.json, or the model alone.
  bool read(const char* text, std::int64_t length) const {
    Json whole{text, text + length, false}, inner = whole;
    if (inner.enter("model")) whole = inner;
    Json first = whole;
    if (!first.enter("vocab") || !vocabulary(first)) return false;
    const bool behind = first.take(',') && first.seek("merges");
    return (behind || whole.enter("merges")) && merges(behind ? first : whole);
  }
};

}  // namespace

extern "C" void millpond_byte_pairs_free(void* pairs) {
  auto* made = (BytePairs*)pairs;
  made->tokens.release();
  made->merges.release();
  made->added.release();
  made->around.release();
  std::free(made->merged);
  std::free(made);
}

// `json`: a tokenizer.json, or its model. `added`: the added tokens one after another, the longest first, each up to its
// end in `ends`, with ids and flags. Returns null if the model is none of byte-level BPE, or there is no memory.
extern "C" void* millpond_byte_pairs(const char* json, std::int64_t length, const char* added, const std::int64_t* ends,
                                     const std::int32_t* ids, const std::int32_t* flags, std::int64_t tokens,
                                     int pattern, int options, const std::int32_t* around, std::int64_t before,
                                     std::int64_t after) {
  auto* made = (BytePairs*)std::calloc(1, sizeof(BytePairs));
  if (!made) return nullptr;
  made->characters = word_characters();
  made->options = options;
  if (!made->characters || !made->around.copy(around, before, after) ||
      !made->added.copy(added, ends, ids, flags, tokens) || !Reader(*made).read(json, length)) {
    millpond_byte_pairs_free(made);
    return nullptr;
  }
  made->words = {made->characters->classes, Pattern(pattern)};
  return made;
}

extern "C" void millpond_byte_pairs_split(const void* made, const char* text, const std::int64_t* ends,
                                          std::int64_t texts, std::int32_t* to, std::int64_t* counts) {
  split_texts(*(const BytePairs*)made, text, ends, texts, to, counts);
}
