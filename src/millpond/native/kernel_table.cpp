// Which instruction sets this processor and its operating system support, and the table of kernels for them.
// Called by library.py.

#include "kernel_table.h"

#include "heads/calls.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include "arm_neon/features.h"
#endif

namespace {

constexpr bool has(unsigned word, unsigned mask) { return (word & mask) == mask; }
constexpr unsigned bit(int n) { return 1u << n; }

#if defined(__x86_64__) && defined(__linux__)

struct Registers {
  unsigned eax, ebx, ecx, edx;

  explicit Registers(unsigned leaf, unsigned subleaf = 0) : eax(0), ebx(0), ecx(0), edx(0) {
    __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx);
  }
};

// Register states that the operating system saves (XCR0).
unsigned saved_states() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Tile registers are given to a process that asks for them; asking again changes nothing.
bool tiles_granted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// The instruction sets that can be used, a bit each, `highest` at most.
unsigned usable(int highest) {
  const Registers basic(1);
  unsigned sets = bit(k_none);
  if (!has(basic.ecx, bit(27))) return sets;  // OSXSAVE: xgetbv may be executed
  const unsigned saved = saved_states();
  const Registers features(7), more(7, 1);
#define ISA(name, base, flags, instruction, condition) \
  if (highest >= k_##name && has(sets, bit(k_##base)) && (condition)) sets |= bit(k_##name);
  MILLPOND_ISAS(ISA)
#undef ISA
  return sets;
}

#elif defined(__aarch64__)

unsigned usable(int highest) {
  const Features features;
  unsigned sets = bit(k_none);
#define ISA(name, base, flags, instruction, condition) \
  if (highest >= k_##name && has(sets, bit(k_##base)) && (condition)) sets |= bit(k_##name);
  MILLPOND_ISAS(ISA)
#undef ISA
  return sets;
}

#else

unsigned usable(int) { return bit(k_none); }

#endif

}  // namespace

// Fills the table for this processor, with instruction sets up to `highest`; returns the highest one that was used.
extern "C" int millpond_kernel_table(KernelTable* table, int highest) {
  *table = {};
  const unsigned sets = usable(highest);
  int used = k_none;
  const auto add = [&](int level, void (*entries)(KernelTable*)) {
    if (!has(sets, bit(level)) || !entries) return;
    entries(table);
    if (level > used) used = level;
  };
#define ISA(name, ...) add(k_##name, millpond_add_##name);
  MILLPOND_ISAS(ISA)
#undef ISA
#define ISA(name, ...) add(k_##name, millpond_add_encoder_##name);
  MILLPOND_ISAS(ISA)
#undef ISA
  return used;
}

// Size of the table: Python's must be equal.
extern "C" std::int64_t millpond_kernel_table_bytes(void) { return sizeof(KernelTable); }

// Sizes of the encoder's structs: Python's (backends/native/structs.py) must be equal.
extern "C" void millpond_plan_bytes(std::int64_t* sizes) {
  const std::int64_t all[] = {sizeof(Weight),     sizeof(NormWeights),  sizeof(Step),        sizeof(Model),
                              sizeof(EncodeCall), sizeof(PackRowsCall), sizeof(ProductCall), sizeof(GeluCall),
                              sizeof(VocabularyCall)};
  for (const std::int64_t size : all) *sizes++ = size;
}
