// Hybrid attention: out_i = sum_j a_ij v_j / sum_j a_ij with a_ij = exp(q_i k_j / sqrt(d)) for the keys of near blocks and
// for sink tokens, and a_ij = phi(q_i) phi(k_j) for all others, which are the same for all queries of a block.
//
// Near keys are tiles (tiles.h). Features (features.h) are summed block by block. A block of queries reads the sums of
// all blocks but the near ones: those before and after all spans of a section of blocks come from a scan, the others of
// the section are added where they are read, in the second cache. Nothing is subtracted, so no digit is lost. Where they
// are read, near keys, sums and sink tokens are joined by their normalisers. The gradients of the sums of blocks of keys
// are such sums over blocks of queries, outside as well.
#pragma once
#include "features.h"
#include "tiles.h"

namespace fast_attention::FAST_ATTENTION_NAMESPACE {

// One head of a call.
class HybridWork {
 public:
  HybridWork(const HybridCall& call, int64_t head, bool backward)
      : c(call), f(call.far), w(call.far, head, backward), width_row(whole(f.width, W)), value_row(w.value_row),
        size(state_numbers(f.features, f.values)), log_count(std::log2(static_cast<float>(f.features))) {
    row = w.m.floats(value_row), token = w.m.floats(width_row), factors = w.m.floats(2 * w.line);
    end_keys = w.m.floats(c.end_count * width_row), end_values = w.m.floats(c.end_count * value_row);
    end_blocks = static_cast<int64_t*>(w.m.bytes(c.end_count * 8));
    ends = c.ends.at(w.b, w.h);
    sums = c.near.sums + w.lane * f.length * 2;
  }

  // The head's sums of blocks, in memory of the call or of the thread.
  float* states(float* of_call, const Outside& cut) const {
    static thread_local Buffer of_thread;
    const int64_t numbers = cut.slots() * size;
    return of_call == nullptr ? static_cast<float*>(of_thread.bytes(numbers * 4)) : of_call + w.lane * numbers;
  }
  FeatureSums block(float* states, int64_t n) const { return sums_at(states + n * size, f.features, f.values); }

  // The queries, and the keys, of a block.
  Span queries_of(int64_t t) const {
    const int64_t first = (c.first_block() + t) * c.block - c.first_position();
    return {std::max<int64_t>(first, 0), std::min(first + c.block, f.length)};
  }
  Span keys_of(int64_t n) const { return span_of({0, f.keys}, c.block, n); }

  // to = a + b over the larger scales; `to` may be a.
  void add(const FeatureSums& a, const FeatureSums& b, const FeatureSums& to) const {
    float *ours = factors, *theirs = ours + w.line;
    for (int64_t e = 0; e < w.columns; e += W) {
      const Vec x = load(a.scale + e), y = load(b.scale + e), top = larger(x, y);
      store(ours + e, exp2(x - top)), store(theirs + e, exp2(y - top));
      store(to.scale + e, top);
      store(to.z + e, load(a.z + e) * load(ours + e) + load(b.z + e) * load(theirs + e));
    }
    for (int64_t p = 0; p < whole(f.values, W); p += PANEL)
      for (int64_t e = 0; e < w.columns; ++e)
        for (int64_t j = 0; j < PANEL && p + j < f.values; j += W) {
          const int64_t at = (p / PANEL * w.line + e) * PANEL + j;
          store(to.kv + at, load(a.kv + at) * ours[e] + load(b.kv + at) * theirs[e]);
        }
  }

  void sum_block(const Outside& cut, int64_t n) {
    if (cut.reads(n)) w.sum_keys(keys_of(n), AT_ONCE, block(states(f.states, cut), n));
  }

  // What lies outside of every section.
  void scan(const Outside& cut, float* of_call) {
    float* sums = states(of_call, cut);
    FeatureSums running = w.new_sums();
    w.begin_sums(running);
    for (int64_t s = 0, n = 0; s < cut.sections(); ++s) {
      for (; n < cut.low(s * cut.together); ++n) add(running, block(sums, n), running);
      w.copy(running, block(sums, cut.summed + 2 * s));
    }
    w.begin_sums(running);
    for (int64_t s = cut.sections() - 1, n = cut.summed; s >= 0; --s) {
      while (n > cut.high(cut.end(s) - 1)) add(running, block(sums, --n), running);
      w.copy(running, block(sums, cut.summed + 2 * s + 1));
    }
  }

  // Calls a function with every reader of a section and the sums that it reads.
  template <class Function>
  void read(const Outside& cut, float* of_call, int64_t section, Function&& function) {
    float* sums = states(of_call, cut);
    const int64_t first = section * cut.together, end = cut.end(section), border = cut.summed + 2 * section;
    const FeatureSums before = w.new_sums();
    float* sums_after = w.m.floats(cut.together * size);
    const auto after = [&](int64_t t) { return block(sums_after, t - first); };
    const bool has_after = cut.high(first) < cut.summed;
    if (has_after) {
      w.copy(block(sums, border + 1), after(end - 1));
      for (int64_t t = end - 2; t >= first; --t) {
        if (cut.high(t) < cut.high(t + 1))
          add(after(t + 1), block(sums, cut.high(t)), after(t));
        else
          w.copy(after(t + 1), after(t));
      }
    }
    w.copy(block(sums, border), before);
    for (int64_t t = first; t < end; ++t) {
      if (t > first && cut.low(t) > cut.low(t - 1)) add(before, block(sums, cut.low(t - 1)), before);
      if (has_after && cut.low(t) > 0) add(after(t), before, after(t));
      function(t, has_after ? after(t) : before);
    }
  }

  void read_ends() {
    for (int64_t s = 0; s < c.end_count; ++s) {
      const bool there = ends[s] < f.keys;  // else no query reads it
      end_blocks[s] = ends[s] / c.block;
      read_row(f.k, there ? w.at(f.k, ends[s]) : 0, there ? f.width : 0, width_row, 1.0f, end_keys + s * width_row);
      read_row(f.v, there ? w.at(f.v, ends[s]) : 0, there ? f.values : 0, value_row, 1.0f, end_values + s * value_row);
    }
  }

  // A query in units of log 2, and its scores of sink tokens: minus infinity for those that are not there, come later or
  // count as near keys of its block, number t. Where near keys have a bias, which sink tokens have not, none does.
  void read_token(int64_t i) { read_row(f.q, w.at(f.q, i), f.width, width_row, c.near.scale * LOG2E, token); }
  float score(int64_t t, int64_t i, int64_t s) const {
    const int64_t distance = end_blocks[s] - (c.first_block() + t);
    const bool near = c.near.numbers == nullptr && distance >= -c.before && (c.causal || distance <= c.after);
    if (ends[s] >= f.keys || near || (c.causal && ends[s] > i + c.first_position())) return NOTHING;
    return product_of_rows(token, end_keys + s * width_row, width_row);
  }

  // Joins near keys, far ones and sink tokens of some queries of block t; whether all outputs are finite.
  bool merge(int64_t t, int64_t first, int64_t n, const FeatureSums& x) {
    const int64_t kinds = 2 + c.end_count;
    Frame m;
    float *queries = m.floats(AT_ONCE * w.line), *numerators = m.floats(AT_ONCE * value_row),
          *terms = m.floats(kinds * AT_ONCE), *parts = m.floats(2 * AT_ONCE), *far = terms + AT_ONCE;
    w.queries(first, n, x.scale, false, queries);
    w.to_values(queries, n, x.kv, numerators);
    for (int64_t r = 0; r < n; ++r) {
      const float total = sums[2 * (first + r) + 1], denominator = product_of_rows(queries + r * w.line, x.z, w.columns);
      const bool negligible = denominator < LEAST;  // rounded, that of a kernel that is never negative may even be
      terms[r] = total > 0.0f ? sums[2 * (first + r)] : NOTHING;
      parts[r] = total;
      far[r] = negligible ? NOTHING : w.exponential ? w.tops[first + r] - log_count : 0.0f;
      parts[AT_ONCE + r] = negligible ? 0.0f : denominator;
      if (c.end_count > 0) read_token(first + r);
      for (int64_t s = 0; s < c.end_count; ++s) terms[(2 + s) * AT_ONCE + r] = score(t, first + r, s);
    }
    for (int64_t r = 0; r < n; r += W) {  // weights in place of logarithms
      Vec most = all(NOTHING), total = {};
      for (int64_t t = 0; t < kinds; ++t) most = larger(load(terms + t * AT_ONCE + r), most);
      most = most > NOTHING ? most : Vec{};
      for (int64_t t = 0; t < kinds; ++t) {
        Vec weight = exp2(load(terms + t * AT_ONCE + r) - most);
        total += t < 2 ? weight * load(parts + t * AT_ONCE + r) : weight;
        store(terms + t * AT_ONCE + r, weight);
      }
      const Vec share = total == 0.0f ? Vec{} : 1.0f / total;
      for (int64_t t = 0; t < kinds; ++t) store(terms + t * AT_ONCE + r, load(terms + t * AT_ONCE + r) * share);
      store(terms + r, load(terms + r) * load(parts + r));
      for (int64_t i = 0; i < W && r + i < n; ++i) {
        sums[2 * (first + r + i)] = most[i];
        sums[2 * (first + r + i) + 1] = total[i];
      }
    }
    Ints broken = {};
    for (int64_t r = 0; r < n; ++r) {
      float* line = static_cast<float*>(c.near.out.data) + w.at(c.near.out, first + r);
      w.denominators[first + r] = far[r];
      for (int64_t e = 0; e < f.values; e += W) {
        Vec number = some<Vec>(line + e, f.values - e) * terms[r] + load(numerators + r * value_row + e) * far[r];
        for (int64_t s = 0; s < c.end_count; ++s)
          if (terms[(2 + s) * AT_ONCE + r] != 0.0f) number += load(end_values + s * value_row + e) * terms[(2 + s) * AT_ONCE + r];
        put(line + e, f.values - e, number);
        broken |= not_finite(number, f.values - e);
      }
    }
    return !any(broken);
  }

  bool read_section(const Outside& cut, int64_t section) {
    bool finite = true;
    read_ends();
    read(cut, f.states, section, [&](int64_t t, const FeatureSums& x) {
      in_steps(queries_of(t), AT_ONCE, [&](int64_t i, int64_t n) { finite = merge(t, i, n, x) && finite; });
    });
    return finite;
  }

  // Gradients of a section of queries, of the sums that they read, and of sink tokens.
  void query_gradients(const Outside& cut, const Outside& back, int64_t section) {
    float *queries = w.m.floats(AT_ONCE * w.line), *d_features = w.m.floats(AT_ONCE * w.line),
          *turned = w.m.floats(w.line * value_row), *gradients = w.m.floats(AT_ONCE * value_row),
          *weighted = w.m.floats(AT_ONCE * value_row), *inner = w.m.floats(AT_ONCE), *d_denominators = w.m.floats(AT_ONCE);
    const int64_t end_row = f.dk.row + f.dv.row;
    float* d_ends = c.d_ends + (w.lane * cut.sections() + section) * c.end_count * end_row;
    if (c.end_count > 0) clear(d_ends, c.end_count * end_row);
    read_ends();
    read(cut, f.states, section, [&](int64_t t, const FeatureSums& x) {
      const FeatureSums d_sums = block(states(f.d_states, back), t);
      w.begin_sums(d_sums);
      for (int64_t e = 0; w.exponential && e < w.line; ++e) d_sums.scale[e] = x.scale[e] > LOWEST ? -x.scale[e] : LOWEST;
      turn_panels(x.kv, w.line, value_row, turned);
      in_steps(queries_of(t), AT_ONCE, [&](int64_t i, int64_t n) {
        for (int64_t r = 0; r < n; ++r) {
          float *grad = gradients + r * value_row, weight = w.denominators[i + r];
          read_row(f.grad_out, w.at(f.grad_out, i + r), f.values, value_row, 1.0f, grad);
          read_row(c.near.out, w.at(c.near.out, i + r), f.values, value_row, 1.0f, row);
          inner[r] = product_of_rows(grad, row, value_row);
          d_denominators[r] = weight == 0.0f ? 0.0f : -weight * inner[r];
          for (int64_t e = 0; e < value_row; e += W)
            store(weighted + r * value_row + e, weight == 0.0f ? Vec{} : load(grad + e) * weight);
        }
        w.queries(i, n, x.scale, true, queries);
        if (back.reads(t)) w.add_to_sums(queries, d_denominators, {weighted, value_row}, n, d_sums);
        w.to_features({weighted, value_row}, n, turned, x.z, d_denominators, d_features);
        w.write_gradients(false, section, i, n, queries, d_features);
        for (int64_t r = 0; r < n; ++r) end_gradients(t, i + r, gradients + r * value_row, inner[r], d_ends);
      });
    });
  }

  // dP = g v, dS = P (dP - g out), dq += scale dS k, dk += scale dS q
  void end_gradients(int64_t t, int64_t i, const float* grad, float inner, float* d_ends) {
    const float top = sums[2 * i], total = sums[2 * i + 1];
    if (c.end_count == 0 || total == 0.0f) return;
    read_token(i);
    float* dq = static_cast<float*>(f.dq.data) + w.at(f.dq, i);
    for (int64_t s = 0; s < c.end_count; ++s, d_ends += f.dk.row + f.dv.row) {
      const float logit = score(t, i, s);
      if (logit == NOTHING) continue;
      const float *key = end_keys + s * width_row, weight = exp2(logit - top) / total;
      const float slope = weight * (product_of_rows(grad, end_values + s * value_row, value_row) - inner);
      for (int64_t e = 0; e < f.width; ++e) dq[e] += slope * c.near.scale * key[e];
      for (int64_t e = 0; e < f.width; ++e) d_ends[e] += slope * LN2 * token[e];
      for (int64_t e = 0; e < f.values; ++e) d_ends[f.dk.row + e] += weight * grad[e];
    }
  }

  // Gradients of a section of keys, far ones and sink tokens.
  void key_gradients(const Outside& cut, const Outside& back, int64_t section) {
    float* inverse = w.m.floats(w.line);
    const int64_t end_row = f.dk.row + f.dv.row;
    read(back, f.d_states, section, [&](int64_t t, const FeatureSums& x) {
      const Span span = keys_of(t);
      for (int64_t e = 0; e < w.line; ++e) inverse[e] = -x.scale[e];
      w.key_gradients(section, span, inverse, x);
      for (int64_t s = 0; s < c.end_count; ++s) {
        if (ends[s] < span.first || ends[s] >= span.end) continue;
        float *dk = static_cast<float*>(f.dk.data) + w.at(f.dk, ends[s]),
              *dv = static_cast<float*>(f.dv.data) + w.at(f.dv, ends[s]);
        const float* of_queries = c.d_ends + (w.lane * cut.sections() * c.end_count + s) * end_row;
        for (int64_t q = 0; q < cut.sections(); ++q, of_queries += c.end_count * end_row) {
          for (int64_t e = 0; e < f.width; ++e) dk[e] += of_queries[e];
          for (int64_t e = 0; e < f.values; ++e) dv[e] += of_queries[f.dk.row + e];
        }
      }
    });
  }

  const HybridCall& c;
  const FeaturesCall& f;
  FeatureWork w;
  const int64_t width_row, value_row, size;
  const float log_count;
  float *row, *token, *factors, *end_keys, *end_values, *sums;
  int64_t* end_blocks;
  const int64_t* ends;
};

inline bool hybrid_forward(const HybridCall& c, const Pool& pool) {
  tiles_forward(c.near, pool);
  const Outside cut = c.of_queries();
  return in_phases(
      pool, c.far.states == nullptr, c.far.batch * c.far.heads, cut.summed,
      [&](int64_t head, int64_t n) { HybridWork(c, head, false).sum_block(cut, n); },
      [&](int64_t head) { HybridWork(c, head, false).scan(cut, c.far.states); }, cut.sections(),
      [&](int64_t head, int64_t section) { return HybridWork(c, head, false).read_section(cut, section); });
}

inline bool hybrid_backward(const HybridCall& c, const Pool& pool) {
  const Outside cut = c.of_queries(), back = c.of_keys();
  in_phases(
      pool, c.far.d_states == nullptr, c.far.batch * c.far.heads, cut.sections(),
      [&](int64_t head, int64_t section) { HybridWork(c, head, true).query_gradients(cut, back, section); },
      [&](int64_t head) { HybridWork(c, head, true).scan(back, c.far.d_states); }, back.sections(),
      [&](int64_t head, int64_t section) { HybridWork(c, head, true).key_gradients(cut, back, section); });
  return tiles_backward(c.near, pool);
}

}  // namespace fast_attention::FAST_ATTENTION_NAMESPACE
