// Whether the kernels run here, and which they are: library.py asks.

#include "processor.h"

extern "C" int millpond_fits(void) {
#if MILLPOND_NATIVE
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return 0;
#endif
}

// The sources that this was built from, as library.py counts them.
#ifndef MILLPOND_SOURCES
#define MILLPOND_SOURCES 0
#endif
extern "C" std::uint64_t millpond_sources(void) { return MILLPOND_SOURCES; }
