// The threads that work on one block together.
#pragma once

#include <sched.h>

#include "states.h"

namespace {

// Shared by the threads of a call. Threads of a team pass a barrier together; between two barriers each does its part.
struct Barrier {
  int64_t members;
  int64_t waiting;
  int64_t generation;
};

struct Team {
  Barrier* barrier;  // null: one thread
  int64_t member, members;

  void wait() const {
    if (members == 1) return;
    const int64_t generation = __atomic_load_n(&barrier->generation, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&barrier->waiting, 1, __ATOMIC_ACQ_REL) == members) {
      __atomic_store_n(&barrier->waiting, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&barrier->generation, generation + 1, __ATOMIC_RELEASE);
      return;
    }
    // A member that lost its core would be waited for in vain: yield after some thousand rounds.
    for (int64_t round = 0; __atomic_load_n(&barrier->generation, __ATOMIC_ACQUIRE) == generation; round++) {
      if (round < 20000)
        _mm_pause();
      else
        sched_yield();
    }
  }

  // The part of `count` pieces that this member works on.
  int64_t first(int64_t count) const { return count * member / members; }
  int64_t last(int64_t count) const { return count * (member + 1) / members; }
};

}  // namespace
