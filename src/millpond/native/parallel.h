// Threads of one call. They are started for it and joined: a pool would be dead in a forked child, and torch's own
// threads are too. A thread costs some 20 microseconds, so only calls of much work ask for several.
#pragma once

#include <cstdint>

// Calls `work(job)` in `threads` threads at once, the calling one included, or in fewer if the system has no more.
// They share the job and take parts of it by its counter.
__attribute__((visibility("hidden"))) void run_threads(void (*work)(void*), void* job, std::int64_t threads);
