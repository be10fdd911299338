// What the tokenizers share: the special tokens around each text, and the texts of a call one after another.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

// The special tokens before a text and after it.
struct Around {
  std::int32_t* tokens;
  std::int64_t before, after;

  bool copy(const std::int32_t* from, std::int64_t front, std::int64_t back) {
    before = front, after = back;
    tokens = (std::int32_t*)std::malloc(std::size_t(front + back + 1) * sizeof(std::int32_t));
    if (tokens) std::copy_n(from, front + back, tokens);
    return tokens;
  }
  void release() { std::free(tokens); }
};

// The tokens of texts, each up to its end in `ends`, one after another in `to`, which has room for a token a byte and
// for those around each text. `counts`: tokens of each text; -1: it is not split here.
template <class Tokenizer>
void split_texts(const Tokenizer& made, const char* text, const std::int64_t* ends, std::int64_t texts,
                 std::int32_t* to, std::int64_t* counts) {
  for (std::int64_t i = 0, start = 0; i < texts; start = ends[i++]) {
    std::int32_t* const first = to;
    std::int32_t* last = std::copy_n(made.around.tokens, made.around.before, to);
    last = made.read(text + start, text + ends[i], last);
    counts[i] = -1;
    if (!last) continue;
    to = std::copy_n(made.around.tokens + made.around.before, made.around.after, last);
    counts[i] = to - first;
  }
}
