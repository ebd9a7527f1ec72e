// Products with bfloat16 matrices in the tile registers of a CPU that has them (Intel AMX): sixteen times the arithmetic
// of vectors. The float32 factor is a sum of two bfloat16 numbers, 16 digits, of which outputs of bfloat16 keep 8.
#pragma once
#include "products.h"

#if defined(__linux__) && defined(__x86_64__) && FAST_ATTENTION_WIDTH == 16 && (defined(__clang__) ? __clang_major__ : __GNUC__) >= 12
#define FAST_ATTENTION_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fast_attention {
namespace FAST_ATTENTION_NAMESPACE {

typedef uint16_t Shorts __attribute__((vector_size(W * 2)));

constexpr int64_t TERMS = 32;  // terms of a product that one instruction adds up

// n floats as sums of two bfloat16 numbers, `high` and `low`; zeros fill both up to `padded`, in whole steps.
inline void split_row(const float* from, int64_t n, int64_t padded, uint16_t* high, uint16_t* low) {
  for (int64_t j = 0; j < padded; j += W) {
    Words upper = {}, lower = {};
    if (j < n) {
      const Vec x = load(from + j);
      upper = (words(x) + 0x8000u) & 0xffff0000u;
      Vec rounded;
      std::memcpy(&rounded, &upper, sizeof rounded);
      lower = words(x - rounded);
    }
    const Shorts a = __builtin_convertvector(upper >> 16, Shorts), b = __builtin_convertvector(lower >> 16, Shorts);
    std::memcpy(high + j, &a, sizeof a);
    std::memcpy(low + j, &b, sizeof b);
  }
}

#ifdef FAST_ATTENTION_AMX

// Whether the CPU has these registers and Linux lends them to this process.
inline bool has_tile_registers() {
  static const bool has = [] {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool there = (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
    return there && syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  }();
  return has;
}

// Numbers e to e + N of a row of `width`, or zeros from its end on.
template <int N, class T>
inline T some(const uint16_t* row, int64_t e, int64_t width) {
  T numbers = {};
  if (e + N <= width)
    std::memcpy(&numbers, row + e, sizeof numbers);
  else if (e < width)
    std::memcpy(&numbers, row + e, static_cast<size_t>(width - e) * 2);
  return numbers;
}

// PANEL tokens of which `number` exist, in pairs of neighbouring numbers: to[(e / 2 * PANEL + n) * 2 + e % 2].
inline void pack_pairs(const Tokens& x, int64_t offset, int64_t number, int64_t width, int64_t padded, uint16_t* to) {
  const uint16_t* from = static_cast<const uint16_t*>(x.data) + offset;
  for (int64_t n = 0; n < PANEL; n += W)
    for (int64_t e = 0; e < padded; e += 2 * W) {
      Vec rows[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) rows[i] = some<2 * W, Vec>(from + (n + i) * x.row, e, n + i < number ? width : 0);
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) std::memcpy(to + ((e / 2 + i) * PANEL + n) * 2, &rows[i], sizeof rows[i]);
    }
}

// PANEL tokens of which `number` exist, in pairs of neighbours: to[(n / 2 * padded + e) * 2 + n % 2].
inline void pack_rows(const Tokens& x, int64_t offset, int64_t number, int64_t width, int64_t padded, uint16_t* to) {
  const uint16_t* from = static_cast<const uint16_t*>(x.data) + offset;
  for (int64_t n = 0; n < PANEL; n += 2, from += 2 * x.row)
    for (int64_t e = 0; e < padded; e += W) {
      const auto even = some<W, Shorts>(from, e, n < number ? width : 0);
      const auto odd = some<W, Shorts>(from + x.row, e, n + 1 < number ? width : 0);
      const Words pairs = __builtin_convertvector(even, Words) | __builtin_convertvector(odd, Words) << 16;
      std::memcpy(to + (n / 2 * padded + e) * 2, &pairs, sizeof pairs);
    }
}

#define FAST_ATTENTION_TILES __attribute__((target("amx-tile,amx-bf16")))

// The tile registers of a thread while this lives: 0 to 3 hold sums of some rows, 4 and 5 the float32 factor, 6 the other.
class TileRegisters {
 public:
  FAST_ATTENTION_TILES ~TileRegisters() {
    if (rows_ > 0) _tile_release();
  }

  // C (M, PANEL) = factor A B, where A has rows of K numbers and B is of `pack_pairs`.
  FAST_ATTENTION_TILES void multiply(int64_t M, int64_t K, float factor, const uint16_t* A, const uint16_t* B, float* C,
                                     int64_t ldc) {
    shape(M);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < K; k += TERMS) {
      _tile_loadd(4, A + k, K * 2);
      _tile_loadd(6, B + k * PANEL, PANEL * 4);
      _tile_loadd(7, B + k * PANEL + 2 * W, PANEL * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, C, ldc * 4);
    _tile_stored(1, C + W, ldc * 4);
    for (int64_t i = 0; i < M; ++i)
      for (int64_t j = 0; j < PANEL; j += W) store(C + i * ldc + j, load(C + i * ldc + j) * factor);
  }

  // C (M, N) += A B, where A is `high` + `low`, K numbers in rows of `row`, and B, rows of N, is of `pack_rows`.
  FAST_ATTENTION_TILES void add(int64_t M, int64_t N, int64_t K, const uint16_t* high, const uint16_t* low, int64_t row,
                                const uint16_t* B, float* C) {
    shape(M);
    for (int64_t n = 0; n < N; n += 4 * W) {
      const int64_t columns = (N - n) / W;
      float* to = C + n;
      _tile_loadd(0, to, N * 4);
      if (columns > 1) _tile_loadd(1, to + W, N * 4);
      if (columns > 2) _tile_loadd(2, to + 2 * W, N * 4);
      if (columns > 3) _tile_loadd(3, to + 3 * W, N * 4);
      for (int64_t k = 0; k < K; k += TERMS) {
        const uint16_t* from = B + (k * N + 2 * n);
        _tile_loadd(4, high + k, row * 2);
        _tile_loadd(5, low + k, row * 2);
        _tile_loadd(6, from, N * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 5, 6);
        if (columns > 1) {
          _tile_loadd(7, from + 2 * W, N * 4);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(1, 5, 7);
        }
        if (columns > 2) {
          _tile_loadd(6, from + 4 * W, N * 4);
          _tile_dpbf16ps(2, 4, 6);
          _tile_dpbf16ps(2, 5, 6);
        }
        if (columns > 3) {
          _tile_loadd(7, from + 6 * W, N * 4);
          _tile_dpbf16ps(3, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, to, N * 4);
      if (columns > 1) _tile_stored(1, to + W, N * 4);
      if (columns > 2) _tile_stored(2, to + 2 * W, N * 4);
      if (columns > 3) _tile_stored(3, to + 3 * W, N * 4);
    }
  }

 private:
  FAST_ATTENTION_TILES void shape(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.rows[i] = static_cast<uint8_t>(i < 6 ? rows : 16);
    _tile_loadconfig(&config);
  }
  int64_t rows_ = 0;
};

#endif

}  // namespace FAST_ATTENTION_NAMESPACE
}  // namespace fast_attention
