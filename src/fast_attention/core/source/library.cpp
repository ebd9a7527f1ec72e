// Registers the operations of the core with torch, by its stable ABI alone: one file serves every torch from 2.11 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
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

// Refuses sizes that the kernels would read or write beyond.
void check(bool fits, const char* message) {
  if (!fits) throw std::runtime_error(message);
}

// The arguments of a call by the names of its schema, all taken from torch's stack at once.
class Arguments {
 public:
  Arguments(const char* schema, const StableIValue* stack) {
    namespace stable = torch::stable::detail;
    values_.reserve(40);
    for (const char* type = std::strchr(schema, '(') + 1; *type != '>'; ++stack) {
      const char *name = std::strchr(type, ' ') + 1, *end = name + std::strcspn(name, ",)"), last = name[-2];
      Value& value = values_.emplace_back();
      value.name = {name, static_cast<size_t>(end - name)};
      if (*type == 'T') value.tensor = last == '?' ? stable::to<MaybeTensor>(*stack) : stable::to<Tensor>(*stack);
      else if (*type == 'f') value.number = stable::to<double>(*stack);
      else if (*type == 'b') value.integer = stable::to<bool>(*stack);
      else if (last == ']') value.list = stable::to<std::vector<int64_t>>(*stack);
      else value.integer = stable::to<int64_t>(*stack);
      type = end + (*end == ',' ? 2 : 3);  // the next type, or the end of the arrow
    }
  }
  const MaybeTensor& maybe(std::string_view name) const { return find(name).tensor; }
  const Tensor& operator[](std::string_view name) const { return *find(name).tensor; }
  const std::vector<int64_t>& list(std::string_view name) const { return find(name).list; }
  int64_t integer(std::string_view name) const { return find(name).integer; }
  double real(std::string_view name) const { return find(name).number; }
  float number(std::string_view name) const { return static_cast<float>(real(name)); }

  // So many contiguous floats; a null pointer where there is no tensor.
  float* floats(std::string_view name, int64_t count, const char* message) const {
    const MaybeTensor& x = find(name).tensor;
    if (!x) return nullptr;
    check(x->numel() == count && x->is_contiguous() && x->scalar_type() == ScalarType::Float, message);
    return static_cast<float*>(x->data_ptr());
  }

 private:
  struct Value {
    std::string_view name;
    MaybeTensor tensor;
    std::vector<int64_t> list;
    double number = 0.0;
    int64_t integer = 0;
  };
  const Value& find(std::string_view name) const {
    size_t at = 0;
    while (values_[at].name != name) ++at;
    return values_[at];
  }
  std::vector<Value> values_;
};

bool has_shape(const Tensor& x, std::initializer_list<int64_t> sizes) {
  bool same = x.dim() == static_cast<int64_t>(sizes.size());
  for (int64_t axis = 0; same && axis < x.dim(); ++axis) same = x.size(axis) == sizes.begin()[axis];
  return same;
}

// Whether numbers of the last axis lie side by side, wherever those of the others are.
bool has_rows(const Tensor& x) { return x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) <= 1; }

// (batch, heads, length, numbers)
Tokens tokens(const Tensor& x) {
  check(x.dim() == 4 && has_rows(x), "the core takes four axes, and numbers of a token side by side");
  const ScalarType type = x.scalar_type();
  check(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
        "the core takes float32, bfloat16 and float16");
  const Kind kind = type == ScalarType::Float ? FLOAT32 : type == ScalarType::BFloat16 ? BFLOAT16 : FLOAT16;
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), kind};
}

// Contiguous numbers that are not floats.
template <class T>
T* numbers_of(const Tensor& x) {
  check(x.is_contiguous(), "the core takes contiguous numbers here");
  return static_cast<T*>(x.data_ptr());
}

template <class Call>
void set_mask(Call& c, const MaybeTensor& mask) {
  if (!mask) return;
  check(has_shape(*mask, {c.batch, c.heads, c.keys}) && has_rows(*mask), "the key mask does not fit");
  c.key_mask = static_cast<const uint8_t*>(mask->data_ptr());
  c.mask_batch = mask->stride(0), c.mask_head = mask->stride(1);
}

// Tiles, and the near keys of Hybrid.
TilesCall near_call(const Arguments& a) {
  const Tensor &q = a["q"], &k = a["k"], &v = a["v"], &tiles = a["tiles"], &ranges = a["ranges"];
  TilesCall c{};
  c.q = tokens(q), c.k = tokens(k), c.v = tokens(v), c.out = tokens(a["out"]);
  c.batch = q.size(0), c.heads = q.size(1), c.length = q.size(2), c.width = q.size(3);
  c.groups = k.size(1), c.keys = k.size(2), c.values = v.size(3);
  check(k.size(3) == c.width && v.size(2) == c.keys && v.size(1) == c.groups, "keys and values do not fit");
  check(k.size(0) == c.batch && v.size(0) == c.batch && c.groups > 0 && c.heads % c.groups == 0, "heads do not fit");
  check(has_shape(a["out"], {c.batch, c.heads, c.length, c.values}), "the output does not fit");
  c.sums = a.floats("sums", 2 * c.batch * c.heads * c.length, "the normalisers do not fit");
  set_mask(c, a.maybe("key_mask"));
  if (const MaybeTensor& numbers = a.maybe("numbers")) c.number_count = c.numbers_head = numbers->size(1);
  c.numbers = a.floats("numbers", c.heads * c.number_count, "the numbers of offsets do not fit");
  c.sinks = a.floats("sinks", c.heads, "the sinks do not fit");
  c.first_offset = a.integer("first_offset"), c.scale = a.number("scale");
  check(tiles.dim() == 4 && tiles.size(3) == 4 && ranges.dim() == 2 && ranges.size(1) == 6,
        "tiles are (batch, heads, number, 4), ranges (number, 6)");
  check((tiles.size(0) == 1 || tiles.size(0) == c.batch) && (tiles.size(1) == 1 || tiles.size(1) == c.heads),
        "the tiles do not fit the heads");
  c.tiles = numbers_of<Tile>(tiles), c.ranges = numbers_of<Range>(ranges);
  c.tile_count = tiles.size(2);
  c.tile_head = tiles.size(1) == 1 ? 0 : c.tile_count;
  c.tile_batch = tiles.size(0) == 1 ? 0 : c.tile_count * tiles.size(1);
  return c;
}

TilesGradients near_gradients(const Arguments& a, const TilesCall& c) {
  TilesGradients d{};
  d.grad_out = tokens(a["grad_out"]), d.dq = tokens(a["dq"]);
  d.dk_row = a["dk"].size(3), d.dv_row = a["dv"].size(3);
  const char* message = "the gradients of keys and values do not fit";
  check(d.dk_row >= c.width && d.dk_row % 16 == 0 && d.dv_row >= c.values && d.dv_row % 16 == 0, message);
  d.dk = a.floats("dk", c.batch * c.groups * c.keys * d.dk_row, message);
  d.dv = a.floats("dv", c.batch * c.groups * c.keys * d.dv_row, message);
  d.d_numbers = a.floats("d_numbers", c.batch * c.heads * c.number_count, "the gradients of numbers do not fit");
  return d;
}

TilesCall tiles_call(const Arguments& a) {
  TilesCall c = near_call(a);
  c.vectors = a.floats("vectors", c.heads * c.number_count * c.width, "the vectors of offsets do not fit");
  if (const MaybeTensor& choices = a.maybe("choices")) {
    c.choice_count = choices->size(3), c.block = a.integer("block");
    check(has_shape(*choices, {c.batch, c.heads, c.length, c.choice_count}) && choices->scalar_type() == ScalarType::Long &&
              c.block >= 1 && c.length <= c.keys && c.tile_count == 0 && c.numbers == nullptr,
          "the choices do not fit");
    c.choices = numbers_of<int64_t>(*choices);
  }
  c.cap = a.number("cap"), c.dropout = a.number("dropout"), c.seed = static_cast<uint64_t>(a.integer("seed"));
  c.keep = static_cast<int32_t>((1.0 - a.real("dropout")) * 16777216.0);
  return c;
}

bool tiles_forward(const Arguments& a) {
  kernels->tiles_forward(tiles_call(a), pool());
  return true;
}

bool tiles_backward(const Arguments& a) {
  const TilesCall c = tiles_call(a);
  TilesGradients d = near_gradients(a, c);
  d.d_vectors = a.floats("d_vectors", c.batch * c.heads * c.number_count * c.width, "the gradients do not fit");
  kernels->tiles_backward(c, d, pool());
  return true;
}

// A state of a call, or its gradient, which has no scales.
States states_of(const Arguments& a, const FeaturesCall& c, const char* kv, const char* z, const char* log_scale) {
  if (!a.maybe(kv)) return {};
  const int64_t rows = c.batch * c.heads * c.features;
  const char* message = "a state does not fit, or one of random features has no scales";
  const States states{a.floats(kv, rows * c.values, message), a.floats(z, rows, message),
                      log_scale == nullptr ? nullptr : a.floats(log_scale, rows, message)};
  check(states.z != nullptr && (log_scale == nullptr || states.log_scale != nullptr || c.map < EXPONENTIAL), message);
  return states;
}

// Features, and the far keys of Hybrid, whose names are others in part.
FeaturesCall far_call(const Arguments& a, const char* key_mask, Map map, bool causal) {
  static std::atomic<int64_t> calls{0};
  const Tensor &q = a["q"], &k = a["k"], &v = a["v"], &out = a["out"];
  FeaturesCall c{};
  c.number = ++calls;
  c.q = tokens(q), c.k = tokens(k), c.v = tokens(v), c.out = tokens(out);
  c.batch = q.size(0), c.heads = q.size(1), c.length = q.size(2), c.width = q.size(3);
  c.keys = k.size(2), c.values = v.size(3), c.features = c.width;
  c.map = map, c.offset = a.number("offset"), c.causal = causal;
  check(has_shape(k, {c.batch, c.heads, c.keys, c.width}) && has_shape(v, {c.batch, c.heads, c.keys, c.values}),
        "heads, keys or values do not fit");
  check(has_shape(out, {c.batch, c.heads, c.length, c.values}), "the output does not fit");
  check(map >= ELU_PLUS_ONE && map <= TRIGONOMETRIC && (!causal || c.keys >= c.length), "such a call is not served");
  set_mask(c, a.maybe(key_mask));
  if (map < EXPONENTIAL) return c;
  check(a.maybe("query_rows") && a.maybe("key_rows"), "random features need rows");
  c.query_rows = tokens(a["query_rows"]), c.key_rows = tokens(a["key_rows"]), c.rows = a["query_rows"].size(2);
  for (const char* name : {"query_rows", "key_rows"})
    check(has_shape(a[name], {c.batch, c.heads, c.rows, c.width}) && tokens(a[name]).kind == FLOAT32, "rows do not fit");
  c.features = map == EXPONENTIAL ? c.rows : 2 * c.rows;
  if (const MaybeTensor& bias = a.maybe("bias"); bias && map == EXPONENTIAL) {
    check(has_shape(*bias, {c.batch, c.heads, c.features}) && has_rows(*bias) && bias->scalar_type() == ScalarType::Float,
          "the bias does not fit");
    c.bias = static_cast<const float*>(bias->data_ptr()), c.bias_batch = bias->stride(0), c.bias_head = bias->stride(1);
  }
  return c;
}

// Memory of the sums of so many sections, and of denominators.
void set_memory(const Arguments& a, FeaturesCall& c, const char* denominators, int64_t slots) {
  const char* message = "the memory of sums does not fit";
  c.states = a.floats("states", c.batch * c.heads * slots * state_numbers(c.features, c.values), message);
  c.denominators = a.floats(denominators, (c.map < EXPONENTIAL ? 1 : 2) * c.batch * c.heads * c.length, message);
}

// With memory of so many sums, and of so many sections of queries and of keys.
FeaturesGradients far_gradients(const Arguments& a, const FeaturesCall& c, int64_t slots, int64_t queries, int64_t keys) {
  FeaturesGradients d{};
  d.grad_out = tokens(a["grad_out"]), d.dq = tokens(a["dq"]), d.dk = tokens(a["dk"]), d.dv = tokens(a["dv"]);
  const int64_t heads = c.batch * c.heads, rows = c.rows * ((c.width + 31) / 32 * 32);
  const char* message = "the memory of gradients does not fit";
  d.states = a.floats("d_states", heads * slots * state_numbers(c.features, c.values), message);
  d.d_query_rows = a.floats("d_query_rows", heads * queries * rows, message);
  d.d_key_rows = a.floats("d_key_rows", heads * keys * rows, message);
  d.d_bias = a.floats("d_bias", heads * (queries + keys) * ((c.features + 31) / 32 * 32), message);
  return d;
}

FeaturesCall features_call(const Arguments& a) {
  FeaturesCall c = far_call(a, "key_mask", static_cast<Map>(a.integer("map")), a.integer("causal") != 0);
  c.eps = a.number("eps"), c.normalized = a.integer("normalized") != 0;
  if (const MaybeTensor& decay = a.maybe("decay")) {
    c.decay = tokens(*decay), c.fading = decay->size(3);
    check(has_shape(*decay, {c.batch, c.heads, c.keys, c.fading}) && (c.fading == 1 || c.fading == c.features) &&
              c.decay.kind == FLOAT32 && c.map < EXPONENTIAL && c.causal && c.keys == c.length,
          "the decays do not fit");
  }
  const int64_t leading = c.causal ? c.keys - c.length : c.keys;
  set_memory(a, c, "denominators", section_count(leading) + (c.causal ? section_count(c.length) : 0) + 1);
  c.first = states_of(a, c, "first_kv", "first_z", "first_scale");
  return c;
}

bool features_forward(const Arguments& a) {
  FeaturesCall c = features_call(a);
  c.last = states_of(a, c, "last_kv", "last_z", "last_scale");
  return kernels->features_forward(c, pool());
}

bool features_backward(const Arguments& a) {
  const FeaturesCall c = features_call(a);
  const int64_t leading = section_count(c.causal ? c.keys - c.length : c.keys), queries = section_count(c.length);
  FeaturesGradients d = far_gradients(a, c, queries + 1, queries, leading + (c.causal ? queries : 0));
  d.last = states_of(a, c, "d_last_kv", "d_last_z", nullptr), d.first = states_of(a, c, "d_first_kv", "d_first_z", nullptr);
  d.d_decay = a.floats("d_decay", c.batch * c.heads * c.keys * c.fading, "gradients of decays do not fit");
  check(c.fading == 0 || d.d_decay != nullptr, "gradients of decays do not fit");
  check(d.first.kv == nullptr || c.first.kv != nullptr, "only a state that was given has a gradient");
  kernels->features_backward(c, d, pool());
  return true;
}

// place: tokens of a block, near blocks before and after a query's own, causal, map of features
HybridCall hybrid_call(const Arguments& a) {
  const std::vector<int64_t>& place = a.list("place");
  const Tensor& ends = a["ends"];
  HybridCall c{};
  check(place.size() == 5 && place[0] >= 1 && place[1] >= 0 && place[2] >= 0, "the blocks do not fit");
  c.block = place[0], c.before = place[1], c.after = place[2], c.causal = place[3] != 0;
  c.near = near_call(a);
  check(c.near.keys >= 1 && c.near.length >= 1 && (!c.causal || c.near.keys >= c.near.length) &&
            c.near.heads == c.near.groups && c.near.out.kind == FLOAT32,
        "such a call is not served");
  c.far = far_call(a, "others", static_cast<Map>(place[4]), false);
  c.far.normalized = c.far.normed = true;
  set_memory(a, c.far, "weights", c.of_queries().slots());
  c.end_count = ends.size(2);
  check(has_shape(ends, {c.near.batch, c.near.heads, c.end_count}) && has_rows(ends) && ends.scalar_type() == ScalarType::Long,
        "the sink tokens do not fit");
  c.ends = static_cast<const int64_t*>(ends.data_ptr()), c.ends_batch = ends.stride(0), c.ends_head = ends.stride(1);
  return c;
}

bool hybrid_forward(const Arguments& a) { return kernels->hybrid_forward(hybrid_call(a), pool()); }

bool hybrid_backward(const Arguments& a) {
  const HybridCall c = hybrid_call(a);
  const int64_t queries = c.of_queries().sections(), keys = c.of_keys().sections();
  HybridGradients d{near_gradients(a, c.near), far_gradients(a, c.far, c.of_keys().slots(), queries, keys), nullptr};
  d.near.part = true;
  check(d.near.dq.kind == FLOAT32, "gradients are in float32 here");
  d.ends = a.floats("d_ends", c.near.batch * c.near.heads * queries * c.end_count * (d.near.dk_row + d.near.dv_row),
                    "the gradients of sink tokens do not fit");
  kernels->hybrid_backward(c, d, pool());
  return true;
}

bool lsh_hash(const Arguments& a) {
  const Tensor &q = a["q"], &rotations = a["rotations"], &buckets = a["buckets"];
  const std::vector<int64_t>& factors = a.list("factors");
  HashCall c{};
  c.batch = q.size(0), c.heads = q.size(1), c.length = q.size(2), c.width = q.size(3);
  c.rounds = rotations.size(1), c.columns = rotations.size(3);
  c.q = tokens(q), c.buckets = numbers_of<int32_t>(buckets);
  check(has_shape(rotations, {c.heads, c.rounds, c.width, c.columns}), "the rotations do not fit");
  c.rotations = a.floats("rotations", c.heads * c.rounds * c.width * c.columns, "the rotations do not fit");
  c.factors = factors.data(), c.factor_count = static_cast<int64_t>(factors.size());
  int64_t halves = 0;
  for (const int64_t factor : factors) {
    check(factor >= 2 && factor % 2 == 0, "numbers of buckets are even");
    halves += factor / 2;
  }
  check(halves == c.columns, "the rotations do not fit the numbers of buckets");
  check(buckets.scalar_type() == ScalarType::Int && buckets.numel() == c.batch * c.heads * c.rounds * c.length,
        "the buckets do not fit");
  kernels->lsh_hash(c, pool());
  return true;
}

// flags: ranked, across, causal, distinct
LshCall lsh_call(const Arguments& a) {
  const Tensor &q = a["q"], &v = a["v"], &codes = a["codes"];
  const std::vector<int64_t>& flags = a.list("flags");
  LshCall c{};
  c.q = tokens(q), c.v = tokens(v), c.out = tokens(a["out"]);
  c.batch = q.size(0), c.heads = q.size(1), c.length = q.size(2), c.width = q.size(3), c.values = v.size(3);
  for (const char* name : {"v", "out"})
    check(has_shape(a[name], {c.batch, c.heads, c.length, c.values}), "values and outputs do not fit");
  c.rounds = codes.size(2), c.number = a.integer("number"), c.size = a.integer("size");
  const int64_t count = c.batch * c.heads * c.length;
  for (const char* name : {"order", "codes"})
    check(a[name].numel() == count * c.rounds && a[name].scalar_type() == ScalarType::Int, "orders and codes do not fit");
  check(c.number >= 1 && c.size >= 1 && flags.size() == 4, "the settings do not fit");
  c.order = numbers_of<int32_t>(a["order"]), c.codes = numbers_of<int32_t>(codes);
  c.lengths = a.floats("lengths", count, "lengths and logs do not fit");
  c.logs = a.floats("logs", count, "lengths and logs do not fit");
  c.ranked = flags[0] != 0, c.across = flags[1] != 0, c.causal = flags[2] != 0, c.distinct = flags[3] != 0;
  c.scale = a.number("scale"), c.shortest = a.number("shortest");
  return c;
}

bool lsh_forward(const Arguments& a) {
  LshCall c = lsh_call(a);
  const Tensor& buckets = a["buckets"];
  check(buckets.numel() == a["codes"].numel() && buckets.scalar_type() == ScalarType::Int, "the buckets do not fit");
  c.buckets = numbers_of<int32_t>(buckets);
  kernels->lsh_forward(c, pool());
  return true;
}

bool lsh_backward(const Arguments& a) {
  const LshCall c = lsh_call(a);
  check(has_shape(a["dq"], {c.batch, c.heads, c.length, c.width}), "the gradients do not fit");
  for (const char* name : {"grad_out", "dv"})
    check(has_shape(a[name], {c.batch, c.heads, c.length, c.values}), "the gradients do not fit");
  kernels->lsh_backward(c, {tokens(a["grad_out"]), tokens(a["dq"]), tokens(a["dv"])}, pool());
  return true;
}

#define TILES                                                                                                       \
  "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? numbers, Tensor? vectors, Tensor? sinks, Tensor tiles, " \
  "Tensor ranges, Tensor? choices, int block, int first_offset, float scale, float cap, float dropout, int seed, "
#define FEATURES                                                                                              \
  "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? query_rows, Tensor? key_rows, Tensor? bias, "      \
  "Tensor? first_kv, Tensor? first_z, Tensor? first_scale, Tensor? decay, int map, float offset, float eps, " \
  "bool normalized, bool causal, "
#define HYBRID                                                                                                       \
  "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor others, Tensor ends, Tensor? numbers, Tensor? sinks, "     \
  "Tensor tiles, Tensor ranges, Tensor? query_rows, Tensor? key_rows, Tensor? bias, int first_offset, float scale, " \
  "int[] place, float offset, "
#define LSH "int number, int size, int[] flags, float scale, float shortest, "

struct Operation {
  const char* schema;
  bool (*run)(const Arguments&);  // whether all outputs are finite, where that is known
};

constexpr Operation OPERATIONS[] = {
    {"tiles_forward(" TILES "Tensor(a!) out, Tensor(b!) sums) -> ()", tiles_forward},
    {"tiles_backward(" TILES "Tensor out, Tensor sums, Tensor grad_out, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
     "Tensor(d!)? d_numbers, Tensor(e!)? d_vectors) -> ()", tiles_backward},
    {"features_forward(" FEATURES "Tensor(a!) out, Tensor(b!) denominators, Tensor(c!) states, Tensor(d!)? last_kv, "
     "Tensor(e!)? last_z, Tensor(f!)? last_scale) -> bool", features_forward},
    {"features_backward(" FEATURES "Tensor out, Tensor denominators, Tensor states, Tensor grad_out, "
     "Tensor? d_last_kv, Tensor? d_last_z, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) d_states, "
     "Tensor(e!)? d_first_kv, Tensor(f!)? d_first_z, Tensor(g!)? d_query_rows, Tensor(h!)? d_key_rows, "
     "Tensor(i!)? d_bias, Tensor(j!)? d_decay) -> ()", features_backward},
    {"hybrid_forward(" HYBRID "Tensor(a!) out, Tensor(b!) sums, Tensor(c!) weights, Tensor(d!)? states) -> bool",
     hybrid_forward},
    {"hybrid_backward(" HYBRID "Tensor out, Tensor sums, Tensor weights, Tensor states, Tensor grad_out, "
     "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) d_ends, Tensor(e!)? d_states, Tensor(f!)? d_numbers, "
     "Tensor(g!)? d_query_rows, Tensor(h!)? d_key_rows, Tensor(i!)? d_bias) -> ()", hybrid_backward},
    {"lsh_hash(Tensor q, Tensor rotations, int[] factors, Tensor(a!) buckets) -> ()", lsh_hash},
    {"lsh_forward(Tensor q, Tensor v, Tensor buckets, " LSH "Tensor(a!) order, Tensor(b!) codes, Tensor(c!) lengths, "
     "Tensor(d!) logs, Tensor(e!) out) -> ()", lsh_forward},
    {"lsh_backward(Tensor q, Tensor v, " LSH "Tensor order, Tensor codes, Tensor lengths, Tensor logs, Tensor out, "
     "Tensor grad_out, Tensor(a!) dq, Tensor(b!) dv) -> ()", lsh_backward},
};

template <size_t N>
void boxed(StableIValue* stack, uint64_t, uint64_t outputs) {
  const bool finite = OPERATIONS[N].run(Arguments(OPERATIONS[N].schema, stack));
  if (outputs > 0) stack[0] = torch::stable::detail::from(finite);
}

template <size_t... N>
void implement(torch::stable::detail::StableLibrary& m, std::index_sequence<N...>) {
  const auto name = [](const char* schema) { return std::string(schema, std::strchr(schema, '(')); };
  (m.impl(name(OPERATIONS[N].schema).c_str(), boxed<N>), ...);
}

}  // namespace

STABLE_TORCH_LIBRARY(fast_attention_core, m) {
  m.def("use_width(int width) -> int");
  for (const Operation& operation : OPERATIONS) m.def(operation.schema);
}

STABLE_TORCH_LIBRARY_IMPL(fast_attention_core, CompositeExplicitAutograd, m) {
  m.impl("use_width", TORCH_BOX(&use_width));
}

STABLE_TORCH_LIBRARY_IMPL(fast_attention_core, CPU, m) {
  implement(m, std::make_index_sequence<std::size(OPERATIONS)>());
}

}  // namespace fast_attention