// Late-interaction kernels for ARM processors with SMMLA and BFMMLA.

#include "../approximate.h"
#include "../maxsim.h"
#include "pairs.h"

extern "C" void millpond_add_bf16(KernelTable* table) {
  approximate::add(table);
  table->maxsim_int8 = MaxSim<Int8Pairs>::call_of;
  table->maxsim_bfloat16 = MaxSim<Bfloat16Pairs>::call_of;
}
