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
#include <vector>

#include "interface.h"

namespace fast_attention {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// The build names the widths in rising order, the narrowest of which is always there: FAST_ATTENTION_WIDTHS(X) X(4) X(16)
#define FAST_ATTENTION_DECLARE(number) extern const Kernels kernels_of_width_##number;
FAST_ATTENTION_WIDTHS(FAST_ATTENTION_DECLARE)

namespace {

const Kernels* kernels = &kernels_of_width_4;

// Takes the widest vectors that are there and no wider than asked for; gives their width.
int64_t use_width(int64_t width) {
#define FAST_ATTENTION_TAKE(number) \
  if (width >= number || number == 4) kernels = &kernels_of_width_##number;
  FAST_ATTENTION_WIDTHS(FAST_ATTENTION_TAKE)
  return kernels->width;
}

Pool pool() {
  const auto run = [](int64_t threads, void (*body)(void*), void* context) {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) body(context);
    });
  };
  return {torch::stable::get_num_threads(), run};
}

// Refuses sizes that the kernels would read or write beyond.
void check(bool fits, std::string_view what, const char* why = "do not fit the call's sizes") {
  if (!fits) throw std::runtime_error("the core's " + std::string(what) + " " + why);
}

bool has_shape(const Tensor& x, std::initializer_list<int64_t> sizes) {
  bool same = x.dim() == static_cast<int64_t>(sizes.size());
  for (int64_t axis = 0; same && axis < x.dim(); ++axis) same = x.size(axis) == sizes.begin()[axis];
  return same;
}

// Whether numbers of the last axis lie side by side, wherever those of the others are.
bool has_rows(const Tensor& x) { return x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) <= 1; }

// The arguments of a call by the names of its schema, all taken from torch's stack at once; 0 and no tensor by all other
// names. Tensors come with the sizes that the kernels read.
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
  bool has(std::string_view name) const { return find(name).tensor.has_value(); }
  const Tensor& operator[](std::string_view name) const { return *find(name).tensor; }
  const std::vector<int64_t>& list(std::string_view name) const { return find(name).list; }
  int64_t integer(std::string_view name) const { return find(name).integer; }
  double real(std::string_view name) const { return find(name).number; }
  float number(std::string_view name) const { return static_cast<float>(real(name)); }

  // (batch, heads, length, numbers)
  Tokens tokens(std::string_view name, std::initializer_list<int64_t> sizes) const {
    const Tensor& x = (*this)[name];
    const ScalarType type = x.scalar_type();
    check(has_shape(x, sizes) && has_rows(x), name);
    check(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, name,
          "are not in float32, bfloat16 or float16");
    const Kind kind = type == ScalarType::Float ? FLOAT32 : type == ScalarType::BFloat16 ? BFLOAT16 : FLOAT16;
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), kind};
  }

  // (batch, heads, numbers); none where there is no tensor.
  template <class T>
  Lines<T> lines(std::string_view name, std::initializer_list<int64_t> sizes) const {
    const MaybeTensor& x = find(name).tensor;
    if (!x) return {};
    check(has_shape(*x, sizes) && has_rows(*x) && x->element_size() == sizeof(T), name);
    return {static_cast<const T*>(x->data_ptr()), x->stride(0), x->stride(1)};
  }

  // So many contiguous numbers; a null pointer where there is no tensor.
  template <class T>
  T* numbers(std::string_view name, int64_t count) const {
    const MaybeTensor& x = find(name).tensor;
    if (!x) return nullptr;
    const ScalarType type = torch::headeronly::CppTypeToScalarType<T>::value;
    check(x->numel() == count && x->is_contiguous() && x->scalar_type() == type, name);
    return static_cast<T*>(x->data_ptr());
  }
  float* floats(std::string_view name, int64_t count) const { return numbers<float>(name, count); }

 private:
  struct Value {
    std::string_view name;
    MaybeTensor tensor;
    std::vector<int64_t> list;
    double number = 0.0;
    int64_t integer = 0;
  };
  const Value& find(std::string_view name) const {
    static const Value none{};
    for (const Value& value : values_)
      if (value.name == name) return value;
    return none;
  }
  std::vector<Value> values_;
};

// Tokens and sizes of a call, and gradients of tokens where it has them; queries are keys where it has no others.
void set_tokens(const Arguments& a, Call& c) {
  const char* keys = a.has("k") ? "k" : "q";
  const Tensor &q = a["q"], &k = a[keys];
  c.batch = q.size(0), c.heads = q.size(1), c.length = q.size(2), c.width = q.size(3);
  c.groups = k.size(1), c.keys = k.size(2), c.values = a["v"].size(3);
  check(c.groups > 0 && c.heads % c.groups == 0, "heads");
  c.q = a.tokens("q", {c.batch, c.heads, c.length, c.width});
  c.k = a.tokens(keys, {c.batch, c.groups, c.keys, c.width});
  c.v = a.tokens("v", {c.batch, c.groups, c.keys, c.values});
  c.out = a.tokens("out", {c.batch, c.heads, c.length, c.values});
  c.key_mask = a.lines<uint8_t>("key_mask", {c.batch, c.heads, c.keys});
  if (!a.has("grad_out")) return;
  c.grad_out = a.tokens("grad_out", {c.batch, c.heads, c.length, c.values});
  c.dq = a.tokens("dq", {c.batch, c.heads, c.length, c.width});
  const auto of_keys = [&](const char* name, int64_t numbers) {
    if (!a.has(name)) return Tokens{};
    check(a[name].size(3) >= numbers, name);
    return a.tokens(name, {c.batch, c.groups, c.keys, a[name].size(3)});
  };
  c.dk = of_keys("dk", c.width), c.dv = of_keys("dv", c.values);
}

// Tiles, and the near keys of Hybrid.
TilesCall tiles_call(const Arguments& a) {
  const Tensor& tiles = a["tiles"];
  TilesCall c{};
  set_tokens(a, c);
  c.sums = a.floats("sums", 2 * c.batch * c.heads * c.length);
  if (a.has("numbers")) c.number_count = a["numbers"].size(1);
  c.numbers = a.floats("numbers", c.heads * c.number_count);
  c.vectors = a.floats("vectors", c.heads * c.number_count * c.width);
  c.sinks = a.floats("sinks", c.heads);
  c.first_offset = a.integer("first_offset"), c.scale = a.number("scale");
  const int64_t batch = tiles.size(0), heads = tiles.size(1);
  check((batch == 1 || batch == c.batch) && (heads == 1 || heads == c.heads) && tiles.size(3) == 4, "tiles");
  c.tile_count = tiles.size(2);
  c.tiles = reinterpret_cast<const Tile*>(a.numbers<int32_t>("tiles", batch * heads * c.tile_count * 4));
  c.ranges = reinterpret_cast<const Range*>(a.numbers<int32_t>("ranges", a["ranges"].size(0) * 6));
  c.tile_head = heads == 1 ? 0 : c.tile_count;
  c.tile_batch = batch == 1 ? 0 : c.tile_count * heads;
  if (a.has("choices")) {
    c.choice_count = a["choices"].size(3), c.block = a.integer("block");
    check(c.block >= 1 && c.length <= c.keys && c.tile_count == 0 && c.numbers == nullptr, "choices");
    c.choices = a.numbers<int64_t>("choices", c.batch * c.heads * c.length * c.choice_count);
  }
  c.cap = a.number("cap"), c.dropout = a.number("dropout"), c.seed = static_cast<uint64_t>(a.integer("seed"));
  c.keep = static_cast<int32_t>((1.0 - a.real("dropout")) * 16777216.0);
  if (!a.has("grad_out")) return c;
  for (const Tokens& x : {c.dk, c.dv}) check(x.kind == FLOAT32 && x.row % 16 == 0, "gradients of keys");
  c.d_numbers = a.floats("d_numbers", c.batch * c.heads * c.number_count);
  c.d_vectors = a.floats("d_vectors", c.batch * c.heads * c.number_count * c.width);
  return c;
}

// A state of a call, or its gradient, which has no scales.
States states_of(const Arguments& a, const FeaturesCall& c, const char* kv, const char* z, const char* log_scale) {
  if (!a.has(kv)) return {};
  const int64_t rows = c.batch * c.heads * c.features;
  const States states{a.floats(kv, rows * c.values), a.floats(z, rows),
                      log_scale == nullptr ? nullptr : a.floats(log_scale, rows)};
  check(states.z != nullptr, kv, "come without those of keys");
  check(log_scale == nullptr || states.log_scale != nullptr || c.map < EXPONENTIAL, kv, "come without their scales");
  return states;
}

// Features, and the far keys of Hybrid.
FeaturesCall far_call(const Arguments& a, Map map, bool causal) {
  static std::atomic<int64_t> calls{0};
  FeaturesCall c{};
  c.number = ++calls;
  set_tokens(a, c);
  c.features = c.width, c.map = map, c.offset = a.number("offset"), c.causal = causal;
  check(c.groups == c.heads && map >= ELU_PLUS_ONE && map <= TRIGONOMETRIC, "heads and maps");
  check(!causal || c.keys >= c.length, "queries");
  if (map < EXPONENTIAL) return c;
  check(a.has("query_rows") && a.has("key_rows"), "rows");
  c.rows = a["query_rows"].size(2);
  c.query_rows = a.tokens("query_rows", {c.batch, c.heads, c.rows, c.width});
  c.key_rows = a.tokens("key_rows", {c.batch, c.heads, c.rows, c.width});
  check(c.query_rows.kind == FLOAT32 && c.key_rows.kind == FLOAT32, "rows", "are not in float32");
  c.features = map == EXPONENTIAL ? c.rows : 2 * c.rows;
  if (map == EXPONENTIAL) c.bias = a.lines<float>("bias", {c.batch, c.heads, c.features});
  return c;
}

// Memory of denominators and of so many sums, and of so many of their gradients, in so many parts.
void set_memory(const Arguments& a, FeaturesCall& c, const char* denominators, int64_t slots, int64_t d_slots,
                int64_t query_parts, int64_t key_parts) {
  const int64_t heads = c.batch * c.heads, numbers = heads * state_numbers(c.features, c.values);
  const int64_t rows = heads * c.rows * ((c.width + 31) / 32 * 32);
  c.denominators = a.floats(denominators, (c.map < EXPONENTIAL ? 1 : 2) * heads * c.length);
  c.states = a.floats("states", slots * numbers);
  if (!a.has("grad_out")) return;
  c.d_states = a.floats("d_states", d_slots * numbers);
  c.query_parts = query_parts, c.key_parts = key_parts;
  c.d_query_rows = a.floats("d_query_rows", query_parts * rows);
  c.d_key_rows = a.floats("d_key_rows", key_parts * rows);
  c.d_bias = a.floats("d_bias", heads * (query_parts + key_parts) * ((c.features + 31) / 32 * 32));
}

FeaturesCall features_call(const Arguments& a) {
  FeaturesCall c = far_call(a, static_cast<Map>(a.integer("map")), a.integer("causal") != 0);
  c.eps = a.number("eps"), c.normalized = a.integer("normalized") != 0;
  if (a.has("decay")) {
    c.fading = a["decay"].size(3);
    c.decay = a.tokens("decay", {c.batch, c.heads, c.keys, c.fading});
    check((c.fading == 1 || c.fading == c.features) && c.decay.kind == FLOAT32 && c.map < EXPONENTIAL && c.causal &&
              c.keys == c.length, "decays");
  }
  set_memory(a, c, "denominators", c.key_sections() + 1, c.query_sections() + 1, c.query_sections(), c.key_sections());
  c.first = states_of(a, c, "first_kv", "first_z", "first_scale"), c.last = states_of(a, c, "last_kv", "last_z", "last_scale");
  if (!a.has("grad_out")) return c;
  c.d_decay = a.floats("d_decay", c.batch * c.heads * c.keys * c.fading);
  check(c.fading == 0 || c.d_decay != nullptr, "d_decay");
  c.d_last = states_of(a, c, "d_last_kv", "d_last_z", nullptr), c.d_first = states_of(a, c, "d_first_kv", "d_first_z", nullptr);
  check(c.d_first.kv == nullptr || c.first.kv != nullptr, "d_first_kv", "belong to no state");
  return c;
}

// place: tokens of a block, near blocks before and after a query's own, causal, map of features
HybridCall hybrid_call(const Arguments& a) {
  const std::vector<int64_t>& place = a.list("place");
  HybridCall c{};
  check(place.size() == 5 && place[0] >= 1 && place[1] >= 0 && place[2] >= 0, "place");
  c.block = place[0], c.before = place[1], c.after = place[2], c.causal = place[3] != 0;
  c.near = tiles_call(a);
  check(c.near.keys >= 1 && c.near.length >= 1 && (!c.causal || c.near.keys >= c.near.length), "queries");
  check(c.near.out.kind == FLOAT32, "out", "are not in float32");
  c.far = far_call(a, static_cast<Map>(place[4]), false);
  c.far.key_mask = a.lines<uint8_t>("others", {c.far.batch, c.far.heads, c.far.keys});
  c.far.normalized = c.far.normed = true;
  const Outside queries = c.of_queries(), keys = c.of_keys();
  set_memory(a, c.far, "weights", queries.slots(), keys.slots(), queries.sections(), keys.sections());
  c.end_count = a["ends"].size(2);
  c.ends = a.lines<int64_t>("ends", {c.near.batch, c.near.heads, c.end_count});
  c.near.part = true;
  check(c.near.dq.kind == FLOAT32, "dq", "are not in float32");
  c.d_ends = a.floats("d_ends", c.near.batch * c.near.heads * queries.sections() * c.end_count * (c.far.dk.row + c.far.dv.row));
  return c;
}

HashCall hash_call(const Arguments& a) {
  const Tensor &q = a["q"], &rotations = a["rotations"];
  const std::vector<int64_t>& factors = a.list("factors");
  HashCall c{};
  c.batch = q.size(0), c.heads = q.size(1), c.length = q.size(2), c.width = q.size(3);
  c.rounds = rotations.size(1), c.columns = rotations.size(3);
  c.q = a.tokens("q", {c.batch, c.heads, c.length, c.width});
  c.rotations = a.floats("rotations", c.heads * c.rounds * c.width * c.columns);
  c.buckets = a.numbers<int32_t>("buckets", c.batch * c.heads * c.rounds * c.length);
  c.factors = factors.data(), c.factor_count = static_cast<int64_t>(factors.size());
  int64_t halves = 0;
  for (const int64_t factor : factors) {
    check(factor >= 2 && factor % 2 == 0, "factors", "are not even numbers of buckets");
    halves += factor / 2;
  }
  check(halves == c.columns, "factors");
  return c;
}

// flags: ranked, across, causal, distinct
LshCall lsh_call(const Arguments& a) {
  const std::vector<int64_t>& flags = a.list("flags");
  LshCall c{};
  set_tokens(a, c);
  c.rounds = a["codes"].size(2), c.number = a.integer("number"), c.size = a.integer("size");
  check(c.number >= 1 && c.size >= 1 && flags.size() == 4, "buckets and flags");
  const int64_t count = c.batch * c.heads * c.length;
  c.order = a.numbers<int32_t>("order", count * c.rounds), c.codes = a.numbers<int32_t>("codes", count * c.rounds);
  c.lengths = a.floats("lengths", count), c.logs = a.floats("logs", count);
  c.ranked = flags[0] != 0, c.across = flags[1] != 0, c.causal = flags[2] != 0, c.distinct = flags[3] != 0;
  c.scale = a.number("scale"), c.shortest = a.number("shortest");
  c.buckets = a.numbers<int32_t>("buckets", count * c.rounds);
  return c;
}

// Gives an operation its kernel, and the function that makes the kernel's call of the arguments.
template <auto KERNEL, auto CALL>
void implement(torch::stable::detail::StableLibrary& m, const char* schema) {
  static const char* const arguments = schema;
  m.impl(std::string(schema, std::strchr(schema, '(')).c_str(), [](StableIValue* stack, uint64_t, uint64_t outputs) {
    const bool finite = (kernels->*KERNEL)(CALL(Arguments(arguments, stack)), pool());
    if (outputs > 0) stack[0] = torch::stable::detail::from(finite);
  });
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
  void (*implement)(torch::stable::detail::StableLibrary&, const char* schema);
};

constexpr Operation OPERATIONS[] = {
    {"tiles_forward(" TILES "Tensor(a!) out, Tensor(b!) sums) -> ()", implement<&Kernels::tiles_forward, tiles_call>},
    {"tiles_backward(" TILES "Tensor out, Tensor sums, Tensor grad_out, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
     "Tensor(d!)? d_numbers, Tensor(e!)? d_vectors) -> ()", implement<&Kernels::tiles_backward, tiles_call>},
    {"features_forward(" FEATURES "Tensor(a!) out, Tensor(b!) denominators, Tensor(c!) states, Tensor(d!)? last_kv, "
     "Tensor(e!)? last_z, Tensor(f!)? last_scale) -> bool", implement<&Kernels::features_forward, features_call>},
    {"features_backward(" FEATURES "Tensor out, Tensor denominators, Tensor states, Tensor grad_out, "
     "Tensor? d_last_kv, Tensor? d_last_z, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) d_states, "
     "Tensor(e!)? d_first_kv, Tensor(f!)? d_first_z, Tensor(g!)? d_query_rows, Tensor(h!)? d_key_rows, "
     "Tensor(i!)? d_bias, Tensor(j!)? d_decay) -> ()", implement<&Kernels::features_backward, features_call>},
    {"hybrid_forward(" HYBRID "Tensor(a!) out, Tensor(b!) sums, Tensor(c!) weights, Tensor(d!)? states) -> bool",
     implement<&Kernels::hybrid_forward, hybrid_call>},
    {"hybrid_backward(" HYBRID "Tensor out, Tensor sums, Tensor weights, Tensor states, Tensor grad_out, "
     "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) d_ends, Tensor(e!)? d_states, Tensor(f!)? d_numbers, "
     "Tensor(g!)? d_query_rows, Tensor(h!)? d_key_rows, Tensor(i!)? d_bias) -> ()", implement<&Kernels::hybrid_backward, hybrid_call>},
    {"lsh_hash(Tensor q, Tensor rotations, int[] factors, Tensor(a!) buckets) -> ()", implement<&Kernels::lsh_hash, hash_call>},
    {"lsh_forward(Tensor q, Tensor v, Tensor buckets, " LSH "Tensor(a!) order, Tensor(b!) codes, Tensor(c!) lengths, "
     "Tensor(d!) logs, Tensor(e!) out) -> ()", implement<&Kernels::lsh_forward, lsh_call>},
    {"lsh_backward(Tensor q, Tensor v, " LSH "Tensor order, Tensor codes, Tensor lengths, Tensor logs, Tensor out, "
     "Tensor grad_out, Tensor(a!) dq, Tensor(b!) dv) -> ()", implement<&Kernels::lsh_backward, lsh_call>},
};

}  // namespace

STABLE_TORCH_LIBRARY(fast_attention_core, m) {
  m.def("use_width(int width) -> int");
  for (const Operation& operation : OPERATIONS) m.def(operation.schema);
}

STABLE_TORCH_LIBRARY_IMPL(fast_attention_core, CompositeExplicitAutograd, m) {
  m.impl("use_width", TORCH_BOX(&use_width));
}

STABLE_TORCH_LIBRARY_IMPL(fast_attention_core, CPU, m) {
  for (const Operation& operation : OPERATIONS) operation.implement(m, operation.schema);
}

}  // namespace fast_attention