// Compiler flags: -mavx2 -mfma -mf16c -mbmi2
// Late-interaction kernels for processors with AVX2.

#include "../approximate.h"
#include "../packing.h"

extern "C" void millpond_add_avx2(KernelTable* table) {
  table->pack_int8 = pack_int8;
  table->pack_bfloat16 = pack_bfloat16;
  approximate::add(table);
}
