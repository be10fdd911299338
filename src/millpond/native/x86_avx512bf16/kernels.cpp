// Late-interaction kernels that multiply bfloat16, for processors with AVX512-BF16.

#include "../maxsim.h"

extern "C" void millpond_add_avx512bf16(KernelTable* table) {
  table->maxsim_bfloat16 = MaxSim<Bfloat16>::call_of;
}
