// The threads that work on one block together.
//
// A step is cut into pieces, and a member takes the next piece that nobody has. So a member that has lost its core, or has
// not woken up yet, holds up at most the piece that it has taken, and one that joins late skips what is done.
#pragma once

#include "../parallel.h"
#include "states.h"

namespace {

constexpr int64_t kPiecesOfMember = 2;  // more even out what members lose to others; each costs two atomic operations

// Shared by the threads of a call. Steps are counted through all blocks.
struct Progress {
  // The next piece of the current step in the lower half, the step in the upper one: a piece is taken of that step only.
  alignas(64) uint64_t next;
  alignas(64) int64_t done;  // pieces of the current step
  int32_t sleepers;

  static uint64_t start_of(uint32_t step) { return uint64_t(step) << 32; }
  uint32_t step() const { return uint32_t(__atomic_load_n(&next, __ATOMIC_ACQUIRE) >> 32); }
  const int32_t* word() const { return (const int32_t*)&next + 1; }  // x86 is little-endian
};

struct Team {
  Progress* progress;  // null: one thread
  int64_t members;
  uint32_t step;       // the next one for this member
  int64_t piece, pieces;  // what the member works on

  // Calls `part()` for pieces of a step; returns when the whole step is done.
  template <class Part>
  MILLPOND_INLINE void share(const Part& part) {
    if (members == 1) return part();
    pieces = members * kPiecesOfMember;
    while (take()) {
      part();
      if (__atomic_add_fetch(&progress->done, 1, __ATOMIC_ACQ_REL) == pieces) finish();
    }
    step++;
  }

  // The part of `count` things that this piece has.
  int64_t first(int64_t count) const { return count * piece / pieces; }
  int64_t last(int64_t count) const { return count * (piece + 1) / pieces; }

 private:
  // The next piece; waits for the others when there is none. False once the step is over.
  bool take() {
    for (int64_t round = 0;; round++) {
      uint64_t next = __atomic_load_n(&progress->next, __ATOMIC_ACQUIRE);
      if (uint32_t(next >> 32) != step) return false;
      if (int64_t(next & 0xffffffff) < pieces) {
        piece = int64_t(next & 0xffffffff);
        if (__atomic_compare_exchange_n(&progress->next, &next, next + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
          return true;
      } else if (round < 1000) {
        relax();
      } else {  // a member has lost its core, perhaps to this one
        __atomic_add_fetch(&progress->sleepers, 1, __ATOMIC_SEQ_CST);
        sleep_while(progress->word(), int32_t(step));
        __atomic_sub_fetch(&progress->sleepers, 1, __ATOMIC_SEQ_CST);
      }
    }
  }

  void finish() {
    __atomic_store_n(&progress->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&progress->next, Progress::start_of(step + 1), __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&progress->sleepers, __ATOMIC_SEQ_CST) > 0) wake_all(progress->word());
  }
};

}  // namespace
