// Late-interaction kernels for every 64-bit ARM processor.

#include "../approximate.h"
#include "../maxsim.h"
#include "../packing.h"

extern "C" void millpond_add_neon(KernelTable* table) {
  table->pack_int8 = pack_int8;
  table->pack_bfloat16 = pack_bfloat16;
  approximate::add(table);
  table->maxsim_int8 = MaxSim<Int8>::call_of;
  table->maxsim_bfloat16 = MaxSim<Bfloat16>::call_of;
  table->maxsim_float32 = MaxSim<Float32>::call_of;
}
