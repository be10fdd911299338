// The encoder in bfloat16, and products in eight bits of both precisions, for ARM processors with BFMMLA and SMMLA.

#include "mmla_products.h"

#include "../encoder/forward.h"
#include "../encoder/pack_rows.h"
#include "../encoder/speed.h"
#include "../heads/vocabulary.h"
#include "../kernel_table.h"

extern "C" void millpond_add_encoder_bf16(KernelTable* table) {
  table->measure_bfloat16 = measure<MmlaSpeed>;
  table->pack_rows_bfloat16 = pack_rows<uint16_t>;
  table->copy_rows_bfloat16 = copy_rows<uint16_t>;
  table->encode_bfloat16 = Forward<MmlaIsa>::encode;
  table->encoder_workspace_bfloat16 = Forward<MmlaIsa>::workspace;
  table->encode_float32 = Forward<FmaIsa>::encode;
  table->encoder_workspace_float32 = Forward<FmaIsa>::workspace;
  table->pack_rows_int8 = pack_rows_int8;
  table->vocabulary_bfloat16 = Vocabulary<MmlaIsa>::run;
}
