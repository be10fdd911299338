// The threads of the late-interaction kernels, and torch's threads for the encoder.

#include "parallel.h"

#include <pthread.h>
#include <signal.h>

// GCC's OpenMP, if torch brings it: a second pool would compete with torch's threads for the cores.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
extern "C" int omp_get_num_threads(void) __attribute__((weak));

namespace {

constexpr std::int64_t kMaxThreads = 256;

struct Work {
  void (*run)(void*);
  void* job;
};

void* start(void* argument) {
  const auto& work = *(const Work*)argument;
  work.run(work.job);
  return nullptr;
}

}  // namespace

void run_threads(void (*run)(void*), void* job, std::int64_t threads) {
  Work work{run, job};
  pthread_t others[kMaxThreads];
  std::int64_t started = 0;
  if (threads > 1) {
    // Signals are for Python's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < threads - 1 && started < kMaxThreads &&
           pthread_create(others + started, nullptr, start, &work) == 0)
      started++;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  run(job);
  while (started > 0) pthread_join(others[--started], nullptr);
}

void run_torch_threads(void (*run)(void*), void* job, std::int64_t threads) {
  if (threads > 1 && GOMP_parallel && omp_get_num_threads)
    GOMP_parallel(run, job, unsigned(threads), 0);
  else
    run(job);
}

std::int64_t team_size() { return omp_get_num_threads ? omp_get_num_threads() : 1; }
