// The kernels of approximate search, and their entries of the table: AVX512 and AVX2 have all of them.
#pragma once

#include "centroids.h"
#include "residuals.h"
#include "scan.h"

namespace {
namespace approximate {

inline void add(KernelTable* table) {
  table->nearest_centroids = nearest_centroids;
  table->centroid_similarities = centroid_similarities;
  table->similarity_table = similarity_table;
  table->scan_codes = scan_codes;
  table->best_documents = best_documents;
  table->score_residuals = score_residuals;
  table->encode_residuals = encode_residuals;
}

}  // namespace approximate
}  // namespace
