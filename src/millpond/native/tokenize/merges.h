// The merges of byte-pair encoding: pairs of tokens by their ranks, and a word's tokens by them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "vocabulary.h"

struct Merges {
  static constexpr std::int64_t kMostTokens = 1 << 20, kMostRanks = (1 << 24) - 1;
  static constexpr std::uint32_t kNone = 0xffffffffu;
  // A longer word takes a heap of its pairs.
  static constexpr std::int64_t kShort = 64;

  std::uint64_t* places;  // left token, right token and rank + 1 in 20, 20 and 24 bits; 0: a free place
  std::int32_t* made;     // token of each rank
  int shift;

  bool reserve(std::int64_t ranks) {
    shift = shift_for(ranks);
    places = (std::uint64_t*)std::calloc(std::size_t(1) << (64 - shift), sizeof(std::uint64_t));
    made = (std::int32_t*)std::malloc(std::size_t(ranks + 1) * sizeof(std::int32_t));
    return places && made;
  }
  void release() {
    std::free(places);
    std::free(made);
  }

  std::uint64_t* place(std::int32_t left, std::int32_t right) const {
    const std::uint64_t key = std::uint64_t(left) << 20 | std::uint64_t(right);
    const std::uint64_t mask = (std::uint64_t(1) << (64 - shift)) - 1;
    std::uint64_t at = scattered(key) >> shift;
    while (places[at] && places[at] >> 24 != key) at = (at + 1) & mask;
    return places + at;
  }
  // The last rank of a pair counts.
  void add(std::int32_t left, std::int32_t right, std::int64_t rank, std::int32_t token) {
    *place(left, right) = (std::uint64_t(left) << 20 | std::uint64_t(right)) << 24 | std::uint64_t(rank + 1);
    made[rank] = token;
  }
  std::uint32_t rank(std::int32_t left, std::int32_t right) const {
    return std::uint32_t(*place(left, right) & 0xffffffu) - 1;
  }

  // Merges `count` tokens where they are: the pair of the lowest rank first, of several the first one. Returns how many
  // are left; -1: there is no memory.
  std::int64_t apply(std::int32_t* tokens, std::int64_t count) const {
    if (count > kShort) return apply_long(tokens, count);
    std::uint32_t ranks[kShort];
    for (std::int64_t i = 0; i + 1 < count; i++) ranks[i] = rank(tokens[i], tokens[i + 1]);
    while (count > 1) {
      std::int64_t best = 0;
      for (std::int64_t i = 1; i + 1 < count; i++)
        if (ranks[i] < ranks[best]) best = i;
      if (ranks[best] == kNone) break;
      tokens[best] = made[ranks[best]];
      count--;
      const std::size_t rest = std::size_t(count - best - 1);
      std::memmove(tokens + best + 1, tokens + best + 2, rest * sizeof *tokens);
      if (rest) std::memmove(ranks + best, ranks + best + 1, rest * sizeof *ranks);
      if (best) ranks[best - 1] = rank(tokens[best - 1], tokens[best]);
      if (rest) ranks[best] = rank(tokens[best], tokens[best + 1]);
    }
    return count;
  }

 private:
  // A word as a list, with the ranks of its pairs. A heap has them in order: a rank above, and a place.
  struct List {
    std::int32_t *next, *last;
    std::uint32_t* ranks;
    std::uint64_t* heap;
    std::int64_t waiting;

    void wait(std::uint32_t rank, std::int64_t place) {
      ranks[place] = rank;
      if (rank == kNone) return;
      heap[waiting++] = std::uint64_t(rank) << 32 | std::uint64_t(place);
      std::push_heap(heap, heap + waiting, std::greater<>());
    }
  };

  std::int64_t apply_long(std::int32_t* tokens, std::int64_t count) const {
    const std::size_t length = std::size_t(count);
    auto* memory = (char*)std::malloc(length * (3 * sizeof(std::uint64_t) + 3 * sizeof(std::int32_t)));
    if (!memory) return -1;
    List list{};
    list.heap = (std::uint64_t*)memory;
    list.next = (std::int32_t*)(list.heap + 3 * length), list.last = list.next + length;
    list.ranks = (std::uint32_t*)(list.last + length);
    for (std::int64_t i = 0; i < count; i++) {
      list.next[i] = std::int32_t(i + 1 < count ? i + 1 : -1), list.last[i] = std::int32_t(i - 1);
      list.wait(i + 1 < count ? rank(tokens[i], tokens[i + 1]) : kNone, i);
    }
    while (list.waiting) {
      std::pop_heap(list.heap, list.heap + list.waiting, std::greater<>());
      const std::uint64_t top = list.heap[--list.waiting];
      const std::int64_t place = std::int64_t(top & 0xffffffffu);
      const std::uint32_t best = std::uint32_t(top >> 32);
      if (list.ranks[place] != best) continue;  // one of the pair was merged with another
      tokens[place] = made[best];
      const std::int32_t gone = list.next[place], after = list.next[gone], before = list.last[place];
      list.ranks[gone] = kNone;
      list.next[place] = after;
      if (after >= 0) list.last[after] = std::int32_t(place);
      list.wait(after >= 0 ? rank(tokens[place], tokens[after]) : kNone, place);
      if (before >= 0) list.wait(rank(tokens[before], tokens[place]), before);
    }
    std::int64_t left = 0;
    for (std::int64_t place = 0; place >= 0; place = list.next[place]) tokens[left++] = tokens[place];
    std::free(memory);
    return left;
  }
};
