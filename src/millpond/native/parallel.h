// Threads of one call. Those of run_threads are started for it and joined: a pool would be dead in a forked child, and torch's own
// threads are too. A thread costs some 20 microseconds, so only calls of much work ask for several.
#pragma once

#include <cstdint>

// Calls `work(job)` in `threads` threads at once, the calling one included, or in fewer if the system has no more.
// They share the job and take parts of it by its counter.
__attribute__((visibility("hidden"))) void run_threads(void (*work)(void*), void* job, std::int64_t threads);

// Calls `work(job)` in `threads` of torch's OpenMP threads at once, the calling one included, or in fewer; in the calling
// one alone if torch brings no OpenMP. team_size() is their number, inside of `work`.
__attribute__((visibility("hidden"))) void run_torch_threads(void (*work)(void*), void* job, std::int64_t threads);
__attribute__((visibility("hidden"))) std::int64_t team_size();
