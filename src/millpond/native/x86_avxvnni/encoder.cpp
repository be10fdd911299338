// The encoder in eight bits, for processors with AVX-VNNI: float32 is that of AVX2.

#include "../encoder/forward.h"
#include "../encoder/pack_rows.h"
#include "../kernel_table.h"

extern "C" void millpond_add_encoder_avxvnni(KernelTable* table) {
  table->pack_rows_int8 = pack_rows_int8;
  table->encode_float32 = Forward<FmaIsa>::encode;
  table->encoder_workspace_float32 = Forward<FmaIsa>::workspace;
}
