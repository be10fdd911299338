// The encoder, and attention for the models that it does not take, in bfloat16 tiles: for processors with AMX.

#include "../encoder/forward.h"
#include "../heads/vocabulary.h"
#include "../kernel_table.h"
#include "segment_attention.h"
#include "tile_codes.h"

extern "C" void millpond_add_encoder_amx(KernelTable* table) {
  table->pack_weight_bfloat16 = Forward<TileIsa>::pack;
  table->encode_bfloat16 = Forward<TileIsa>::encode;
  table->encoder_workspace_bfloat16 = Forward<TileIsa>::workspace;
  table->vocabulary_bfloat16 = Vocabulary<TileIsa>::run;
  table->pack_weight_int8 = Forward<TileIsa>::pack_int8;
  table->attention_bfloat16 = SegmentAttention::run;
  table->attention_workspace_bfloat16 = SegmentAttention::workspace;
}
