// Vectors of FAST_ATTENTION_WIDTH floats in the notation of GCC and Clang, and what elementwise functions are made of.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "interface.h"

#define FAST_ATTENTION_JOIN_(a, b) a##b
#define FAST_ATTENTION_JOIN(a, b) FAST_ATTENTION_JOIN_(a, b)
#define FAST_ATTENTION_NAMESPACE FAST_ATTENTION_JOIN(width, FAST_ATTENTION_WIDTH)

namespace fast_attention::FAST_ATTENTION_NAMESPACE {

constexpr int W = FAST_ATTENTION_WIDTH;
constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));
typedef uint16_t Shorts __attribute__((vector_size(W * 2)));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec all(float x) { return x - Vec{}; }

inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__) && FAST_ATTENTION_WIDTH == 16
  return _mm512_max_ps(a, b);
#elif defined(__AVX__) && FAST_ATTENTION_WIDTH == 8
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// Numbers of two vectors, by places that are constants: else a compiler builds the order number by number at every call.
template <int... I>
__attribute__((always_inline)) inline Vec shuffled(Vec a, Vec b) {
#if defined(__GNUC__) && !defined(__clang__)
  return __builtin_shuffle(a, b, Ints{I...});
#else
  return __builtin_shufflevector(a, b, I...);
#endif
}

constexpr std::make_integer_sequence<int, W> PLACES{};

// Combines the numbers of a vector by halves; every place has the result.
template <int S, class Function, int... J>
inline Vec folded(Vec v, Function&& two, std::integer_sequence<int, J...> places) {
  v = two(v, shuffled<(J ^ S)...>(v, v));
  if constexpr (S > 1) v = folded<S / 2>(v, two, places);
  return v;
}

inline float sum(Vec v) {
  return folded<W / 2>(v, [](Vec a, Vec b) { return a + b; }, PLACES)[0];
}

inline float largest(Vec v) {
  return folded<W / 2>(v, [](Vec a, Vec b) { return larger(a, b); }, PLACES)[0];
}

// 0, 1, 2, ...
inline Ints counting() {
  Ints i;
  for (int j = 0; j < W; ++j) i[j] = j;
  return i;
}

// The same bits as numbers of another type.
template <class To, class From>
inline To as(From x) {
  return reinterpret_cast<To>(x);
}

// 2^x for x < 128; 0 from -126 down, and for minus infinity. The relative error is about 1e-7.
__attribute__((always_inline)) inline Vec exp2(Vec x) {
  const Vec rounding = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
  const Vec shifted = x + rounding;
  const Vec f = x - (shifted - rounding);  // in [-1/2, 1/2]
  Vec p = all(1.535336188319500e-4f);
  p = p * f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  const Vec power = as<Vec>(as<Words>(p) + (as<Words>(shifted) << 23));  // the shift leaves the whole number alone
  return x > -126.0f ? power : Vec{};
}

inline float exp2(float x) { return exp2(all(x))[0]; }

// tanh(x), by way of 2^(-2 |x| log2 e).
inline Vec tanh(Vec x) {
  const Vec size = x < 0.0f ? -x : x;
  const Vec e = exp2(size * (-2.0f * LOG2E));
  const Vec t = (1.0f - e) / (1.0f + e);
  const Vec small = x - x * x * x * (1.0f / 3.0f);  // where 1 - e would lose digits
  return size < 0.02f ? small : (x < 0.0f ? -t : t);
}

// A hash of 32 bits in which every bit of x moves about half of the bits (lowbias32, Wellons 2018).
template <class T>
inline T mixed(T x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Numbers of 16 bits as floats.
inline Vec widened(Shorts numbers, Kind kind) {
  const Words x = __builtin_convertvector(numbers, Words);
  if (kind == BFLOAT16) return as<Vec>(x << 16);
  const Words magnitude = (x & 0x7fffu) << 13;  // shifted into place, and a product corrects the exponent
  const Words size = as<Words>(as<Vec>(magnitude) * 5.192296858534828e33f);  // 2^112
  const Words top = magnitude >= 0x0f800000u ? Words{} + 0x7f800000u : Words{};         // infinity, NaN
  return as<Vec>(size | top | (x & 0x8000u) << 16);
}

// To nearest, ties to even.
inline Shorts narrowed(Vec numbers, Kind kind) {
  const Words x = as<Words>(numbers), size = x & 0x7fffffffu, nan = Words{} + (kind == BFLOAT16 ? 0x7fc0u : 0x7e00u);
  Words out;
  if (kind == BFLOAT16) {
    out = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  } else {
    const Words small = as<Words>(as<Vec>(size) + 0.5f) - 0x3f000000u;  // rounds to multiples of 2^-24
    out = size < 0x38800000u ? small : (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
    out = (size < 0x477ff000u ? out : Words{} + 0x7c00u) | ((x >> 16) & 0x8000u);  // the others round to infinity
  }
  return __builtin_convertvector(size > 0x7f800000u ? nan : out, Shorts);
}

// The first n numbers of a vector, and zeros where there are fewer than it holds.
template <class V, class T>
inline V some(const T* from, int64_t n) {
  V v = {};
  if (n * static_cast<int64_t>(sizeof(T)) >= static_cast<int64_t>(sizeof v)) std::memcpy(&v, from, sizeof v);
  else if (n > 0) std::memcpy(&v, from, static_cast<size_t>(n) * sizeof(T));
  return v;
}

// Writes them.
template <class V, class T>
inline void put(T* to, int64_t n, V v) {
  if (n * static_cast<int64_t>(sizeof(T)) >= static_cast<int64_t>(sizeof v)) std::memcpy(to, &v, sizeof v);
  else for (int64_t i = 0; i < n; ++i) to[i] = v[i];
}

// Up to n numbers of a token from a place on, as floats.
inline Vec read(const Tokens& x, int64_t at, int64_t n) {
  if (x.kind == FLOAT32) return some<Vec>(static_cast<const float*>(x.data) + at, n);
  return widened(some<Shorts>(static_cast<const uint16_t*>(x.data) + at, n), x.kind);
}

// Whether rows of tokens are whole vectors of float32, which are read and written where they are.
inline bool whole_vectors(const Tokens& x, int64_t n) { return x.kind == FLOAT32 && n % W == 0; }

// Copies n numbers of a token, times factor, as floats; zeros fill the row up to `padded`, in whole vectors.
inline void read_row(const Tokens& tokens, int64_t offset, int64_t n, int64_t padded, float factor, float* to) {
  const Tokens x = tokens;  // for all that a compiler knows, stores might change the other
  const float* floats = static_cast<const float*>(x.data) + offset;
  int64_t i = 0;
  for (; x.kind == FLOAT32 && i + W <= n; i += W) store(to + i, load(floats + i) * factor);
  for (; x.kind == FLOAT32 && i < n; ++i) to[i] = floats[i] * factor;
  for (; i < n; i += W) store(to + i, read(x, offset + i, n - i) * factor);
  for (i = n; i < padded; ++i) to[i] = 0.0f;
}

// Zeros in place of all but the first n numbers.
inline Vec first_of(Vec x, int64_t n) { return counting() < static_cast<int32_t>(n) ? x : Vec{}; }

// Not 0 where one of the first n numbers is infinite or NaN: told by its bits, because compilers take 0 x for 0.
inline Ints not_finite(Vec x, int64_t n) { return (as<Ints>(n < W ? first_of(x, n) : x) & 0x7f800000) == 0x7f800000; }

inline bool any(Ints x) { return largest(__builtin_convertvector(-x, Vec)) > 0.0f; }

// Writes n numbers of a row of whole vectors, times factor, as those of a token; gives where they are not finite.
inline Ints write_row(const Tokens& tokens, int64_t offset, int64_t n, float factor, const float* from) {
  const Tokens x = tokens;
  Ints broken = {};
  for (int64_t i = 0; i < n; i += W) {
    const Vec number = load(from + i) * factor;
    if (x.kind == FLOAT32) put(static_cast<float*>(x.data) + offset + i, n - i, number);
    else put(static_cast<uint16_t*>(x.data) + offset + i, n - i, narrowed(number, x.kind));
    broken |= not_finite(number, n - i);
  }
  return broken;
}

inline int64_t whole(int64_t n, int64_t size) { return (n + size - 1) / size * size; }

// Rows of numbers, where they are or copied, and the distance between them.
struct Rows {
  float* data;
  int64_t distance;
  float* operator[](int64_t i) const { return data + i * distance; }
};

// n numbers of whole vectors.
inline void clear(float* x, int64_t n) { std::memset(x, 0, static_cast<size_t>(n) * 4); }
inline void add_row(float* to, const float* from, int64_t n, float factor = 1.0f) {
  for (int64_t e = 0; e < n; e += W) store(to + e, load(to + e) + load(from + e) * factor);
}
inline void scale_row(float* to, int64_t n, float factor) {
  for (int64_t e = 0; e < n; e += W) store(to + e, load(to + e) * factor);
}
inline float product_of_rows(const float* a, const float* b, int64_t n) {
  Vec total = {};
  for (int64_t e = 0; e < n; e += W) total += load(a + e) * load(b + e);
  return sum(total);
}

// The same, added up in double precision.
inline float inner_product(const float* a, const float* b, int64_t n) {
  typedef float Half __attribute__((vector_size(W * 2)));
  typedef double Doubles __attribute__((vector_size(W * 4)));
  const auto wide = [](const float* x) { return __builtin_convertvector(some<Half>(x, W / 2), Doubles); };
  Doubles added = {};
  for (int64_t i = 0; i < n; i += W / 2) added += wide(a + i) * wide(b + i);
  double total = 0.0;
  for (int i = 0; i < W / 2; ++i) total += added[i];
  return static_cast<float>(total);
}

// Memory that is kept, and replaced where more is asked for; under a sanitizer it has just the size that was asked for.
struct Buffer {
  std::unique_ptr<void, decltype(&std::free)> memory{nullptr, std::free};
  int64_t size = -1;
  void* bytes(int64_t n) {
#ifdef FAST_ATTENTION_SANITIZE
    if (n == size) return memory.get();
#else
    if (n <= size) return memory.get();
#endif
    memory.reset(), size = -1;
    memory.reset(std::aligned_alloc(64, static_cast<size_t>(whole(n > 0 ? n : 1, 64))));
    if (memory == nullptr) throw std::bad_alloc();
    size = n;
    return memory.get();
  }
};

// Memory of a function or an object while it lives, of buffers that a thread keeps between calls, so that pages are not
// faulted in anew. Of frames that stand one in another the inner one gives out and ends first.
class Frame {
 public:
  Frame() : memory_(of_thread()), first_(memory_.used) {}
  Frame(const Frame&) = delete;
  ~Frame() { memory_.used = first_; }
  float* floats(int64_t n) { return static_cast<float*>(bytes(n * 4)); }
  int32_t* ints(int64_t n) { return static_cast<int32_t*>(bytes(n * 4)); }
  void* bytes(int64_t n) {
    if (memory_.used == memory_.buffers.size()) memory_.buffers.emplace_back();
    return memory_.buffers[memory_.used++].bytes(n);
  }

 private:
  struct Memory {
    std::deque<Buffer> buffers;
    size_t used = 0;
  };
  static Memory& of_thread() {
    static thread_local Memory memory;
    return memory;
  }
  Memory& memory_;
  const size_t first_;
};

}  // namespace fast_attention::FAST_ATTENTION_NAMESPACE
