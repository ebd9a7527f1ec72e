// What crosses between library.cpp, which knows torch, and the kernels, which do not: pointers, sizes, strides.
#pragma once
#include <cstdint>

namespace fast_attention {

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Tokens (batch, heads, length, numbers); strides count numbers, those of a token lie side by side.
struct Tokens {
  void* data;
  int64_t batch, head, row;
  Kind kind;
  int64_t at(int64_t b, int64_t h, int64_t i) const { return b * batch + h * head + i * row; }
};

// Numbers (batch, heads, n), those of a head side by side; nullptr: there are none.
template <class T>
struct Lines {
  const T* data;
  int64_t batch, head;
  const T* at(int64_t b, int64_t h) const { return data == nullptr ? nullptr : data + b * batch + h * head; }
};

// Runs body(context) on some threads of torch's own pool at once: one parallel region.
struct Pool {
  int64_t threads;
  void (*run)(int64_t threads, void (*body)(void* context), void* context);
};

// Some queries of one head, [row, row_end), and the ranges of keys that they see, in the order of keys.
struct Tile {
  int32_t row, row_end, range, range_end;
};

// Keys [first, end), none of them in another range of the tile; those from the last key on do not exist. Query i sees
// key j where low <= j - i <= high; but `least` keys at least, by moving the nearer end inwards. A key counts as often
// as `count` says.
struct Range {
  int32_t first, end, low, high, least, count;
};

// What every attention has: tokens, their sizes, and one byte a key, not 0 where it may be seen. Gradients, here and below,
// are those of a backward pass; rows of dk and dv may be longer than those of keys and values.
struct Call {
  Tokens q, k, v, out, grad_out, dq, dk, dv;
  int64_t batch, heads, groups, length, keys, width, values;
  Lines<uint8_t> key_mask;
};

struct TilesCall : Call {
  float* sums;  // (batch, heads, length, 2): a query's largest score in units of log 2, and the sum of powers of two of
                // what its scores are below it: one number for both would lose digits of every weight. 0, 0: it sees none
  const float* numbers;  // (heads, number_count): what scores gain by offset j - i, from first_offset on
  int64_t first_offset, number_count;
  const float* vectors;  // (heads, number_count, width): queries meet them by offset, beside keys; nullptr: none
  const float* sinks;  // (heads): a logit of each head without a value
  const Tile* tiles;   // sorted by rows; tile_batch and tile_head are strides in tiles, 0 where all share them
  int64_t tile_count, tile_batch, tile_head;
  const Range* ranges;
  // Where `block` is not 0 there are no tiles: each query sees its own block of so many keys, up to itself, for the last
  // query is the last key, and those of its choices (batch, heads, length, choice_count) that are before its own.
  const int64_t* choices;
  int64_t choice_count, block;
  float scale, cap;  // cap: 0 for none, else scores become cap tanh(score / cap)
  int32_t keep;      // of 2^24 hashes, those that keep a weight; the others set it to zero
  float dropout;     // the share of weights that are set to zero, those whose hash of seed, head, query and key says so
  uint64_t seed;
  // dk and dv are float32, zeros at first, and their rows are whole vectors.
  float *d_numbers, *d_vectors;  // (batch, heads, number_count[, width]), zeros at first; nullptr: not wanted
  bool part;  // normalisers and outputs are of more keys than the tiles': gradients are added to those of the others
};

// How tokens become features: number by number, 2^(rows of a matrix times the token), or cosines and sines of these
// products, times e^(half of the token's square).
enum Map : int32_t { ELU_PLUS_ONE = 0, RELU = 1, IDENTITY = 2, EXPONENTIAL = 3, TRIGONOMETRIC = 4 };

// Sums over keys, (batch, heads, features, values) and (batch, heads, features), over e^log_scale of each feature.
struct States {
  float *kv, *z, *log_scale;
};

constexpr int64_t SECTION = 256;  // tokens of one item of work
inline int64_t section_count(int64_t tokens) { return (tokens + SECTION - 1) / SECTION; }
inline int64_t state_numbers(int64_t features, int64_t values) {
  return (features + 31) / 32 * 32 * ((values + 31) / 32 * 32 + 2);
}

struct FeaturesCall : Call {
  float* denominators;  // ([1 or 2], batch, heads, length): then the logarithms of the queries' largest terms
  float* states;        // (batch, heads, sections of keys + 1, state_numbers): the sums before each, and after all
  int64_t rows, features;
  Map map;
  float offset, eps;  // offset: what RELU adds
  bool causal;        // as many keys at least as queries, which are the last of them
  Tokens query_rows, key_rows;  // (batch, heads, rows, width)
  Tokens decay;                 // (batch, heads, keys, fading): e^it is what a token leaves of the sums before it
  int64_t fading;               // 0: nothing decays, 1: all features alike, else as many as there are features
  Lines<float> bias;            // of features, added to exponents
  States first, last;  // before the first key, after the last; null pointers where not given, not wanted
  int64_t number;      // of the call
  bool normed;         // features of queries have the factor of their lengths, which normalisers of their own cancel
  bool normalized;     // outputs are numerators over denominators, not numerators

  // Sections of leading keys, which all queries see, come first, then those of the keys beside the queries.
  int64_t leading_keys() const { return causal ? keys - length : keys; }
  int64_t leading() const { return section_count(leading_keys()); }
  int64_t query_sections() const { return section_count(length); }
  int64_t key_sections() const { return leading() + (causal ? query_sections() : 0); }

  float* d_states;                   // (batch, heads, sections of queries + 1, state_numbers)
  States d_last, d_first;
  int64_t query_parts, key_parts;    // items of work, each of which adds to gradients of weights of its own
  float *d_query_rows, *d_key_rows;  // (batch, heads, parts of queries or keys, features, rows of whole vectors)
  float* d_bias;                     // (batch, heads, both parts, features)
  float* d_decay;                    // as decays, zeros at first: of the sum of a token's decays and those before it
};

// Sums of blocks of keys that every block of queries reads but for the blocks around it. Reader t of `readers` has the
// sums of blocks [0, low(t)) and [high(t), summed). Readers of a section, `together` of them, are one item of work.
struct Outside {
  int64_t summed, readers, low_shift, high_shift, together;
  int64_t at(int64_t n) const { return n < 0 ? 0 : n > summed ? summed : n; }
  int64_t low(int64_t t) const { return at(t + low_shift); }
  int64_t high(int64_t t) const { return at(t + high_shift); }
  int64_t sections() const { return (readers + together - 1) / together; }
  int64_t end(int64_t section) const { return (section + 1) * together < readers ? (section + 1) * together : readers; }
  bool reads(int64_t n) const { return n < low(readers - 1) || n >= high(0); }
  int64_t slots() const { return summed + 2 * sections(); }  // sums of blocks, then of those outside of each section
};

// Near keys by tiles, sums of features for the others, and sink tokens, under one normaliser. Both have the same gradients of
// tokens, in float32 and uninitialised.
struct HybridCall {
  TilesCall near;     // `out` in float32; its sums become those of all keys; with numbers its mask leaves sink tokens out
  FeaturesCall far;   // of the same tokens; its mask leaves sink tokens out; denominators: weights of the sums in outputs, then logarithms
  int64_t block, before, after;  // tokens of a block, counted from the first key; near blocks around the query's own
  bool causal;        // as many keys at least as queries, which are the last of them
  Lines<int64_t> ends;  // positions of sink tokens; there is none from `keys` on
  int64_t end_count;
  float* d_ends;  // (batch, heads, sections of queries, end_count, rows of dk and dv)

  int64_t first_position() const { return near.keys - near.length; }  // of a query
  int64_t first_block() const {  // of a query, rounded down
    return first_position() >= 0 ? first_position() / block : -((block - 1 - first_position()) / block);
  }
  int64_t key_blocks() const { return (near.keys + block - 1) / block; }
  int64_t query_blocks() const { return (near.keys - 1) / block - first_block() + 1; }
  int64_t readers_together() const { return block > 128 ? 1 : block < 32 ? 8 : 256 / block; }
  // What blocks of queries read of keys, and the gradients that blocks of keys read of queries.
  Outside of_queries() const {
    const int64_t b = first_block(), never = INT64_MAX / 2;
    return {key_blocks(), query_blocks(), b - before, causal ? never : b + after + 1, readers_together()};
  }
  Outside of_keys() const {
    const int64_t b = first_block(), never = INT64_MIN / 2;
    return {query_blocks(), key_blocks(), causal ? never : -b - after, before - b + 1, readers_together()};
  }
};

// Buckets (batch, heads, rounds, length) of tokens by rotations (heads, rounds, width, columns).
struct HashCall {
  Tokens q;
  const float* rotations;
  int32_t* buckets;
  int64_t batch, heads, length, width, rounds, columns;
  const int64_t* factors;  // of the number of buckets, even; half of their sum is `columns`
  int64_t factor_count;
};

struct LshCall : Call {
  const int32_t* buckets;  // (batch, heads, rounds, length), from 0 to `number`, which is that of masked tokens
  int32_t *order, *codes;  // (batch, heads, rounds, length): see lsh.h
  float *lengths, *logs;   // (batch, heads, length): of queries; of normalisers, base 2, +infinity where nobody is met
  int64_t rounds, number, size;
  bool ranked, across, causal, distinct;
  float scale, shortest;
};

// The functions of one width of vectors. They give whether all outputs are finite where they tell, else true.
struct Kernels {
  int32_t width;
  bool (*tiles_forward)(const TilesCall&, const Pool&);
  bool (*tiles_backward)(const TilesCall&, const Pool&);
  bool (*features_forward)(const FeaturesCall&, const Pool&);
  bool (*features_backward)(const FeaturesCall&, const Pool&);
  bool (*hybrid_forward)(const HybridCall&, const Pool&);
  bool (*hybrid_backward)(const HybridCall&, const Pool&);
  bool (*lsh_hash)(const HashCall&, const Pool&);
  bool (*lsh_forward)(const LshCall&, const Pool&);
  bool (*lsh_backward)(const LshCall&, const Pool&);
};

}  // namespace fast_attention
