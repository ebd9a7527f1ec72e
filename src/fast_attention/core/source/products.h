// Products of small matrices: C (M, N) = A (M, K) B (K, N), or added to C. A is read number by number with any strides,
// B and C in rows of whole vectors.
#pragma once
#include <atomic>
#include <type_traits>
#include <utility>

#include "vectors.h"

namespace fast_attention {
namespace FAST_ATTENTION_NAMESPACE {

// A micro-kernel keeps ROWS x PANEL sums in registers: 24 of 32 with AVX-512, 12 of 16 else.
constexpr int ROWS = W == 16 ? 12 : 6;
constexpr int PANEL = 2 * W;

template <int M, int N>
inline void micro_kernel(int64_t K, const float* A, int64_t row, int64_t column, const float* B, int64_t ldb, float* C,
                         int64_t ldc, bool add) {
  Vec sums[M][N];
#pragma GCC unroll 12
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) sums[i][j] = Vec{};
  for (int64_t k = 0; k < K; ++k) {
    Vec b[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      b[j] = load(B + j * W);
      __builtin_prefetch(B + 8 * ldb + j * W);
    }
#pragma GCC unroll 12
    for (int i = 0; i < M; ++i) {
      const Vec a = all(A[i * row]);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sums[i][j] += a * b[j];
    }
    A += column;
    B += ldb;
  }
#pragma GCC unroll 12
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j)  // added up first: a large sum would round every term
      store(C + i * ldc + j * W, add ? load(C + i * ldc + j * W) + sums[i][j] : sums[i][j]);
}

// All rows against N vectors of columns, which stay in the first cache: K * N * W numbers.
template <int N>
inline void column_panel(int64_t M, int64_t K, const float* A, int64_t row, int64_t column, const float* B, int64_t ldb,
                         float* C, int64_t ldc, bool add) {
  int64_t i = 0;
  const auto kernels_of = [&](auto number) {
    for (constexpr int R = decltype(number)::value; i + R <= M; i += R)
      micro_kernel<R, N>(K, A + i * row, row, column, B, ldb, C + i * ldc, ldc, add);
  };
  kernels_of(std::integral_constant<int, ROWS>());
  if constexpr (W == 16) kernels_of(std::integral_constant<int, 8>());
  kernels_of(std::integral_constant<int, 4>());
  kernels_of(std::integral_constant<int, 2>());
  kernels_of(std::integral_constant<int, 1>());
}

// N is a multiple of W.
inline void product(int64_t M, int64_t N, int64_t K, const float* A, int64_t row, int64_t column, const float* B,
                    int64_t ldb, float* C, int64_t ldc, bool add) {
  int64_t j = 0;
  for (; j + PANEL <= N; j += PANEL) column_panel<2>(M, K, A, row, column, B + j, ldb, C + j, ldc, add);
  if (j < N) column_panel<1>(M, K, A, row, column, B + j, ldb, C + j, ldc, add);
}

// The step of size S of a transposition: rows i and i + S exchange their off-diagonal blocks. The orders are constants of
// the program, else a compiler builds them number by number at every call.
#if defined(__GNUC__) && !defined(__clang__)
template <int S, int... J>
inline void exchange(Vec (&rows)[W], std::integer_sequence<int, J...>) {
  const Ints upper = {(J & S ? W + J - S : J)...}, lower = {(J & S ? W + J : J + S)...};
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i)
    if (!(i & S)) {
      const Vec a = rows[i], b = rows[i + S];
      rows[i] = __builtin_shuffle(a, b, upper);
      rows[i + S] = __builtin_shuffle(a, b, lower);
    }
}
#endif

// Transposes W x W numbers in registers.
inline void transpose(Vec (&rows)[W]) {
#if defined(__GNUC__) && !defined(__clang__)
  constexpr std::make_integer_sequence<int, W> numbers;
  exchange<1>(rows, numbers);
  exchange<2>(rows, numbers);
  if constexpr (W > 4) exchange<4>(rows, numbers);
  if constexpr (W > 8) exchange<8>(rows, numbers);
#else
  float numbers[W][W], turned[W][W];
  for (int i = 0; i < W; ++i) store(numbers[i], rows[i]);
  for (int i = 0; i < W; ++i)
    for (int j = 0; j < W; ++j) turned[i][j] = numbers[j][i];
  for (int i = 0; i < W; ++i) rows[i] = load(turned[i]);
#endif
}

// Writes PANEL tokens, of which `number` exist, as columns: to[e * PANEL + n]; zeros stand for those that do not.
inline void pack_panel(const Tokens& x, int64_t offset, int64_t number, int64_t width, float* row, float* to) {
  for (int64_t n = 0; n < PANEL; n += W) {
    int64_t e = 0;
    if (x.kind == FLOAT32 && n + W <= number) {
      const float* from = static_cast<const float*>(x.data) + offset + n * x.row;
      for (; e + W <= width; e += W) {
        Vec rows[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) rows[i] = load(from + i * x.row + e);
        transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(to + (e + i) * PANEL + n, rows[i]);
      }
    }
    if (n + W > number)
      for (int64_t c = e; c < width; ++c) store(to + c * PANEL + n, Vec{});
    for (int64_t i = n; i < n + W && i < number && e < width; ++i) {
      read_row(x, offset + i * x.row, width, width, 1.0f, row);
      for (int64_t c = e; c < width; ++c) to[c * PANEL + i] = row[c];
    }
  }
}

// Threads take items by a counter: which thread has which never changes a bit of the results.
template <class Function>
inline void parallel_items(const Pool& pool, int64_t items, Function&& function) {
  struct Shared {
    std::atomic<int64_t> next;
    int64_t items;
    Function* function;
  } shared{{0}, items, &function};
  const int64_t threads = pool.threads < items ? pool.threads : items;
  pool.run(
      threads,
      [](void* context, int64_t) {
        Shared& s = *static_cast<Shared*>(context);
        for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.items;) (*s.function)(i);
      },
      &shared);
}

}  // namespace FAST_ATTENTION_NAMESPACE
}  // namespace fast_attention
