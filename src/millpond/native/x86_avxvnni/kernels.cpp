// Late-interaction kernels that multiply bytes, for processors with AVX-VNNI.

#include "../maxsim.h"

extern "C" void millpond_add_avxvnni(KernelTable* table) { table->maxsim_int8 = MaxSim<Int8>::call_of; }
