// Compiler flags: -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16
// Late-interaction kernels that multiply tiles, for processors with AMX.

#include "../kernel_table.h"

extern "C" void millpond_add_amx(KernelTable*) {}
