// The arguments of the kernels of heads, as backends/native/heads/kernels.py lays them out.
//
// Rows are float32, one behind another. Weights are padded with zeros to multiples of 32, and packed by `pack_rows`.
#pragma once

#include "../encoder/plan.h"

// out = rows W^T + bias
struct ProductCall {
  const float* rows;  // [count, width]
  float* out;         // [count, columns]
  Weight weight;      // in float32
  std::int64_t count, width, columns, threads;
};

struct GeluCall {
  float* numbers;  // [count], replaced
  std::int64_t count;
};

// The logits of a masked language model, decoder(norm(activation(dense(rows)))), pooled over the rows of each text.
struct VocabularyCall {
  const float* rows;           // [rows, width]
  const std::int32_t* bounds;  // [texts + 1], where each text begins and ends
  float* out;                  // [texts, decoder.out]
  Weight dense, decoder;       // in the precision of the kernel
  NormWeights norm;            // a layer norm, of dense.out columns: zeros behind `columns`
  std::int64_t width, columns;  // of the rows, and of the norm
  std::int64_t texts, activation;
  std::int64_t logarithms;     // 0: the largest logit; 1: the sum of log(1 + positive logits); 2: of log(1 + that)
  std::int64_t threads;
};
