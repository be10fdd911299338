// The encoder, and attention for the models that it does not take, in bfloat16 tiles: for processors with AMX.

#include "../encoder/forward.h"
#include "../heads/vocabulary.h"
#include "../kernel_table.h"
#include "segment_attention.h"
#include "tile_codes.h"

extern "C" void millpond_add_encoder_amx(KernelTable* table) {
  table->encode_bfloat16 = Forward<TileIsa>::encode;
  table->encoder_workspace_bfloat16 = Forward<TileIsa>::workspace;
  table->vocabulary_bfloat16 = Vocabulary<TileIsa>::run;
  table->attention_bfloat16 = SegmentAttention::run;
  table->attention_workspace_bfloat16 = SegmentAttention::workspace;
}
