// The arguments of a forward pass, as backends/native/structs.py lays them out.
//
// A model is a list of steps that run one after another on a block of tokens: whole texts, packed one behind another.
// A block has these buffers (layouts in states.h):
//   states  [hidden]                  the input of a product, in the precision of the model
//   heads   [(heads + 2 kv_heads) dim]  queries, keys and values; attention writes its result over the queries
//   sums    [hidden]                  float32: results of products; the residual stream of a pre-norm model
//   branch  [hidden]                  float32: a result that is normalized before it is added to the sums
//   kept    [hidden]                  states of an encoder, to which its decoder attends, in the precision of the model
// Every number of columns is a multiple of 32: a model with others has columns that are 0, with weights of 0.
#pragma once

#include <cstdint>

enum StepKind : std::int64_t {
  kEmbed, kNorm, kProduct, kHeads, kAttention, kFeed, kAdapt, kExperts, kConvolve, kKeep, kGate, kExclude, kBlend
};

enum Activation : std::int64_t { kIdentity, kGelu, kGeluTanh, kSilu, kRelu, kSigmoid, kReluSquared };

enum NormKind : std::int64_t { kCopy, kLayerNorm, kRmsNorm, kScale };  // kScale: weight and bias alone

// A weight [out, in] in units of a number of columns, packed by `pack_rows` (pack_rows.h).
struct Weight {
  const void* units;        // null: none
  const float* bias;        // [out]; null: none
  std::int64_t out, in;
  // Of int8 weights [chunks of 384 inner numbers, 2, out]: each chunk's scales of the columns, and the sums of its
  // integers; null: the weights have the model's precision.
  const float* scales;
};

struct NormWeights {
  std::int64_t kind;
  const float* weight;  // [columns]; null: ones
  const float* bias;    // [columns]; null: zeros
  double epsilon;
  std::int64_t padding;  // columns that are 0, weight and bias included, and count for nothing
};

// What a step reads depends on its kind:
//   kEmbed      sums = scale * word + position + type; the word with its adapter, and the adapter's types; without
//               words sums += position + type; or sums = next word, word, word before (`whole`), 0 beyond a text's ends;
//               `shifted`: the word before instead, of a text's first token the word `start`; heads from column
//               `other` on += word (`target` 1)
//   kNorm       states = norm(sums), or of sums + states (`residual`); sums = the same (`target` 1), or only
//               sums (2); sums += norm(branch) (3); branch = the same (4); states = norm(scale * sums + share * branch) (5)
//   kProduct    heads = states W (`target` 0); sums = heads W (1), sums += heads W (2), branch = heads W (3),
//               sums = states W (4), heads from column `columns` on = kept W (5); heads from column `columns` on of
//               the kept rows, which lie behind the others, = kept W (6)
//   kHeads      norms of query and key heads (norm, key_norm), of each or of all as one row (`whole`), then rotation by
//               position; of the kept rows (`target` 1), whose keys begin at column `columns`
//   kAttention  queries = attention; after it a call that reads one row of each text drops the others; `target` 1: to
//               all of the text's kept rows too
//   kFeed       sums = down(activation(up(states))) (`target` 1), sums += (2), branch = (3)
//   kAdapt      behind the states (`target` 0), or the queries (1): their products with the first factors of the
//               adapters, see adapters.h
//   kConvolve   queries = keys * a convolution of queries * values, see convolution.h; read and dropped as for kAttention
//   kKeep       kept = states; or means of `reach` neighbours each, after which the rows are those of the call's second
//               half (EncodeCall::kept)
//   kGate, kExclude  the queries times a gate, or without their part along the values, see gates.h
//   kBlend      branch = scale * states (`target` 0), branch += scale * states (1), and then states = branch (2)
//   kExperts    as kFeed, of the feeds that a row's router chooses, see experts.h
struct Step {
  std::int64_t kind;
  std::int64_t target, activation, gated, residual;
  std::int64_t columns;    // of the norm, of the embeddings, of experts' results, or of a head's embeddings of distances
  Weight weight, down;     // of a gated feed, columns of gate and up alternate
  Weight low;              // of a feed with adapters: first factors for `down`
  NormWeights norm, key_norm;
  std::int64_t whole;
  const void* words;       // [vocabulary, columns], in the precision of the model; null: none
  const void* positions;   // [positions, columns]; null: none
  const void* types;       // [types, columns]; null: none; with adapters further tables, one for each of them
  const float* low_words;    // [adapters, vocabulary, rank]; null: no adapters
  const float* low_columns;  // [adapters, rank, columns]
  std::int64_t vocabulary, kinds;  // rows of the tables of words and of types
  const float* cosines;    // [positions, dim / 2]; null: no rotation
  const float* sines;      // [positions, dim / 2]
  // [heads, 2 reach - 1], added to the scores of a query and a key by their distance; 32 numbers more may be read
  const float* distances;
  // of a convolution: its taps [reach, columns], the first for the rows that are farthest back
  std::int64_t reach;      // distances are key - query + reach - 1; of an attention with DeBERTa's terms, see below
  std::int64_t heads, kv_heads, dim;
  std::int64_t before, after;  // how many positions back and ahead a query attends
  double scale;                // of the scores, the words, blended states, or of the sums in what is normalized
  double softcap;              // 0: none
  std::int64_t last;           // of an attention: the last one of the model
  // Of an attention with DeBERTa's terms (disentangled.h): `weight` holds the embeddings of distances as keys, `down` as
  // queries, [heads, columns, dim] each. These are their columns by key - query and by query - key, [2 reach + 1]; the 32
  // at either end are the same. Null: without such a term.
  const std::int32_t* key_columns;
  const std::int32_t* query_columns;
  // Of a mixture of experts, whose router is `weight`; `down` has only a bias, which is added once.
  const Weight* experts;       // [expert_count, 2]: `weight` and `down` of a feed each
  std::int64_t expert_count;
  std::int64_t top;            // experts of a row
  std::int64_t renormalized;   // whether the weights of a row's experts add up to 1
  std::int64_t shifted, start;  // of embeddings, see above
  std::int64_t factor, other;   // first columns of heads, see above and gates.h
  double share;                 // of the branch in what is normalized
  std::int64_t int8;  // of an attention: whether scores may be products in eight bits (code_scores.h)
  // [columns] of a norm with a residual: what the states are times when they are added; null: ones
  const float* state_factors;
};

struct Model {
  const Step* steps;
  std::int64_t count;
  std::int64_t hidden;   // most columns of states, sums and branch
  std::int64_t heads;    // most columns of heads
  std::int64_t inner;    // most inner columns of a feed
  std::int64_t branch;   // whether any step uses the branch
  std::int64_t codes;    // most inner columns of an int8 weight, but for a feed's second one; 0: no weight is int8
  std::int64_t output;   // columns of the result, any number
  std::int64_t low;      // columns of the first factors of all adapters, zeros behind them included; 0: no adapters
  std::int64_t rank;     // of an adapter
  std::int64_t kept;     // whether any step keeps states
};

enum Reading : std::int64_t { kAllRows, kFirstRow, kLastRow, kMeanRow };

struct EncodeCall {
  const Model* model;
  const std::int32_t* ids;     // [tokens]
  const std::int32_t* bounds;  // [texts + 1]
  const std::int32_t* types;   // [tokens]; null: all 0
  const std::int32_t* keys;    // [texts], number of first tokens that are attended to; null: all
  const std::int32_t* skip;    // [texts], first tokens that a mean and the first row leave out; null: none
  const std::int32_t* leads;   // [texts], the text of the call that each continues, -1 for none; null: none does
  float* out;                  // [tokens, output], or [texts, output] unless all rows are read
  void* workspace;             // threads * workspace_bytes(call)
  std::int64_t texts;
  std::int64_t offset;         // position of a text's first token
  std::int64_t reading;
  std::int64_t block;          // tokens of a block; a longer text is a block of its own, computed in slices of so many
  std::int64_t threads;
  const std::int32_t* adapters;  // [texts], -1: none; null: none at all
  double* timings;             // [8] seconds of each kind of step, added up; null: not measured
  // Of a model whose decoder reads another text than its encoder: the first half of the texts are for the encoder, the
  // second half for the decoder, whose rows alone are results; [texts / 2 + 1] where each one's kept rows begin, and their
  // end. Null: of any other model.
  const std::int32_t* kept;
  // Of a call that a single text makes, with nothing behind it; all 0 in others, whose caller checks ids and rows:
  std::int64_t vocabulary;     // more than any id may be
  std::int64_t width;          // columns of the result, of the first ones
  std::int64_t unit;           // whether the rows are divided by their lengths
  // Keys and values of a prefix, attention by attention: [2 kv_heads dim / kPanel][prefix_tokens][kPanel]. A call with
  // leads writes those of its first text there; in any other all texts continue the prefix. Null: neither.
  void* prefix;
  std::int64_t prefix_tokens;
  // [steps, hidden]: of each norm whose states are quantized, the largest magnitude of each column, which is raised. Null:
  // not measured. Only with one thread.
  float* peaks;
};

// What a call returns: 0, or why there is no result.
enum EncodeError : std::int64_t { kBadToken = 1, kNotFinite = 2 };

enum Stored : std::int64_t { kStoredFloat32, kStoredBfloat16 };

// Some inner numbers of a weight, of all its columns (pack_rows.h).
struct PackRowsCall {
  const void* const* rows;  // [out], the address of each column's inner numbers; null: zeros
  void* units;              // where the first of these inner numbers is, in the first unit
  float* scales;            // of int8 weights [chunks of 384 inner numbers, 2, out], written too
  std::int64_t stored;      // precision of the rows
  std::int64_t out;
  std::int64_t in;          // inner numbers of the whole weight
  std::int64_t count;       // of these, a multiple of 32
  std::int64_t piece;       // a row's numbers are pieces of so many ...
  std::int64_t padded;      // ... each with zeros behind it, so many with them: a multiple of 32
  std::int64_t exact;       // of int8 weights: whether the model is in float32, else numbers are rounded to bfloat16 first
  const float* factors;     // [in] of int8 weights, by which the inner numbers are multiplied then; null: ones
};
