// Attention by features: out_i = phi(q_i) S_i / (phi(q_i) z_i + eps), S_i = sum_j phi(k_j) v_j^T and z_i = sum_j phi(k_j)
// over the keys that query i sees: all, or those up to its own.
//
// Sequences are cut into sections. Sections of keys are summed at once; a scan of these sums gives what lies before each;
// then sections of queries are read at once, in steps whose pairs are taken one by one. Features are made where they are
// read. Exponentials come as logarithms to base two, and every feature has a scale of its own, the largest logarithm of
// the keys so far: sums are over 2^scale. The scales of a step are those of its first key; it ends before a key that
// is far above them, so that no key counts for a query before it, none vanishes, and nothing overflows.
//
// Trigonometric features have such a logarithm for each token. Where sums decay, those of a token are what has decayed
// since its section began, which queries subtract again; sums of whole sections are brought to where the next begins.
#pragma once
#include <cmath>
#include <vector>

#include "products.h"

namespace fast_attention {
namespace FAST_ATTENTION_NAMESPACE {

constexpr int64_t STEP = 32;         // tokens that meet pair by pair
constexpr int64_t MANY = 60;         // tokens at once that do not: whole micro-kernels, at most 2 STEP
constexpr float SLACK = 57.0f;       // how far a key may be above a step's scales: 2^57, about e^40
constexpr float LOWEST = -1e30f;     // the scale before the first key
constexpr float MOST = 1e13f;        // of a coordinate: half of its square is a number above LOWEST
constexpr float LEAST = 9.860761e-32f;  // of a denominator: below, a quotient means nothing

// Sums of a section in panels of columns, which products read one after another: kv[panel][feature][PANEL].
struct FeatureSums {
  float *kv, *z, *scale;
};

inline FeatureSums sums_at(float* numbers, int64_t features, int64_t values) {
  float* z = numbers + whole(features, 32) * whole(values, 32);
  return {numbers, z, z + whole(features, 32)};
}

struct FeatureScratch {
  Buffer queries, keys, panel, value_panel, values, pairs, d_pairs, sums, turned, top, out, tokens, row, bias, norms,
      not_numbers, query_rows, key_rows, query_columns, key_columns, wide, grad, d_denominators, d_features, d_values,
      d_tokens, totals, scales, factors, parts, apart, parts_of_lead, logs, log_row;
  std::vector<int64_t> steps;
  const void* packed = nullptr;  // the rows of which query_rows and key_rows are made
  int64_t call = -1;
};

inline FeatureScratch& feature_scratch() {
  static thread_local FeatureScratch memory;
  return memory;
}

// C (M, columns of panels) = or += A (M, K) B, B in panels of K rows that are `panel` numbers apart.
inline void panel_product(int64_t M, int64_t N, int64_t K, const float* A, int64_t row, int64_t column, const float* B,
                          int64_t panel, float* C, int64_t ldc, bool add) {
  for (int64_t j = 0; j < N; j += PANEL, B += panel)
    if (N - j > W)
      column_panel<2>(M, K, A, row, column, B, PANEL, C + j, ldc, add);
    else
      column_panel<1>(M, K, A, row, column, B, PANEL, C + j, ldc, add);
}

// Panels of C += A (M, K) B (K, N), rows of B ldb numbers apart.
inline void add_to_panels(int64_t M, int64_t N, int64_t K, const float* A, int64_t row, int64_t column, const float* B,
                          int64_t ldb, float* C, int64_t panel) {
  for (int64_t j = 0; j < N; j += PANEL, C += panel)
    if (N - j > W)
      column_panel<2>(M, K, A, row, column, B + j, ldb, C, PANEL, true);
    else
      column_panel<1>(M, K, A, row, column, B + j, ldb, C, PANEL, true);
}

// Panels of (rows, columns) as panels of (columns, rows); both are whole panels of 32.
inline void turn_panels(const float* from, int64_t rows, int64_t columns, float* to) {
  for (int64_t r = 0; r < rows; r += W)
    for (int64_t c = 0; c < columns; c += W) {
      Vec block[W];
      const float* source = from + (c / PANEL * rows + r) * PANEL + c % PANEL;
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) block[i] = load(source + i * PANEL);
      transpose(block);
      float* target = to + (r / PANEL * columns + c) * PANEL + r % PANEL;
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(target + i * PANEL, block[i]);
    }
}

inline float product_of_rows(const float* a, const float* b, int64_t n) {
  Vec total = {};
  for (int64_t e = 0; e < n; e += W) total += load(a + e) * load(b + e);
  return sum(total);
}

// Zeros in place of the numbers behind the column `last`.
inline Vec columns_up_to(Vec x, int64_t last) { return counting() <= static_cast<int32_t>(last) ? x : Vec{}; }

// Of x turns.
inline void cosine_and_sine(Vec x, Vec& cosine, Vec& sine) {
  const Vec shifted = x * 2.0f + 12582912.0f;  // rounds to half turns: see exp2
  Vec y = x - (shifted - 12582912.0f) * 0.5f;
  y = -larger(all(-0.25f), -larger(all(-0.25f), y));  // beyond 2^22 turns a float says nothing of the rest
  const Vec u = y * y;
  Vec c = all(-24.981836f), s = all(39.760723f);
  c = c * u + 60.14395f, s = s * u - 76.58128f;
  c = c * u - 85.45357f, s = s * u + 81.60248f;
  c = c * u + 64.93935f, s = s * u - 41.341682f;
  c = c * u - 19.739208f, s = s * u + 6.2831855f;
  c = c * u + 1.0f, s = s * y;
  const Words half = words(shifted) << 31;  // the sign of an odd half turn
  cosine = from_bits(from_words(words(c) ^ half)), sine = from_bits(from_words(words(s) ^ half));
}

// Not 0 where a number is infinite or NaN: told by its bits, because compilers take 0 x for 0.
inline Ints not_finite(Vec x) { return (bits(x) & 0x7f800000) == 0x7f800000; }

inline bool any(Ints x) {
  int32_t found = 0;
  for (int i = 0; i < W; ++i) found |= x[i];
  return found != 0;
}

// What one head's items share: how tokens become features, and sums that steps add to.
class FeatureWork {
 public:
  FeatureWork(const FeaturesCall& call, int64_t batch, int64_t head, FeatureScratch& memory, bool backward)
      : c(call), b(batch), h(head), m(memory), exponential(call.map == EXPONENTIAL), random(call.map >= EXPONENTIAL),
        scaled(random || call.fading > 0), columns(whole(call.features, W)), line(whole(call.features, 32)),
        value_row(whole(call.values, 32)), width_row(whole(call.width, 32)), row_line(whole(call.rows, 32)),
        tokens_at_once(call.causal ? STEP : MANY) {
    const int64_t rows = 2 * STEP;
    tokens = m.tokens.floats(rows * width_row);
    row = m.row.floats(width_row + value_row + line);
    value_memory = m.values.floats(rows * value_row);
    direct_values = c.v.kind == FLOAT32 && c.values % W == 0;
    const int64_t size = line * value_row + 2 * line;
    sums = sums_at(m.sums.floats(size), c.features, c.values);
    if (!scaled) return;
    top = m.top.floats(line);
    logs = static_cast<double*>(m.logs.bytes((c.fading > 0 ? SECTION * c.fading : rows) * 8));
    log_row = m.log_row.floats(line);
    if (!random) return;
    norms = m.norms.floats(rows);
    not_numbers = m.not_numbers.floats(rows);
    bias = m.bias.floats(line);
    const float* added = c.bias == nullptr ? nullptr : c.bias + b * c.bias_batch + h * c.bias_head;
    for (int64_t e = 0; e < line; ++e)
      bias[e] = e >= c.features ? -INFINITE : added == nullptr ? 0.0f : added[e] * LOG2E;
    query_rows = m.query_rows.floats(row_line * c.width);
    key_rows = m.key_rows.floats(row_line * c.width);
    if (backward) {
      query_columns = m.query_columns.floats(row_line * width_row);
      key_columns = m.key_columns.floats(row_line * width_row);
    }
    const void* source = static_cast<const char*>(c.query_rows.data) + 4 * (b * c.query_rows.batch + h * c.query_rows.head);
    if (m.call == c.number && m.packed == source) return;
    m.call = c.number, m.packed = source;
    pack_rows(c.query_rows, query_rows, query_columns);
    pack_rows(c.key_rows, key_rows, key_columns);
  }

  // Rows of the map as panels of their numbers, (width, PANEL) each, and as panels of columns, (rows, PANEL).
  void pack_rows(const Tokens& rows, float* to, float* in_columns) {
    for (int64_t p = 0; p < c.rows; p += PANEL)
      pack_panel(rows, at(rows, p), c.rows - p, c.width, row, to + p * c.width);
    if (in_columns == nullptr) return;
    for (int64_t e = 0; e < c.rows; ++e) {
      read_row(rows, at(rows, e), c.width, width_row, 1.0f, row);
      for (int64_t p = 0; p < width_row; p += PANEL)
        std::memcpy(in_columns + (p / PANEL * row_line + e) * PANEL, row + p, PANEL * 4);
    }
  }

  int64_t at(const Tokens& x, int64_t i) const { return b * x.batch + h * x.head + i * x.row; }
  bool hidden(int64_t key) const { return c.key_mask != nullptr && !c.key_mask[b * c.mask_batch + h * c.mask_head + key]; }

  FeatureSums kept(float* states, int64_t slots, int64_t slot) const {
    return sums_at(states + ((b * c.heads + h) * slots + slot) * state_numbers(c.features, c.values), c.features, c.values);
  }

  // Features of a map that takes every number by itself; zeros for hidden keys.
  void elementwise(const Tokens& x, int64_t first, int64_t n, bool keys, float* to) const {
    for (int64_t i = 0; i < n; ++i, to += line) {
      if (keys && hidden(first + i)) {
        std::memset(to, 0, static_cast<size_t>(line) * 4);
        continue;
      }
      const float* from = to;
      if (x.kind == FLOAT32 && c.width % W == 0)
        from = static_cast<const float*>(x.data) + at(x, first + i);
      else
        read_row(x, at(x, first + i), c.width, line, 1.0f, to);
      if (c.map == ELU_PLUS_ONE)  // NaN stays: `larger` gives its second number then
        for (int64_t e = 0; e < columns; e += W) {
          const Vec number = load(from + e);
          store(to + e, larger(Vec{}, number) + exp2(-larger(Vec{}, -number) * LOG2E));
        }
      else if (c.map == RELU)
        for (int64_t e = 0; e < columns; e += W) store(to + e, larger(Vec{}, load(from + e)) + c.offset);
      else if (from != to)
        std::memcpy(to, from, static_cast<size_t>(columns) * 4);
      for (int64_t e = c.features; e < columns; ++e) to[e] = 0.0f;
    }
  }

  // Numbers of n tokens within MOST, times d^(-1/4); zeros for hidden keys.
  void read_tokens(const Tokens& x, int64_t first, int64_t n, bool keys) const {
    const float factor = std::pow(static_cast<float>(c.width), -0.25f);
    for (int64_t i = 0; i < n; ++i) {
      float* to = tokens + i * width_row;
      norms[i] = 0.0f, not_numbers[i] = 0.0f;
      if (keys && hidden(first + i)) {
        std::memset(to, 0, static_cast<size_t>(width_row) * 4);
        norms[i] = INFINITE;
        continue;
      }
      read_row(x, at(x, first + i), c.width, width_row, 1.0f, to);
      Vec square = {};
      Ints broken = {};
      for (int64_t e = 0; e < width_row; e += W) {
        const Vec number = -larger(all(-MOST), -larger(all(-MOST), load(to + e))) * factor;
        store(to + e, number);
        square += number * number;
        broken |= not_finite(number);
      }
      if (keys || c.normed) norms[i] = sum(square) * ((exponential ? 0.5f : -0.5f) * LOG2E);
      not_numbers[i] = any(broken) ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
  }

  // Features over what their logarithms say; of exponentials these to base two. The rows of a map, in panels of 8 KiB,
  // come from the second cache; tokens stay in the first.
  void features(const Tokens& x, int64_t first, int64_t n, bool keys, float* to) const {
    if (!random) return elementwise(x, first, n, keys, to);
    read_tokens(x, first, n, keys);
    const float* rows = keys ? key_rows : query_rows;
    for (int64_t p = 0; p < c.rows; p += PANEL)
      column_panel<2>(n, c.width, tokens, width_row, 1, rows + p * c.width, PANEL, to + p, line, false);
    for (int64_t i = 0; i < n; ++i, to += line) {
      if (exponential) {
        for (int64_t e = 0; e < columns; e += W) store(to + e, load(to + e) * LOG2E + (load(bias + e) - norms[i]));
        continue;
      }
      for (int64_t e = whole(c.rows, W) - W; e >= 0; e -= W) {  // backwards: what lies behind the last row is overwritten
        Vec cosine, sine;
        cosine_and_sine(load(to + e) * 0.15915494309189535f, cosine, sine);
        store(to + e, cosine), store(to + c.rows + e, sine);
      }
      for (int64_t e = c.features; e < columns; ++e) to[e] = 0.0f;
      if (keys) logs[i] = -norms[i];
    }
  }

  // From here on the logarithms of tokens are what has decayed since this section's first.
  void begin_section(int64_t first, int64_t end) {
    begun = first, ended = end;
    for (int64_t i = first; i < end && c.fading > 0; ++i) {
      const float* decay = static_cast<const float*>(c.decay.data) + at(c.decay, i);
      for (int64_t e = 0, place = (i - first) * c.fading; e < c.fading; ++e, ++place) {
        const double gone = -(decay[e] > -1e6f ? decay[e] : -1e6f) * 1.4426950408889634;
        logs[place] = i > first ? logs[place - c.fading] + gone : gone;
      }
    }
  }

  // Logarithms of token i of those from `first` on, one of each feature or of all; of a feature at the section's end.
  const double* logs_of(int64_t first, int64_t i) const {
    return c.fading > 0 ? logs + (first + i - begun) * c.fading : logs + i;
  }
  double at_end(int64_t feature) const { return logs_of(ended, -1)[c.fading > 1 ? feature : 0]; }

  // Those of features `to`, all in float32.
  const float* row_of_logs(const float* to, const double* of_token) const {
    if (exponential) return to;
    for (int64_t e = 0; e < line; ++e)
      log_row[e] = static_cast<float>(c.fading > 1 && e < c.features ? of_token[e] : of_token[0]);
    return log_row;
  }

  // Multiplies features, or gradients, by 2^(sign (logarithms - scale)).
  void shift(float* to, const double* of_token, const float* scale, double sign) const {
    if (c.fading <= 1) {
      const float factor = exp2(static_cast<float>(sign * (of_token[0] - scale[0])));
      for (int64_t e = 0; e < columns; e += W) store(to + e, load(to + e) * factor);
      return;
    }
    for (int64_t e = 0; e < columns; ++e)
      log_row[e] = e < c.features ? static_cast<float>(sign * (of_token[e] - scale[e])) : 0.0f;
    for (int64_t e = 0; e < columns; e += W) store(to + e, load(to + e) * exp2(load(log_row + e)));
  }

  // Brings the sums to other scales; gradients of sums are divided by what these are multiplied by.
  void rescale(const float* scale, bool gradients = false) {
    for (int64_t f = 0; f < c.features; ++f) {
      if (scale[f] == sums.scale[f]) continue;
      if (!gradients && sums.scale[f] == LOWEST) {  // nothing is summed yet
        sums.scale[f] = scale[f];
        continue;
      }
      const float factor = exp2(gradients ? scale[f] - sums.scale[f] : sums.scale[f] - scale[f]);
      for (const FeatureSums& x : {sums, before, section}) {
        if (x.kv == nullptr) continue;
        for (int64_t p = 0; p < value_row; p += PANEL)
          for (int64_t e = 0; e < PANEL; e += W) {
            float* to = x.kv + (p / PANEL * line + f) * PANEL + e;
            store(to, load(to) * factor);
          }
        x.z[f] *= factor;
      }
      sums.scale[f] = scale[f];
    }
  }

  // The same where the sums of values stand in panels of features.
  void rescale_turned(const float* scale, float* turned) {
    bool same = true;
    float* factors = m.factors.floats(line);
    for (int64_t f = 0; f < line; ++f) {
      same = same && (f >= c.features || scale[f] == sums.scale[f]);
      factors[f] = f >= c.features ? 1.0f : scale[f] == sums.scale[f] ? 1.0f : exp2(sums.scale[f] - scale[f]);
      sums.z[f] *= factors[f];
      sums.scale[f] = scale[f];
    }
    if (same) return;
    for (int64_t p = 0; p < line; p += PANEL)
      for (int64_t e = 0; e < c.values; ++e)
        for (int64_t f = 0; f < PANEL; f += W) {
          float* to = turned + (p / PANEL * value_row + e) * PANEL + f;  // rows: value_row, as turn_panels leaves them
          store(to, load(to) * load(factors + p + f));
        }
  }

  void raise(float* scale, const float* to) const {
    for (int64_t e = 0; e < columns; e += W) store(scale + e, larger(load(to + e), load(scale + e)));
  }

  // Key i of those from `first` on over 2^scale.
  void over(float* to, int64_t first, int64_t i, const float* scale) const {
    if (!exponential) return shift(to, logs_of(first, i), scale, 1.0);
    for (int64_t e = 0; e < columns; e += W) store(to + e, exp2(load(to + e) - load(scale + e)) + not_numbers[i]);
    for (int64_t e = c.features; e < columns; ++e) to[e] = 0.0f;
  }

  // Features of keys over scales that none of them is above.
  void keys_over(int64_t first, int64_t n, const float* scale, float* to) const {
    features(c.k, first, n, true, to);
    for (int64_t i = 0; i < n && scaled; ++i) over(to + i * line, first, i, scale);
  }

  // Features of keys whose sums nobody reads before they are all there; the sums take their scales.
  void keys_of_sums(int64_t first, int64_t n, float* to) {
    features(c.k, first, n, true, to);
    if (!scaled) return;
    std::memcpy(top, sums.scale, static_cast<size_t>(line) * 4);
    for (int64_t i = 0; i < n; ++i) raise(top, row_of_logs(to + i * line, logs_of(first, i)));
    rescale(top);
    for (int64_t i = 0; i < n; ++i) over(to + i * line, first, i, sums.scale);
  }

  // Features of the keys of a step, of which there may be fewer than n; `scale` becomes the step's, `top` the largest
  // logarithms up to its end. The sums are left as they are.
  int64_t keys_of_step(int64_t first, int64_t n, float* to, float* scale) {
    features(c.k, first, n, true, to);
    if (!scaled) return n;
    std::memcpy(scale, top, static_cast<size_t>(line) * 4);
    raise(scale, row_of_logs(to, logs_of(first, 0)));
    for (int64_t i = 0; i < n; ++i) {
      const float* own = row_of_logs(to + i * line, logs_of(first, i));
      Vec above = all(-INFINITE);
      for (int64_t e = 0; e < columns; e += W) above = larger(load(own + e) - load(scale + e), above);
      if (i > 0 && largest(above) > SLACK) return i;
      raise(top, own);
      over(to + i * line, first, i, scale);
    }
    return n;
  }

  // Features of queries beside sums over 2^scale. Random ones are over each query's largest term, whose logarithm is kept
  // or `known`.
  void queries(int64_t first, int64_t n, const float* scale, float* tops, bool known, float* to) {
    features(c.q, first, n, false, to);
    for (int64_t i = 0; i < n && c.fading > 0; ++i) shift(to + i * line, logs_of(first, i), scale, -1.0);
    for (int64_t i = 0; i < n && random && !exponential; ++i) {
      if (!known) tops[first + i] = scale[0];
      const float factor = exp2(scale[0] - tops[first + i]);
      for (int64_t e = 0; e < columns && known; e += W) store(to + i * line + e, load(to + i * line + e) * factor);
    }
    for (int64_t i = 0; i < n && exponential; ++i) {
      float* logs = to + i * line;
      float before = tops[first + i];
      if (!known) {
        Vec most = all(-INFINITE);
        for (int64_t e = 0; e < columns; e += W) {
          const Vec term = load(logs + e) + load(scale + e);
          store(logs + e, term);
          most = larger(term, most);
        }
        tops[first + i] = before = largest(most);
        for (int64_t e = 0; e < columns; e += W) store(logs + e, exp2(load(logs + e) - before) + not_numbers[i]);
      } else {
        for (int64_t e = 0; e < columns; e += W) store(logs + e, exp2(load(logs + e) + load(scale + e) - before));
      }
      for (int64_t e = c.features; e < columns; ++e) logs[e] = 0.0f;
    }
  }

  // Rows of values of keys, zeros for hidden ones.
  const float* values(int64_t first, int64_t n, int64_t& distance) const {
    const uint8_t* seen = c.key_mask == nullptr ? nullptr : c.key_mask + b * c.mask_batch + h * c.mask_head + first;
    if (direct_values && (seen == nullptr || std::memchr(seen, 0, static_cast<size_t>(n)) == nullptr)) {
      distance = c.v.row;
      return static_cast<const float*>(c.v.data) + at(c.v, first);
    }
    distance = value_row;
    for (int64_t i = 0; i < n; ++i) {
      if (hidden(first + i))
        std::memset(value_memory + i * value_row, 0, static_cast<size_t>(value_row) * 4);
      else
        read_row(c.v, at(c.v, first + i), c.values, value_row, 1.0f, value_memory + i * value_row);
    }
    return value_memory;
  }

  // Writes a row times a factor; gives where its numbers are not finite.
  Ints write_output(int64_t i, float* from, float factor) const {
    Ints broken = {};
    for (int64_t e = c.values; e < whole(c.values, W); ++e) from[e] = 0.0f;
    if (c.out.kind == FLOAT32 && c.values % W == 0) {
      float* to = static_cast<float*>(c.out.data) + at(c.out, i);
      for (int64_t e = 0; e < c.values; e += W) {
        const Vec number = load(from + e) * factor;
        store(to + e, number);
        broken |= not_finite(number);
      }
      return broken;
    }
    for (int64_t e = 0; e < c.values; e += W) broken |= not_finite(load(from + e) * factor);
    write_row(c.out, at(c.out, i), c.values, factor, from);
    return broken;
  }

  // S += K^T V, z += sum of K.
  void add_keys(const float* keys, const float* v, int64_t distance, int64_t n) {
    const FeatureSums& to = section.kv == nullptr ? sums : section;
    add_to_panels(c.features, c.values, n, keys, 1, line, v, distance, to.kv, line * PANEL);
    add_rows(keys, n, to.z);
    if (section.kv == nullptr) return;
    for (int64_t i = 0; i < line * value_row + line; i += W) store(sums.kv + i, load(before.kv + i) + load(section.kv + i));
  }

  // From here on the keys of a section are summed apart from those before it, which rounds each of them once.
  void sum_apart(const FeatureSums& earlier) {
    float* memory = m.apart.floats(2 * state_numbers(c.features, c.values));
    before = sums_at(memory, c.features, c.values);
    section = sums_at(memory + state_numbers(c.features, c.values), c.features, c.values);
    copy(earlier, before);
    std::memset(section.kv, 0, static_cast<size_t>(line * value_row + line) * 4);
  }

  void add_rows(const float* rows, int64_t n, float* to) const {
    for (int64_t e = 0; e < columns; e += W) {
      Vec total = {};
      for (int64_t i = 0; i < n; ++i) total += load(rows + i * line + e);
      store(to + e, load(to + e) + total);
    }
  }

  // z += the sum of rows times weights
  void add_weighted_rows(const float* rows, const float* weights, int64_t n, float* to) const {
    for (int64_t e = 0; e < columns; e += W) {
      Vec total = {};
      for (int64_t i = 0; i < n; ++i) total += load(rows + i * line + e) * weights[i];
      store(to + e, load(to + e) + total);
    }
  }

  // rows += weights times z, of features; one for each row, or 1
  void add_to_rows(const float* z, const float* weights, int64_t n, float* rows) const {
    for (int64_t r = 0; r < n; ++r) {
      const float weight = weights == nullptr ? 1.0f : weights[r];
      for (int64_t e = r * line, f = 0; f < columns; e += W, f += W) store(rows + e, load(rows + e) + load(z + f) * weight);
    }
  }

  // Products of keys of a step as columns, in panels of (numbers, PANEL); `above` rows see none of a panel's keys.
  void triangle(const float* rows, int64_t row_distance, const float* keys, int64_t key_distance, int64_t numbers, int64_t n,
                float* panel, float* to) const {
    for (int64_t p = 0; p < n; p += PANEL) {
      pack_panel({const_cast<float*>(keys), 0, 0, key_distance, FLOAT32}, p * key_distance, n - p, numbers, row, panel);
      const int64_t above = p / ROWS * ROWS;
      column_panel<2>(n - above, numbers, rows + above * row_distance, row_distance, 1, panel, PANEL, to + above * STEP + p,
                      STEP, false);
    }
  }

  // C += the triangle's rows times rows of keys
  void add_triangle(const float* pairs, const float* rows, int64_t distance, int64_t numbers, int64_t n, float* to,
                    int64_t to_row) const {
    for (int64_t r = 0; r < n; r += ROWS) {
      const int64_t count = n - r < ROWS ? n - r : ROWS;
      product(count, whole(numbers, W), r + count, pairs + r * STEP, STEP, 1, rows, distance, to + r * to_row, to_row, true);
    }
  }

  // Gradients of numerators and denominators of n queries.
  void quotients(const FeaturesGradients& d, int64_t first, int64_t n, float* grad, float* d_denominators) const {
    const float* denominators = c.denominators + (b * c.heads + h) * c.length;
    for (int64_t i = 0; i < n; ++i, grad += value_row) {
      read_row(d.grad_out, at(d.grad_out, first + i), c.values, value_row, 1.0f / denominators[first + i], grad);
      read_row(c.out, at(c.out, first + i), c.values, value_row, 1.0f, row);
      d_denominators[i] = c.normalized ? -product_of_rows(grad, row, value_row) : 0.0f;
    }
  }

  // Writes the gradients of tokens, given their features and the gradients of these, which are lost. Those of rows and
  // bias have null pointers where they are not wanted; those of decays go to d_decay, given the scale of features.
  void write_gradients(const Tokens& x, int64_t first, int64_t n, bool keys, const float* features, float* d_features,
                       const Tokens& to, float* d_rows, float* d_bias, float* d_decay = nullptr,
                       const float* scale = nullptr) {
    if (!random) {
      float* plain = m.d_tokens.floats(line);
      for (int64_t i = 0; i < n; ++i) {
        float* slope = d_features + i * line;
        const float* feature = features + i * line;
        if (c.fading > 0) {
          float* decay = d_decay + ((b * c.heads + h) * c.keys + first + i) * c.fading;
          for (int64_t e = 0; e < c.features; ++e)
            decay[c.fading > 1 ? e : 0] += (keys ? -1.0f : 1.0f) * slope[e] * feature[e];
          shift(slope, logs_of(first, i), scale, keys ? 1.0 : -1.0);
          elementwise(x, first + i, 1, keys, plain);
          feature = plain;
        }
        if (keys && hidden(first + i)) {
          for (int64_t e = 0; e < c.width; ++e) slope[e] = 0.0f;
        } else if (c.map == ELU_PLUS_ONE) {
          for (int64_t e = 0; e < columns; e += W) store(slope + e, load(slope + e) * -larger(all(-1.0f), -load(feature + e)));
        } else if (c.map == RELU) {
          read_row(x, at(x, first + i), c.width, width_row, 1.0f, row);
          for (int64_t e = 0; e < columns; e += W)
            store(slope + e, load(row + e) > 0.0f ? load(slope + e) : Vec{});
        }
        write_row(to, at(to, first + i), c.width, 1.0f, slope);
      }
      return;
    }
    read_tokens(x, first, n, keys);
    float *d_tokens = m.d_tokens.floats(2 * STEP * width_row), all_features[2 * STEP];
    for (int64_t i = 0; i < n; ++i) {
      float* slope = d_features + i * line;
      const float* feature = features + i * line;
      Vec total = {};
      for (int64_t e = 0; e < columns; e += W) {
        const Vec gained = load(slope + e) * load(feature + e);
        total += gained;
        if (exponential) store(slope + e, gained);
      }
      all_features[i] = exponential ? -sum(total) : sum(total);
      for (int64_t e = 0; e < c.rows && !exponential; e += W)  // cosines come first, then sines
        store(slope + e, load(slope + c.rows + e) * load(feature + e) - load(slope + e) * load(feature + c.rows + e));
    }
    panel_product(n, c.width, c.rows, d_features, line, 1, keys ? key_columns : query_columns, row_line * PANEL, d_tokens,
                  width_row, false);
    if (d_rows != nullptr)
      product(c.rows, whole(c.width, W), n, d_features, 1, line, tokens, width_row, d_rows, width_row, true);
    if (d_bias != nullptr) add_rows(d_features, n, d_bias);
    const float factor = std::pow(static_cast<float>(c.width), -0.25f);
    for (int64_t i = 0; i < n; ++i) {
      float *dx = d_tokens + i * width_row, *token = tokens + i * width_row;
      if (keys || c.normed)
        for (int64_t e = 0; e < width_row; e += W) store(dx + e, load(dx + e) + load(token + e) * all_features[i]);
      for (int64_t e = 0; e < c.width; ++e)  // slope 0 beyond the bound
        if (std::fabs(token[e]) >= MOST * factor) dx[e] = 0.0f;
      write_row(to, at(to, first + i), c.width, factor, dx);
    }
  }

  void write_values(const Tokens& to, int64_t first, int64_t n, float* rows) const {
    for (int64_t i = 0; i < n; ++i, rows += value_row) {
      if (hidden(first + i)) std::memset(rows, 0, static_cast<size_t>(value_row) * 4);
      write_row(to, at(to, first + i), c.values, 1.0f, rows);
    }
  }

  float* rows_of(float* gradients, int64_t slots, int64_t slot) const {
    return gradients == nullptr ? nullptr : gradients + ((b * c.heads + h) * slots + slot) * c.rows * width_row;
  }
  float* bias_of(float* gradients, int64_t slots, int64_t slot) const {
    return gradients == nullptr ? nullptr : gradients + ((b * c.heads + h) * slots + slot) * line;
  }

  void clear(FeatureSums& x) const {
    std::memset(x.kv, 0, static_cast<size_t>(line * value_row + line) * 4);
    for (int64_t e = 0; e < line; ++e) x.scale[e] = random ? LOWEST : 0.0f;
  }

  void copy(const FeatureSums& from, const FeatureSums& to) const {
    std::memcpy(to.kv, from.kv, static_cast<size_t>(state_numbers(c.features, c.values)) * 4);
  }

  const FeaturesCall& c;
  const int64_t b, h;
  FeatureScratch& m;
  const bool exponential, random, scaled;
  const int64_t columns, line, value_row, width_row, row_line, tokens_at_once;
  FeatureSums sums{}, before{}, section{};  // sums = before + section where those are kept apart
  bool direct_values = false;
  int64_t begun = 0, ended = 0;
  double* logs = nullptr;
  float *tokens = nullptr, *row = nullptr, *value_memory = nullptr, *top = nullptr, *norms = nullptr,
        *not_numbers = nullptr, *bias = nullptr, *query_rows = nullptr, *key_rows = nullptr, *query_columns = nullptr,
        *key_columns = nullptr, *log_row = nullptr;
};

// Sections of one call. Leading keys, which all queries see, come first, then those beside the queries.
struct Sections {
  explicit Sections(const FeaturesCall& c)
      : lead_keys(c.causal ? c.keys - c.length : c.keys), lead(section_count(lead_keys)), queries(section_count(c.length)),
        keys(lead + (c.causal ? queries : 0)) {}
  int64_t lead_keys, lead, queries, keys;
  // The keys of a section.
  void of_keys(int64_t section, const FeaturesCall& c, int64_t& first, int64_t& end) const {
    first = section < lead ? section * SECTION : lead_keys + (section - lead) * SECTION;
    const int64_t limit = section < lead ? lead_keys : c.keys;
    end = first + SECTION < limit ? first + SECTION : limit;
  }
  void of_queries(int64_t section, const FeaturesCall& c, int64_t& first, int64_t& end) const {
    first = section * SECTION;
    end = first + SECTION < c.length ? first + SECTION : c.length;
  }
};

inline void sum_section(const FeaturesCall& c, const Sections& cut, int64_t batch, int64_t head, int64_t section) {
  FeatureScratch& m = feature_scratch();
  FeatureWork work(c, batch, head, m, false);
  float* keys = m.keys.floats(2 * STEP * work.line);
  work.sums = work.kept(c.states, cut.keys + 1, section);
  work.clear(work.sums);
  int64_t first, end;
  cut.of_keys(section, c, first, end);
  work.begin_section(first, end);
  for (int64_t j = first; j < end; j += MANY) {
    const int64_t n = end - j < MANY ? end - j : MANY;
    int64_t distance;
    work.keys_of_sums(j, n, keys);
    const float* v = work.values(j, n, distance);
    work.add_keys(keys, v, distance, n);
  }
}

// A call's own states are (features, values) and natural logarithms: what is lost in rounding those goes to the factor.
inline float natural(float scale, double& factor) {
  const float log = static_cast<float>(scale * 0.6931471805599453);
  factor = scale > -1e20f ? std::exp2(scale - log * 1.4426950408889634) : 1.0;
  return log;
}

inline float binary(float log, double& factor) {
  const float scale = static_cast<float>(log * 1.4426950408889634);
  factor = log > -1e20f ? std::exp2(log * 1.4426950408889634 - scale) : 1.0;
  return scale;
}

// Sums of many sections in float64.
class Totals {
 public:
  Totals(const FeatureWork& work, Buffer& memory)
      : w(work), kv(static_cast<double*>(memory.bytes((work.line * work.value_row + work.line) * 8))),
        z(kv + work.line * work.value_row) {}

  void clear() { std::memset(kv, 0, static_cast<size_t>(w.line * w.value_row + w.line) * 8); }

  // = total 2^(scale - to) + sums 2^(their scale - to): to the larger scales, or to the end of the section that `of` began
  void add(const FeatureSums& sums, float* scale, const FeatureWork& of) {
    for (int64_t f = 0; f < w.c.features; ++f) {
      const double to = w.c.fading > 0 ? of.at_end(f) : sums.scale[f] > scale[f] ? sums.scale[f] : scale[f];
      const double ours = factor(scale[f], to), theirs = factor(sums.scale[f], to);
      scale[f] = w.c.fading > 0 ? 0.0f : static_cast<float>(to);
      z[f] = z[f] * ours + sums.z[f] * theirs;
      combine(sums, f, ours, theirs);
    }
  }

  void combine(const FeatureSums& sums, int64_t f, double ours, double theirs) {
    for (int64_t p = 0; p < w.value_row / PANEL; ++p) {
      double* total = kv + (p * w.line + f) * PANEL;
      const float* part = sums.kv + (p * w.line + f) * PANEL;
      for (int64_t e = 0; e < PANEL; ++e) total[e] = total[e] * ours + part[e] * theirs;
    }
  }

  static double factor(double from, double to) { return from == to ? 1.0 : std::exp2(from - to); }

  void write(const FeatureSums& to, const float* scale) const {
    for (int64_t i = 0; i < w.line * w.value_row; ++i) to.kv[i] = static_cast<float>(kv[i]);
    for (int64_t f = 0; f < w.line; ++f) to.z[f] = static_cast<float>(z[f]), to.scale[f] = scale[f];
  }

  // A state of the caller, or the gradient of one.
  void read(const States& x) {
    const int64_t head = w.b * w.c.heads + w.h, features = w.c.features, values = w.c.values;
    for (int64_t f = 0; f < features; ++f) {
      z[f] = x.z[head * features + f];
      for (int64_t e = 0; e < values; ++e)
        kv[(e / PANEL * w.line + f) * PANEL + e % PANEL] = x.kv[(head * features + f) * values + e];
    }
  }

  void multiply(int64_t f, double factor) {
    z[f] *= factor;
    for (int64_t p = 0; p < w.value_row / PANEL; ++p)
      for (int64_t e = 0; e < PANEL; ++e) kv[(p * w.line + f) * PANEL + e] *= factor;
  }

  void write(const States& x) const {
    const int64_t head = w.b * w.c.heads + w.h, features = w.c.features, values = w.c.values;
    for (int64_t f = 0; f < features; ++f) {
      x.z[head * features + f] = static_cast<float>(z[f]);
      for (int64_t e = 0; e < values; ++e)
        x.kv[(head * features + f) * values + e] = static_cast<float>(kv[(e / PANEL * w.line + f) * PANEL + e % PANEL]);
    }
  }

  const FeatureWork& w;
  double *kv, *z;
};

// The sums of all keys up to a section of one head, in float64.
class HeadSums {
 public:
  HeadSums(const FeaturesCall& call, const Sections& sections, int64_t batch, int64_t head)
      : c(call), cut(sections), work(call, batch, head, feature_scratch(), false), totals(work, feature_scratch().wide),
        scale(feature_scratch().totals.floats(2 * work.line)), first_scale((batch * c.heads + head) * c.features) {
    totals.clear();
    for (int64_t f = 0; f < work.line; ++f) scale[f] = work.random ? LOWEST : 0.0f;
    if (c.first.kv == nullptr) return;
    totals.read(c.first);
    for (int64_t f = 0; f < c.features && work.random; ++f) {
      double factor;
      scale[f] = binary(c.first.log_scale[first_scale + f], factor);
      totals.multiply(f, factor);
    }
  }

  // Writes the sums before section `s` to its place, behind the last those of all keys.
  FeatureSums write(int64_t s) const {
    const FeatureSums slot = work.kept(c.states, cut.keys + 1, s);
    totals.write(slot, scale);
    return slot;
  }

  void add(const FeatureSums& section, const FeatureWork& of) { totals.add(section, scale, of); }

  // The state behind the last key, if the call wants it.
  void finish() {
    write(cut.keys);
    if (c.last.kv == nullptr) return;
    for (int64_t f = 0; f < c.features && work.random; ++f) {
      double factor;
      c.last.log_scale[first_scale + f] = natural(scale[f], factor);
      totals.multiply(f, factor);
    }
    totals.write(c.last);
  }

  const FeaturesCall& c;
  const Sections& cut;
  FeatureWork work;
  Totals totals;
  float* scale;
  const int64_t first_scale;
};

// In place of the sums of each section those before it, and behind the last those of all keys.
inline void scan_sections(const FeaturesCall& c, const Sections& cut, int64_t batch, int64_t head) {
  FeatureScratch& m = feature_scratch();
  HeadSums sums(c, cut, batch, head);
  const bool all_summed = !c.causal || c.last.kv != nullptr;
  FeatureSums part = sums_at(m.sums.floats(state_numbers(c.features, c.values)), c.features, c.values);
  for (int64_t s = 0; s < cut.keys; ++s) {
    const bool summed = all_summed || s < cut.keys - 1;
    if (summed) sums.work.copy(sums.work.kept(c.states, cut.keys + 1, s), part);
    sums.write(s);
    int64_t first, end;
    cut.of_keys(s, c, first, end);
    sums.work.begin_section(first, end);
    if (summed) sums.add(part, sums.work);
  }
  sums.finish();
}

// The outputs of a section; whether all are finite. `whole`: takes the section's keys, which no pass before summed.
inline bool read_section(const FeaturesCall& c, const Sections& cut, int64_t batch, int64_t head, int64_t section,
                         HeadSums* whole = nullptr) {
  FeatureScratch& m = feature_scratch();
  FeatureWork work(c, batch, head, m, false);
  const int64_t line = work.line, value_row = work.value_row, at_once = work.tokens_at_once;
  float *queries = m.queries.floats(2 * STEP * line), *out = m.out.floats(2 * STEP * value_row);
  float *keys = nullptr, *panel = nullptr, *pairs = nullptr, *scale = nullptr, *parts = m.parts.floats(2 * STEP * W);
  int64_t first, end, distance = 0;
  cut.of_queries(section, c, first, end);
  const FeatureSums before = work.kept(c.states, cut.keys + 1, c.causal ? cut.lead + section : cut.keys);
  if (c.causal) {
    work.copy(before, work.sums);
    if (whole != nullptr) work.sum_apart(before);
    if (work.scaled) std::memcpy(work.top, before.scale, static_cast<size_t>(line) * 4);
    work.begin_section(first, end);
    keys = m.keys.floats(2 * STEP * line), panel = m.panel.floats(STEP * line), pairs = m.pairs.floats(STEP * STEP);
    scale = m.scales.floats(line);
    std::memset(scale, 0, static_cast<size_t>(line) * 4);
  } else {
    work.sums = before;
  }
  float* denominators = c.denominators + (batch * c.heads + head) * c.length;
  float* tops = denominators + c.batch * c.heads * c.length;  // of exponentials
  Ints broken = {};
  for (int64_t i = first; i < end;) {
    int64_t n = end - i < at_once ? end - i : at_once;
    if (c.causal) {
      n = work.keys_of_step(i + cut.lead_keys, n, keys, scale);
      if (work.scaled) work.rescale(scale);
    }
    work.queries(i, n, work.sums.scale, tops, false, queries);
    // Queries and their outputs stay in the first cache; a panel of the sums has features x PANEL numbers.
    panel_product(n, c.values, c.features, queries, line, 1, work.sums.kv, line * PANEL, out, value_row, false);
    for (int64_t r = 0; r < n; ++r) {
      Vec total = {};
      for (int64_t e = 0; e < work.columns; e += W) total += load(queries + r * line + e) * load(work.sums.z + e);
      store(parts + r * W, total);
    }
    if (c.causal) {
      work.triangle(queries, line, keys, line, c.features, n, panel, pairs);
      for (int64_t r = 0; r < n; ++r) {
        Vec total = load(parts + r * W);
        for (int64_t j = 0; j < STEP; j += W) {
          const Vec seen = columns_up_to(load(pairs + r * STEP + j), r - j);
          store(pairs + r * STEP + j, seen);
          total += seen;
        }
        store(parts + r * W, total);
      }
      const float* v = work.values(i + cut.lead_keys, n, distance);
      work.add_triangle(pairs, v, distance, c.values, n, out, value_row);
      if (i + n < end || whole != nullptr) work.add_keys(keys, v, distance, n);
    }
    for (int64_t r = 0; r < n; r += W) {  // the sums of the rows of W x W numbers, side by side
      Vec block[W], denominator = {};
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) block[j] = load(parts + (r + j) * W);
      transpose(block);
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) denominator += block[j];
      denominator += c.eps;
      const Vec size = denominator < 0.0f ? -denominator : denominator;
      denominator = size < INFINITE ? denominator : all(std::numeric_limits<float>::quiet_NaN());
      denominator = size < LEAST ? all(INFINITE) : denominator;
      store(parts + r * W, c.normalized ? denominator : all(1.0f));
    }
    for (int64_t r = 0; r < n; ++r) {
      const float denominator = parts[r / W * W * W + r % W];
      denominators[i + r] = denominator;
      broken |= work.write_output(i + r, out + r * value_row, 1.0f / denominator);
    }
    i += n;
  }
  if (whole != nullptr) {
    if (work.scaled) work.rescale(work.top);
    std::memcpy(work.section.scale, work.sums.scale, static_cast<size_t>(line) * 4);
    whole->add(work.section, work);
  }
  return !any(broken);
}

// The outputs of a head, from its first token to its last: keys are read once.
inline bool read_head(const FeaturesCall& c, const Sections& cut, int64_t batch, int64_t head) {
  FeatureScratch& m = feature_scratch();
  for (int64_t s = 0; s < cut.lead; ++s) sum_section(c, cut, batch, head, s);
  bool finite = true;
  HeadSums sums(c, cut, batch, head);
  const FeatureSums part = sums_at(m.parts_of_lead.floats(state_numbers(c.features, c.values)), c.features, c.values);
  for (int64_t s = 0; s < cut.lead; ++s) {
    sums.work.copy(sums.work.kept(c.states, cut.keys + 1, s), part);
    sums.write(s);
    sums.add(part, sums.work);
  }
  for (int64_t s = 0; s < cut.queries; ++s) {
    if (c.causal) sums.write(cut.lead + s);
    if (s == 0 && !c.causal) sums.finish();
    const bool last = s == cut.queries - 1 && c.last.kv == nullptr;
    finite &= read_section(c, cut, batch, head, s, c.causal && !last ? &sums : nullptr);
  }
  if (c.causal) sums.finish();
  return finite;
}

// Runs parts of all heads at once. Heads of one place in all sequences follow one another: they share rows, which are
// packed once.
template <class Function>
inline void of_heads(const FeaturesCall& c, const Pool& pool, int64_t parts, Function&& run) {
  parallel_items(pool, c.batch * c.heads * parts, [&](int64_t item) {
    const int64_t head = item / parts;
    run(head % c.batch, head / c.batch, item % parts);
  });
}

// Whether one item a head does it all: few tokens, or heads enough for the threads of most machines.
inline bool one_item_a_head(const FeaturesCall& c, const Sections& cut) {
  return (cut.lead <= 1 && cut.queries <= 1) || c.batch * c.heads >= 8;
}

inline bool features_forward(const FeaturesCall& c, const Pool& pool) {
  const Sections cut(c);
  std::atomic<bool> finite{true};
  const bool whole = one_item_a_head(c, cut);
  if (!whole) {
    const int64_t summed = !c.causal || c.last.kv != nullptr ? cut.keys : cut.keys - 1;
    if (summed > 0)
      of_heads(c, pool, summed, [&](int64_t batch, int64_t head, int64_t s) { sum_section(c, cut, batch, head, s); });
    of_heads(c, pool, 1, [&](int64_t batch, int64_t head, int64_t) { scan_sections(c, cut, batch, head); });
  }
  of_heads(c, pool, whole ? 1 : cut.queries, [&](int64_t batch, int64_t head, int64_t s) {
    if (!(whole ? read_head(c, cut, batch, head) : read_section(c, cut, batch, head, s)))
      finite.store(false, std::memory_order_relaxed);
  });
  return finite;
}

// Gradients of the sums that a section of queries reads, in the scales before it; where all queries read the same sums,
// the queries' own gradients as well.
inline void sum_gradients(const FeaturesCall& c, const FeaturesGradients& d, const Sections& cut, int64_t batch, int64_t head,
                          int64_t section) {
  FeatureScratch& m = feature_scratch();
  FeatureWork work(c, batch, head, m, true);
  const int64_t line = work.line, value_row = work.value_row, most = 2 * STEP;
  float *queries = m.queries.floats(most * line), *grad = m.grad.floats(most * value_row),
        *d_denominators = m.d_denominators.floats(most), *d_features = m.d_features.floats(most * line);
  const FeatureSums before = work.kept(c.states, cut.keys + 1, c.causal ? cut.lead + section : cut.keys);
  FeatureSums into = work.kept(d.states, cut.queries + 1, section);
  work.clear(into);
  float *tops = c.denominators + (c.batch * c.heads + batch * c.heads + head) * c.length, *turned = nullptr;
  if (!c.causal) {
    turned = m.turned.floats(line * value_row);
    turn_panels(before.kv, line, value_row, turned);
  }
  int64_t first, end;
  cut.of_queries(section, c, first, end);
  work.begin_section(first, end);
  const int64_t slots = cut.queries + cut.keys;
  for (int64_t i = first; i < end; i += most) {
    const int64_t n = end - i < most ? end - i : most;
    work.queries(i, n, before.scale, tops, true, queries);
    work.quotients(d, i, n, grad, d_denominators);
    add_to_panels(c.features, c.values, n, queries, 1, line, grad, value_row, into.kv, line * PANEL);
    work.add_weighted_rows(queries, d_denominators, n, into.z);
    if (c.causal) continue;
    panel_product(n, c.features, c.values, grad, value_row, 1, turned, value_row * PANEL, d_features, line, false);
    work.add_to_rows(before.z, d_denominators, n, d_features);
    work.write_gradients(c.q, i, n, false, queries, d_features, d.dq, work.rows_of(d.d_query_rows, cut.queries, section),
                         work.bias_of(d.d_bias, slots, section));
  }
}

// In place of the gradients that each section's queries give to the sums before it, those of all later sections to the
// sums after it; those of all queries in the first slot.
inline void scan_gradients(const FeaturesCall& c, const FeaturesGradients& d, const Sections& cut, int64_t batch, int64_t head,
                           bool all_summed) {
  FeatureScratch& m = feature_scratch();
  FeatureWork work(c, batch, head, m, true);
  Totals totals(work, m.wide);
  totals.clear();
  const FeatureSums end = work.kept(c.states, cut.keys + 1, cut.keys);
  if (d.last.kv != nullptr) {
    totals.read(d.last);
    for (int64_t f = 0; f < c.features && work.random; ++f) {
      double factor;
      natural(end.scale[f], factor);
      totals.multiply(f, factor);
    }
  }
  FeatureSums part = sums_at(m.sums.floats(state_numbers(c.features, c.values)), c.features, c.values);
  const float* scale = end.scale;
  float* ends = m.totals.floats(2 * work.line);
  for (int64_t t = cut.queries - 1; t >= 0; --t) {
    const bool summed = all_summed || t > 0;
    if (summed) work.copy(work.kept(d.states, cut.queries + 1, t), part);
    if (c.causal) {
      int64_t first, last;
      cut.of_queries(t, c, first, last);
      work.begin_section(first, last);
      if (c.fading > 0) scale = ends;
      for (int64_t f = 0; f < c.features && c.fading > 0; ++f) {
        ends[f] = static_cast<float>(work.at_end(f));
        totals.multiply(f, Totals::factor(ends[f], work.at_end(f)));
      }
      totals.write(work.kept(d.states, cut.queries + 1, t + 1), scale);
      const float* earlier = work.kept(c.states, cut.keys + 1, cut.lead + t).scale;
      for (int64_t f = 0; f < c.features && work.scaled; ++f) totals.multiply(f, Totals::factor(earlier[f], scale[f]));
      scale = earlier;
    }
    for (int64_t f = 0; f < c.features && summed; ++f) {
      totals.z[f] += part.z[f];
      totals.combine(part, f, 1.0, 1.0);
    }
  }
  totals.write(work.kept(d.states, cut.queries + 1, 0), scale);
  if (d.first.kv == nullptr) return;
  const float* earliest = work.kept(c.states, cut.keys + 1, 0).scale;
  for (int64_t f = 0; f < c.features && work.random; ++f) {
    double factor;
    binary(c.first.log_scale[(batch * c.heads + head) * c.features + f], factor);
    totals.multiply(f, factor * Totals::factor(earliest[f], scale[f]));
  }
  totals.write(d.first);
}

// Gradients of a section of keys that all queries see.
inline void lead_gradients(const FeaturesCall& c, const FeaturesGradients& d, const Sections& cut, int64_t batch, int64_t head,
                           int64_t section) {
  FeatureScratch& m = feature_scratch();
  FeatureWork work(c, batch, head, m, true);
  const int64_t line = work.line, value_row = work.value_row, most = 2 * STEP;
  const FeatureSums later = work.kept(d.states, cut.queries + 1, 0);
  float *keys = m.keys.floats(most * line), *d_features = m.d_features.floats(most * line),
        *d_values = m.d_values.floats(most * value_row), *turned = m.turned.floats(line * value_row);
  turn_panels(later.kv, line, value_row, turned);
  int64_t first, end, distance;
  cut.of_keys(section, c, first, end);
  const int64_t slots = cut.queries + cut.keys;
  for (int64_t j = first; j < end; j += most) {
    const int64_t n = end - j < most ? end - j : most;
    work.keys_over(j, n, later.scale, keys);
    const float* v = work.values(j, n, distance);
    panel_product(n, c.features, c.values, v, distance, 1, turned, value_row * PANEL, d_features, line, false);
    work.add_to_rows(later.z, nullptr, n, d_features);
    panel_product(n, c.values, c.features, keys, line, 1, later.kv, line * PANEL, d_values, value_row, false);
    work.write_values(d.dv, j, n, d_values);
    work.write_gradients(c.k, j, n, true, keys, d_features, d.dk, work.rows_of(d.d_key_rows, cut.keys, section),
                         work.bias_of(d.d_bias, slots, cut.queries + section));
  }
}

// Gradients of a section of queries and the keys beside them: first to last those of queries, then back those of keys.
inline void section_gradients(const FeaturesCall& c, const FeaturesGradients& d, const Sections& cut, int64_t batch,
                              int64_t head, int64_t section) {
  FeatureScratch& m = feature_scratch();
  FeatureWork work(c, batch, head, m, true);
  const int64_t line = work.line, value_row = work.value_row;
  // What both ways read: features, numerators' gradients and pairs' gradients of a section, parts of the second cache.
  float *queries = m.queries.floats(SECTION * line), *keys = m.keys.floats(SECTION * line),
        *grad = m.grad.floats(SECTION * value_row), *d_denominators = m.d_denominators.floats(SECTION),
        *d_pairs = m.d_pairs.floats(SECTION * STEP), *pairs = m.pairs.floats(STEP * STEP);
  float *d_features = m.d_features.floats(STEP * line), *d_values = m.d_values.floats(STEP * value_row),
        *turned = m.turned.floats(line * value_row), *panel = m.panel.floats(PANEL * line),
        *value_panel = m.value_panel.floats(PANEL * value_row);
  float* scales = m.scales.floats((work.scaled ? SECTION : 1) * line);
  std::memset(scales, 0, static_cast<size_t>(line) * 4);
  const FeatureSums before = work.kept(c.states, cut.keys + 1, cut.lead + section);
  float* tops = c.denominators + (c.batch * c.heads + batch * c.heads + head) * c.length;
  turn_panels(before.kv, line, value_row, turned);
  std::memcpy(work.sums.z, before.z, static_cast<size_t>(2 * line) * 4);  // and scales
  if (work.scaled) std::memcpy(work.top, before.scale, static_cast<size_t>(line) * 4);
  int64_t first, end, distance;
  cut.of_queries(section, c, first, end);
  work.begin_section(first, end);
  const int64_t slots = cut.queries + cut.keys, key_section = cut.lead + section;
  m.steps.clear();
  for (int64_t i = first; i < end;) {
    const int64_t at = i - first;
    float *Q = queries + at * line, *K = keys + at * line, *g = grad + at * value_row, *dP = d_pairs + at * STEP;
    float* scale = scales + (work.scaled ? static_cast<int64_t>(m.steps.size()) * line : 0);
    const int64_t n = work.keys_of_step(i + cut.lead_keys, end - i < STEP ? end - i : STEP, K, scale);
    if (work.scaled) work.rescale_turned(scale, turned);
    work.queries(i, n, scale, tops, true, Q);
    work.quotients(d, i, n, g, d_denominators + at);
    panel_product(n, c.features, c.values, g, value_row, 1, turned, value_row * PANEL, d_features, line, false);
    const float* v = work.values(i + cut.lead_keys, n, distance);
    work.triangle(g, value_row, v, distance, c.values, n, value_panel, dP);
    work.add_to_rows(work.sums.z, d_denominators + at, n, d_features);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t j = 0; j < STEP; j += W)
        store(dP + r * STEP + j, columns_up_to(load(dP + r * STEP + j) + d_denominators[at + r], r - j));
    work.add_triangle(dP, K, line, c.features, n, d_features, line);
    work.write_gradients(c.q, i, n, false, Q, d_features, d.dq, work.rows_of(d.d_query_rows, cut.queries, section),
                         work.bias_of(d.d_bias, slots, section), d.d_decay, scale);
    if (i + n < end) {
      add_to_panels(c.values, c.features, n, v, 1, distance, K, line, turned, value_row * PANEL);
      work.add_rows(K, n, work.sums.z);
    }
    m.steps.push_back(i);
    i += n;
  }
  work.copy(work.kept(d.states, cut.queries + 1, section + 1), work.sums);
  if (work.scaled && section == cut.queries - 1 && d.last.kv == nullptr)  // nobody reads the sums after these keys,
    std::memcpy(work.sums.scale, scales + (m.steps.size() - 1) * line, static_cast<size_t>(line) * 4);  // nor made them
  for (int64_t step = static_cast<int64_t>(m.steps.size()) - 1, stop = end; step >= 0; --step) {
    const int64_t i = m.steps[step], n = stop - i, at = i - first;
    const float *Q = queries + at * line, *K = keys + at * line, *g = grad + at * value_row, *dP = d_pairs + at * STEP;
    if (work.scaled) work.rescale(scales + step * line, true);
    turn_panels(work.sums.kv, line, value_row, turned);
    const float* v = work.values(i + cut.lead_keys, n, distance);
    panel_product(n, c.features, c.values, v, distance, 1, turned, value_row * PANEL, d_features, line, false);
    work.add_to_rows(work.sums.z, nullptr, n, d_features);
    product(n, whole(c.features, W), n, dP, 1, STEP, Q, line, d_features, line, true);
    work.triangle(Q, line, K, line, c.features, n, panel, pairs);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t j = 0; j < STEP; j += W) store(pairs + r * STEP + j, columns_up_to(load(pairs + r * STEP + j), r - j));
    panel_product(n, c.values, c.features, K, line, 1, work.sums.kv, line * PANEL, d_values, value_row, false);
    product(n, whole(c.values, W), n, pairs, 1, STEP, g, value_row, d_values, value_row, true);
    work.write_values(d.dv, i + cut.lead_keys, n, d_values);
    work.write_gradients(c.k, i + cut.lead_keys, n, true, K, d_features, d.dk,
                         work.rows_of(d.d_key_rows, cut.keys, key_section), work.bias_of(d.d_bias, slots, cut.queries + key_section), d.d_decay,
                         scales + (work.scaled ? step * line : 0));
    if (i > first) {
      add_to_panels(c.features, c.values, n, Q, 1, line, g, value_row, work.sums.kv, line * PANEL);
      work.add_weighted_rows(Q, d_denominators + at, n, work.sums.z);
    }
    stop = i;
  }
}

inline void features_backward(const FeaturesCall& c, const FeaturesGradients& d, const Pool& pool) {
  const Sections cut(c);
  const bool all_summed = !c.causal || cut.lead > 0 || d.first.kv != nullptr;
  const int64_t skipped = all_summed ? 0 : 1, summed = cut.queries - skipped, parts = cut.lead + (c.causal ? cut.queries : 0);
  const auto sum = [&](int64_t batch, int64_t head, int64_t s) { sum_gradients(c, d, cut, batch, head, s + skipped); };
  const auto scan = [&](int64_t batch, int64_t head, int64_t) { scan_gradients(c, d, cut, batch, head, all_summed); };
  const auto keys_of = [&](int64_t batch, int64_t head, int64_t s) {
    if (s < cut.lead)
      lead_gradients(c, d, cut, batch, head, s);
    else
      section_gradients(c, d, cut, batch, head, s - cut.lead);
  };
  if (one_item_a_head(c, cut))
    return of_heads(c, pool, 1, [&](int64_t batch, int64_t head, int64_t) {
      for (int64_t s = 0; s < summed; ++s) sum(batch, head, s);
      scan(batch, head, 0);
      for (int64_t s = 0; s < parts; ++s) keys_of(batch, head, s);
    });
  if (summed > 0) of_heads(c, pool, summed, sum);
  of_heads(c, pool, 1, scan);
  of_heads(c, pool, parts, keys_of);
}

}  // namespace FAST_ATTENTION_NAMESPACE
}  // namespace fast_attention
