// Whether this processor can run the kernels, and the sources they were built from. Called by library.py.

#include "processor.h"

extern "C" int millpond_supported(void) {
#if MILLPOND_NATIVE
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return 0;
#endif
}

// The hash of the sources, as library.py computes it; hatch_build.py defines it.
#ifndef MILLPOND_SOURCE_HASH
#define MILLPOND_SOURCE_HASH 0
#endif
extern "C" std::uint64_t millpond_source_hash(void) { return MILLPOND_SOURCE_HASH; }
