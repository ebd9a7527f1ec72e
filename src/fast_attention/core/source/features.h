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

#include "products.h"

namespace fast_attention::FAST_ATTENTION_NAMESPACE {

constexpr int64_t STEP = 32;         // tokens that meet pair by pair
constexpr int64_t AT_ONCE = 64;      // tokens that do not, of a product
constexpr int64_t MANY = 60;         // the same in whole micro-kernels
constexpr float SLACK = 57.0f;       // how far a key may be above a step's scales: 2^57, about e^40
constexpr float LOWEST = -1e30f;     // the scale before the first key
constexpr float LARGEST = 1e13f;     // of a coordinate: half of its square is a number above LOWEST
constexpr float LEAST = 9.860761e-32f;  // of a denominator: below, a quotient means nothing

// Sums of a section in panels of columns, which products read one after another: kv[panel][feature][PANEL].
struct FeatureSums {
  float *kv, *z, *scale;
};

inline FeatureSums sums_at(float* numbers, int64_t features, int64_t values) {
  float* z = numbers + whole(features, 32) * whole(values, 32);
  return {numbers, z, z + whole(features, 32)};
}

// Panels of (rows, columns) as panels of (columns, rows); both are whole panels of 32.
inline void turn_panels(const float* from, int64_t rows, int64_t columns, float* to) {
  for (int64_t r = 0; r < rows; r += W)
    for (int64_t c = 0; c < columns; c += W)
      turn(from + (c / PANEL * rows + r) * PANEL + c % PANEL, PANEL, to + (r / PANEL * columns + c) * PANEL + r % PANEL, PANEL);
}

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
  const Words half = as<Words>(shifted) << 31;  // the sign of an odd half turn
  cosine = as<Vec>(as<Words>(c) ^ half), sine = as<Vec>(as<Words>(s) ^ half);
}

// Rows of a random map, packed once for the heads of one place in all sequences, which share them.
struct PackedRows {
  Buffer memory;
  float *rows, *columns;       // panels of their numbers, (width_row, PANEL) each; panels of columns, (rows, PANEL)
  const void* from = nullptr;  // what was packed in which call
  int64_t call = -1;
};

// What one head's items share: how tokens become features, and sums that steps add to.
class FeatureWork {
 public:
  FeatureWork(const FeaturesCall& call, int64_t head, bool backward)
      : c(call), b(head % call.batch), h(head / call.batch), lane(b * call.heads + h),
        mask(call.key_mask.at(b, h)), exponential(call.map == EXPONENTIAL), random(call.map >= EXPONENTIAL), scaled(random || call.fading > 0),
        columns(whole(call.features, W)), line(whole(call.features, 32)), value_row(whole(call.values, 32)),
        width_row(whole(call.width, 32)), row_line(whole(call.rows, 32)), sum_numbers(line * value_row + line) {
    const int64_t rows = AT_ONCE;
    tokens = m.floats(rows * width_row), d_tokens = m.floats(rows * (random ? width_row : line));
    row = m.floats(value_row), value_memory = m.floats(rows * value_row);
    sums = new_sums();
    denominators = c.denominators + lane * c.length, tops = denominators + c.batch * c.heads * c.length;
    if (!scaled) return;
    top = m.floats(line), log_row = m.floats(line);
    logs = static_cast<double*>(m.bytes((c.fading > 0 ? SECTION * c.fading : rows) * 8));
    if (!random) return;
    norms = m.floats(rows), not_numbers = m.floats(rows), bias = m.floats(line);
    const float* added = c.bias.at(b, h);
    for (int64_t e = 0; e < line; ++e)
      bias[e] = e >= c.features ? -INFINITE : added == nullptr ? 0.0f : added[e] * LOG2E;
    static thread_local PackedRows packed[2];
    query_rows = pack_rows(c.query_rows, packed[0], backward), key_rows = pack_rows(c.key_rows, packed[1], backward);
  }

  const PackedRows* pack_rows(const Tokens& rows, PackedRows& packed, bool backward) const {
    const void* from = static_cast<const float*>(rows.data) + at(rows, 0);
    if (packed.call == c.number && packed.from == from) return &packed;
    packed.call = c.number, packed.from = from;
    packed.rows = static_cast<float*>(packed.memory.bytes(row_line * width_row * (backward ? 8 : 4)));
    packed.columns = packed.rows + row_line * width_row;
    clear(packed.rows, row_line * width_row);
    for (int64_t p = 0; p < c.rows; p += PANEL)
      pack_panel(rows, at(rows, p), c.rows - p, c.width, packed.rows + p * width_row);
    if (backward) turn_panels(packed.rows, width_row, row_line, packed.columns);
    return &packed;
  }

  int64_t at(const Tokens& x, int64_t i) const { return x.at(b, h, i); }
  bool hidden(int64_t key) const { return mask != nullptr && !mask[key]; }

  FeatureSums new_sums() { return sums_at(m.floats(state_numbers(c.features, c.values)), c.features, c.values); }

  // Sums number `slot` of `slots` that each head has.
  FeatureSums slot_of(float* states, int64_t slots, int64_t slot) const {
    return sums_at(states + (lane * slots + slot) * state_numbers(c.features, c.values), c.features, c.values);
  }

  // Features of a map that takes every number by itself; zeros for hidden keys.
  void elementwise(int64_t first, int64_t n, bool keys, float* to) const {
    const Tokens x = keys ? c.k : c.q;
    const Map map = c.map;
    const int64_t width = c.width;
    const float offset = c.offset;
    for (int64_t i = 0; i < n; ++i, to += line) {
      if (keys && hidden(first + i)) {
        clear(to, line);
        continue;
      }
      const float* from = to;
      if (whole_vectors(x, width)) from = static_cast<const float*>(x.data) + at(x, first + i);
      else read_row(x, at(x, first + i), width, line, 1.0f, to);
      for (int64_t e = 0; e < columns; e += W) {
        const Vec number = load(from + e), positive = larger(Vec{}, number);  // NaN stays: it gives its second number then
        if (map == ELU_PLUS_ONE) store(to + e, positive + exp2(-larger(Vec{}, -number) * LOG2E));
        else store(to + e, map == RELU ? positive + offset : number);
      }
      for (int64_t e = c.features; e < columns; ++e) to[e] = 0.0f;
    }
  }

  // Numbers of n tokens within LARGEST, times d^(-1/4); zeros for hidden keys.
  void read_tokens(int64_t first, int64_t n, bool keys) const {
    const Tokens x = keys ? c.k : c.q;
    const int64_t width = c.width;
    const float factor = std::pow(static_cast<float>(c.width), -0.25f);
    for (int64_t i = 0; i < n; ++i) {
      float* to = tokens + i * width_row;
      norms[i] = 0.0f, not_numbers[i] = 0.0f;
      if (keys && hidden(first + i)) {
        clear(to, width_row);
        norms[i] = INFINITE;
        continue;
      }
      const int64_t place = at(x, first + i);
      Vec square = {};
      Ints broken = {};
      for (int64_t e = 0; e < width_row; e += W) {
        const Vec number = -larger(all(-LARGEST), -larger(all(-LARGEST), read(x, place + e, width - e))) * factor;
        store(to + e, number);
        square += number * number;
        broken |= not_finite(number, W);
      }
      if (keys || c.normed) norms[i] = sum(square) * ((exponential ? 0.5f : -0.5f) * LOG2E);
      not_numbers[i] = any(broken) ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
  }

  // Features over what their logarithms say; of exponentials these to base two. The rows of a map, in panels of 8 KiB,
  // come from the second cache; tokens stay in the first.
  void features(int64_t first, int64_t n, bool keys, float* to) const {
    if (!random) return elementwise(first, n, keys, to);
    read_tokens(first, n, keys);
    const float* rows = (keys ? key_rows : query_rows)->rows;
    panel_product(n, whole(c.rows, PANEL), c.width, tokens, width_row, 1, rows, PANEL, width_row * PANEL, to, line, PANEL, false);
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

  // From here on the logarithms of tokens are what has decayed since this span's first.
  void begin_decays(Span span) {
    decaying = span;
    if (c.fading == 0) return;
    for (int64_t i = span.first, place = 0; i < span.end; ++i) {
      const float* decay = static_cast<const float*>(c.decay.data) + at(c.decay, i);
      for (int64_t e = 0; e < c.fading; ++e, ++place) {
        const double gone = -(decay[e] > -1e6f ? decay[e] : -1e6f) * 1.4426950408889634;
        logs[place] = i > span.first ? logs[place - c.fading] + gone : gone;
      }
    }
  }

  // Logarithms of token i of those from `first` on, one of each feature or of all; of a feature at the span's end.
  const double* logs_of(int64_t first, int64_t i) const {
    return c.fading > 0 ? logs + (first + i - decaying.first) * c.fading : logs + i;
  }
  double at_end(int64_t feature) const { return logs_of(decaying.end, -1)[c.fading > 1 ? feature : 0]; }

  // Those of features `to`, all in float32.
  const float* row_of_logs(const float* to, const double* of_token) const {
    if (exponential) return to;
    for (int64_t e = 0; e < line; ++e)
      log_row[e] = static_cast<float>(c.fading > 1 && e < c.features ? of_token[e] : of_token[0]);
    return log_row;
  }

  // Multiplies features, or gradients, by 2^(sign (logarithms - scale)).
  void shift(float* to, const double* of_token, const float* scale, double sign) const {
    if (c.fading <= 1) return scale_row(to, columns, exp2(static_cast<float>(sign * (of_token[0] - scale[0]))));
    for (int64_t e = 0; e < columns; ++e)
      log_row[e] = e < c.features ? static_cast<float>(sign * (of_token[e] - scale[e])) : 0.0f;
    for (int64_t e = 0; e < columns; e += W) store(to + e, load(to + e) * exp2(load(log_row + e)));
  }

  // Brings the sums to other scales; gradients of sums are divided by what these are multiplied by.
  void rescale(const float* scale, bool gradients = false) {
    for (int64_t f = 0; f < c.features; ++f) {
      if (scale[f] == sums.scale[f]) continue;
      const float power = gradients ? scale[f] - sums.scale[f] : sums.scale[f] - scale[f];
      const bool nothing_yet = !gradients && sums.scale[f] == LOWEST;
      sums.scale[f] = scale[f];
      if (nothing_yet) continue;
      const float factor = exp2(power);
      for (const FeatureSums& x : {sums, before, added}) {
        if (x.kv == nullptr) continue;
        for (int64_t p = 0; p < value_row; p += PANEL)
          scale_row(x.kv + (p / PANEL * line + f) * PANEL, PANEL, factor);
        x.z[f] *= factor;
      }
    }
  }

  void raise_scale(float* scale, const float* to) const {
    for (int64_t e = 0; e < columns; e += W) store(scale + e, larger(load(to + e), load(scale + e)));
  }

  // Brings key i of those from `first` on over 2^scale.
  void divide_by_scale(float* to, int64_t first, int64_t i, const float* scale) const {
    if (!exponential) return shift(to, logs_of(first, i), scale, 1.0);
    for (int64_t e = 0; e < columns; e += W) store(to + e, exp2(load(to + e) - load(scale + e)) + not_numbers[i]);
    for (int64_t e = c.features; e < columns; ++e) to[e] = 0.0f;
  }

  // The sums of some keys, which nobody reads before they are all there; they take the keys' scales.
  void sum_keys(Span span, int64_t at_once, const FeatureSums& to) {
    float* keys = m.floats(AT_ONCE * line);
    sums = to;
    begin_sums(sums);
    begin_decays(span);
    in_steps(span, at_once, [&](int64_t first, int64_t n) {
      features(first, n, true, keys);
      if (scaled) {
        copy_row(top, sums.scale);
        for (int64_t i = 0; i < n; ++i) raise_scale(top, row_of_logs(keys + i * line, logs_of(first, i)));
        rescale(top);
        for (int64_t i = 0; i < n; ++i) divide_by_scale(keys + i * line, first, i, sums.scale);
      }
      add_to_sums(keys, nullptr, values(first, n), n, sums);
    });
  }

  // Features of the keys of a step, of which there may be fewer than n; `scale` becomes the step's, `top` the largest
  // logarithms up to its end. The sums are left as they are.
  int64_t keys_of_step(int64_t first, int64_t n, float* to, float* scale) {
    features(first, n, true, to);
    if (!scaled) return n;
    copy_row(scale, top);
    raise_scale(scale, row_of_logs(to, logs_of(first, 0)));
    for (int64_t i = 0; i < n; ++i) {
      const float* own = row_of_logs(to + i * line, logs_of(first, i));
      Vec excess = all(-INFINITE);
      for (int64_t e = 0; e < columns; e += W) excess = larger(load(own + e) - load(scale + e), excess);
      if (i > 0 && largest(excess) > SLACK) return i;
      raise_scale(top, own);
      divide_by_scale(to + i * line, first, i, scale);
    }
    return n;
  }

  // Features of queries beside sums over 2^scale. Random ones are over each query's largest term, whose logarithm is
  // written to `tops`, or read from there.
  void queries(int64_t first, int64_t n, const float* scale, bool has_tops, float* to) const {
    features(first, n, false, to);
    for (int64_t i = 0; i < n && scaled; ++i, to += line) {
      if (c.fading > 0) {
        shift(to, logs_of(first, i), scale, -1.0);
      } else if (!exponential) {
        if (has_tops) scale_row(to, columns, exp2(scale[0] - tops[first + i]));
        else tops[first + i] = scale[0];
      } else {
        Vec most = all(-INFINITE);
        for (int64_t e = 0; e < columns; e += W) {
          const Vec term = load(to + e) + load(scale + e);
          store(to + e, term);
          most = larger(term, most);
        }
        if (!has_tops) tops[first + i] = largest(most);
        for (int64_t e = 0; e < columns; e += W) store(to + e, exp2(load(to + e) - tops[first + i]) + not_numbers[i]);
        for (int64_t e = c.features; e < columns; ++e) to[e] = 0.0f;
      }
    }
  }

  // Rows of values of keys, zeros for hidden ones.
  Rows values(int64_t first, int64_t n) const {
    const bool hides = mask != nullptr && std::memchr(mask + first, 0, static_cast<size_t>(n)) != nullptr;
    if (whole_vectors(c.v, c.values) && !hides) return {static_cast<float*>(c.v.data) + at(c.v, first), c.v.row};
    for (int64_t i = 0; i < n; ++i)
      if (hidden(first + i)) clear(value_memory + i * value_row, value_row);
      else read_row(c.v, at(c.v, first + i), c.values, value_row, 1.0f, value_memory + i * value_row);
    return {value_memory, value_row};
  }

  // S += K^T V, z += sum of K, times weights if there are any: of n rows of features, and of values or numerators.
  void add_to_sums(const float* rows, const float* weights, Rows v, int64_t n, const FeatureSums& to) const {
    panel_product(c.features, c.values, n, rows, 1, line, v.data, v.distance, PANEL, to.kv, PANEL, line * PANEL, true);
    add_rows(rows, weights, n, to.z);
  }

  // z += the sum of rows, times weights if there are any
  void add_rows(const float* rows, const float* weights, int64_t n, float* to) const {
    for (int64_t e = 0; e < columns; e += W) {
      Vec total = {};
      for (int64_t i = 0; i < n; ++i) total += load(rows + i * line + e) * (weights == nullptr ? 1.0f : weights[i]);
      store(to + e, load(to + e) + total);
    }
  }

  // C = A S^T + weights z^T, gradients of features: of values or numerators A, with turned sums; weights are 1 if there are
  // none.
  void to_features(Rows A, int64_t n, const float* turned, const float* z, const float* weights, float* to) const {
    panel_product(n, c.features, c.values, A.data, A.distance, 1, turned, PANEL, value_row * PANEL, to, line, PANEL, false);
    for (int64_t r = 0; r < n; ++r) add_row(to + r * line, z, columns, weights == nullptr ? 1.0f : weights[r]);
  }

  // C = features S
  void to_values(const float* features, int64_t n, const float* kv, float* to) const {
    panel_product(n, c.values, c.features, features, line, 1, kv, PANEL, line * PANEL, to, value_row, PANEL, false);
  }

  // Products of rows of a step and its keys up to each row's own, zeros for later ones, plus a number of each row if there
  // are any. Keys are columns, in panels of (numbers, PANEL); rows before a panel's keys see none of them.
  void triangle(Rows rows, Rows keys, int64_t numbers, int64_t n, const float* of_rows, float* to) const {
    Frame frame;
    const int64_t padded = whole(numbers, W);  // as rows are
    float* panel = frame.floats(PANEL * padded);
    for (int64_t p = 0; p < n; p += PANEL) {
      pack_panel({keys.data, 0, 0, keys.distance, FLOAT32}, p * keys.distance, n - p, padded, panel);
      const int64_t first = p / ROWS * ROWS;
      column_panel<2>(n - first, numbers, rows[first], rows.distance, 1, panel, PANEL, to + first * STEP + p, STEP, false);
    }
    for (int64_t r = 0; r < n; ++r)
      for (int64_t j = 0; j < STEP; j += W) {
        const Vec number = load(to + r * STEP + j);
        store(to + r * STEP + j, first_of(of_rows == nullptr ? number : number + of_rows[r], r - j + 1));
      }
  }

  // C += the triangle's rows times rows of keys
  void add_triangle(const float* pairs, Rows rows, int64_t numbers, int64_t n, Rows to) const {
    in_steps({0, n}, ROWS, [&](int64_t r, int64_t count) {
      product(count, whole(numbers, W), r + count, pairs + r * STEP, STEP, 1, rows.data, rows.distance, to[r], to.distance, true);
    });
  }

  // Gradients of numerators and denominators of n queries.
  void quotients(int64_t first, int64_t n, float* grad, float* d_denominators) const {
    for (int64_t i = 0; i < n; ++i, grad += value_row) {
      read_row(c.grad_out, at(c.grad_out, first + i), c.values, value_row, 1.0f / denominators[first + i], grad);
      read_row(c.out, at(c.out, first + i), c.values, value_row, 1.0f, row);
      d_denominators[i] = c.normalized ? -product_of_rows(grad, row, value_row) : 0.0f;
    }
  }

  // Writes the gradients of tokens of a section, given their features and the gradients of these, which are lost, and
  // those of weights; those of decays as well, given the scale of features.
  void write_gradients(bool keys, int64_t section, int64_t first, int64_t n,
                       const float* features, float* d_features, const float* scale = nullptr) {
    const Tokens &x = keys ? c.k : c.q, &to = keys ? c.dk : c.dq;
    if (!random) {
      for (int64_t i = 0; i < n; ++i) {
        float* slope = d_features + i * line;
        const float* feature = features + i * line;
        if (c.fading > 0) {
          float* decay = c.d_decay + (lane * c.keys + first + i) * c.fading;
          for (int64_t e = 0; e < c.features; ++e)
            decay[c.fading > 1 ? e : 0] += (keys ? -1.0f : 1.0f) * slope[e] * feature[e];
          shift(slope, logs_of(first, i), scale, keys ? 1.0 : -1.0);
          elementwise(first + i, 1, keys, d_tokens);
          feature = d_tokens;
        }
        if (keys && hidden(first + i)) {
          for (int64_t e = 0; e < c.width; ++e) slope[e] = 0.0f;
        } else if (c.map == ELU_PLUS_ONE) {
          for (int64_t e = 0; e < columns; e += W) store(slope + e, load(slope + e) * -larger(all(-1.0f), -load(feature + e)));
        } else if (c.map == RELU) {
          for (int64_t e = 0; e < columns; e += W)
            store(slope + e, read(x, at(x, first + i) + e, c.width - e) > 0.0f ? load(slope + e) : Vec{});
        }
        write_row(to, at(to, first + i), c.width, 1.0f, slope);
      }
      return;
    }
    read_tokens(first, n, keys);
    float all_features[AT_ONCE];
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
    panel_product(n, c.width, c.rows, d_features, line, 1, (keys ? key_rows : query_rows)->columns, PANEL, row_line * PANEL,
                  d_tokens, width_row, PANEL, false);
    if (float* d_rows = keys ? c.d_key_rows : c.d_query_rows) {
      d_rows += (lane * (keys ? c.key_parts : c.query_parts) + section) * c.rows * width_row;
      product(c.rows, whole(c.width, W), n, d_features, 1, line, tokens, width_row, d_rows, width_row, true);
    }
    if (c.d_bias != nullptr) {
      const int64_t slot = lane * (c.query_parts + c.key_parts) + (keys ? c.query_parts : 0) + section;
      add_rows(d_features, nullptr, n, c.d_bias + slot * line);
    }
    const float factor = std::pow(static_cast<float>(c.width), -0.25f);
    for (int64_t i = 0; i < n; ++i) {
      float *dx = d_tokens + i * width_row, *token = tokens + i * width_row;
      if (keys || c.normed) add_row(dx, token, width_row, all_features[i]);
      for (int64_t e = 0; e < width_row; e += W) {  // slope 0 beyond the bound
        const Vec number = load(token + e), size = number < 0.0f ? -number : number;
        store(dx + e, size >= LARGEST * factor ? Vec{} : load(dx + e));
      }
      write_row(to, at(to, first + i), c.width, factor, dx);
    }
  }

  // Gradients of a section's keys that queries read over `scale`, none of them above it, from sums whose own gradients are
  // `d_sums`.
  void key_gradients(int64_t section, Span span, const float* scale, const FeatureSums& d_sums) {
    Frame frame;
    float *keys = frame.floats(AT_ONCE * line), *d_features = frame.floats(AT_ONCE * line),
          *d_values = frame.floats(AT_ONCE * value_row), *turned = frame.floats(line * value_row);
    turn_panels(d_sums.kv, line, value_row, turned);
    in_steps(span, AT_ONCE, [&](int64_t first, int64_t n) {
      features(first, n, true, keys);
      for (int64_t i = 0; i < n && scaled; ++i) divide_by_scale(keys + i * line, first, i, scale);
      to_features(values(first, n), n, turned, d_sums.z, nullptr, d_features);
      to_values(keys, n, d_sums.kv, d_values);
      write_values(c.dv, first, n, d_values);
      write_gradients(true, section, first, n, keys, d_features);
    });
  }

  void write_values(const Tokens& to, int64_t first, int64_t n, float* rows) const {
    for (int64_t i = 0; i < n; ++i, rows += value_row) {
      if (hidden(first + i)) clear(rows, value_row);
      write_row(to, at(to, first + i), c.values, 1.0f, rows);
    }
  }

  void begin_sums(const FeatureSums& x) const {
    clear(x.kv, sum_numbers);
    for (int64_t e = 0; e < line; ++e) x.scale[e] = random ? LOWEST : 0.0f;
  }
  void copy(const FeatureSums& from, const FeatureSums& to) const {
    std::memcpy(to.kv, from.kv, static_cast<size_t>(state_numbers(c.features, c.values)) * 4);
  }
  void copy_row(float* to, const float* from) const { std::memcpy(to, from, static_cast<size_t>(line) * 4); }

  Frame m;
  const FeaturesCall& c;
  const int64_t b, h, lane;
  const uint8_t* const mask;
  const bool exponential, random, scaled;
  const int64_t columns, line, value_row, width_row, row_line, sum_numbers;
  FeatureSums sums{}, before{}, added{};  // sums = before + added where those are kept apart
  Span decaying{};
  double* logs = nullptr;
  float *tokens, *d_tokens, *row, *value_memory, *denominators, *tops, *top = nullptr, *log_row = nullptr,
      *norms = nullptr, *not_numbers = nullptr, *bias = nullptr;
  const PackedRows *query_rows = nullptr, *key_rows = nullptr;
};

// A call's own states are (features, values) and natural logarithms: what is lost in rounding those is a factor.
inline double natural(float scale, float& log) {
  log = static_cast<float>(scale * 0.6931471805599453);
  return scale > -1e20f ? std::exp2(scale - log * 1.4426950408889634) : 1.0;
}
inline double binary(float log, float& scale) {
  scale = static_cast<float>(log * 1.4426950408889634);
  return log > -1e20f ? std::exp2(log * 1.4426950408889634 - scale) : 1.0;
}

// Sums of many sections of a head in float64, in panels as theirs, and their scales.
class Totals {
 public:
  explicit Totals(FeatureWork& work)
      : w(work), kv(static_cast<double*>(w.m.bytes(w.sum_numbers * 8))), z(kv + w.line * w.value_row),
        scale(w.m.floats(w.line)), first_feature(w.lane * w.c.features) {
    std::memset(kv, 0, static_cast<size_t>(w.sum_numbers) * 8);
    for (int64_t f = 0; f < w.line; ++f) scale[f] = w.random ? LOWEST : 0.0f;
  }

  // = total 2^(scale - to) + sums 2^(their scale - to): to the larger scales, or to the end of the section that `of` began
  void add(const FeatureSums& sums, const FeatureWork& of) {
    for (int64_t f = 0; f < w.c.features; ++f) {
      const double to = w.c.fading > 0 ? of.at_end(f) : std::max(scale[f], sums.scale[f]);
      combine(sums, f, factor(scale[f], to), factor(sums.scale[f], to));
      scale[f] = w.c.fading > 0 ? 0.0f : static_cast<float>(to);
    }
  }

  void combine(const FeatureSums& sums, int64_t f, double ours, double theirs) {
    each_of(f, [&](int64_t i) { kv[i] = kv[i] * ours + sums.kv[i] * theirs; });
  }
  void multiply(int64_t f, double factor) {
    each_of(f, [&](int64_t i) { kv[i] *= factor; });
  }
  static double factor(double from, double to) { return from == to ? 1.0 : std::exp2(from - to); }

  // Calls function(number of ours) for the numbers of a feature, the last of which is that of z.
  template <class Function>
  void each_of(int64_t f, Function&& function) const {
    const int64_t end = w.line * w.value_row;
    for (int64_t i = f * PANEL; i < end; i += w.line * PANEL)
      for (int64_t e = 0; e < PANEL; ++e) function(i + e);
    function(end + f);
  }

  void write(const FeatureSums& to) const {
    typedef double Doubles __attribute__((vector_size(W * 8)));
    for (int64_t i = 0; i < w.sum_numbers; i += W) store(to.kv + i, __builtin_convertvector(some<Doubles>(kv + i, W), Vec));
    w.copy_row(to.scale, scale);
  }

  // Calls function(number of the caller's, number of ours) for all numbers of a state (features, values).
  template <class Function>
  void each_number(Function&& function) const {
    for (int64_t f = 0; f < w.c.features; ++f)
      for (int64_t e = 0; e < w.c.values; ++e)
        function((first_feature + f) * w.c.values + e, (e / PANEL * w.line + f) * PANEL + e % PANEL);
  }

  // A state of the caller, or the gradient of one.
  void read(const States& x) {
    for (int64_t f = 0; f < w.c.features; ++f) z[f] = x.z[first_feature + f];
    each_number([&](int64_t theirs, int64_t ours) { kv[ours] = x.kv[theirs]; });
  }
  void write(const States& x) const {
    for (int64_t f = 0; f < w.c.features; ++f) x.z[first_feature + f] = static_cast<float>(z[f]);
    each_number([&](int64_t theirs, int64_t ours) { x.kv[theirs] = static_cast<float>(kv[ours]); });
  }

  // The sums of all keys up to a section: they begin with the state before the first key, and end with that after the last.
  void begin() {
    const States& state = w.c.first;
    if (state.kv == nullptr) return;
    read(state);
    for (int64_t f = 0; f < w.c.features && w.random; ++f)
      multiply(f, binary(state.log_scale[first_feature + f], scale[f]));
  }
  void finish() {
    const States& state = w.c.last;
    if (state.kv == nullptr) return;
    for (int64_t f = 0; f < w.c.features && w.random; ++f)
      multiply(f, natural(scale[f], state.log_scale[first_feature + f]));
    write(state);
  }

  FeatureWork& w;
  double *kv, *z;
  float* scale;
  const int64_t first_feature;
};

// Sections of one head of a call: their sums, outputs and gradients.
class SectionWork : public FeatureWork {
 public:
  using FeatureWork::FeatureWork;

  Span of_queries(int64_t section) const { return span_of({0, c.length}, SECTION, section); }
  Span of_keys(int64_t section) const {
    const int64_t first = c.leading_keys(), after = section - c.leading();
    return after < 0 ? span_of({0, first}, SECTION, section) : span_of({first, c.keys}, SECTION, after);
  }

  // The sums before section `s` of keys, behind the last those of all; those before queries, or of all where all are read.
  FeatureSums sums_before(int64_t s) const { return slot_of(c.states, c.key_sections() + 1, s); }
  FeatureSums sums_read(int64_t section) const { return sums_before(c.leading() + (c.causal ? section : 0)); }
  FeatureSums gradients_after(int64_t t) const {
    return slot_of(c.d_states, c.query_sections() + 1, t);
  }

  void sum_section(int64_t s) { sum_keys(of_keys(s), MANY, sums_before(s)); }

  // In place of the sums of the first sections those before each.
  void scan(Totals& totals, int64_t sections) {
    for (int64_t s = 0; s < sections; ++s) {
      const bool summed = !c.causal || c.last.kv != nullptr || s < c.key_sections() - 1;
      if (summed) copy(sums_before(s), sums);
      totals.write(sums_before(s));
      begin_decays(of_keys(s));
      if (summed) totals.add(sums, *this);
    }
  }

  // In place of those of all sections, and behind the last those of all keys.
  void scan() {
    Totals totals(*this);
    totals.begin();
    scan(totals, c.key_sections());
    totals.write(sums_before(c.key_sections()));
    totals.finish();
  }

  // The outputs of a section; whether all are finite. `whole`: takes the section's keys, which no pass before summed.
  bool read(int64_t section, Totals* whole = nullptr) {
    float *queries = m.floats(AT_ONCE * line), *out = m.floats(AT_ONCE * value_row), *parts = m.floats(AT_ONCE * W),
          *keys = m.floats(AT_ONCE * line), *pairs = m.floats(STEP * STEP), *scale = m.floats(line);
    const int64_t leading_keys = c.leading_keys();
    const Span span = of_queries(section);
    clear(scale, line);
    begin_decays(span);
    if (!c.causal) sums = sums_read(section);
    else copy(sums_read(section), sums);
    if (whole != nullptr) {  // the section's keys are summed apart from those before it, which rounds each of them once
      before = new_sums(), added = new_sums();
      copy(sums, before);
      clear(added.kv, sum_numbers);
    }
    if (scaled) copy_row(top, sums.scale);
    Ints broken = {};
    for (int64_t i = span.first, n; i < span.end; i += n) {
      n = std::min(span.end - i, c.causal ? STEP : MANY);
      if (c.causal) n = keys_of_step(i + leading_keys, n, keys, scale);
      if (c.causal && scaled) rescale(scale);
      this->queries(i, n, sums.scale, false, queries);
      to_values(queries, n, sums.kv, out);  // these stay in the first cache; a panel of the sums has features x PANEL numbers
      for (int64_t r = 0; r < n; ++r) {
        Vec total = {};
        for (int64_t e = 0; e < columns; e += W) total += load(queries + r * line + e) * load(sums.z + e);
        store(parts + r * W, total);
      }
      if (c.causal) {
        triangle({queries, line}, {keys, line}, c.features, n, nullptr, pairs);
        for (int64_t r = 0; r < n; ++r)
          for (int64_t j = 0; j < STEP; j += W) add_row(parts + r * W, pairs + r * STEP + j, W);
        const Rows v = values(i + leading_keys, n);
        add_triangle(pairs, v, c.values, n, {out, value_row});
        if (i + n < span.end || whole != nullptr) add_to_sums(keys, nullptr, v, n, whole == nullptr ? sums : added);
        for (int64_t e = 0; e < sum_numbers && whole != nullptr; e += W)
          store(sums.kv + e, load(before.kv + e) + load(added.kv + e));
      }
      for (int64_t r = 0; r < n; r += W) {  // the sums of the rows of W x W numbers, side by side
        Vec denominator = {};
        turn(parts + r * W, W, parts + r * W, W);
        for (int j = 0; j < W; ++j) denominator += load(parts + (r + j) * W);
        denominator += c.eps;
        const Vec size = denominator < 0.0f ? -denominator : denominator;
        denominator = size < INFINITE ? denominator : all(std::numeric_limits<float>::quiet_NaN());
        denominator = size < LEAST ? all(INFINITE) : denominator;
        store(parts + r * W, c.normalized ? denominator : all(1.0f));
      }
      for (int64_t r = 0; r < n; ++r) {
        const float denominator = parts[r / W * W * W + r % W];
        denominators[i + r] = denominator;
        broken |= write_row(c.out, at(c.out, i + r), c.values, 1.0f / denominator, out + r * value_row);
      }
    }
    if (whole != nullptr) {
      if (scaled) rescale(top);
      copy_row(added.scale, sums.scale);
      whole->add(added, *this);
    }
    return !any(broken);
  }

  // Gradients of the sums that a section of queries reads, in the scales before it; where all queries read the same sums,
  // the queries' own gradients as well.
  void sum_gradients(int64_t section) {
    float *queries = m.floats(AT_ONCE * line), *grad = m.floats(AT_ONCE * value_row), *d_denominators = m.floats(AT_ONCE),
          *d_features = m.floats(AT_ONCE * line), *turned = m.floats(line * value_row);
    const FeatureSums read = sums_read(section), d_sums = gradients_after(section);
    begin_sums(d_sums);
    if (!c.causal) turn_panels(read.kv, line, value_row, turned);
    begin_decays(of_queries(section));
    in_steps(of_queries(section), AT_ONCE, [&](int64_t i, int64_t n) {
      this->queries(i, n, read.scale, true, queries);
      quotients(i, n, grad, d_denominators);
      add_to_sums(queries, d_denominators, {grad, value_row}, n, d_sums);
      if (c.causal) return;
      to_features({grad, value_row}, n, turned, read.z, d_denominators, d_features);
      write_gradients(false, section, i, n, queries, d_features);
    });
  }

  // In place of the gradients that each section's queries give to the sums before it, those of all later sections to the
  // sums after it; those of all queries in the first slot.
  void scan_gradients(bool all_summed) {
    const float* end = sums_before(c.key_sections()).scale;
    if (c.query_sections() == 1 && !(c.causal && c.leading() > 0) && c.d_last.kv == nullptr && c.d_first.kv == nullptr) {
      const FeatureSums only = gradients_after(c.causal ? 1 : 0);  // of one section of queries, or of none after it
      if (c.causal) clear(only.kv, sum_numbers);
      return copy_row(only.scale, end);
    }
    Totals totals(*this);
    copy_row(totals.scale, end);
    if (c.d_last.kv != nullptr) {
      float log;
      totals.read(c.d_last);
      for (int64_t f = 0; f < c.features && random; ++f) totals.multiply(f, natural(totals.scale[f], log));
    }
    for (int64_t t = c.query_sections() - 1; t >= 0; --t) {
      const bool summed = all_summed || t > 0;
      if (summed) copy(gradients_after(t), sums);
      if (c.causal) {
        begin_decays(of_queries(t));
        for (int64_t f = 0; f < c.features && c.fading > 0; ++f) {
          totals.scale[f] = static_cast<float>(at_end(f));
          totals.multiply(f, Totals::factor(totals.scale[f], at_end(f)));
        }
        totals.write(gradients_after(t + 1));
        const float* scale = sums_before(c.leading() + t).scale;
        for (int64_t f = 0; f < c.features && scaled; ++f) totals.multiply(f, Totals::factor(scale[f], totals.scale[f]));
        copy_row(totals.scale, scale);
      }
      for (int64_t f = 0; f < c.features && summed; ++f) totals.combine(sums, f, 1.0, 1.0);
    }
    totals.write(gradients_after(0));
    if (c.d_first.kv == nullptr) return;
    float of_state;
    const float* scale = sums_before(0).scale;
    for (int64_t f = 0; f < c.features && random; ++f)
      totals.multiply(f, binary(c.first.log_scale[lane * c.features + f], of_state) * Totals::factor(scale[f], totals.scale[f]));
    totals.write(c.d_first);
  }

  // Gradients of a section of queries and the keys beside them: first to last those of queries, then back those of keys.
  void section_gradients(int64_t section) {
    // What both ways read: features, numerators' gradients and pairs' gradients of a section, parts of the second cache.
    float *queries = m.floats(SECTION * line), *keys = m.floats(SECTION * line), *grad = m.floats(SECTION * value_row),
          *d_denominators = m.floats(SECTION), *d_pairs = m.floats(SECTION * STEP), *pairs = m.floats(STEP * STEP),
          *d_features = m.floats(STEP * line), *d_values = m.floats(STEP * value_row), *turned = m.floats(line * value_row),
          *scales = m.floats((scaled ? SECTION : 1) * line);
    const int64_t leading_keys = c.leading_keys();
    const FeatureSums read = sums_read(section);
    const Span span = of_queries(section);
    clear(scales, line);
    copy(read, sums);
    if (scaled) copy_row(top, read.scale);
    begin_decays(span);
    struct Step {
      int64_t i, n;
      float *scale, *queries, *keys, *grad, *d_denominators, *d_pairs;
    };
    int64_t count = 0;
    Step steps[SECTION];
    for (int64_t i = span.first; i < span.end;) {
      const int64_t at = i - span.first;
      Step s{i, std::min(span.end - i, STEP), scales + (scaled ? count * line : 0), queries + at * line, keys + at * line,
             grad + at * value_row, d_denominators + at, d_pairs + at * STEP};
      s.n = keys_of_step(i + leading_keys, s.n, s.keys, s.scale);
      if (scaled) rescale(s.scale);
      turn_panels(sums.kv, line, value_row, turned);
      this->queries(i, s.n, s.scale, true, s.queries);
      quotients(i, s.n, s.grad, s.d_denominators);
      to_features({s.grad, value_row}, s.n, turned, sums.z, s.d_denominators, d_features);
      const Rows v = values(i + leading_keys, s.n);
      triangle({s.grad, value_row}, v, c.values, s.n, s.d_denominators, s.d_pairs);
      add_triangle(s.d_pairs, {s.keys, line}, c.features, s.n, {d_features, line});
      write_gradients(false, section, i, s.n, s.queries, d_features, s.scale);
      i += s.n;
      steps[count++] = s;
      if (i == span.end) break;
      add_to_sums(s.keys, nullptr, v, s.n, sums);
    }
    copy(gradients_after(section + 1), sums);
    if (scaled && section == c.query_sections() - 1 && c.d_last.kv == nullptr)  // nobody reads the sums after these keys,
      copy_row(sums.scale, steps[count - 1].scale);                    // nor made them
    while (count-- > 0) {
      const Step& s = steps[count];
      const int64_t first_key = s.i + leading_keys;
      if (scaled) rescale(s.scale, true);
      turn_panels(sums.kv, line, value_row, turned);
      to_features(values(first_key, s.n), s.n, turned, sums.z, nullptr, d_features);
      product(s.n, columns, s.n, s.d_pairs, 1, STEP, s.queries, line, d_features, line, true);
      triangle({s.queries, line}, {s.keys, line}, c.features, s.n, nullptr, pairs);
      to_values(s.keys, s.n, sums.kv, d_values);
      product(s.n, whole(c.values, W), s.n, pairs, 1, STEP, s.grad, value_row, d_values, value_row, true);
      write_values(c.dv, first_key, s.n, d_values);
      write_gradients(true, c.leading() + section, first_key, s.n, s.keys, d_features, s.scale);
      if (count > 0) add_to_sums(s.queries, s.d_denominators, {s.grad, value_row}, s.n, sums);
    }
  }
};

// One head from its first key to its last, each key read once: in causal order the queries' sections sum their own keys.
inline bool read_head(const FeaturesCall& c, int64_t head) {
  bool finite = true;
  SectionWork work(c, head, false);
  if (c.key_sections() == 1 && c.first.kv == nullptr && c.last.kv == nullptr) {  // sums of one section, or of nothing
    work.begin_sums(work.sums_before(0));
    work.begin_sums(work.sums_before(1));
    if (!c.causal) SectionWork(c, head, false).sum_keys(work.of_keys(0), MANY, work.sums_before(1));
    for (int64_t s = 0; s < c.query_sections(); ++s) finite &= SectionWork(c, head, false).read(s);
    return finite;
  }
  for (int64_t s = 0; s < c.leading(); ++s) SectionWork(c, head, false).sum_section(s);
  Totals totals(work);
  totals.begin();
  work.scan(totals, c.leading());
  if (!c.causal) totals.write(work.sums_read(0));
  for (int64_t s = 0; s < c.query_sections(); ++s) {
    if (c.causal) totals.write(work.sums_read(s));
    const bool unread = s == c.query_sections() - 1 && c.last.kv == nullptr;  // the sums after it
    finite &= SectionWork(c, head, false).read(s, c.causal && !unread ? &totals : nullptr);
  }
  if (c.causal) totals.write(work.sums_before(c.key_sections()));
  totals.finish();
  return finite;
}

// Whether one item a head does it all: few tokens, or heads enough for the threads of most machines.
inline bool one_item_a_head(const FeaturesCall& c) {
  return (c.leading() <= 1 && c.query_sections() <= 1) || c.batch * c.heads >= 8;
}

inline bool features_forward(const FeaturesCall& c, const Pool& pool) {
  const int64_t heads = c.batch * c.heads, unread = !c.causal || c.last.kv != nullptr ? 0 : 1;
  if (one_item_a_head(c)) return parallel_items(pool, heads, [&](int64_t head) { return read_head(c, head); });
  return in_phases(
      pool, false, heads, c.key_sections() - unread,
      [&](int64_t head, int64_t s) { SectionWork(c, head, false).sum_section(s); },
      [&](int64_t head) { SectionWork(c, head, false).scan(); }, c.query_sections(),
      [&](int64_t head, int64_t s) { return SectionWork(c, head, false).read(s); });
}

inline bool features_backward(const FeaturesCall& c, const Pool& pool) {
  const bool all_summed = !c.causal || c.leading() > 0 || c.d_first.kv != nullptr;
  const int64_t skipped = all_summed ? 0 : 1, heads = c.batch * c.heads;
  return in_phases(
      pool, one_item_a_head(c), heads, c.query_sections() - skipped,
      [&](int64_t head, int64_t s) { SectionWork(c, head, true).sum_gradients(s + skipped); },
      [&](int64_t head) { SectionWork(c, head, true).scan_gradients(all_summed); }, c.key_sections(),
      [&](int64_t head, int64_t s) {
        SectionWork work(c, head, true);
        const FeatureSums d_sums = work.gradients_after(0);
        if (s < c.leading()) work.key_gradients(s, work.of_keys(s), d_sums.scale, d_sums);
        else work.section_gradients(s - c.leading());
      });
}

}  // namespace fast_attention::FAST_ATTENTION_NAMESPACE
