// The encoder in bfloat16, for processors with AVX512-BF16.

#include "../encoder/forward.h"
#include "../encoder/pack_rows.h"
#include "../encoder/speed.h"
#include "../heads/vocabulary.h"
#include "../kernel_table.h"

extern "C" void millpond_add_encoder_avx512bf16(KernelTable* table) {
  table->measure_bfloat16 = measure<DotSpeed>;
  table->pack_rows_bfloat16 = pack_rows<uint16_t>;
  table->copy_rows_bfloat16 = copy_rows<uint16_t>;
  table->encode_bfloat16 = Forward<DotIsa>::encode;
  table->encoder_workspace_bfloat16 = Forward<DotIsa>::workspace;
  table->vocabulary_bfloat16 = Vocabulary<DotIsa>::run;
}
