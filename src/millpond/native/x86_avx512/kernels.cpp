// Compiler flags: -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni
// Late-interaction kernels for processors with AVX512-VNNI.

#include "../approximate.h"
#include "../packing.h"

extern "C" void millpond_add_avx512(KernelTable* table) {
  table->pack_int8 = pack_int8;
  table->pack_bfloat16 = pack_bfloat16;
  approximate::add(table);
}
