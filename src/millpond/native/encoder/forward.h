// The forward pass: the steps of a model on blocks of whole texts.
//
// With many tokens each thread takes blocks from a counter, and a block's buffers stay in the cache of its core while the
// weights pass by. With few tokens the threads share each step of a block, and meet at a barrier after it.
#pragma once

#include <time.h>

#include "../parallel.h"
#include "../unit_rows.h"
#include "adapters.h"
#include "attention.h"
#include "convolution.h"
#include "denormals.h"
#include "disentangled.h"
#include "experts.h"
#include "gates.h"
#include "int8.h"
#include "norms.h"
#include "team.h"

namespace {

constexpr int64_t kWholeFeed = 64;    // rows for which all inner columns are kept
constexpr int64_t kShared = 256;      // tokens of a call whose steps the threads share

template <class Isa>
struct Forward {
  using State = typename Isa::State;

  // The buffers of a block, and what each thread has of its own.
  struct Room {
    States<Isa> states, heads, inner, kept;
    Sums sums, branch, low;
    Codes codes, inner_codes;  // of the states or heads, and of a feed's inner states
    typename Attention<Isa>::Room attention;
    typename Disentangled<Isa>::Room disentangled;
    typename Experts<Isa>::Room experts;
  };

  struct Sizes {
    int64_t rows, keys, dim;
    int64_t states, kept, heads, sums, branch, low, codes, ranges, inner_codes, inner_ranges, attention, disentangled, bytes;
    typename Experts<Isa>::Sizes experts;
  };

  static bool any_disentangled(const Model& model) {
    for (int64_t i = 0; i < model.count; i++)
      if (is_disentangled(model.steps[i])) return true;
    return false;
  }

  static int64_t most_dim(const Model& model) {
    int64_t dim = 32;
    for (int64_t i = 0; i < model.count; i++) dim = most_of(dim, model.steps[i].dim);
    return dim;
  }

  static int64_t length_of(const EncodeCall& call, int64_t text) { return call.bounds[text + 1] - call.bounds[text]; }
  // Tokens of the prefix that all texts continue, and whose keys and values were computed by an earlier call.
  static int64_t given_of(const EncodeCall& call) { return call.prefix && !call.leads ? call.prefix_tokens : 0; }
  // Tokens that a text continues: the position of its first token.
  static int64_t lead_of(const EncodeCall& call, int64_t text) {
    return call.leads && call.leads[text] >= 0 ? length_of(call, call.leads[text]) : given_of(call);
  }

  // Rows that are kept of the text of the encoder that goes with one of the decoder.
  static int64_t kept_of(const EncodeCall& call, int64_t text) {
    const int64_t own = text - call.texts / 2;
    return call.kept && own >= 0 ? call.kept[own + 1] - call.kept[own] : 0;
  }
  // Whether all texts are one block: a layer reads keys of this layer, or kept rows, of another text.
  static bool is_whole(const EncodeCall& call) { return call.leads || call.kept; }

  static Sizes sizes_of(const EncodeCall& call) {
    const Model& model = *call.model;
    int64_t longest = 1;
    for (int64_t t = 0; t < call.texts; t++)
      longest = most_of(longest, lead_of(call, t) + length_of(call, t) + kept_of(call, t));
    const int64_t tokens = call.bounds[call.texts];
    const int64_t block = is_whole(call) ? tokens : most_of(least_of(call.block, tokens), longest);
    Sizes sizes;
    // Panels an odd number of 32 rows apart: else their rows meet in the same sets of the cache.
    sizes.rows = (block + given_of(call) + 31) / 32 * 32 + 32;
    if (sizes.rows % 64 == 0) sizes.rows += 32;
    sizes.keys = longest;
    sizes.dim = most_dim(model);
    const auto inner_of = [&](int64_t columns) {
      return most_of(least_of(sizes.rows, kWholeFeed + 96) * columns, sizes.rows * least_of(columns, kChunk));
    };
    const auto bytes = [](int64_t numbers, int64_t size) { return (numbers * size + 4096 + 64) / 64 * 64; };
    sizes.states = bytes(sizes.rows * (model.hidden + model.low), sizeof(State));
    sizes.kept = model.kept ? sizes.states : 0;
    sizes.heads = bytes(most_of(sizes.rows * model.heads, inner_of(model.inner)), sizeof(State));
    sizes.sums = bytes(sizes.rows * model.hidden + 64 * model.hidden / kColumns, 4);
    sizes.branch = model.branch ? sizes.sums : 0;
    sizes.low = model.low ? bytes(sizes.rows * model.low + 64 * model.low / kColumns, 4) : 0;
    const int64_t inner = model.codes ? model.inner : 0, ranges = sizes.rows * int64_t(sizeof(Range));
    sizes.codes = bytes(sizes.rows * code_panels(model.codes) * kCodePanel, 1);
    sizes.ranges = bytes(quotient_up(model.codes, kChunk) * ranges, 1);
    sizes.inner_codes = bytes(inner_of(code_panels(inner) * kCodePanel), 1);
    sizes.inner_ranges = bytes(quotient_up(inner, kChunk) * ranges, 1);
    sizes.attention = bytes(Attention<Isa>::room_bytes(sizes.keys, sizes.dim), 1);
    sizes.disentangled =
        any_disentangled(model) ? bytes(Disentangled<Isa>::room_bytes(sizes.keys, sizes.dim), 1) : 0;
    sizes.experts = Experts<Isa>::Sizes::of(model, least_of(call.block, block), kChunk);
    sizes.bytes = sizes.states + sizes.kept + sizes.heads + sizes.sums + sizes.branch + sizes.low + sizes.codes + sizes.ranges +
                  sizes.inner_codes + sizes.inner_ranges + sizes.attention + sizes.disentangled + sizes.experts.bytes;
    return sizes;
  }

  static Room room_at(char* at, const Sizes& sizes) {
    Room room;
    const auto take = [&](int64_t bytes) {
      char* from = at;
      at += bytes;
      return from;
    };
    room.states = {(State*)take(sizes.states), sizes.rows * Isa::kPanel};
    room.kept = {(State*)take(sizes.kept), sizes.rows * Isa::kPanel};
    room.heads = {(State*)take(sizes.heads), sizes.rows * Isa::kPanel};
    room.inner = room.heads;  // queries are done with by then
    room.sums = {(float*)take(sizes.sums), sizes.rows * kColumns + 64};
    room.branch = {(float*)take(sizes.branch), sizes.rows * kColumns + 64};
    room.low = {(float*)take(sizes.low), sizes.rows * kColumns + 64};
    const auto codes_at = [&](int64_t codes, int64_t ranges) {
      auto* at = (uint8_t*)take(codes);
      return Codes{at, sizes.rows * kCodePanel, (Range*)take(ranges), sizes.rows};
    };
    room.codes = codes_at(sizes.codes, sizes.ranges);
    room.inner_codes = codes_at(sizes.inner_codes, sizes.inner_ranges);
    room.attention = Attention<Isa>::room_at(take(sizes.attention), sizes.keys, sizes.dim);
    room.disentangled = Disentangled<Isa>::room_at(take(sizes.disentangled), sizes.keys, sizes.dim);
    room.experts = Experts<Isa>::room_at(take(sizes.experts.bytes), sizes.experts);
    return room;
  }

  // A block: texts [first, last) of a call, and the buffers they are in. A slice of it: some of its rows.
  struct Block {
    const EncodeCall& call;
    const Room& room;  // shared by the team, but for the attention's
    const Room& own;   // has those
    Team& team;
    int64_t first, last;
    int64_t rows;       // tokens, or texts once only one row of each is left
    int64_t row = 0;    // of a slice: its first row in the block
    int64_t total = 0;  // rows of the block that a slice is of

    int64_t start(int64_t text) const { return call.bounds[text] - call.bounds[first]; }
    int64_t adapter(int64_t text) const { return call.adapters ? call.adapters[text] : -1; }

    // Calls `done(row, position, token, text)` for the rows of this piece; the position is that within the text.
    template <class Done>
    MILLPOND_INLINE void each_token(const Done& done) const {
      const int64_t from = row + team.first(rows), to = row + team.last(rows);
      for (int64_t t = first; t < last; t++) {
        const int64_t begin = start(t), offset = lead_of(call, t) - begin;
        for (int64_t r = most_of(begin, from); r < least_of(start(t + 1), to); r++)
          done(r - row, r + offset, call.bounds[first] + r, t);
      }
    }
  };

  // What only passes from one step to the next (codes, products with adapters) is for the rows of one slice.
  static Room slice_of(const Room& room, int64_t row) {
    Room slice = room;
    slice.states.at = room.states.row(row, 0);
    slice.kept.at = room.kept.row(row, 0);
    slice.heads.at = slice.inner.at = room.heads.row(row, 0);
    slice.sums.at = room.sums.row(row, 0);
    slice.branch.at = room.branch.row(row, 0);
    return slice;
  }

  // The words after a token, of it and before it, side by side.
  static void place_neighbours(const Block& block, const Step& step, int64_t row, int64_t token, int64_t text) {
    const EncodeCall& call = block.call;
    for (int64_t part = 0; part < 3; part++) {
      const int64_t other = token + 1 - part;
      const bool within_text = other >= call.bounds[text] && other < call.bounds[text + 1];
      const State* word = within_text ? (const State*)step.words + call.ids[other] * step.columns : nullptr;
      for (int64_t c = 0; c < step.columns; c += kLanes)
        store(block.room.sums.row(row, part * step.columns + c), word ? Isa::load_state(word + c) : zeros());
    }
  }

  static void embed(const Block& block, const Step& step) {
    const EncodeCall& call = block.call;
    const State *words = (const State*)step.words, *positions = (const State*)step.positions;
    const State* types = (const State*)step.types;
    const Floats scale = broadcast(float(step.scale));
    block.each_token([&](int64_t row, int64_t at, int64_t token, int64_t text) {
      const int64_t adapter = block.adapter(text), kinds = step.low_words ? (adapter + 1) * step.kinds : 0;
      const int64_t id = !step.shifted ? call.ids[token] : token > call.bounds[text] ? call.ids[token - 1] : step.start;
      const int64_t kind = kinds + (call.types ? call.types[token] : 0);
      if (step.whole) return place_neighbours(block, step, row, token, text);
      const State* word = words ? words + id * step.columns : nullptr;
      const State* position = positions ? positions + (call.offset + at) * step.columns : nullptr;
      const State* type = types ? types + kind * step.columns : nullptr;
      for (int64_t c = 0; c < step.columns; c += kLanes) {
        Floats x = word ? scaled(Isa::load_state(word + c), scale) : load(block.room.sums.row(row, c));
        if (step.low_words && adapter >= 0) x = adapted_word(x, step, id, c, adapter, call.model->rank);
        if (type) x = sum_of(x, Isa::load_state(type + c));
        if (position) x = sum_of(x, Isa::load_state(position + c));
        store(block.room.sums.row(row, c), x);
      }
    });
  }

  // Adds the row of each token's word to its heads.
  static void add_words(const Block& block, const Step& step) {
    block.each_token([&](int64_t row, int64_t, int64_t token, int64_t) {
      const State* word = (const State*)step.words + block.call.ids[token] * step.columns;
      for (int64_t c = 0; c < step.columns; c += kLanes) {
        State* const at = block.room.heads.row(row, step.other + c);
        Isa::store_state(at, sum_of(Isa::load_state(at), Isa::load_state(word + c)));
      }
    });
  }

  static void gate(const Block& block, const Step& step) {
    for (int64_t r = block.team.first(block.rows); r < block.team.last(block.rows); r++) {
      if (step.kind == kGate)
        gate_row<Isa>(block.room.heads, r, step);
      else
        exclude_values<Isa>(block.room.heads, r, step);
    }
  }

  // Whether a norm makes its states' codes, too: those that the step after it multiplies.
  static bool quantizes(const Step& step, const Step* after) {
    if (step.kind != kNorm || step.target == 2 || step.target == 3) return false;
    const bool reads = after && (after->kind == kFeed || (after->kind == kProduct && after->target == 0));
    return reads && after->weight.scales && after->weight.in == step.columns;
  }

  static void norm(const Block& block, const Step& step, const Step* after) {
    const int64_t end = block.team.last(block.rows), several = quantizes(step, after) ? kFewRows : block.rows;
    for (int64_t row = block.team.first(block.rows), to; row < end; row = to) {
      to = least_of(row + several, end);
      norm_rows(block, step, row, to);
      if (!quantizes(step, after)) continue;
      if (const EncodeCall& call = block.call; call.peaks)
        raise_peaks<Isa>(block.room.states, row, to, step.columns,
                         call.peaks + (&step - call.model->steps) * call.model->hidden);
      quantize_rows<Isa>(block.room.states, row, to, step.columns, block.room.codes);
    }
  }

  static void norm_rows(const Block& block, const Step& step, int64_t from, int64_t to) {
    if (step.target == 3)
      norm_to_sums(block.room.branch, block.room.sums, from, to, step.columns, step.norm);
    else if (step.target == 5)
      norm_of_mixture<Isa>(block.room.sums, block.room.branch, block.room.states, from, to, step);
    else
      norm_to_states<Isa>(block.room.sums, block.room.states, block.room.branch, from, to, step);
  }

  // Adds a bias to units [first, last) of sums that a product is added to.
  static void add_bias(const Sums& sums, int64_t rows, int64_t first, int64_t last, const float* bias) {
    if (!bias) return;
    for (int64_t c = first * kColumns; c < last * kColumns; c += kLanes)
      for (int64_t r = 0; r < rows; r++) store(sums.row(r, c), sum_of(load(sums.row(r, c)), load(bias + c)));
  }

  alignas(64) static constexpr float kNone[kMostColumns] = {};

  // Panels [from, from + depth) of the first factors of adapters.
  static void add_low(const Block& block, const States<Isa>& a, const Weight& weight, int64_t from, int64_t depth) {
    const int64_t panels = weight.in / Isa::kPanel, units = weight.out / kColumns;
    product_to_sums<Isa>(a, block.rows, (const State*)weight.units + unit_size<Isa>(from), unit_size<Isa>(panels), depth,
                         block.team.first(units), block.team.last(units), from == 0 ? kNone : nullptr, block.room.low);
  }

  // Behind `column` of each row, the columns of its text's adapter.
  static void place_low(const Block& block, const States<Isa>& to, int64_t column) {
    const int64_t from = block.row + block.team.first(block.rows), end = block.row + block.team.last(block.rows);
    const bool dropped = block.total == block.last - block.first;  // a row for each text
    for (int64_t t = block.first; t < block.last; t++) {
      const int64_t first = dropped ? t - block.first : block.start(t), last = dropped ? first + 1 : block.start(t + 1);
      place_adapter<Isa>(block.room.low, to, column, most_of(first, from) - block.row, least_of(last, end) - block.row,
                         block.adapter(t), *block.call.model);
    }
  }

  static void adapt(const Block& block, const Step& step) {
    const States<Isa>& a = step.target == 1 ? block.room.heads : block.room.states;
    if (block.call.adapters) block.team.share([&] { add_low(block, a, step.weight, 0, step.weight.in / Isa::kPanel); });
    block.team.share([&] { place_low(block, a, step.weight.in); });
  }

  // The input of a product in eight bits, if its weight is int8: a step of its own.
  static void quantize(const Block& block, const States<Isa>& a, const Weight& weight, int64_t columns, const Codes& to) {
    if (!weight.scales) return;
    block.team.share([&] {
      quantize_rows<Isa>(a, block.team.first(block.rows), block.team.last(block.rows), columns, to);
    });
  }

  // Inner columns [column, column + width) of a weight, to the sums or the branch.
  static void add_product(const Block& block, const States<Isa>& a, const Codes& codes, const Weight& weight,
                          int64_t target, int64_t column, int64_t width) {
    const int64_t panels = weight.in / Isa::kPanel, units = weight.out / kColumns;
    const int64_t from = column / Isa::kPanel, depth = width / Isa::kPanel;
    const int64_t first = block.team.first(units), last = block.team.last(units);
    const Sums& to = target == 3 ? block.room.branch : block.room.sums;
    const bool fresh = target != 2 && from == 0;
    if (!fresh && from == 0) add_bias(to, block.rows, first, last, weight.bias);
    if (weight.scales)
      return code_product_to_sums<Isa>(codes, block.rows, weight, column, width, first, last, fresh, to);
    product_to_sums<Isa>(a, block.rows, (const State*)weight.units + unit_size<Isa>(from), unit_size<Isa>(panels), depth,
                         first, last, fresh ? (weight.bias ? weight.bias : kNone) : nullptr, to);
  }

  template <bool kGated, int64_t kActivation>
  static void product_to_states(const Block& block, const States<Isa>& a, const Weight& weight, int64_t first,
                                int64_t last, const States<Isa>& to, int64_t to_column) {
    constexpr int64_t kOut = kGated ? kLanes : kColumns;
    const int64_t panels = weight.in / Isa::kPanel;
    const auto done = [&](int64_t unit, int64_t row, int64_t count, const float* sums) __attribute__((always_inline)) {
      store_activated<Isa, kGated, kActivation>(sums, count, to, row, unit * kOut - to_column);
    };
    if (weight.scales) return code_product<Isa>(block.room.codes, block.rows, weight, first, last, done);
    product<Isa>(a, block.rows, (const State*)weight.units, unit_size<Isa>(panels), panels, first, last, weight.bias,
                 done);
  }

  template <bool kGated>
  static void activated_product(const Block& block, const States<Isa>& a, const Weight& weight, int64_t activation,
                                int64_t first, int64_t last, const States<Isa>& to, int64_t to_column) {
    switch (activation) {
      case kGelu: return product_to_states<kGated, kGelu>(block, a, weight, first, last, to, to_column);
      case kGeluTanh: return product_to_states<kGated, kGeluTanh>(block, a, weight, first, last, to, to_column);
      case kSilu: return product_to_states<kGated, kSilu>(block, a, weight, first, last, to, to_column);
      case kRelu: return product_to_states<kGated, kRelu>(block, a, weight, first, last, to, to_column);
      case kSigmoid: return product_to_states<kGated, kSigmoid>(block, a, weight, first, last, to, to_column);
      case kReluSquared: return product_to_states<kGated, kReluSquared>(block, a, weight, first, last, to, to_column);
      default: return product_to_states<kGated, kIdentity>(block, a, weight, first, last, to, to_column);
    }
  }

  static const States<Isa>& input_of(const Block& block, const Step& step) {
    if (step.target == 5) return block.room.kept;
    return step.target == 0 || step.target == 4 ? block.room.states : block.room.heads;
  }

  static void multiply(const Block& block, const Step& step) {
    const Weight& weight = step.weight;
    const States<Isa>& a = input_of(block, step);
    if (step.target == 0 || step.target == 5) {
      const int64_t units = weight.out / kColumns;
      activated_product<false>(block, a, weight, step.activation, block.team.first(units), block.team.last(units),
                               block.room.heads, -step.columns);
      return;
    }
    add_product(block, a, block.room.codes, weight, step.target == 4 ? 1 : step.target, 0, weight.in);
  }

  // `quantized`: the states are in eight bits already.
  static void feed(const Block& block, const Step& step, bool quantized) {
    const Weight &up = step.weight, &down = step.down;
    const int64_t inner = step.low.units ? step.low.in : down.in, of_unit = step.gated ? kLanes : kColumns;
    // All inner columns of a slice would overwrite the heads of the next one.
    const bool whole = block.rows <= kWholeFeed && block.rows == block.total;
    const int64_t chunk = whole ? inner : least_of(kChunk, inner);
    States<Isa> states = block.room.inner;
    if (chunk == inner && inner > kChunk) states.stride = (block.rows + 31) / 32 * 32 * Isa::kPanel + 32 * Isa::kPanel;
    if (!quantized) quantize(block, block.room.states, up, up.in, block.room.codes);
    Codes codes = block.room.inner_codes;
    if (chunk == inner) codes.stride = (block.rows + 31) / 32 * 32 * kCodePanel + 32 * kCodePanel;
    for (int64_t column = 0; column < inner; column += chunk) {
      const int64_t width = least_of(chunk, inner - column), units = width / of_unit, from = column / of_unit;
      // One thread quantizes rows while they are in the first cache.
      const bool alone = up.scales && down.scales && block.team.members == 1 && !Isa::kTiles;
      const int64_t several = alone ? Int8Of<Isa>::Type::kRows : block.rows;
      for (int64_t row = 0; row < block.rows; row += several) {
        Room room = block.room;
        room.codes = room.codes.from(row);
        const Block part{block.call, room, block.own, block.team, block.first, block.last,
                         least_of(several, block.rows - row)};
        const States<Isa> a{room.states.row(row, 0), room.states.stride}, to{states.row(row, 0), states.stride};
        block.team.share([&] {
          const int64_t first = from + block.team.first(units), last = from + block.team.last(units);
          if (step.gated)
            activated_product<true>(part, a, up, step.activation, first, last, to, column);
          else
            activated_product<false>(part, a, up, step.activation, first, last, to, column);
        });
        quantize(part, to, down, width, codes.from(row));
      }
      block.team.share([&] {
        add_product(block, states, codes, down, step.target, column, width);
        if (step.low.units && block.call.adapters)
          add_low(block, states, step.low, column / Isa::kPanel, width / Isa::kPanel);
      });
    }
    if (!step.low.units || !block.call.adapters) return;
    block.team.share([&] { place_low(block, states, 0); });
    block.team.share(
        [&] { add_product(block, states, codes, down, step.target, inner, down.in - inner); });
  }

  // A mixture of experts, for this piece's rows.
  static void mix(const Block& block, const Step& step) {
    const int64_t first = block.team.first(block.rows), rows = block.team.last(block.rows) - first;
    const typename Experts<Isa>::Room& own = block.own.experts;
    const Sums& to = step.target == 3 ? block.room.branch : block.room.sums;
    for (int64_t c = 0; c < step.columns; c += kLanes)
      for (int64_t r = first; r < first + rows; r++) {
        const Floats bias = step.down.bias ? load(step.down.bias + c) : zeros();
        store(to.row(r, c), step.target == 2 ? sum_of(load(to.row(r, c)), bias) : bias);
      }
    const States<Isa> mine{block.room.states.row(first, 0), block.room.states.stride};
    const Weight& router = step.weight;
    const int64_t panels = router.in / Isa::kPanel;
    product_to_sums<Isa>(mine, rows, (const State*)router.units, unit_size<Isa>(panels), panels, 0, router.out / kColumns,
                         router.bias ? router.bias : kNone, own.scores);
    Experts<Isa>::choose(step, own, rows);
    Block part{block.call, block.room, block.own, block.team, block.first, block.last, 0};
    for (int64_t e = 0; e < step.expert_count; e++) {
      part.rows = Experts<Isa>::gather(step, own, rows, e, mine, 0);
      if (part.rows == 0) continue;
      const Weight &up = step.experts[2 * e], &down = step.experts[2 * e + 1];
      const int64_t of_unit = step.gated ? kLanes : kColumns, depth = down.in / Isa::kPanel;
      for (int64_t column = 0; column < down.in; column += kChunk) {
        const int64_t width = least_of(kChunk, down.in - column), from = column / of_unit, end = from + width / of_unit;
        if (step.gated)
          activated_product<true>(part, own.gathered, up, step.activation, from, end, own.inner, column);
        else
          activated_product<false>(part, own.gathered, up, step.activation, from, end, own.inner, column);
        const float* bias = column > 0 ? nullptr : down.bias ? down.bias : kNone;
        product_to_sums<Isa>(own.inner, part.rows, (const State*)down.units + unit_size<Isa>(column / Isa::kPanel),
                             unit_size<Isa>(depth), width / Isa::kPanel, 0, down.out / kColumns, bias, own.results);
      }
      Experts<Isa>::scatter(step, own, part.rows, to, first);
    }
  }

  // Means of neighbouring states, and then the rows of the decoder.
  static void compress(const Block& block, const Step& step) {
    const int64_t panels = block.call.model->hidden / Isa::kPanel;
    for (int64_t c = block.team.first(panels) * Isa::kPanel; c < block.team.last(panels) * Isa::kPanel; c += kLanes)
      for (int64_t t = block.first; t < block.last; t++) {
        int64_t to = block.call.kept[t];
        for (int64_t row = block.start(t), end; row < block.start(t + 1); row = end, to++) {
          end = least_of(row + step.reach, block.start(t + 1));
          Floats sum = zeros();
          for (int64_t r = row; r < end; r++) sum = sum_of(sum, Isa::load_state(block.room.states.row(r, c)));
          Isa::store_state(block.room.kept.row(to, c), quotient(sum, broadcast(float(end - row))));
        }
      }
  }

  static void multiply_kept(const Block& block, const Step& step) {
    const int64_t units = step.weight.out / kColumns;
    const Block part{block.call, block.room, block.own, block.team, block.first, block.last,
                     block.call.kept[block.call.texts / 2]};
    quantize(part, block.room.kept, step.weight, step.weight.in, block.room.codes);
    const States<Isa> to{block.room.heads.row(block.rows, 0), block.room.heads.stride};
    block.team.share([&] {
      activated_product<false>(part, block.room.kept, step.weight, step.activation, block.team.first(units),
                               block.team.last(units), to, -step.columns);
    });
  }

  static void turn_kept(const Block& block, const Step& step) {
    const int64_t count = block.call.kept[block.call.texts / 2];
    const States<Isa> keys{block.room.heads.row(block.rows, step.columns), block.room.heads.stride};
    for (int64_t r = block.team.first(count); r < block.team.last(count); r++) turn_heads<Isa>(keys, r, 0, step);
  }

  static void keep(const Block& block) {
    const int64_t from = block.team.first(block.rows), rows = block.team.last(block.rows) - from;
    for (int64_t c = 0; c < block.call.model->hidden; c += Isa::kPanel)
      std::memcpy(block.room.kept.row(from, c), block.room.states.row(from, c), rows * Isa::kPanel * sizeof(State));
  }

  static void blend(const Block& block, const Step& step) {
    const Floats scale = broadcast(float(step.scale));
    for (int64_t r = block.team.first(block.rows); r < block.team.last(block.rows); r++)
      for (int64_t c = 0; c < step.columns; c += kLanes) {
        Floats x = scaled(Isa::load_state(block.room.states.row(r, c)), scale);
        if (step.target != 0) x = sum_of(load(block.room.branch.row(r, c)), x);
        store(block.room.branch.row(r, c), x);
        if (step.target == 2) Isa::store_state(block.room.states.row(r, c), x);
      }
  }

  static void turn(const Block& block, const Step& step) {
    block.each_token([&](int64_t row, int64_t at, int64_t, int64_t) {
      turn_heads<Isa>(block.room.heads, row, block.call.offset + at, step);
    });
  }

  // Rows [row, end) of a text, after all that is kept of the one that goes with it. No kernel knows a window behind keys
  // that all see, and few texts of a decoder are longer than one: a row beyond it has its keys packed for itself.
  static void attend_merged(const Block& block, const Step& step, const KeyRows& rows, int64_t head, int64_t row,
                            int64_t end) {
    Step wide = step;
    wide.before = int64_t(1) << 40;
    const int64_t within = least_of(end, step.before + 1);
    if (row < within)
      Attention<Isa>::run(wide, block.room.heads, block.own.attention, rows, rows.lead + within, head, row, within);
    for (row = most_of(row, within); row < end; row++) {
      const KeyRows near{rows.lead_start, rows.lead, rows.start + row - step.before};
      const int64_t keys = rows.lead + step.before + 1;
      Attention<Isa>::run(wide, block.room.heads, block.own.attention, near, keys, head, step.before, step.before + 1);
    }
  }

  // Copies keys and values of the prefix: from the first text's rows, or behind the block's rows.
  static void move_prefix(const Block& block, const Step& step) {
    const EncodeCall& call = block.call;
    int64_t columns = 0;
    for (const Step* before = call.model->steps; before < &step; before++)
      if (before->kind == kAttention) columns += 2 * before->kv_heads * before->dim;
    auto* const prefix = (State*)call.prefix + columns * call.prefix_tokens;
    const int64_t panels = 2 * step.kv_heads * step.dim / Isa::kPanel, size = call.prefix_tokens * Isa::kPanel;
    for (int64_t p = block.team.first(panels); p < block.team.last(panels); p++) {
      State* const rows = block.room.heads.row(call.leads ? 0 : block.rows, step.heads * step.dim + p * Isa::kPanel);
      std::memcpy(call.leads ? prefix + p * size : rows, call.leads ? rows : prefix + p * size, size * sizeof(State));
    }
  }

  static void attend(const Block& block, const Step& step) {
    const int64_t part = block.team.members > 1 ? Attention<Isa>::kTaskRows : INT64_MAX;
    int64_t task = 0;
    for (int64_t t = block.first; t < block.last; t++) {
      const int64_t length = length_of(block.call, t), lead = lead_of(block.call, t);
      const int64_t kept = step.target == 1 ? kept_of(block.call, t) : 0;
      const KeyRows rows{kept                          ? block.rows + block.call.kept[t - block.first]
                         : lead > 0 && block.call.leads ? block.start(block.call.leads[t])
                                                        : block.rows,
                         lead + kept, block.start(t)};
      const int64_t keys = lead + (block.call.keys ? block.call.keys[t] : length);
      for (int64_t h = 0; h < step.kv_heads; h++)
        for (int64_t row = 0, end; row < length; row = end, task++) {
          end = part < length - row ? row + part : length;
          if (task % block.team.pieces != block.team.piece) continue;
          if (step.target == 1)
            attend_merged(block, step, rows, h, row, end);
          else if (is_disentangled(step))
            Disentangled<Isa>::run(step, block.room.heads, block.own.attention, block.own.disentangled, rows, keys, h, row,
                                   end);
          else
            Attention<Isa>::run(step, block.room.heads, block.own.attention, rows, keys, h, row, end);
        }
    }
  }

  static void convolve(const Block& block, const Step& step) {
    const int64_t vectors = step.dim / kLanes;
    for (int64_t v = block.team.first(vectors); v < block.team.last(vectors); v++)
      for (int64_t t = block.first; t < block.last; t++) {
        const int64_t length = length_of(block.call, t), keys = block.call.keys ? block.call.keys[t] : length;
        Convolution<Isa>::run(step, block.room.heads, block.start(t), length, keys, v * kLanes);
      }
  }

  // A step of the encoder's rows, after which the rows are the decoder's, or of those that were kept.
  static bool changes_rows(const Step& step) {
    return (step.kind == kKeep && step.reach > 0) || (step.kind == kProduct && step.target == 6) ||
           (step.kind == kHeads && step.target == 1);
  }

  // A step that is run on a whole block: it reads other rows of a text, or is not of the block's rows.
  static bool mixes_rows(const Step& step) {
    return step.kind == kAttention || step.kind == kConvolve || changes_rows(step);
  }

  // Keeps one row of each text, as the call reads no more.
  static void drop_rows(const Block& block) {
    const Room& room = block.room;
    const int64_t texts = block.last - block.first;
    const auto source = [&](int64_t i) {
      const int64_t text = block.first + i;
      if (block.call.reading == kLastRow) return block.start(text + 1) - 1;
      return block.start(text) + (block.call.skip ? block.call.skip[text] : 0);
    };
    const auto gather = [&](char* at, int64_t stride, int64_t panels, int64_t bytes) {
      for (int64_t p = block.team.first(panels); p < block.team.last(panels); p++)
        for (int64_t i = 0; i < texts; i++)
          if (source(i) != i) std::memcpy(at + p * stride + i * bytes, at + p * stride + source(i) * bytes, bytes);
    };
    const int64_t hidden = block.call.model->hidden, size = sizeof(State);
    gather((char*)room.states.at, room.states.stride * size, hidden / Isa::kPanel, Isa::kPanel * size);
    gather((char*)room.heads.at, room.heads.stride * size, block.call.model->heads / Isa::kPanel, Isa::kPanel * size);
    if (block.call.model->kept)
      gather((char*)room.kept.at, room.kept.stride * size, hidden / Isa::kPanel, Isa::kPanel * size);
    gather((char*)room.sums.at, room.sums.stride * 4, hidden / kColumns, kColumns * 4);
    if (block.call.model->branch) gather((char*)room.branch.at, room.branch.stride * 4, hidden / kColumns, kColumns * 4);
  }

  static void read(const Block& block) {
    const EncodeCall& call = block.call;
    const int64_t columns = call.width ? call.width : call.model->output;
    const States<Isa>& states = block.room.states;
    if (call.reading == kMeanRow) {
      for (int64_t t = block.first + block.team.piece; t < block.last; t += block.team.pieces) {
        const int64_t from = block.start(t) + (call.skip ? call.skip[t] : 0), to = block.start(t + 1);
        const Floats count = broadcast(float(to - from));
        for (int64_t c = 0; c < columns; c += kLanes) {
          Floats sum = zeros();
          for (int64_t r = from; r < to; r++) sum = sum_of(sum, Isa::load_state(states.row(r, c)));
          store_first(call.out + t * columns + c, quotient(sum, count), columns - c);
        }
      }
      return;
    }
    const int64_t base = call.kept ? 0 : call.reading == kAllRows ? call.bounds[block.first] : block.first;
    for (int64_t r = block.team.first(block.rows); r < block.team.last(block.rows); r++)
      for (int64_t c = 0; c < columns; c += kLanes)
        store_first(call.out + (base + r) * columns + c, Isa::load_state(states.row(r, c)), columns - c);
  }

  static double now() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
  }

  // The kind whose time a step adds to.
  static int64_t timed_as(const Step& step) {
    if (step.kind == kExperts) return kFeed;
    if (step.kind == kConvolve) return kAttention;
    if (step.kind == kKeep || step.kind == kBlend) return kNorm;
    if (step.kind == kGate || step.kind == kExclude) return kHeads;
    return step.kind == kProduct && step.target != 0 && step.target != 5 ? 6 : step.kind;
  }

  // `before` and `after`: the steps around it that run on the same rows; null: none.
  static void run_step(Block& block, const Step& step, const Step* before, const Step* after, double* timings) {
    Team& team = block.team;
    const bool quantized = before && quantizes(*before, &step);
    const double begun = timings ? now() : 0;
    switch (step.kind) {
      case kEmbed: team.share([&] { step.target == 1 ? add_words(block, step) : embed(block, step); }); break;
      case kNorm: team.share([&] { norm(block, step, after); }); break;
      case kProduct:
        if (step.target == 6) {
          multiply_kept(block, step);
          break;
        }
        if (!quantized) quantize(block, input_of(block, step), step.weight, step.weight.in, block.room.codes);
        team.share([&] { multiply(block, step); });
        break;
      case kHeads: team.share([&] { step.target == 1 ? turn_kept(block, step) : turn(block, step); }); break;
      case kAttention:
      case kConvolve:
        if (block.call.prefix) team.share([&] { move_prefix(block, step); });
        team.share([&] { step.kind == kAttention ? attend(block, step) : convolve(block, step); });
        if (step.last && (block.call.reading == kFirstRow || block.call.reading == kLastRow)) {
          team.share([&] { drop_rows(block); });
          block.rows = block.last - block.first;
        }
        break;
      case kAdapt: adapt(block, step); break;
      case kKeep:
        team.share([&] { step.reach > 0 ? compress(block, step) : keep(block); });
        if (step.reach > 0) {
          block.first = block.last;
          block.last = block.call.texts;
          block.rows = block.call.bounds[block.last] - block.call.bounds[block.first];
        }
        break;
      case kGate:
      case kExclude: team.share([&] { gate(block, step); }); break;
      case kBlend: team.share([&] { blend(block, step); }); break;
      case kExperts: team.share([&] { mix(block, step); }); break;
      default: feed(block, step, quantized);
    }
    if (timings) timings[timed_as(step)] += now() - begun;
  }

  static void run_block(Block& block, double* timings) {
    const Model& model = *block.call.model;
    for (int64_t i = 0, end; i < model.count; i = end) {
      end = i + 1;
      if (mixes_rows(model.steps[i])) {
        run_step(block, model.steps[i], nullptr, nullptr, timings);
        continue;
      }
      // Attention reads the whole block. The steps from one attention to the next are run on one slice after the other.
      while (end < model.count && !mixes_rows(model.steps[end])) end++;
      const int64_t slices = block.rows > block.call.block ? quotient_up(block.rows, block.call.block) : 1;
      const int64_t several = quotient_up(quotient_up(block.rows, slices), 32) * 32;
      for (int64_t row = 0; row < block.rows; row += several) {
        const Room room = slice_of(block.room, row);
        Block slice{block.call, room, block.own, block.team, block.first, block.last,
                    least_of(several, block.rows - row), row, block.rows};
        for (int64_t k = i; k < end; k++) {
          const Step* step = model.steps + k;
          run_step(slice, *step, k > i ? step - 1 : nullptr, k + 1 < end ? step + 1 : nullptr, timings);
        }
      }
    }
    const double begun = timings ? now() : 0;
    block.team.share([&] { read(block); });
    if (timings) timings[7] += now() - begun;
  }

  struct Job {
    const EncodeCall* call;
    Sizes sizes;
    bool shared;        // whether the threads share each step
    Progress progress;
    int64_t next_text;  // first text that no thread has taken
  };

  // Texts [from, result) are a block. Blocks end near equal parts of the call, of which each thread has the same number.
  // With leads all texts are one block, since a layer reads the lead's keys of this layer.
  static int64_t block_end(const EncodeCall& call, int64_t from, int64_t threads) {
    if (is_whole(call)) return call.texts;
    const int64_t total = call.bounds[call.texts], begin = call.bounds[from];
    const int64_t parts = threads * quotient_up(total, threads * call.block);
    const int64_t part = (2 * begin * parts + total) / (2 * total);  // the one that begins next to here
    const int64_t end = total * (part + 1) / parts;
    int64_t to = from + 1;
    for (; to < call.texts && call.bounds[to + 1] - begin <= call.block; to++)
      if (call.bounds[to + 1] - end > end - call.bounds[to]) break;
    return to;
  }

  // The next block: none if from is to.
  static void take(Job& job, int64_t* from, int64_t* to) {
    *from = __atomic_load_n(&job.next_text, __ATOMIC_RELAXED);
    do {
      *to = *from < job.call->texts ? block_end(*job.call, *from, job.call->threads) : *from;
    } while (!__atomic_compare_exchange_n(&job.next_text, from, *to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  }

  static void work(void* argument, int64_t member) {
    auto& job = *(Job*)argument;
    const EncodeCall& call = *job.call;
    const FlushDenormals flush;
    Isa::begin();
    const Room own = room_at((char*)call.workspace + member * job.sizes.bytes, job.sizes);
    const Room room = room_at((char*)call.workspace, job.sizes);
    Team team{&job.progress, job.shared ? call.threads : 1, 0, 0, 1};
    double* timings = member == 0 ? call.timings : nullptr;
    int64_t from = 0, to = 0;
    for (;;) {
      if (job.shared) {
        from = to;
        to = from < call.texts ? block_end(call, from, 1) : from;
      } else {
        take(job, &from, &to);
      }
      if (from == to) break;
      const int64_t last = call.kept ? to / 2 : to;  // of the encoder's texts, the decoder's after them
      Block block{call, job.shared ? room : own, own, team, from, last, call.bounds[last] - call.bounds[from]};
      run_block(block, timings);
    }
    Isa::end();
  }

  static bool ids_are_known(const EncodeCall& call) {
    if (call.vocabulary)
      for (int64_t i = 0; i < call.bounds[call.texts]; i++)
        if (call.ids[i] < 0 || call.ids[i] >= call.vocabulary) return false;
    return true;
  }

  static int64_t workspace(const void* argument) { return sizes_of(*(const EncodeCall*)argument).bytes; }

  static int64_t encode(const void* argument) {
    const auto& call = *(const EncodeCall*)argument;
    if (!ids_are_known(call)) return kBadToken;
    Job job{&call, sizes_of(call), false, {0, 0, 0}, 0};
    job.shared = call.threads > 1 && (call.bounds[call.texts] <= kShared || call.texts < call.threads || is_whole(call));
    run_team(work, &job, call.threads);
    if (!call.width) return 0;
    return finish_rows(call.out, call.texts, call.width, call.unit != 0) ? 0 : kNotFinite;
  }
};

}  // namespace
