// The encoder in float32 with products in eight bits by SDOT.

#include "../encoder/forward.h"
#include "../kernel_table.h"

extern "C" void millpond_add_encoder_dotprod(KernelTable* table) {
  table->encode_float32 = Forward<FmaIsa>::encode;
  table->encoder_workspace_float32 = Forward<FmaIsa>::workspace;
}
