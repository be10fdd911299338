// WordPiece of texts in ASCII, as BERT's tokenizers do it. Called by wordpiece.py, for every processor.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "texts.h"

namespace {

using Byte = unsigned char;

enum Kind : Byte { kLetter, kSpace, kSign, kRefused };

struct Piece {
  std::uint64_t hash;
  const char* at;
  std::int32_t length;  // 0: a free place
  std::int32_t id;
};

constexpr std::uint64_t kBegins = 0xcbf29ce484222325u, kContinues = 0x84222325cbf29ce4u;

inline std::uint64_t extended(std::uint64_t hash, char byte) { return (hash ^ Byte(byte)) * 0x100000001b3u; }

struct WordPieces {
  char* bytes;  // of all tokens
  Piece* places;
  std::int64_t* ends;  // of the added tokens, in lower case, from the end of the tokens before them
  std::int64_t added;
  bool marked[256];  // what one of them begins with
  Kind kinds[256];
  char folded[256];
  std::int64_t mask, longest, most;
  std::int32_t unknown;
  Around around;

  void add(std::uint64_t hash, const char* at, std::int32_t length, std::int32_t id) {
    if (length == 0) return;
    for (std::int32_t i = 0; i < length; i++) hash = extended(hash, at[i]);
    std::int64_t place = std::int64_t(hash >> 20) & mask;
    while (places[place].length) place = (place + 1) & mask;
    places[place] = {hash, at, length, id};
    longest = std::max<std::int64_t>(longest, length);
  }

  // The token of these bytes, or -1. Tokens that begin a word and those that continue one differ in their hashes.
  std::int32_t find(std::uint64_t hash, const char* at, std::int64_t length) const {
    for (std::int64_t place = std::int64_t(hash >> 20) & mask; places[place].length; place = (place + 1) & mask) {
      const Piece& piece = places[place];
      if (piece.hash == hash && piece.length == length && !std::memcmp(piece.at, at, std::size_t(length)))
        return piece.id;
    }
    return -1;
  }

  // Whether an added token may be found in the text, or a byte is not printable ASCII or a common space.
  bool refuses(const char* text, std::int64_t length) const {
    for (std::int64_t i = 0; i < length; i++) {
      if (kinds[Byte(text[i])] == kRefused) return true;
      const char* at = text + i;
      if (!marked[Byte(lower(*at))]) continue;
      for (std::int64_t k = 0; k < added; k++) {
        const char *mark = bytes + ends[k], *last = bytes + ends[k + 1];
        if (last - mark <= length - i && std::equal(mark, last, at, [](char a, char b) { return a == lower(b); }))
          return true;
      }
    }
    return false;
  }

  static char lower(char byte) { return byte >= 'A' && byte <= 'Z' ? char(byte + 32) : byte; }

  // Writes the tokens of a folded word, and returns the place after them.
  std::int32_t* split(const char* word, std::int64_t length, std::uint64_t hash, std::int32_t* to,
                      std::uint64_t* hashes) const {
    if (length > most) return *to = unknown, to + 1;
    if (const std::int32_t whole = find(hash, word, length); whole >= 0) return *to = whole, to + 1;
    std::int32_t* const first = to;
    for (std::int64_t start = 0; start < length;) {
      std::uint64_t sum = start ? kContinues : kBegins;
      std::int64_t size = std::min(longest, length - start);
      for (std::int64_t i = 0; i < size; i++) hashes[i] = sum = extended(sum, word[start + i]);
      std::int32_t id = -1;
      for (; size > 0 && id < 0; size--) id = find(hashes[size - 1], word + start, size);
      if (id < 0) return *first = unknown, first + 1;
      *to++ = id;
      start += size + 1;
    }
    return to;
  }

  // Writes the tokens of a text, and returns the place after them; null: it is not split here.
  std::int32_t* read(const char* at, const char* end, std::int32_t* to) const {
    // Words longer than this are unknown, or too long to be looked for here.
    constexpr std::int64_t kWord = 256;
    char word[kWord];
    std::uint64_t hashes[kWord];
    if (refuses(at, end - at)) return nullptr;
    while (at < end) {
      const Kind kind = kinds[Byte(*at)];
      std::int64_t length = 0;
      std::uint64_t hash = kBegins;
      if (kind == kSpace) {
        at++;
        continue;
      }
      do {
        const char byte = folded[Byte(*at)];
        if (length < kWord) word[length] = byte;
        hash = extended(hash, byte);
        length++, at++;
      } while (kind == kLetter && at < end && kinds[Byte(*at)] == kLetter);
      to = split(word, length, hash, to, hashes);
    }
    return to;
  }
};

}  // namespace

extern "C" void millpond_wordpiece_free(void* pieces) {
  auto* made = (WordPieces*)pieces;
  std::free(made->bytes);
  std::free(made->places);
  std::free(made->ends);
  made->around.release();
  std::free(made);
}

// `bytes`: the tokens one after another, each up to its end in `ends`, and then the added tokens in lower case. The
// tokens from `continuing` on continue a word, their mark left out. `around`: the special tokens before a text and after
// it. Returns null if there is no memory.
extern "C" void* millpond_wordpiece(const char* bytes, const std::int64_t* ends, const std::int32_t* ids,
                                    std::int64_t continuing, std::int64_t tokens, std::int64_t added,
                                    std::int64_t most, std::int32_t unknown, int folds, const std::int32_t* around,
                                    std::int64_t before, std::int64_t after) {
  std::int64_t size = 64;
  while (size < 4 * tokens) size *= 2;
  const std::int64_t last = tokens + added, length = last ? ends[last - 1] : 0;
  auto* made = (WordPieces*)std::calloc(1, sizeof(WordPieces));
  if (!made) return nullptr;
  made->bytes = (char*)std::malloc(std::size_t(length) + 1);
  made->places = (Piece*)std::calloc(std::size_t(size), sizeof(Piece));
  made->ends = (std::int64_t*)std::malloc(std::size_t(added + 1) * sizeof(std::int64_t));
  if (!made->bytes || !made->places || !made->ends || !made->around.copy(around, before, after)) {
    millpond_wordpiece_free(made);
    return nullptr;
  }
  std::memcpy(made->bytes, bytes, std::size_t(length));
  made->mask = size - 1, made->longest = 1, made->most = most, made->unknown = unknown, made->added = added;
  made->ends[0] = tokens ? ends[tokens - 1] : 0;
  for (int byte = 0; byte < 256; byte++) {
    const int small = byte < 128 ? WordPieces::lower(char(byte)) : 0;
    const bool letter = (small >= '0' && small <= '9') || (small >= 'a' && small <= 'z');
    const bool space = byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r';
    made->kinds[byte] = letter ? kLetter : space ? kSpace : byte > ' ' && byte < 127 ? kSign : kRefused;
    made->folded[byte] = folds ? WordPieces::lower(char(byte)) : char(byte);
  }
  for (std::int64_t i = 0, start = 0; i < last; start = ends[i++]) {
    const char* at = made->bytes + start;
    if (i < tokens) {
      made->add(i < continuing ? kBegins : kContinues, at, std::int32_t(ends[i] - start), ids[i]);
    } else {
      made->ends[i - tokens + 1] = ends[i];
      made->marked[Byte(*at)] = true;
    }
  }
  return made;
}

extern "C" void millpond_wordpiece_split(const void* made, const char* text, const std::int64_t* ends,
                                         std::int64_t texts, std::int32_t* to, std::int64_t* counts) {
  split_texts(*(const WordPieces*)made, text, ends, texts, to, counts);
}
