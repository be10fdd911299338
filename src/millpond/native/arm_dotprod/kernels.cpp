// Late-interaction kernels that multiply eight bits, for ARM processors with SDOT.

#include "../approximate.h"
#include "../maxsim.h"

extern "C" void millpond_add_dotprod(KernelTable* table) {
  approximate::add(table);
  table->maxsim_int8 = MaxSim<Int8>::call_of;
}
