// What an ARM processor has beyond NEON, as the operating system says.
#pragma once

#ifdef __APPLE__
#include <sys/sysctl.h>

#include <cstddef>
#else
#include <sys/auxv.h>
#endif

namespace {

#ifdef __APPLE__

inline bool is_set(const char* name) {
  int value = 0;
  std::size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

struct Features {
  bool dotprod = is_set("hw.optional.arm.FEAT_DotProd");
  bool bf16 = is_set("hw.optional.arm.FEAT_BF16");
  bool i8mm = is_set("hw.optional.arm.FEAT_I8MM");
};

#else

// Bits of Linux's interface; headers of glibc 2.28 lack some.
struct Features {
  bool dotprod = getauxval(AT_HWCAP) & 1ul << 20;  // HWCAP_ASIMDDP
  bool i8mm = getauxval(AT_HWCAP2) & 1ul << 13;    // HWCAP2_I8MM
  bool bf16 = getauxval(AT_HWCAP2) & 1ul << 14;    // HWCAP2_BF16
};

#endif

}  // namespace
