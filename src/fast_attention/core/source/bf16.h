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

namespace fast_attention::FAST_ATTENTION_NAMESPACE {

constexpr int64_t TERMS = 32;  // terms of a product that one instruction adds up

// n floats as sums of two bfloat16 numbers, `high` and `low`; zeros fill both up to `padded`, in whole steps.
inline void split_row(const float* from, int64_t n, int64_t padded, uint16_t* high, uint16_t* low) {
  for (int64_t j = 0; j < padded; j += W) {
    Words upper = {}, lower = {};
    if (j < n) {
      const Vec x = load(from + j);
      upper = (as<Words>(x) + 0x8000u) & 0xffff0000u;
      lower = as<Words>(x - as<Vec>(upper));
    }
    put(high + j, W, __builtin_convertvector(upper >> 16, Shorts));
    put(low + j, W, __builtin_convertvector(lower >> 16, Shorts));
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

// PANEL tokens of which `number` exist, in pairs of neighbours: to[(n / 2 * padded + e) * 2 + n % 2].
inline void pack_rows(const Tokens& x, int64_t offset, int64_t number, int64_t width, int64_t padded, uint16_t* to) {
  const uint16_t* from = static_cast<const uint16_t*>(x.data) + offset;
  for (int64_t n = 0; n < PANEL; n += 2, from += 2 * x.row)
    for (int64_t e = 0; e < padded; e += W) {
      const auto even = some<Shorts>(from + e, n < number ? width - e : 0);
      const auto odd = some<Shorts>(from + x.row + e, n + 1 < number ? width - e : 0);
      const Words pairs = __builtin_convertvector(even, Words) | __builtin_convertvector(odd, Words) << 16;
      std::memcpy(to + (n / 2 * padded + e) * 2, &pairs, sizeof pairs);
    }
}

// Instructions on the tile registers whose numbers are T, A and B. Rows are `stride` bytes apart.
template <int T>
inline void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int T, int A, int B>
inline void add_tile_product() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(T), "i"(A), "i"(B));
}

// Calls function(T) for the first tiles of a row of up to four, as constants.
template <class Function, int... T>
inline void each_tile_of(int64_t count, Function&& function, std::integer_sequence<int, T...>) {
  ((T < count ? function(std::integral_constant<int, T>()) : void()), ...);
}

// The tile registers of a thread while this lives: 0 to 3 hold sums of some rows, 4 and 5 the float32 factor, 6 and 7 the
// other.
class TileRegisters {
 public:
  ~TileRegisters() {
    if (rows_ > 0) __asm__ volatile("tilerelease");
  }

  // C (M, PANEL) = factor A B, where A has rows of K numbers and B is of `pack_panel`, in pairs.
  void multiply(int64_t M, int64_t K, float factor, const uint16_t* A, const uint16_t* B, float* C, int64_t ldc) {
    shape(M);
    __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1" ::);
    for (int64_t k = 0; k < K; k += TERMS) {
      load_tile<4>(A + k, K * 2);
      load_tile<6>(B + k * PANEL, PANEL * 4), add_tile_product<0, 4, 6>();
      load_tile<7>(B + k * PANEL + 2 * W, PANEL * 4), add_tile_product<1, 4, 7>();
    }
    store_tile<0>(C, ldc * 4), store_tile<1>(C + W, ldc * 4);
    for (int64_t i = 0; i < M; ++i) scale_row(C + i * ldc, PANEL, factor);
  }

  // C (M, N) += A B, where A is `high` + `low`, K numbers in rows of `row`, and B, rows of N, is of `pack_rows`.
  void add(int64_t M, int64_t N, int64_t K, const uint16_t* high, const uint16_t* low, int64_t row, const uint16_t* B,
           float* C) {
    shape(M);
    for (int64_t n = 0; n < N; n += 4 * W) {
      const auto columns = [&](auto&& function) { each_tile_of((N - n) / W, function, std::make_integer_sequence<int, 4>()); };
      columns([&](auto t) { load_tile<t>(C + n + t * W, N * 4); });
      for (int64_t k = 0; k < K; k += TERMS) {
        load_tile<4>(high + k, row * 2), load_tile<5>(low + k, row * 2);
        columns([&](auto t) {
          load_tile<6 + t % 2>(B + k * N + 2 * (n + t * W), N * 4);
          add_tile_product<t, 4, 6 + t % 2>(), add_tile_product<t, 5, 6 + t % 2>();
        });
      }
      columns([&](auto t) { store_tile<t>(C + n + t * W, N * 4); });
    }
  }

 private:
  void shape(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.rows[i] = static_cast<uint8_t>(i < 6 ? rows : 16);
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  int64_t rows_ = 0;
};

#endif

}  // namespace fast_attention::FAST_ATTENTION_NAMESPACE
