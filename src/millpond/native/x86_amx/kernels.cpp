// Late-interaction kernels that multiply tiles, for processors with AMX.

#include "../maxsim.h"
#include "tiles.h"

extern "C" void millpond_add_amx(KernelTable* table) {
  table->maxsim_int8 = MaxSim<Int8Tiles>::call_of;
  table->maxsim_bfloat16 = MaxSim<Bfloat16Tiles>::call_of;
}
