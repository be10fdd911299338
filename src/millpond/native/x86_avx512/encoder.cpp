// The encoder in float32, for processors with AVX512-VNNI.

#include "../encoder/forward.h"
#include "../encoder/pack_rows.h"
#include "../encoder/speed.h"
#include "../heads/vocabulary.h"
#include "../kernel_table.h"

extern "C" void millpond_add_encoder_avx512(KernelTable* table) {
  table->measure_float32 = measure<FmaSpeed>;
  table->pack_rows_float32 = pack_rows<float>;
  table->pack_rows_int8 = pack_rows_int8;
  table->copy_rows_float32 = copy_rows<float>;
  table->encode_float32 = Forward<FmaIsa>::encode;
  table->encoder_workspace_float32 = Forward<FmaIsa>::workspace;
  table->head_product = HeadProduct::run;
  table->gelu = gelu;
  table->vocabulary_float32 = Vocabulary<FmaIsa>::run;
}
