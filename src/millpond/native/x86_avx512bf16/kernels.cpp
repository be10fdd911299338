// Compiler flags: -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16
// Late-interaction kernels that multiply bfloat16, for processors with AVX512-BF16.

#include "../maxsim.h"

extern "C" void millpond_add_avx512bf16(KernelTable* table) {
  table->maxsim_bfloat16 = MaxSim<Bfloat16>::call_of;
}
