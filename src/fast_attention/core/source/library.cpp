// Registers the operations of the core with torch, by its stable ABI alone: one file serves every torch from 2.11 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <atomic>
#include <optional>
#include <vector>

#include "interface.h"

namespace fast_attention {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

#ifdef FAST_ATTENTION_HAS_16
extern const Kernels kernels_of_width_16;
#endif
#ifdef FAST_ATTENTION_HAS_8
extern const Kernels kernels_of_width_8;
#endif
extern const Kernels kernels_of_width_4;

namespace {

const Kernels* kernels = &kernels_of_width_4;

// Takes the widest vectors that are there and no wider than asked for; gives their width.
int64_t use_width(int64_t width) {
  kernels = &kernels_of_width_4;
#ifdef FAST_ATTENTION_HAS_8
  if (width >= 8) kernels = &kernels_of_width_8;
#endif
#ifdef FAST_ATTENTION_HAS_16
  if (width >= 16) kernels = &kernels_of_width_16;
#endif
  return kernels->width;
}

Pool pool() {
  Pool result;
  result.threads = torch::stable::get_num_threads();
  result.run = [](int64_t threads, Body body, void* context) {
    if (threads <= 1) {
      if (threads == 1) body(context, 0);
      return;
    }
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) body(context, thread);
    });
  };
  return result;
}

Kind kind(const Tensor& x) {
  const ScalarType type = x.scalar_type();
  if (type == ScalarType::Float) return FLOAT32;
  if (type == ScalarType::BFloat16) return BFLOAT16;
  STD_TORCH_CHECK(type == ScalarType::Half, "the core takes float32, bfloat16 and float16");
  return FLOAT16;
}

// (batch, heads, length, numbers)
Tokens tokens(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4 && (x.stride(3) == 1 || x.size(3) <= 1), "the core takes four axes, and numbers of a token side by side");
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), kind(x)};
}

template <class T>
T* numbers_of(const Tensor& x) {
  STD_TORCH_CHECK(x.is_contiguous(), "the core takes contiguous numbers here");
  return static_cast<T*>(x.data_ptr());
}

template <class Call>
void set_mask(Call& c, const MaybeTensor& mask) {
  if (!mask) return;
  STD_TORCH_CHECK(mask->dim() == 3 && mask->size(0) == c.batch && mask->size(1) == c.heads && mask->size(2) == c.keys &&
                      (mask->stride(2) == 1 || c.keys <= 1),
                  "the key mask does not fit");
  c.key_mask = static_cast<const uint8_t*>(mask->data_ptr());
  c.mask_batch = mask->stride(0), c.mask_head = mask->stride(1);
}

TilesCall tiles_call(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& key_mask,
                     const MaybeTensor& numbers, const MaybeTensor& vectors, const MaybeTensor& sinks,
                     const Tensor& tiles, const Tensor& ranges, const MaybeTensor& choices, int64_t block,
                     int64_t first_offset, double scale, double cap,
                     double dropout, int64_t seed, const Tensor& out, const Tensor& sums) {
  TilesCall c{};
  c.q = tokens(q), c.k = tokens(k), c.v = tokens(v), c.out = tokens(out);
  c.batch = q.size(0), c.heads = q.size(1), c.length = q.size(2), c.width = q.size(3);
  c.groups = k.size(1), c.keys = k.size(2), c.values = v.size(3);
  STD_TORCH_CHECK(k.size(3) == c.width && v.size(2) == c.keys && v.size(1) == c.groups, "keys and values do not fit");
  STD_TORCH_CHECK(k.size(0) == c.batch && v.size(0) == c.batch && c.groups > 0 && c.heads % c.groups == 0,
                  "heads do not fit");
  STD_TORCH_CHECK(out.size(0) == c.batch && out.size(1) == c.heads && out.size(2) == c.length && out.size(3) == c.values,
                  "the output does not fit");
  STD_TORCH_CHECK(sums.numel() == 2 * c.batch * c.heads * c.length, "the normalisers do not fit");
  c.sums = numbers_of<float>(sums);
  set_mask(c, key_mask);
  if (numbers) {
    STD_TORCH_CHECK(numbers->dim() == 2 && numbers->size(0) == c.heads, "the numbers of offsets do not fit");
    c.numbers = numbers_of<float>(*numbers);
    c.number_count = numbers->size(1), c.numbers_head = c.number_count, c.first_offset = first_offset;
  }
  if (vectors) {
    STD_TORCH_CHECK(numbers && vectors->dim() == 3 && vectors->size(0) == c.heads &&
                        vectors->size(1) == c.number_count && vectors->size(2) == c.width,
                    "the vectors of offsets do not fit");
    c.vectors = numbers_of<float>(*vectors);
  }
  if (sinks) {
    STD_TORCH_CHECK(sinks->numel() == c.heads, "the sinks do not fit");
    c.sinks = numbers_of<float>(*sinks);
  }
  STD_TORCH_CHECK(tiles.dim() == 4 && tiles.size(3) == 4 && ranges.dim() == 2 && ranges.size(1) == 6,
                  "tiles are (batch, heads, number, 4), ranges (number, 6)");
  STD_TORCH_CHECK((tiles.size(0) == 1 || tiles.size(0) == c.batch) && (tiles.size(1) == 1 || tiles.size(1) == c.heads),
                  "the tiles do not fit the heads");
  c.tiles = numbers_of<Tile>(tiles), c.ranges = numbers_of<Range>(ranges);
  c.tile_count = tiles.size(2);
  c.tile_head = tiles.size(1) == 1 ? 0 : c.tile_count;
  c.tile_batch = tiles.size(0) == 1 ? 0 : c.tile_count * tiles.size(1);
  if (choices) {
    STD_TORCH_CHECK(choices->dim() == 4 && choices->size(0) == c.batch && choices->size(1) == c.heads &&
                        choices->size(2) == c.length && choices->scalar_type() == ScalarType::Long && block >= 1 &&
                        c.length <= c.keys && c.tile_count == 0 && !numbers,
                    "the choices do not fit");
    c.choices = numbers_of<int64_t>(*choices), c.choice_count = choices->size(3), c.block = block;
  }
  c.scale = static_cast<float>(scale), c.cap = static_cast<float>(cap);
  c.keep = static_cast<int32_t>((1.0 - dropout) * 16777216.0);
  c.dropout = static_cast<float>(dropout), c.seed = static_cast<uint64_t>(seed);
  return c;
}

void tiles_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& key_mask,
                   const MaybeTensor& numbers, const MaybeTensor& vectors, const MaybeTensor& sinks,
                   const Tensor& tiles, const Tensor& ranges, const MaybeTensor& choices, int64_t block,
                     int64_t first_offset, double scale, double cap,
                   double dropout, int64_t seed, const Tensor& out, const Tensor& sums) {
  const TilesCall c = tiles_call(q, k, v, key_mask, numbers, vectors, sinks, tiles, ranges, choices, block, first_offset, scale, cap,
                                 dropout, seed, out, sums);
  kernels->tiles_forward(c, pool());
}

TilesGradients tiles_gradients(const TilesCall& c, const Tensor& grad_out, const Tensor& dq, const Tensor& dk,
                               const Tensor& dv, const MaybeTensor& d_numbers, const MaybeTensor& d_vectors) {
  TilesGradients d{};
  d.grad_out = tokens(grad_out), d.dq = tokens(dq);
  d.dk = numbers_of<float>(dk), d.dv = numbers_of<float>(dv);
  d.dk_row = dk.size(3), d.dv_row = dv.size(3);
  STD_TORCH_CHECK(dk.numel() == c.batch * c.groups * c.keys * d.dk_row && d.dk_row >= c.width && d.dk_row % 16 == 0 &&
                      dv.numel() == c.batch * c.groups * c.keys * d.dv_row && d.dv_row >= c.values && d.dv_row % 16 == 0,
                  "the gradients of keys and values do not fit");
  if (d_numbers) {
    STD_TORCH_CHECK(d_numbers->numel() == c.batch * c.heads * c.number_count, "the gradients of numbers do not fit");
    d.d_numbers = numbers_of<float>(*d_numbers);
  }
  if (d_vectors) {
    STD_TORCH_CHECK(d_vectors->numel() == c.batch * c.heads * c.number_count * c.width, "the gradients do not fit");
    d.d_vectors = numbers_of<float>(*d_vectors);
  }
  return d;
}

void tiles_backward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& key_mask,
                    const MaybeTensor& numbers, const MaybeTensor& vectors, const MaybeTensor& sinks,
                    const Tensor& tiles, const Tensor& ranges, const MaybeTensor& choices, int64_t block,
                     int64_t first_offset, double scale, double cap,
                    double dropout, int64_t seed, const Tensor& out, const Tensor& sums, const Tensor& grad_out,
                    const Tensor& dq, const Tensor& dk, const Tensor& dv, const MaybeTensor& d_numbers,
                    const MaybeTensor& d_vectors) {
  const TilesCall c = tiles_call(q, k, v, key_mask, numbers, vectors, sinks, tiles, ranges, choices, block, first_offset, scale, cap,
                                 dropout, seed, out, sums);
  kernels->tiles_backward(c, tiles_gradients(c, grad_out, dq, dk, dv, d_numbers, d_vectors), pool());
}

States states_of(const MaybeTensor& kv, const MaybeTensor& z, const MaybeTensor& log_scale, const FeaturesCall& c) {
  States states{};
  if (!kv) return states;
  const int64_t rows = c.batch * c.heads * c.features;
  STD_TORCH_CHECK(kv->numel() == rows * c.values && z && z->numel() == rows, "a state does not fit");
  states.kv = numbers_of<float>(*kv), states.z = numbers_of<float>(*z);
  if (log_scale) {
    STD_TORCH_CHECK(log_scale->numel() == rows, "a state's scales do not fit");
    states.log_scale = numbers_of<float>(*log_scale);
  }
  return states;
}

FeaturesCall features_call(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& key_mask,
                           const MaybeTensor& query_rows, const MaybeTensor& key_rows, const MaybeTensor& bias,
                           const MaybeTensor& first_kv, const MaybeTensor& first_z, const MaybeTensor& first_scale,
                           const MaybeTensor& decay, int64_t map, double offset, double eps, bool normalized, bool causal,
                           const Tensor& out, const Tensor& denominators, const MaybeTensor& states, int64_t slots = 0) {
  static std::atomic<int64_t> calls{0};
  FeaturesCall c{};
  c.number = ++calls;
  c.q = tokens(q), c.k = tokens(k), c.v = tokens(v), c.out = tokens(out);
  c.batch = q.size(0), c.heads = q.size(1), c.length = q.size(2), c.width = q.size(3);
  c.keys = k.size(2), c.values = v.size(3), c.features = c.width;
  c.normalized = normalized;
  c.map = static_cast<Map>(map), c.offset = static_cast<float>(offset), c.eps = static_cast<float>(eps), c.causal = causal;
  for (const Tensor* x : {&k, &v, &out})
    STD_TORCH_CHECK(x->size(0) == c.batch && x->size(1) == c.heads, "heads do not fit");
  STD_TORCH_CHECK(k.size(3) == c.width && v.size(2) == c.keys, "keys and values do not fit");
  STD_TORCH_CHECK(out.size(2) == c.length && out.size(3) == c.values, "the output does not fit");
  STD_TORCH_CHECK(map >= ELU_PLUS_ONE && map <= TRIGONOMETRIC && (!causal || c.keys >= c.length), "such a call is not served");
  set_mask(c, key_mask);
  const bool exponential = map == EXPONENTIAL;
  if (decay) {
    c.decay = tokens(*decay), c.fading = decay->size(3);
    STD_TORCH_CHECK(decay->size(0) == c.batch && decay->size(1) == c.heads && decay->size(2) == c.keys &&
                        (c.fading == 1 || c.fading == c.features) && c.decay.kind == FLOAT32 && map < EXPONENTIAL &&
                        causal && c.keys == c.length,
                    "the decays do not fit");
  }
  if (map >= EXPONENTIAL) {
    STD_TORCH_CHECK(query_rows && key_rows, "random features need rows");
    c.query_rows = tokens(*query_rows), c.key_rows = tokens(*key_rows), c.rows = query_rows->size(2);
    c.features = exponential ? c.rows : 2 * c.rows;
    for (const Tensor* x : {&*query_rows, &*key_rows})
      STD_TORCH_CHECK(x->size(0) == c.batch && x->size(1) == c.heads && x->size(2) == c.rows && x->size(3) == c.width &&
                          x->scalar_type() == ScalarType::Float,
                      "rows do not fit");
    if (bias && exponential) {
      STD_TORCH_CHECK(bias->dim() == 3 && bias->size(0) == c.batch && bias->size(1) == c.heads &&
                          bias->size(2) == c.features && (bias->stride(2) == 1 || c.features == 1) &&
                          bias->scalar_type() == ScalarType::Float,
                      "the bias does not fit");
      c.bias = static_cast<const float*>(bias->data_ptr());
      c.bias_batch = bias->stride(0), c.bias_head = bias->stride(1);
    }
  }
  const int64_t lead = causal ? c.keys - c.length : c.keys;
  if (slots == 0) slots = section_count(lead) + (causal ? section_count(c.length) : 0) + 1;
  STD_TORCH_CHECK((!states || states->numel() == c.batch * c.heads * slots * state_numbers(c.features, c.values)) &&
                      denominators.numel() == (map < EXPONENTIAL ? 1 : 2) * c.batch * c.heads * c.length,
                  "the memory of sums does not fit");
  c.denominators = numbers_of<float>(denominators);
  if (states) c.states = numbers_of<float>(*states);
  c.first = states_of(first_kv, first_z, first_scale, c);
  STD_TORCH_CHECK(!c.first.kv || map < EXPONENTIAL || c.first.log_scale, "a state of random features has scales");
  return c;
}

bool features_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& key_mask,
                      const MaybeTensor& query_rows, const MaybeTensor& key_rows, const MaybeTensor& bias,
                      const MaybeTensor& first_kv, const MaybeTensor& first_z, const MaybeTensor& first_scale,
                      const MaybeTensor& decay, int64_t map, double offset, double eps, bool normalized, bool causal,
                      const Tensor& out, const Tensor& denominators,
                      const Tensor& states, const MaybeTensor& last_kv, const MaybeTensor& last_z,
                      const MaybeTensor& last_scale) {
  FeaturesCall c = features_call(q, k, v, key_mask, query_rows, key_rows, bias, first_kv, first_z, first_scale, decay, map,
                                 offset, eps, normalized, causal, out, denominators, states);
  c.last = states_of(last_kv, last_z, last_scale, c);
  STD_TORCH_CHECK(!c.last.kv || map < EXPONENTIAL || c.last.log_scale, "a state of random features has scales");
  return kernels->features_forward(c, pool());
}

// of sections of queries and of keys
FeaturesGradients features_gradients(const FeaturesCall& c, const Tensor& grad_out, const Tensor& dq, const Tensor& dk,
                                     const Tensor& dv, const MaybeTensor& d_states, int64_t slots, int64_t queries,
                                     int64_t sections, const MaybeTensor& d_query_rows, const MaybeTensor& d_key_rows,
                                     const MaybeTensor& d_bias) {
  FeaturesGradients d{};
  d.grad_out = tokens(grad_out), d.dq = tokens(dq), d.dk = tokens(dk), d.dv = tokens(dv);
  const int64_t heads = c.batch * c.heads, rows = c.rows * ((c.width + 31) / 32 * 32);
  STD_TORCH_CHECK(!d_states || d_states->numel() == heads * slots * state_numbers(c.features, c.values),
                  "the memory of gradients does not fit");
  if (d_states) d.states = numbers_of<float>(*d_states);
  if (d_query_rows) {
    STD_TORCH_CHECK(d_query_rows->numel() == heads * queries * rows, "gradients of rows do not fit");
    d.d_query_rows = numbers_of<float>(*d_query_rows);
  }
  if (d_key_rows) {
    STD_TORCH_CHECK(d_key_rows->numel() == heads * sections * rows, "gradients of rows do not fit");
    d.d_key_rows = numbers_of<float>(*d_key_rows);
  }
  if (d_bias) {
    STD_TORCH_CHECK(d_bias->numel() == heads * (queries + sections) * ((c.features + 31) / 32 * 32),
                    "gradients of the bias do not fit");
    d.d_bias = numbers_of<float>(*d_bias);
  }
  return d;
}

void features_backward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& key_mask,
                       const MaybeTensor& query_rows, const MaybeTensor& key_rows, const MaybeTensor& bias,
                       const MaybeTensor& first_kv, const MaybeTensor& first_z, const MaybeTensor& first_scale,
                       const MaybeTensor& decay, int64_t map, double offset, double eps, bool normalized, bool causal,
                      const Tensor& out, const Tensor& denominators,
                       const Tensor& states, const Tensor& grad_out, const MaybeTensor& d_last_kv,
                       const MaybeTensor& d_last_z, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                       const Tensor& d_states, const MaybeTensor& d_first_kv, const MaybeTensor& d_first_z,
                       const MaybeTensor& d_query_rows, const MaybeTensor& d_key_rows, const MaybeTensor& d_bias,
                       const MaybeTensor& d_decay) {
  const FeaturesCall c = features_call(q, k, v, key_mask, query_rows, key_rows, bias, first_kv, first_z, first_scale, decay, map,
                                       offset, eps, normalized, causal, out, denominators, states);
  const int64_t lead = section_count(causal ? c.keys - c.length : c.keys), queries = section_count(c.length);
  FeaturesGradients d = features_gradients(c, grad_out, dq, dk, dv, d_states, queries + 1, queries,
                                           lead + (causal ? queries : 0), d_query_rows, d_key_rows, d_bias);
  d.last = states_of(d_last_kv, d_last_z, {}, c), d.first = states_of(d_first_kv, d_first_z, {}, c);
  if (c.fading > 0) {
    STD_TORCH_CHECK(d_decay && d_decay->numel() == c.batch * c.heads * c.keys * c.fading, "gradients of decays do not fit");
    d.d_decay = numbers_of<float>(*d_decay);
  }
  STD_TORCH_CHECK(!d.first.kv || c.first.kv, "only a state that was given has a gradient");
  kernels->features_backward(c, d, pool());
}

// place: tokens of a block, near blocks before and after a query's own, causal, map of features
HybridCall hybrid_call(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& key_mask,
                       const Tensor& others, const Tensor& ends,
                       const MaybeTensor& numbers, const MaybeTensor& sinks, const Tensor& tiles, const Tensor& ranges,
                       const MaybeTensor& query_rows, const MaybeTensor& key_rows, const MaybeTensor& bias,
                       int64_t first_offset, double scale, const std::vector<int64_t>& place, double offset,
                       const Tensor& out, const Tensor& sums, const Tensor& weights, const MaybeTensor& states) {
  HybridCall c{};
  STD_TORCH_CHECK(place.size() == 5 && place[0] >= 1 && place[1] >= 0 && place[2] >= 0, "the blocks do not fit");
  c.block = place[0], c.before = place[1], c.after = place[2], c.causal = place[3] != 0;
  c.near = tiles_call(q, k, v, key_mask, numbers, {}, sinks, tiles, ranges, {}, 0, first_offset, scale, 0.0, 0.0, 0, out, sums);
  STD_TORCH_CHECK(c.near.keys >= 1 && c.near.length >= 1 && (!c.causal || c.near.keys >= c.near.length) &&
                      c.near.heads == c.near.groups && c.near.out.kind == FLOAT32,
                  "such a call is not served");
  c.far = features_call(q, k, v, others, query_rows, key_rows, bias, {}, {}, {}, {}, place[4], offset, 0.0, true, false, out,
                        weights, states, c.of_queries().slots());
  c.far.normed = true;
  STD_TORCH_CHECK(ends.dim() == 3 && ends.size(0) == c.near.batch && ends.size(1) == c.near.heads &&
                      ends.scalar_type() == ScalarType::Long && (ends.stride(2) == 1 || ends.size(2) <= 1),
                  "the sink tokens do not fit");
  c.ends = static_cast<const int64_t*>(ends.data_ptr()), c.end_count = ends.size(2);
  c.ends_batch = ends.stride(0), c.ends_head = ends.stride(1);
  return c;
}

bool hybrid_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& key_mask,
                    const Tensor& others, const Tensor& ends,
                    const MaybeTensor& numbers, const MaybeTensor& sinks, const Tensor& tiles, const Tensor& ranges,
                    const MaybeTensor& query_rows, const MaybeTensor& key_rows, const MaybeTensor& bias,
                    int64_t first_offset, double scale, std::vector<int64_t> place, double offset, const Tensor& out,
                    const Tensor& sums, const Tensor& weights, const MaybeTensor& states) {
  return kernels->hybrid_forward(hybrid_call(q, k, v, key_mask, others, ends, numbers, sinks, tiles, ranges, query_rows, key_rows,
                                             bias, first_offset, scale, place, offset, out, sums, weights, states),
                                 pool());
}

void hybrid_backward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& key_mask,
                     const Tensor& others, const Tensor& ends,
                     const MaybeTensor& numbers, const MaybeTensor& sinks, const Tensor& tiles, const Tensor& ranges,
                     const MaybeTensor& query_rows, const MaybeTensor& key_rows, const MaybeTensor& bias,
                     int64_t first_offset, double scale, std::vector<int64_t> place, double offset, const Tensor& out,
                     const Tensor& sums, const Tensor& weights, const Tensor& states, const Tensor& grad_out,
                     const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& d_ends, const MaybeTensor& d_states,
                     const MaybeTensor& d_numbers, const MaybeTensor& d_query_rows, const MaybeTensor& d_key_rows,
                     const MaybeTensor& d_bias) {
  const HybridCall c = hybrid_call(q, k, v, key_mask, others, ends, numbers, sinks, tiles, ranges, query_rows, key_rows, bias,
                                   first_offset, scale, place, offset, out, sums, weights, states);
  const int64_t queries = c.of_queries().sections(), keys = c.of_keys().sections();
  HybridGradients d{};
  d.near = tiles_gradients(c.near, grad_out, dq, dk, dv, d_numbers, {});
  d.near.part = true;
  d.far = features_gradients(c.far, grad_out, dq, dk, dv, d_states, c.of_keys().slots(), queries, keys, d_query_rows,
                             d_key_rows, d_bias);
  STD_TORCH_CHECK(d.near.dq.kind == FLOAT32, "gradients are in float32 here");
  d.ends = numbers_of<float>(d_ends);
  STD_TORCH_CHECK(d_ends.numel() == c.near.batch * c.near.heads * queries * c.end_count * (d.near.dk_row + d.near.dv_row),
                  "the gradients of sink tokens do not fit");
  kernels->hybrid_backward(c, d, pool());
}

void lsh_hash(const Tensor& q, const Tensor& rotations, std::vector<int64_t> factors, const Tensor& buckets) {
  HashCall c{};
  c.q = tokens(q), c.rotations = numbers_of<float>(rotations), c.buckets = numbers_of<int32_t>(buckets);
  c.batch = q.size(0), c.heads = q.size(1), c.length = q.size(2), c.width = q.size(3);
  STD_TORCH_CHECK(rotations.dim() == 4 && rotations.size(0) == c.heads && rotations.size(2) == c.width &&
                      rotations.scalar_type() == ScalarType::Float,
                  "the rotations do not fit");
  c.rounds = rotations.size(1), c.columns = rotations.size(3);
  c.factors = factors.data(), c.factor_count = static_cast<int64_t>(factors.size());
  int64_t halves = 0;
  for (const int64_t factor : factors) {
    STD_TORCH_CHECK(factor >= 2 && factor % 2 == 0, "numbers of buckets are even");
    halves += factor / 2;
  }
  STD_TORCH_CHECK(halves == c.columns, "the rotations do not fit the numbers of buckets");
  STD_TORCH_CHECK(buckets.scalar_type() == ScalarType::Int && buckets.numel() == c.batch * c.heads * c.rounds * c.length,
                  "the buckets do not fit");
  kernels->lsh_hash(c, pool());
}

// flags: ranked, across, causal, distinct
LshCall lsh_call(const Tensor& q, const Tensor& v, const Tensor& order, const Tensor& codes, const Tensor& lengths,
                 const Tensor& logs, const Tensor& out, int64_t number, int64_t size, const std::vector<int64_t>& flags,
                 double scale, double shortest) {
  LshCall c{};
  c.q = tokens(q), c.v = tokens(v), c.out = tokens(out);
  c.batch = q.size(0), c.heads = q.size(1), c.length = q.size(2), c.width = q.size(3), c.values = v.size(3);
  for (const Tensor* x : {&v, &out})
    STD_TORCH_CHECK(x->size(0) == c.batch && x->size(1) == c.heads && x->size(2) == c.length && x->size(3) == c.values,
                    "values and outputs do not fit");
  STD_TORCH_CHECK(codes.dim() == 4 && codes.numel() == order.numel(), "orders and codes do not fit");
  c.rounds = codes.size(2), c.number = number, c.size = size;
  const int64_t tokens_of_all = c.batch * c.heads * c.length;
  STD_TORCH_CHECK(codes.numel() == tokens_of_all * c.rounds && codes.scalar_type() == ScalarType::Int &&
                      order.scalar_type() == ScalarType::Int,
                  "orders and codes do not fit");
  STD_TORCH_CHECK(lengths.numel() == tokens_of_all && logs.numel() == tokens_of_all, "lengths and logs do not fit");
  STD_TORCH_CHECK(number >= 1 && size >= 1 && flags.size() == 4, "the settings do not fit");
  c.order = numbers_of<int32_t>(order), c.codes = numbers_of<int32_t>(codes);
  c.lengths = numbers_of<float>(lengths), c.logs = numbers_of<float>(logs);
  c.ranked = flags[0] != 0, c.across = flags[1] != 0, c.causal = flags[2] != 0, c.distinct = flags[3] != 0;
  c.scale = static_cast<float>(scale), c.shortest = static_cast<float>(shortest);
  return c;
}

void lsh_forward(const Tensor& q, const Tensor& v, const Tensor& buckets, int64_t number, int64_t size,
                 std::vector<int64_t> flags, double scale, double shortest, const Tensor& order, const Tensor& codes,
                 const Tensor& lengths, const Tensor& logs, const Tensor& out) {
  LshCall c = lsh_call(q, v, order, codes, lengths, logs, out, number, size, flags, scale, shortest);
  STD_TORCH_CHECK(buckets.numel() == codes.numel() && buckets.scalar_type() == ScalarType::Int, "the buckets do not fit");
  c.buckets = numbers_of<int32_t>(buckets);
  kernels->lsh_forward(c, pool());
}

void lsh_backward(const Tensor& q, const Tensor& v, int64_t number, int64_t size, std::vector<int64_t> flags,
                  double scale, double shortest, const Tensor& order, const Tensor& codes, const Tensor& lengths,
                  const Tensor& logs, const Tensor& out, const Tensor& grad_out, const Tensor& dq, const Tensor& dv) {
  const LshCall c = lsh_call(q, v, order, codes, lengths, logs, out, number, size, flags, scale, shortest);
  LshGradients d{};
  d.grad_out = tokens(grad_out), d.dq = tokens(dq), d.dv = tokens(dv);
  for (int64_t axis = 0; axis < 4; ++axis)
    STD_TORCH_CHECK(grad_out.size(axis) == out.size(axis) && dv.size(axis) == v.size(axis) &&
                        dq.size(axis) == q.size(axis),
                    "the gradients do not fit");
  kernels->lsh_backward(c, d, pool());
}

}  // namespace

STABLE_TORCH_LIBRARY(fast_attention_core, m) {
  m.def("use_width(int width) -> int");
#define TILES                                                                                                    \
  "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? numbers, Tensor? vectors, Tensor? sinks, Tensor tiles, " \
  "Tensor ranges, Tensor? choices, int block, int first_offset, float scale, float cap, float dropout, int seed, "
  m.def("tiles_forward(" TILES "Tensor(a!) out, Tensor(b!) sums) -> ()");
  m.def("tiles_backward(" TILES "Tensor out, Tensor sums, Tensor grad_out, Tensor(a!) dq, Tensor(b!) dk, "
        "Tensor(c!) dv, Tensor(d!)? d_numbers, Tensor(e!)? d_vectors) -> ()");
#undef TILES
#define FEATURES                                                                                                 \
  "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? query_rows, Tensor? key_rows, Tensor? bias, "            \
  "Tensor? first_kv, Tensor? first_z, Tensor? first_scale, Tensor? decay, int map, float offset, float eps, "          \
  "bool normalized, bool causal, "
  m.def("features_forward(" FEATURES "Tensor(a!) out, Tensor(b!) denominators, Tensor(c!) states, "
        "Tensor(d!)? last_kv, Tensor(e!)? last_z, Tensor(f!)? last_scale) -> bool");
  m.def("features_backward(" FEATURES "Tensor out, Tensor denominators, Tensor states, Tensor grad_out, "
        "Tensor? d_last_kv, Tensor? d_last_z, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) d_states, "
        "Tensor(e!)? d_first_kv, Tensor(f!)? d_first_z, Tensor(g!)? d_query_rows, Tensor(h!)? d_key_rows, "
        "Tensor(i!)? d_bias, Tensor(j!)? d_decay) -> ()");
#undef FEATURES
#define HYBRID                                                                                                   \
  "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor others, Tensor ends, Tensor? numbers, Tensor? sinks, Tensor tiles, "      \
  "Tensor ranges, Tensor? query_rows, Tensor? key_rows, Tensor? bias, int first_offset, float scale, int[] place, " \
  "float offset, "
  m.def("hybrid_forward(" HYBRID "Tensor(a!) out, Tensor(b!) sums, Tensor(c!) weights, Tensor(d!)? states) -> bool");
  m.def("hybrid_backward(" HYBRID "Tensor out, Tensor sums, Tensor weights, Tensor states, Tensor grad_out, "
        "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) d_ends, Tensor(e!)? d_states, Tensor(f!)? d_numbers, "
        "Tensor(g!)? d_query_rows, Tensor(h!)? d_key_rows, Tensor(i!)? d_bias) -> ()");
#undef HYBRID
  m.def("lsh_hash(Tensor q, Tensor rotations, int[] factors, Tensor(a!) buckets) -> ()");
  m.def(
      "lsh_forward(Tensor q, Tensor v, Tensor buckets, int number, int size, int[] flags, float scale, "
      "float shortest, Tensor(a!) order, Tensor(b!) codes, Tensor(c!) lengths, Tensor(d!) logs, Tensor(e!) out) -> ()");
  m.def(
      "lsh_backward(Tensor q, Tensor v, int number, int size, int[] flags, float scale, float shortest, Tensor order, "
      "Tensor codes, Tensor lengths, Tensor logs, Tensor out, Tensor grad_out, Tensor(a!) dq, Tensor(b!) dv) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fast_attention_core, CompositeExplicitAutograd, m) {
  m.impl("use_width", TORCH_BOX(&use_width));
}

STABLE_TORCH_LIBRARY_IMPL(fast_attention_core, CPU, m) {
  m.impl("tiles_forward", TORCH_BOX(&tiles_forward));
  m.impl("tiles_backward", TORCH_BOX(&tiles_backward));
  m.impl("features_forward", TORCH_BOX(&features_forward));
  m.impl("features_backward", TORCH_BOX(&features_backward));
  m.impl("hybrid_forward", TORCH_BOX(&hybrid_forward));
  m.impl("hybrid_backward", TORCH_BOX(&hybrid_backward));
  m.impl("lsh_hash", TORCH_BOX(&lsh_hash));
  m.impl("lsh_forward", TORCH_BOX(&lsh_forward));
  m.impl("lsh_backward", TORCH_BOX(&lsh_backward));
}

}  // namespace fast_attention
