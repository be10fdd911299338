// Ward's clustering, the merges in order of height. Called by late_interaction/encoding/ward.py, whose numpy does the same.

#include <cstdint>
#include <limits>

// Chosen when the library is loaded, which needs a linker that glibc has.
#if defined(__x86_64__) && defined(__GLIBC__)
#if defined(__clang__) || __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else  // GCC 11 knows the levels, but cannot choose by them
#define WIDE __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#endif
#else
#define WIDE
#endif

namespace {

constexpr int64_t kLanes = 8;
constexpr double kInfinite = std::numeric_limits<double>::infinity();

// One matrix. All distances and heights are squared.
struct Tree {
  double* distances;  // [n, n], symmetric for clusters that exist, infinite from one to itself; overwritten
  double* sizes;      // [n] rows of each cluster; 0: none
  double* gone;       // [n] infinite for clusters that do not exist, else 0
  int64_t* parents;   // [n] the place that a cluster was merged into
  double* heights;    // [n] of that merge
  double* near;       // [n] at most the distance of the nearest cluster
  int64_t* nearest;   // [n] that cluster; -1: near is a bound, and the nearest is not known
  double* merged;     // [n]
};

// The least of row[k] + gone[k].
WIDE double least(const double* row, const double* gone, int64_t n) {
  double lanes[kLanes];
  for (int64_t l = 0; l < kLanes; l++) lanes[l] = kInfinite;
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int64_t l = 0; l < kLanes; l++) {
      const double sum = row[k + l] + gone[k + l];
      lanes[l] = sum < lanes[l] ? sum : lanes[l];
    }
  double result = kInfinite;
  for (; k < n; k++) result = row[k] + gone[k] < result ? row[k] + gone[k] : result;
  for (int64_t l = 0; l < kLanes; l++) result = lanes[l] < result ? lanes[l] : result;
  return result;
}

int64_t place_of(double value, const double* row, const double* gone, int64_t n) {
  for (int64_t k = 0; k < n; k++)
    if (row[k] + gone[k] == value) return k;
  return -1;
}

void find_nearest(Tree& tree, int64_t i, int64_t n) {
  const double* row = tree.distances + i * n;
  tree.near[i] = least(row, tree.gone, n);
  tree.nearest[i] = tree.near[i] < kInfinite ? place_of(tree.near[i], row, tree.gone, n) : -1;
}

// Distances of the union of i and j, by Lance and Williams's update for Ward's linkage.
WIDE void join(const double* one, const double* two, const double* sizes, double* merged, double one_size,
               double two_size, double height, int64_t n) {
  for (int64_t k = 0; k < n; k++)
    merged[k] = ((one_size + sizes[k]) * one[k] + (two_size + sizes[k]) * two[k] - sizes[k] * height) /
                (one_size + two_size + sizes[k]);
}

void merge(Tree& tree, int64_t i, int64_t j, double height, int64_t n) {
  double* row = tree.distances + i * n;
  join(row, tree.distances + j * n, tree.sizes, tree.merged, tree.sizes[i], tree.sizes[j], height, n);
  tree.parents[j] = i;
  tree.heights[j] = height;
  tree.sizes[i] += tree.sizes[j];
  tree.sizes[j] = 0;
  tree.gone[j] = tree.near[j] = kInfinite;
  for (int64_t k = 0; k < n; k++) {
    const double distance = tree.merged[k];
    row[k] = distance;
    if (tree.gone[k] != 0 || k == i) continue;
    tree.distances[k * n + i] = distance;
    if (tree.nearest[k] != i && tree.nearest[k] != j) continue;
    // Nothing came nearer: what was nearest still is, if it is no farther.
    tree.nearest[k] = distance <= tree.near[k] ? i : -1;
  }
  find_nearest(tree, i, n);
}

void grow(Tree& tree, int64_t merges, const double* zeros, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    tree.near[i] = kInfinite;
    tree.nearest[i] = -1;
    if (tree.gone[i] == 0) find_nearest(tree, i, n);
  }
  double highest = 0;
  for (int64_t made = 0;;) {
    const double height = least(tree.near, zeros, n);
    if (height == kInfinite || (made >= merges && height > highest)) return;
    const int64_t i = place_of(height, tree.near, zeros, n), j = tree.nearest[i];
    if (j < 0) {
      find_nearest(tree, i, n);
      continue;
    }
    merge(tree, i < j ? i : j, i < j ? j : i, height, n);
    highest = height > highest ? height : highest;
    made++;
  }
}

}  // namespace

// Merges the clusters of `count` matrices until `merges[b]` merges were made, and those of the same height as the last.
// distances [count, n, n], sizes, gone, parents and heights [count, n], workspace [4 n].
extern "C" void millpond_ward(double* distances, double* sizes, double* gone, const int64_t* merges, int64_t* parents,
                              double* heights, int64_t count, int64_t n, double* workspace) {
  double* zeros = workspace + 3 * n;
  for (int64_t k = 0; k < n; k++) zeros[k] = 0;
  for (int64_t b = 0; b < count; b++) {
    if (merges[b] < 1) continue;
    Tree tree{distances + b * n * n, sizes + b * n,   gone + b * n,           parents + b * n,
              heights + b * n,       workspace,       (int64_t*)(workspace + n), workspace + 2 * n};
    grow(tree, merges[b], zeros, n);
  }
}
