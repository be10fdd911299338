// The table of kernels of late interaction and of the encoder, and the instruction sets that have an implementation of them.
//
// A folder per instruction set holds one translation unit for late interaction (kernels.cpp) and one for the encoder,
// compiled with the flags that its row of isas.h names. They set the entries of the table that they compute faster than
// the folders before them. The shared code is in the headers of
// this folder: same source, other flags. Two rules follow from the flags:
// - Shared code is in an anonymous namespace, and calls no inline function or template of the C++ library. Otherwise
//   the linker could merge it with the copy of another instruction set, which older processors cannot run.
// - Only kernel_table.cpp calls into a folder, after it has checked the processor.
#pragma once

#include <cstdint>

#include "isas.h"

// A kernel takes the address of a struct of its arguments, which Python lays out equally (late_interaction/kernels/),
// and returns 0, or -1 if there is no memory for its workspace. It checks nothing.
using Kernel = std::int64_t (*)(const void* call);

// Null: no instruction set of this processor has it. library.py lists the entries in the same order.
struct KernelTable {
  Kernel pack_int8, pack_bfloat16;                      // packing.h
  Kernel maxsim_int8, maxsim_bfloat16, maxsim_float32;  // maxsim.h
  Kernel nearest_centroids, centroid_similarities, similarity_table;  // centroids.h
  Kernel scan_codes, best_documents;                                  // scan.h
  Kernel score_residuals, encode_residuals;                           // residuals.h
  Kernel measure_float32, measure_bfloat16;                           // encoder/speed.h
  Kernel encode_float32, encoder_workspace_float32;                                  // encoder/forward.h
  Kernel encode_bfloat16, encoder_workspace_bfloat16;
  Kernel attention_bfloat16, attention_workspace_bfloat16;  // of attention_call.h; null: those of attention.cpp
  Kernel pack_rows_float32, pack_rows_bfloat16;  // encoder/pack_rows.h
  Kernel pack_rows_int8;
  Kernel copy_rows_float32, copy_rows_bfloat16;
  Kernel head_product, gelu, vocabulary_float32, vocabulary_bfloat16;  // heads/
};

// As numbers: k_avx2 is 1.
#define ISA(name, ...) k_##name,
enum Isa { k_none, MILLPOND_ISAS(ISA) };
#undef ISA

// Set the entries that an instruction set implements. Weak: the compiler may not know the instruction set.
#define MILLPOND_FOLDER extern "C" __attribute__((weak, visibility("hidden"))) void
#define ISA(name, ...)                                    \
  MILLPOND_FOLDER millpond_add_##name(KernelTable* table); \
  MILLPOND_FOLDER millpond_add_encoder_##name(KernelTable* table);
MILLPOND_ISAS(ISA)
#undef ISA
