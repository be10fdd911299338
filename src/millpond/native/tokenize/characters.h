// What BERT's normalizer and pre-tokenizer, and the patterns of byte-level BPE, do with each character.

#pragma once

#include "utf8.h"

constexpr Character kCharacters = 0x110000;

// Of BertCharacters. Those with kLower or kStrip become others in lower case, or without accents.
enum BertFlag : Byte {
  kIsRemoved = 1,
  kIsSpace = 2,
  kIsSign = 4,
  kIsChinese = 8,
  kIsMark = 16,
  kIsMoving = 32,
  kHasLower = 64,
  kHasStripped = 128,
};

// Of WordCharacters: a class, and what it does under NFC.
enum WordClass : Byte { kOther, kSpace, kLetter, kNumber, kAccent, kClass = 7, kMayCompose = 8, kHasClass = 16 };

// Most characters that one becomes in lower case, or without accents.
constexpr int kMostParts = 4;

struct BertCharacters {
  const Byte* flags;  // [kCharacters]

  Character lower(Character character) const;  // but for U+0130, which becomes two
  int strip(Character character, Character* parts) const;
};

struct WordCharacters {
  const Byte* classes;    // [kCharacters]
  const Byte* combining;  // [kCharacters] canonical combining classes
};

// They are made at the first call; null: there is no memory.
const BertCharacters* bert_characters();
const WordCharacters* word_characters();
