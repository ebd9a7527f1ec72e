// Vectors of FAST_ATTENTION_WIDTH floats in the notation of GCC and Clang, and what elementwise functions are made of.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "interface.h"

#define FAST_ATTENTION_JOIN_(a, b) a##b
#define FAST_ATTENTION_JOIN(a, b) FAST_ATTENTION_JOIN_(a, b)
#define FAST_ATTENTION_NAMESPACE FAST_ATTENTION_JOIN(width, FAST_ATTENTION_WIDTH)

namespace fast_attention {
namespace FAST_ATTENTION_NAMESPACE {

constexpr int W = FAST_ATTENTION_WIDTH;
constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));

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

// The order in which numbers S apart change places, as a constant of the program.
template <int S, int... J>
inline Vec swapped(Vec v, std::integer_sequence<int, J...>) {
#if defined(__GNUC__) && !defined(__clang__)
  return __builtin_shuffle(v, Ints{(J ^ S)...});
#else
  return __builtin_shufflevector(v, v, (J ^ S)...);
#endif
}

// Combines the numbers of a vector by halves; every place has the result.
template <int S, class Function>
inline Vec folded(Vec v, Function&& two) {
  v = two(v, swapped<S>(v, std::make_integer_sequence<int, W>{}));
  if constexpr (S > 1) v = folded<S / 2>(v, two);
  return v;
}

inline float sum(Vec v) {
  return folded<W / 2>(v, [](Vec a, Vec b) { return a + b; })[0];
}

// Of rows of whole vectors, added up in double precision.
inline float inner_product(const float* a, const float* b, int64_t n) {
  typedef float Half __attribute__((vector_size(W * 2)));
  typedef double Doubles __attribute__((vector_size(W * 4)));
  Doubles added = {};
  for (int64_t i = 0; i < n; i += W / 2) {
    Half x, y;
    std::memcpy(&x, a + i, sizeof x);
    std::memcpy(&y, b + i, sizeof y);
    added += __builtin_convertvector(x, Doubles) * __builtin_convertvector(y, Doubles);
  }
  double total = 0.0;
  for (int i = 0; i < W / 2; ++i) total += added[i];
  return static_cast<float>(total);
}

inline float largest(Vec v) {
  return folded<W / 2>(v, [](Vec a, Vec b) { return larger(a, b); })[0];
}

// 0, 1, 2, ...
inline Ints counting() {
  Ints i;
  for (int j = 0; j < W; ++j) i[j] = j;
  return i;
}

typedef uint32_t Words __attribute__((vector_size(W * 4)));

inline Ints bits(Vec v) { return reinterpret_cast<Ints>(v); }
inline Vec from_bits(Ints i) { return reinterpret_cast<Vec>(i); }
inline Words words(Vec v) { return reinterpret_cast<Words>(v); }
inline Ints from_words(Words x) { return reinterpret_cast<Ints>(x); }

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
  const Vec power = from_bits(from_words(words(p) + (words(shifted) << 23)));  // the shift leaves the whole number alone
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

inline float widened(uint16_t x, Kind kind) {
  uint32_t out;
  if (kind == BFLOAT16) {
    out = static_cast<uint32_t>(x) << 16;
  } else {  // float16: shift into place and let a product correct the exponent, subnormal numbers included
    const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fff) << 13;
    float scaled;
    std::memcpy(&scaled, &magnitude, 4);
    scaled *= 5.192296858534828e33f;  // 2^112
    std::memcpy(&out, &scaled, 4);
    if (magnitude >= 0x0f800000u) out |= 0x7f800000u;  // infinity, NaN
    out |= static_cast<uint32_t>(x & 0x8000) << 16;
  }
  float value;
  std::memcpy(&value, &out, 4);
  return value;
}

inline uint16_t narrowed(float value, Kind kind) {
  uint32_t x;
  std::memcpy(&x, &value, 4);
  if (kind == BFLOAT16) {
    if ((x & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<uint16_t>((x + 0x7fffu + ((x >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
  const uint32_t sign = (x >> 16) & 0x8000u, size = x & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7e00;
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (size < 0x38800000u) {  // subnormal: adding 1/2 rounds to multiples of 2^-24
    float y;
    std::memcpy(&y, &size, 4);
    y += 0.5f;
    uint32_t z;
    std::memcpy(&z, &y, 4);
    return static_cast<uint16_t>(sign | (z - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1)) >> 13));
}

// Copies n numbers of a token, times factor, as floats; zeros fill the row up to `padded`.
inline void read_row(const Tokens& x, int64_t offset, int64_t n, int64_t padded, float factor, float* to) {
  if (x.kind == FLOAT32) {
    const float* from = static_cast<const float*>(x.data) + offset;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(from + i) * factor);
    for (; i < n; ++i) to[i] = from[i] * factor;
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(x.data) + offset;
    if (x.kind == BFLOAT16)
      for (int64_t i = 0; i < n; ++i) to[i] = widened(from[i], BFLOAT16) * factor;
    else
      for (int64_t i = 0; i < n; ++i) to[i] = widened(from[i], FLOAT16) * factor;
  }
  for (int64_t i = n; i < padded; ++i) to[i] = 0.0f;
}

// Whether rows of tokens are whole vectors of float32, which are read and written where they are.
inline bool whole_vectors(const Tokens& x, int64_t n) { return x.kind == FLOAT32 && n % W == 0; }

inline void write_row(const Tokens& x, int64_t offset, int64_t n, float factor, const float* from) {
  if (x.kind == FLOAT32) {
    float* to = static_cast<float*>(x.data) + offset;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(from + i) * factor);
    for (; i < n; ++i) to[i] = from[i] * factor;
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(x.data) + offset;
  if (x.kind == BFLOAT16)
    for (int64_t i = 0; i < n; ++i) to[i] = narrowed(from[i] * factor, BFLOAT16);
  else
    for (int64_t i = 0; i < n; ++i) to[i] = narrowed(from[i] * factor, FLOAT16);
}

inline int64_t whole(int64_t n, int64_t size) { return (n + size - 1) / size * size; }

// Memory of one thread that is kept between calls, so that its pages are not faulted in anew. A buffer is asked for
// with its size once a call; under a sanitizer each has an allocation of its own, whose ends are watched.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(memory_); }
  float* floats(int64_t n) { return static_cast<float*>(bytes(n * 4)); }
  int32_t* ints(int64_t n) { return static_cast<int32_t*>(bytes(n * 4)); }
  void* bytes(int64_t n) {
#ifdef FAST_ATTENTION_SANITIZE
    const bool fits = n == size_;
#else
    const bool fits = n <= size_;
#endif
    if (!fits) {
      std::free(memory_);
      size_ = n;
      memory_ = std::aligned_alloc(64, static_cast<size_t>(whole(n > 0 ? n : 1, 64)));
      if (memory_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace FAST_ATTENTION_NAMESPACE
}  // namespace fast_attention
