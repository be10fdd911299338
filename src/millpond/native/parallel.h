// Threads of one call.
//
// Those of run_threads are started for it and joined, which costs some 20 microseconds a thread: late interaction asks
// for them where there is much work. Those of run_team wait for the next call between two calls, since a forward pass of
// one short text takes a few hundred microseconds.
#pragma once

#include <cstdint>

#define MILLPOND_HIDDEN __attribute__((visibility("hidden")))

namespace {

// Gives the core's other thread, or its power, a moment while this one watches a word.
inline __attribute__((always_inline)) void relax() {
#ifdef __aarch64__
  __asm__ volatile("isb");  // `yield` does nothing on most cores
#else
  __builtin_ia32_pause();
#endif
}

}  // namespace

// Calls `work(job)` in `threads` threads at once, the calling one included, or in fewer if the system has no more.
// They share the job and take parts of it by its counter.
MILLPOND_HIDDEN void run_threads(void (*work)(void*), void* job, std::int64_t threads);

// Calls `work(job, member)` in up to `threads` threads, the calling one included as member 0. The others join when they
// are awake: the work may be done before one of them has begun, and then it does not begin. So no member may wait for
// another one that has not taken a part yet. Threads of a pool, which a forked child starts anew.
MILLPOND_HIDDEN void run_team(void (*work)(void*, std::int64_t), void* job, std::int64_t threads);

// Sleeps as long as `*word` is `value`, until wake_all or, sometimes, for no reason.
MILLPOND_HIDDEN void sleep_while(const std::int32_t* word, std::int32_t value);
MILLPOND_HIDDEN void wake_all(const std::int32_t* word);
