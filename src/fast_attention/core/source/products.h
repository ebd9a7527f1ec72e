// Products of small matrices: C (M, N) = A (M, K) B (K, N), or added to C. A is read number by number with any strides,
// B and C in rows of whole vectors.
#pragma once
#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>

#include "vectors.h"

namespace fast_attention::FAST_ATTENTION_NAMESPACE {

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
    for (int j = 0; j < N; ++j) b[j] = load(B + j * W);
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

// The same with B and C in panels of columns that are b_panel and c_panel numbers apart. It is compiled once: a call costs
// nothing beside what it does.
__attribute__((noinline)) inline void panel_product(int64_t M, int64_t N, int64_t K, const float* A, int64_t row,
                                                    int64_t column, const float* B, int64_t ldb, int64_t b_panel, float* C,
                                                    int64_t ldc, int64_t c_panel, bool add) {
  for (; N > 0; N -= PANEL, B += b_panel, C += c_panel)
    if (N > W)
      column_panel<2>(M, K, A, row, column, B, ldb, C, ldc, add);
    else
      column_panel<1>(M, K, A, row, column, B, ldb, C, ldc, add);
}

// C (M, N) = or += A B, all in rows; of the last vector of columns all numbers are there.
inline void product(int64_t M, int64_t N, int64_t K, const float* A, int64_t row, int64_t column, const float* B,
                    int64_t ldb, float* C, int64_t ldc, bool add) {
  panel_product(M, N, K, A, row, column, B, ldb, PANEL, C, ldc, PANEL, add);
}

// The step of size S of a transposition, and those after it: rows i and i + S exchange their off-diagonal blocks.
template <int S, int... J>
inline void exchange(Vec (&rows)[W], std::integer_sequence<int, J...> places) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i)
    if (!(i & S)) {
      const Vec a = rows[i], b = rows[i + S];
      rows[i] = shuffled<(J & S ? W + J - S : J)...>(a, b);
      rows[i + S] = shuffled<(J & S ? W + J : J + S)...>(a, b);
    }
  if constexpr (2 * S < W) exchange<2 * S>(rows, places);
}

// Transposes W x W numbers in registers.
inline void transpose(Vec (&rows)[W]) { exchange<1>(rows, PLACES); }

// Writes the first `number` columns of W x W numbers as rows; `to` may be `from`.
inline void turn(const float* from, int64_t distance, float* to, int64_t to_distance, int64_t number = W) {
  Vec rows[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) rows[i] = load(from + i * distance);
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i)
    if (i < number) store(to + i * to_distance, rows[i]);
}

// Writes PANEL tokens, of which `number` exist, as columns: to[e * PANEL + n]; zeros stand for those that do not. In pairs
// two neighbouring numbers of 16 bits are one column.
inline void pack_panel(const Tokens& x, int64_t offset, int64_t number, int64_t width, float* to, bool pairs = false) {
  const int64_t parts = pairs ? 2 : 1;
  const bool in_place = x.kind == FLOAT32 || (pairs && x.row % 2 == 0);
  for (int64_t n = 0; n < PANEL; n += W)
    for (int64_t e = 0; e * parts < width; e += W) {
      const int64_t at = offset + n * x.row + e * parts, rest = width - e * parts;
      const uint16_t* halves = static_cast<const uint16_t*>(x.data) + at;
      const float* from = pairs ? reinterpret_cast<const float*>(halves) : static_cast<const float*>(x.data) + at;
      int64_t distance = x.row / parts;
      float copied[W * W];
      if (!in_place || n + W > number || W * parts > rest) {
        for (int i = 0; i < W; ++i) {
          const int64_t left = n + i < number ? rest : 0;
          store(copied + i * W, pairs ? some<Vec>(halves + i * x.row, left) : read(x, at + i * x.row, left));
        }
        from = copied, distance = W;
      }
      turn(from, distance, to + e * PANEL + n, PANEL, (rest + parts - 1) / parts);
    }
}

// Calls a function; whether what it computed is finite, where it tells.
template <class Function, class... Arguments>
inline bool finite(const Function& function, Arguments... arguments) {
  if constexpr (std::is_void_v<decltype(function(arguments...))>) return function(arguments...), true;
  else return function(arguments...);
}

// Threads take items by a counter: which thread has which never changes a bit of the results. Whether all are finite.
template <class Function>
inline bool parallel_items(const Pool& pool, int64_t items, const Function& function) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> all_finite{true};
  auto body = [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;)
      if (!finite(function, i)) all_finite = false;
  };
  pool.run(std::min(pool.threads, items), [](void* context) { (*static_cast<decltype(body)*>(context))(); }, &body);
  return all_finite;
}

// Calls function(head, part) for some parts of every head.
template <class Function>
inline bool parallel_parts(const Pool& pool, int64_t heads, int64_t parts, const Function& function) {
  return parallel_items(pool, heads * parts, [&](int64_t item) { return function(item / parts, item % parts); });
}

// For every head some parts, then one, then some more. By head one thread does all of a head, as it does where there are
// many; every number is computed in the same order either way. Whether the last parts are all finite.
template <class First, class Second, class Third>
inline bool in_phases(const Pool& pool, bool by_head, int64_t heads, int64_t first, const First& a, const Second& b,
                      int64_t last, const Third& z) {
  if (by_head || heads >= 2 * pool.threads)
    return parallel_items(pool, heads, [&](int64_t head) {
      for (int64_t i = 0; i < first; ++i) a(head, i);
      b(head);
      bool all_finite = true;
      for (int64_t i = 0; i < last; ++i) all_finite &= finite(z, head, i);
      return all_finite;
    });
  parallel_parts(pool, heads, first, a);
  parallel_items(pool, heads, b);
  return parallel_parts(pool, heads, last, z);
}

struct Span {
  int64_t first, end;
};

// Span number n of those of `size` that [first, end) is cut into.
inline Span span_of(Span all, int64_t size, int64_t n) {
  return {all.first + n * size, std::min(all.first + (n + 1) * size, all.end)};
}

// Calls function(first, n) for at most `most` of a span at a time.
template <class Function>
inline void in_steps(Span span, int64_t most, Function&& function) {
  for (int64_t i = span.first; i < span.end; i += most) function(i, std::min(span.end - i, most));
}

}  // namespace fast_attention::FAST_ATTENTION_NAMESPACE
