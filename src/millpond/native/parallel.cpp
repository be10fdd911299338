// The threads of the late-interaction kernels; the encoder's use torch's (processor.h).

#include "parallel.h"

#include <pthread.h>
#include <signal.h>

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
