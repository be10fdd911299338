// The peak of one core: how many operations a second its multiply-add instructions do on registers alone.
// Twelve independent sums hide the latency; the best of many short windows, since other work only lowers it.
// Compiled by peak.py with a macro for each instruction that the processor has. Prints "name Gop/s" lines.
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <sys/syscall.h>
#include <unistd.h>

static double now() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
}

template <class Run>
static void measure(const char* name, double operations, Run run) {
  double least = 1e9;
  for (int window = 0; window < 600; window++) {
    const double begun = now();
    for (int i = 0; i < 4000; i++) run();
    const double seconds = now() - begun;
    if (seconds < least) least = seconds;
  }
  std::printf("%s %.1f\n", name, 4000 * operations / least / 1e9);
}

#define ONE(op, r, n) op " %%" r "0, %%" r "1, %%" r n "\n"
#define FOUR(op, r, a, b, c, d) ONE(op, r, a) ONE(op, r, b) ONE(op, r, c) ONE(op, r, d)
#define TWELVE(op, r) FOUR(op, r, "4", "5", "6", "7") FOUR(op, r, "8", "9", "10", "11") FOUR(op, r, "12", "13", "14", "15")
#define CHANGED "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"
#define VECTOR(name, op, r, operations) measure(name, 12 * operations, [] { asm volatile(TWELVE(op, r)::: CHANGED); })

#ifdef HAS_AMX
static void tiles() {
  struct alignas(64) {
    std::uint8_t palette, start, reserved[14];
    std::uint16_t bytes[16];
    std::uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return;  // the system grants no tiles
  asm volatile("ldtilecfg %0" ::"m"(config));
  asm volatile(
      "tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n"
      "tilezero %%tmm4\n tilezero %%tmm5\n tilezero %%tmm6\n tilezero %%tmm7\n" ::);
#define TILES(op)                                                      \
  op " %%tmm4, %%tmm6, %%tmm0\n" op " %%tmm5, %%tmm6, %%tmm1\n" op     \
     " %%tmm4, %%tmm7, %%tmm2\n" op " %%tmm5, %%tmm7, %%tmm3\n"
  measure("amx bfloat16", 4 * 16384.0, [] { asm volatile(TILES("tdpbf16ps") ::); });
  measure("amx int8", 4 * 32768.0, [] { asm volatile(TILES("tdpbssd") ::); });
  asm volatile("tilerelease");
}
#endif

int main() {
  asm volatile("vzeroall" ::: "xmm0", "xmm1", CHANGED);
  VECTOR("avx2 float32", "vfmadd231ps", "ymm", 16);
  VECTOR("avx2 int8", "vpmaddubsw", "ymm", 64);  // sums of 16 bits, which a product has to widen
#ifdef HAS_AVX512
  VECTOR("avx512 float32", "vfmadd231ps", "zmm", 32);
#endif
#ifdef HAS_VNNI
  VECTOR("avx512 int8", "vpdpbusd", "zmm", 128);
#endif
#ifdef HAS_AVX512BF16
  VECTOR("avx512bf16 bfloat16", "vdpbf16ps", "zmm", 64);
#endif
#ifdef HAS_AMX
  tiles();
#endif
  return 0;
}
