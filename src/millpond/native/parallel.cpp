// The threads of the late-interaction kernels and of the encoder.

#include "parallel.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

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

#ifdef __linux__

void sleep_while(const std::int32_t* word, std::int32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(const std::int32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0); }

namespace {
void forget_sleepers() {}
}  // namespace

#else  // macOS has no futex: all sleepers wait for one condition, and look at their own words again

namespace {

pthread_mutex_t sleepers = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t woken = PTHREAD_COND_INITIALIZER;

void forget_sleepers() {
  sleepers = PTHREAD_MUTEX_INITIALIZER;
  woken = PTHREAD_COND_INITIALIZER;
}

}  // namespace

void sleep_while(const std::int32_t* word, std::int32_t value) {
  pthread_mutex_lock(&sleepers);
  if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value) pthread_cond_wait(&woken, &sleepers);
  pthread_mutex_unlock(&sleepers);
}

void wake_all(const std::int32_t*) {  // the word has changed: whoever looks at it from here on does not sleep
  pthread_mutex_lock(&sleepers);
  pthread_cond_broadcast(&woken);
  pthread_mutex_unlock(&sleepers);
}

#endif

namespace {

// What a worker is doing. A caller posts work to an idle worker, and withdraws what it has not begun.
enum Doing : std::int32_t { kIdle, kAsleep, kPosted, kRunning, kAwaited };

// How long a thread watches a word before it sleeps: a sleeping one is awake again after 50 microseconds or more, and a
// watching one takes a core from whoever else could use it.
constexpr int kWatchForWork = 4000, kWatchForEnd = 1000;

struct Worker {
  std::int32_t doing;
  void (*work)(void*, std::int64_t);
  void* job;
  std::int64_t member;
  std::int64_t number;  // from 0, in the order in which they were started
  Worker* next;  // of the free ones
};

// The cores that workers stay on, one after another; none: the system moves them.
constexpr std::int64_t kMostCores = 1024;
std::int32_t pins[kMostCores];
std::int64_t pin_count = 0;

// Keeps the calling thread on its core: beside other programs a worker that wakes up may get the core of its caller.
void stay([[maybe_unused]] std::int64_t number) {
#ifdef __linux__
  if (pin_count == 0) return;
  const std::int32_t core = pins[number % pin_count];
  std::uint64_t mask[kMostCores / 64] = {};
  mask[core / 64] = std::uint64_t(1) << core % 64;
  syscall(SYS_sched_setaffinity, 0, sizeof mask, mask);  // fails for a core that was taken away; then it moves
#endif
}

// Workers are never freed: one may still be about to look at its word.
struct Pool {
  pthread_mutex_t mutex;
  Worker* free;
  std::int64_t count;
};
Pool pool = {PTHREAD_MUTEX_INITIALIZER, nullptr, 0};

std::int32_t doing(const Worker* worker) { return __atomic_load_n(&worker->doing, __ATOMIC_ACQUIRE); }

bool change(Worker* worker, std::int32_t from, std::int32_t to) {
  return __atomic_compare_exchange_n(&worker->doing, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

void* serve(void* argument) {
  auto* worker = (Worker*)argument;
  stay(worker->number);
  for (;;) {
    for (int round = 0; round < kWatchForWork && doing(worker) == kIdle; round++) relax();
    if (change(worker, kIdle, kAsleep))
      while (doing(worker) == kAsleep) sleep_while(&worker->doing, kAsleep);
    if (!change(worker, kPosted, kRunning)) continue;
    worker->work(worker->job, worker->member);
    if (__atomic_exchange_n(&worker->doing, kIdle, __ATOMIC_ACQ_REL) == kAwaited) wake_all(&worker->doing);
  }
  return nullptr;
}

Worker* started() {
  auto* worker = (Worker*)calloc(1, sizeof(Worker));  // kIdle
  if (!worker) return nullptr;
  worker->number = pool.count;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  sigset_t all, before;  // signals are for Python's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const bool runs = pthread_create(&thread, &attributes, serve, worker) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (runs) return worker;
  free(worker);
  return nullptr;
}

// Up to `wanted` workers that no call uses; returns their number.
std::int64_t hire(Worker** hired, std::int64_t wanted) {
  std::int64_t count = 0;
  pthread_mutex_lock(&pool.mutex);
  for (; count < wanted; count++) {
    Worker* worker = pool.free;
    if (worker) {
      pool.free = worker->next;
    } else {
      worker = pool.count < kMaxThreads ? started() : nullptr;
      if (!worker) break;
      pool.count++;
    }
    hired[count] = worker;
  }
  pthread_mutex_unlock(&pool.mutex);
  return count;
}

void dismiss(Worker** hired, std::int64_t count) {
  pthread_mutex_lock(&pool.mutex);
  while (count > 0) {  // those hired first are on top again: they were at work last
    Worker* worker = hired[--count];
    worker->next = pool.free;
    pool.free = worker;
  }
  pthread_mutex_unlock(&pool.mutex);
}

void await(Worker* worker) {
  if (change(worker, kPosted, kIdle)) return;  // withdrawn
  for (int round = 0; round < kWatchForEnd && doing(worker) == kRunning; round++) relax();
  if (change(worker, kRunning, kAwaited))
    while (doing(worker) == kAwaited) sleep_while(&worker->doing, kAwaited);
}

// The threads of a forked child's parent are not in the child, and the mutex may have been locked.
void forget_workers() {
  pool = {PTHREAD_MUTEX_INITIALIZER, nullptr, 0};
  forget_sleepers();
}

__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, forget_workers); }

}  // namespace

void run_team(void (*work)(void*, std::int64_t), void* job, std::int64_t threads) {
  Worker* hired[kMaxThreads];
  const std::int64_t wanted = threads - 1 < kMaxThreads ? threads - 1 : kMaxThreads;
  const std::int64_t count = wanted > 0 ? hire(hired, wanted) : 0;
  for (std::int64_t i = 0; i < count; i++) {
    Worker* worker = hired[i];
    worker->work = work;
    worker->job = job;
    worker->member = i + 1;
    if (__atomic_exchange_n(&worker->doing, kPosted, __ATOMIC_ACQ_REL) == kAsleep) wake_all(&worker->doing);
  }
  work(job, 0);
  for (std::int64_t i = 0; i < count; i++) await(hired[i]);
  if (count > 0) dismiss(hired, count);
}

// Wakes up to `wanted` workers that no call uses, which then watch for work for a while: a call that follows soon does
// not wait for them. Called before the caller knows its tokens.
extern "C" void millpond_wake_workers(std::int64_t wanted) {
  pthread_mutex_lock(&pool.mutex);
  for (Worker* worker = pool.free; worker && wanted > 0; worker = worker->next, wanted--)
    if (change(worker, kAsleep, kIdle)) wake_all(&worker->doing);
  pthread_mutex_unlock(&pool.mutex);
}

// Workers that are started from now on stay on these cores, one after another.
extern "C" void millpond_pin_workers(const std::int32_t* cores, std::int64_t count) {
  pin_count = 0;
  for (std::int64_t i = 0; i < count; i++)
    if (cores[i] >= 0 && cores[i] < kMostCores) pins[pin_count++ % kMostCores] = cores[i];
  if (pin_count > kMostCores) pin_count = kMostCores;
}
