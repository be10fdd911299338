// Reads the vocabulary and the merges of a BPE model from JSON that the library tokenizers wrote.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "utf8.h"

struct Json {
  const char* at;
  const char* end;
  bool broken;

  char peek() {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) at++;
    return at < end ? *at : '\0';
  }
  // Whether the next sign is this one, which then is behind.
  bool take(char sign) { return peek() == sign ? at++, true : false; }
  bool expect(char sign) {
    if (!take(sign)) broken = true;
    return !broken;
  }

  // A string's characters, each given to `add`.
  template <class Add>
  void string(const Add& add) {
    if (!expect('"')) return;
    while (at < end && *at != '"') {
      if (*at != '\\') {
        if (Byte(*at) >= 0x80 && end - at < 4) return void(broken = true);
        add(next_character(at));
        continue;
      }
      if (++at >= end) break;
      const char* const found = std::strchr("n\nt\tr\rb\bf\f", *at);
      if (*at == 'u') {
        at++;
        Character character = hex();
        if (character >= 0xd800 && character < 0xdc00 && end - at > 6 && at[0] == '\\' && at[1] == 'u') {
          at += 2;
          character = 0x10000 + ((character - 0xd800) << 10) + (hex() - 0xdc00);
        }
        add(character);
      } else {
        add(Character(found && *at > '\r' ? found[1] : *at));
        at++;
      }
    }
    expect('"');
  }

  Character hex() {
    Character value = 0;
    for (int i = 0; i < 4 && at < end; i++, at++) {
      const char low = char(*at | 32);
      value = value * 16 + Character(low >= 'a' ? low - 'a' + 10 : low - '0');
    }
    return value;
  }

  std::int64_t number() {
    std::int64_t value = 0;
    if (peek() < '0' || *at > '9') broken = true;
    for (; at < end && *at >= '0' && *at <= '9'; at++) value = std::min<std::int64_t>(value, 1 << 30) * 10 + (*at - '0');
    return value;
  }

  // Goes behind any value.
  void skip() {
    int depth = 0;
    do {
      const char sign = peek();
      if (sign == '"') {
        string([](Character) {});
      } else if (sign == '{' || sign == '[') {
        depth++, at++;
      } else if (sign == '}' || sign == ']') {
        depth--, at++;
      } else if (sign == '\0') {
        broken = true;
      } else {
        at++;
      }
      while (depth == 0 && at < end && !std::strchr(",}] \n\r\t", *at)) at++;
    } while (depth > 0 && !broken);
  }

  // Goes to the value of a key of the object that comes; false: it has none.
  bool enter(const char* key) { return take('{') && seek(key); }

  // Goes to the value of a key that comes in this object.
  bool seek(const char* key) {
    const std::size_t length = std::strlen(key);
    while (!broken && peek() == '"') {
      std::size_t count = 0;
      bool same = true;
      string([&](Character c) { same &= count < length && c == Character(key[count]), count++; });
      if (!expect(':')) return false;
      if (same && count == length) return true;
      skip();
      take(',');
    }
    return false;
  }
};
