// LSH attention (Reformer, arXiv 2001.04451): hashing by rotations, sorting by bucket, softmax among tokens that meet.
//
// Keys are the queries at length 1: out_i = sum_j P_ij v_j, P_ij = exp(s_ij - logs_i), s_ij = scale q_i k_j, k_j =
// q_j / |q_j|. In every round of hashing each token has a code; i meets j where code_i - code_j is 0 or 1, never itself,
// causally only earlier tokens. Sorted by bucket and position, those that i meets stand one behind another: its piece,
// the tokens of its code, and the piece before. A query that meets nobody gets its own value. Scores are kept in units
// of log 2, so that an exponential is a power of two.
#pragma once
#include <cmath>

#include "products.h"

namespace fast_attention::FAST_ATTENTION_NAMESPACE {

constexpr int64_t HASHED_ROWS = 72;        // queries of a strip, at most
constexpr int64_t HASHED_KEYS = 128;       // keys of a block, at most
constexpr int64_t HASHED_SHORT = 192;      // tokens up to which all pairs cost less than sorting does
constexpr int64_t HASHED_SEGMENT = 4096;   // queries of one item of work
constexpr int64_t HASHING_SEGMENT = 512;   // tokens that are hashed as one item of work
constexpr int32_t HIDDEN = -5;             // as the code of a key it meets no query: those have -1 or 2 and more
constexpr int64_t PREFETCHED = 12;         // rows ahead that are asked for
constexpr float SMALL_SCORE = 46.0f;          // scores up to this need no maximum: 2^-92 is far above the smallest float

inline Ints all(int32_t x) { return x - Ints{}; }

// h(x) = argmax [x R; -x R], the first of equal ones: of a few columns of scores, for the tokens side by side in them.
inline Ints hashed(const float* scores, int64_t halves) {
  Vec high = load(scores), low = high;
  Ints highest = {}, lowest = {};
  for (int64_t c = 1; c < halves; ++c) {
    const Vec s = load(scores + c * PANEL);
    const Ints here = all(static_cast<int32_t>(c));
    highest = s > high ? here : highest;
    high = s > high ? s : high;
    lowest = s < low ? here : lowest;
    low = s < low ? s : low;
  }
  return high >= -low ? highest : lowest + all(static_cast<int32_t>(halves));
}

// Buckets of tokens of a head in all rounds; several factors make h_1 + b_1 h_2 + b_1 b_2 h_3 ...
inline void hash_segment(const HashCall& c, int64_t lane, int64_t segment) {
  const int64_t batch = lane / c.heads, head = lane % c.heads;
  Frame m;
  float *panel = m.floats(PANEL * c.width), *scores = m.floats(PANEL * c.columns);
  const float* rotations = c.rotations + head * c.rounds * c.width * c.columns;
  int32_t* to = c.buckets + lane * c.rounds * c.length;
  // a panel of tokens and a round's rotations are in the first cache
  in_steps(span_of({0, c.length}, HASHING_SEGMENT, segment), PANEL, [&](int64_t t, int64_t number) {
    pack_panel(c.q, c.q.at(batch, head, t), number, c.width, panel);
    for (int64_t r = 0; r < c.rounds; ++r) {
      product(c.columns, PANEL, c.width, rotations + r * c.width * c.columns, 1, c.columns, panel, PANEL, scores, PANEL,
              false);
      in_steps({0, number}, W, [&](int64_t n, int64_t count) {
        Ints bucket = {};
        int32_t column = 0, stride = 1;
        for (int64_t f = 0; f < c.factor_count; ++f) {
          const int32_t halves = static_cast<int32_t>(c.factors[f] / 2);
          bucket += hashed(scores + column * PANEL + n, halves) * all(stride);
          column += halves, stride *= 2 * halves;
        }
        std::memcpy(to + r * c.length + t + n, &bucket, static_cast<size_t>(count) * 4);
      });
    }
  });
}

inline bool lsh_hash(const HashCall& c, const Pool& pool) {
  return parallel_parts(pool, c.batch * c.heads, (c.length + HASHING_SEGMENT - 1) / HASHING_SEGMENT,
                 [&](int64_t lane, int64_t segment) { hash_segment(c, lane, segment); });
}

// One round of a head: a stable counting sort by bucket, and the codes. Bucket `number`, of masked tokens, comes last
// and has code -1. Codes rise by 2 where a bucket begins, and by 1 where a chunk of it does.
inline void arrange(const LshCall& c, const int32_t* bucket, int32_t* order, int32_t* codes) {
  Frame m;
  const int64_t numbers = c.number + 2;
  int32_t* starts = m.ints(numbers);
  std::memset(starts, 0, static_cast<size_t>(numbers) * 4);
  for (int64_t i = 0; i < c.length; ++i) ++starts[bucket[i] + 1];
  for (int64_t b = 1; b < numbers; ++b) starts[b] += starts[b - 1];
  for (int64_t i = 0; i < c.length; ++i) order[starts[bucket[i]]++] = static_cast<int32_t>(i);
  int32_t code = 0, before = -1;
  int64_t in_chunk = 0;
  for (int64_t p = 0; p < c.length; ++p, ++in_chunk) {
    const int32_t token = order[p], here = bucket[token];
    const bool begins = p == 0 || (here != before && !c.across), full = in_chunk == c.size;
    if (begins) code += 2;
    else if (full) code += 1;
    if (full || (begins && c.ranked)) in_chunk = 0;
    before = here;
    codes[token] = here == c.number ? -1 : code;
  }
}

// Asks for a row that is read soon: those of sorted tokens are all over the second cache and beyond it.
inline void prefetch_row(const Tokens& x, int64_t offset, int64_t n) {
  const int64_t size = x.kind == FLOAT32 ? 4 : 2;
  const char* from = static_cast<const char*>(x.data) + offset * size;
  for (int64_t byte = 0; byte < n * size; byte += 64) __builtin_prefetch(from + byte);
}

// Some queries of one code and the keys that they meet, as places in the order of a round: keys [keys, piece), of the
// code before, and [piece, end), of their own. Of short sequences the places are the tokens, of all rounds at once.
struct Strip {
  int64_t round, first, last, keys, piece, end;
};

// Keys of consecutive places, gathered.
struct HashedKeys {
  float *rows, *panels, *values, *value_panels;
  int32_t *codes, *tokens;
  int64_t round, first, number, padded;
};

// What forward and backward of a head share: gathering, scores, who counts.
class HashedWork {
 public:
  HashedWork(const LshCall& call, int64_t lane_, bool gradients)
      : c(call), batch(lane_ / call.heads), head(lane_ % call.heads), lane(lane_), all_pairs(call.length <= HASHED_SHORT),
        backward(gradients), width_row(whole(call.width, W)), value_row(whole(call.values, W)),
        order(call.order + lane_ * call.rounds * call.length), codes(call.codes + lane_ * call.rounds * call.length),
        lengths(call.lengths + lane_ * call.length), steps(counting()) {
    for (HashedKeys& k : slots) {
      k.rows = m.floats(HASHED_KEYS * width_row), k.panels = m.floats(HASHED_KEYS * width_row);
      k.values = m.floats(HASHED_KEYS * value_row), k.value_panels = m.floats(backward ? HASHED_KEYS * value_row : 0);
      k.codes = m.ints(HASHED_KEYS * c.rounds), k.tokens = m.ints(HASHED_KEYS), k.round = -1;
    }
    queries = m.floats(HASHED_ROWS * width_row), scores = m.floats(HASHED_ROWS * HASHED_KEYS);
    query_codes = m.ints(HASHED_ROWS * c.rounds), query_tokens = m.ints(HASHED_ROWS);
    row = m.floats(std::max(width_row, value_row));
  }

  int64_t place(const Tokens& x, int64_t i) const { return x.at(batch, head, i); }

  // Rows of sums: those of the tensor where they are whole vectors, else of a buffer; zeros at first.
  Rows sums_of(const Tokens& x, int64_t n, Span span) {
    Rows sums{nullptr, whole(n, W)};
    if (whole_vectors(x, n)) sums = {static_cast<float*>(x.data) + place(x, span.first), x.row};
    else sums.data = m.floats((span.end - span.first) * sums.distance);
    for (int64_t i = 0; i < span.end - span.first; ++i) clear(sums[i], whole(n, W));
    return sums;
  }

  // Calls function(strip) for all queries of a span.
  template <class Function>
  void strips(Span span, Function&& function) {
    if (all_pairs)
      return in_steps(span, HASHED_ROWS, [&](int64_t i, int64_t n) { function(Strip{0, i, i + n, 0, 0, c.length}); });
    for (int64_t r = 0; r < c.rounds; ++r) {
      const int32_t *sorted = order + r * c.length, *code = codes + r * c.length;
      const auto inside = [&](int64_t at) { return sorted[at] >= span.first && sorted[at] < span.end; };
      int32_t code_before = HIDDEN;
      for (int64_t piece = 0, end, before = 0; piece < c.length; before = piece, piece = end) {
        const int32_t here = code[sorted[piece]];
        if (here < 0) break;
        for (end = piece + 1; end < c.length && code[sorted[end]] == here;) ++end;
        const int64_t keys = here == code_before + 1 ? before : piece;
        code_before = here;
        if (end - keys < 2) continue;
        for (int64_t a = piece, b; a < end; a = b) {
          for (b = a; b < end && b < a + HASHED_ROWS && inside(b);) ++b;
          if (b > a) function(Strip{r, a, b, keys, piece, end});
          else ++b;
        }
      }
    }
  }

  int64_t token(int64_t round, int64_t at) const { return all_pairs ? at : order[round * c.length + at]; }

  // Queries are their keys times their lengths; codes of the rounds that a pair is looked up in.
  void read_queries(const Strip& s) {
    compared = all_pairs ? c.rounds : c.distinct ? s.round : 0;
    for (int64_t i = s.first; i < s.last;) {
      const int64_t first = i - (i - s.piece) % HASHED_KEYS;
      const HashedKeys& k = keys(s.round, first, std::min(first + HASHED_KEYS, s.end));
      for (const int64_t end = std::min(s.last, first + k.number); i < end; ++i) {
        const int64_t at = i - s.first, t = k.tokens[i - first];
        const float factor = c.scale * LOG2E * lengths[t];
        const float* from = k.rows + (i - first) * width_row;
        query_tokens[at] = static_cast<int32_t>(t);
        for (int64_t e = 0; e < width_row; e += W) store(queries + at * width_row + e, load(from + e) * factor);
        for (int64_t r = 0; r < compared; ++r) query_codes[at * c.rounds + r] = codes[r * c.length + t];
      }
    }
  }

  // Calls function(keys) for the keys of a strip, some at a time.
  template <class Function>
  void blocks(const Strip& s, Function&& function) {
    in_steps({s.keys, s.piece}, HASHED_KEYS, [&](int64_t k, int64_t n) { function(keys(s.round, k, k + n)); });
    for (int64_t k = s.piece, end = c.causal ? s.last - 1 : s.end; k < end; k += HASHED_KEYS)
      function(keys(s.round, k, std::min(k + HASHED_KEYS, s.end)));
  }

  // Those of a chunk serve it and the next one: of the two slots the one gathered first is overwritten.
  const HashedKeys& keys(int64_t round, int64_t first, int64_t end) {
    for (const HashedKeys& k : slots)
      if (k.round == round && k.first == first && k.number == end - first) return k;
    newest = 1 - newest;
    HashedKeys& k = slots[newest];
    k.round = round, k.first = first, k.number = end - first, k.padded = whole(end - first, W);
    for (int64_t n = 0; n < k.number; ++n) k.tokens[n] = static_cast<int32_t>(token(round, first + n));
    for (int64_t n = 0; n < k.number; ++n) {
      const int64_t t = k.tokens[n], next = first + n + PREFETCHED;
      if (next < c.length) {
        prefetch_row(c.q, place(c.q, token(round, next)), c.width);
        prefetch_row(c.v, place(c.v, token(round, next)), c.values);
      }
      read_row(c.q, place(c.q, t), c.width, width_row, 1.0f / lengths[t], k.rows + n * width_row);
      read_row(c.v, place(c.v, t), c.values, value_row, 1.0f, k.values + n * value_row);
    }
    for (int64_t r = 0; r < compared; ++r) {
      int32_t* to = k.codes + r * HASHED_KEYS;
      for (int64_t n = 0; n < k.padded; ++n) {
        const int32_t code = n < k.number ? codes[r * c.length + k.tokens[n]] : HIDDEN;
        to[n] = code < 0 ? HIDDEN : code;
      }
    }
    pack(k, k.rows, width_row, k.panels);
    if (backward) pack(k, k.values, value_row, k.value_panels);
    return k;
  }

  // Rows of whole vectors as columns, PANEL of them side by side; zeros stand for rows that do not exist.
  void pack(const HashedKeys& k, float* rows, int64_t row, float* to) const {
    clear(rows + k.number * row, (k.padded - k.number) * row);
    for (int64_t n = 0; n < k.padded; n += PANEL)
      pack_panel({rows, 0, 0, row, FLOAT32}, n * row, k.padded - n, row, to + n * row);
  }

  // How many columns queries [i, i + ROWS) of a strip have, in whole vectors: later keys of their own piece are not met.
  int64_t columns(const Strip& s, const HashedKeys& k, int64_t i) const {
    if (!c.causal || k.first < s.piece) return k.padded;
    const int64_t met = std::min(s.first + i + ROWS, s.last) - 1 - k.first;
    return met <= 0 ? 0 : met < k.number ? whole(met, W) : k.padded;
  }

  // A (rows of a strip, K) times packed columns: to[i * HASHED_KEYS + j]. A panel stays in the first cache for all rows.
  void times_columns(const Strip& s, const HashedKeys& k, int64_t K, const float* A, int64_t row_length, const float* panels,
                     float* to) const {
    for (int64_t p = 0; p < k.padded; p += PANEL)
      in_steps({0, s.last - s.first}, ROWS, [&](int64_t i, int64_t n) {
        panel_product(n, std::min<int64_t>(columns(s, k, i) - p, PANEL), K, A + i * row_length, row_length, 1,
                      panels + p * row_length, PANEL, 0, to + i * HASHED_KEYS + p, HASHED_KEYS, 0, false);
      });
  }

  // C += weights of a strip's rows, or other numbers of pairs, times rows of keys.
  void add_products(const Strip& s, const HashedKeys& k, const float* pairs, const float* rows, int64_t row_length, float* to) const {
    in_steps({0, s.last - s.first}, ROWS, [&](int64_t i, int64_t n) {
      product(n, row_length, std::min(columns(s, k, i), k.number), pairs + i * HASHED_KEYS, HASHED_KEYS, 1, rows, row_length,
              to + i * row_length, row_length, true);
    });
  }

  // What tells which keys of a block query i counts: its codes and the keys', its own place, the end of those that it
  // may see. Kept by value, so that stores of weights do not make a compiler read it again.
  struct Visible {
    const int32_t *query, *keys;
    int64_t compared;
    Ints own, end, all_pairs, steps;
    bool repeated;  // weights are multiplied by how often keys are met

    // In how many rounds the query meets keys from j on.
    Ints meetings(int64_t j) const {
      Ints often = {};
      for (int64_t r = 0; r < compared; ++r) {
        const Ints difference = all(query[r]) - some<Ints>(keys + r * HASHED_KEYS + j, W);
        often -= as<Ints>(as<Words>(difference) <= 1u);
      }
      return often;
    }

    // The scores of keys from j on; minus infinity where the query does not meet them, or met them in a round before.
    Vec counted(int64_t j, Vec score, Ints often) const {
      const Ints at = steps + all(static_cast<int32_t>(j));
      return (at >= end) | (at == own) | ((often > 0) ^ all_pairs) ? all(-INFINITE) : score;
    }

    // The weights of keys from j on.
    Vec weight(int64_t j, Vec score, Vec top) const {
      const Ints often = meetings(j);
      const Vec weight = exp2(counted(j, score, often) - top);
      return repeated ? weight * __builtin_convertvector(often, Vec) : weight;
    }
  };

  Visible visible(const Strip& s, const HashedKeys& k, int64_t i) const {
    const int32_t own = static_cast<int32_t>(s.first + i - k.first), number = static_cast<int32_t>(k.number);
    return {query_codes + i * c.rounds, k.codes, compared, all(own), all(c.causal && own < number ? own : number),
            all(all_pairs ? -1 : 0), steps, all_pairs && !c.distinct};
  }

  Frame m;
  const LshCall& c;
  const int64_t batch, head, lane;
  const bool all_pairs, backward;
  const int64_t width_row, value_row;
  int64_t compared = 0, newest = 0;
  const int32_t *order, *codes;
  const float* lengths;
  HashedKeys slots[2]{};
  float *queries, *scores, *row;
  int32_t *query_codes, *query_tokens;
  Ints steps;
};

// out = sum of exp2(s - top) v / total for the queries of a span; rounds are added as they come.
inline void lsh_forward_span(const LshCall& c, int64_t lane, Span span) {
  HashedWork work(c, lane, false);
  const Rows outs = work.sums_of(c.out, c.values, span);
  Frame m;
  const int64_t value_row = work.value_row, number = span.end - span.first;
  float *top = m.floats(number), *total = m.floats(number), *out = m.floats(HASHED_ROWS * value_row);
  float *tops = m.floats(HASHED_ROWS), *sums = m.floats(HASHED_ROWS * W);
  const float factor = std::fabs(c.scale) * LOG2E;
  const auto small = [&](int64_t token) { return factor * work.lengths[token] <= SMALL_SCORE; };
  for (int64_t i = 0; i < number; ++i) {
    total[i] = 0.0f;
    top[i] = small(span.first + i) ? 0.0f : -INFINITE;
  }
  work.strips(span, [&](const Strip& s) {
    const int64_t rows = s.last - s.first;
    work.read_queries(s);
    bool all_small = true;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t token = work.query_tokens[i];
      all_small = all_small && small(token);
      tops[i] = top[token - span.first];
      for (int64_t e = 0; e < value_row; e += 16) __builtin_prefetch(outs[token - span.first] + e, 1);
      store(sums + i * W, Vec{});
    }
    clear(out, rows * value_row);
    work.blocks(s, [&](const HashedKeys& k) {
      work.times_columns(s, k, c.width, work.queries, work.width_row, k.panels, work.scores);
      for (int64_t i = 0; i < rows && !all_small; ++i) {  // larger scores than before: what there is shrinks
        if (small(work.query_tokens[i])) continue;
        const HashedWork::Visible visible = work.visible(s, k, i);
        const float* line = work.scores + i * HASHED_KEYS;
        Vec most = all(-INFINITE);
        for (int64_t j = 0, high = work.columns(s, k, i / ROWS * ROWS); j < high; j += W)
          most = larger(visible.counted(j, load(line + j), visible.meetings(j)), most);
        const float before = tops[i], now = largest(most);
        if (now <= before) continue;
        const float shrunk = before == -INFINITE ? 0.0f : exp2(before - now);
        tops[i] = now;
        scale_row(sums + i * W, W, shrunk);
        scale_row(out + i * value_row, value_row, shrunk);
      }
      for (int64_t i = 0; i < rows; ++i) {  // weights in place of scores, in the first cache
        const HashedWork::Visible visible = work.visible(s, k, i);
        float* line = work.scores + i * HASHED_KEYS;
        const Vec highest = all(tops[i] == -INFINITE ? 0.0f : tops[i]);
        Vec added = load(sums + i * W);
        for (int64_t j = 0, high = work.columns(s, k, i / ROWS * ROWS); j < high; j += W) {
          const Vec weight = visible.weight(j, load(line + j), highest);
          store(line + j, weight);
          added += weight;
        }
        store(sums + i * W, added);
      }
      work.add_products(s, k, work.scores, k.values, value_row, out);
    });
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = work.query_tokens[i] - span.first;
      const float shrunk = tops[i] == top[at] ? 1.0f : top[at] == -INFINITE ? 0.0f : exp2(top[at] - tops[i]);
      float *to = outs[at], *from = out + i * value_row;
      for (int64_t e = 0; e < value_row; e += W) store(to + e, load(to + e) * shrunk + load(from + e));
      total[at] = total[at] * shrunk + sum(load(sums + i * W));
      top[at] = tops[i];
    }
  });
  float* logs = c.logs + lane * c.length + span.first;
  for (int64_t i = 0; i < number; ++i) {
    const bool alone = total[i] == 0.0f;
    logs[i] = alone ? INFINITE : top[i] + std::log2(total[i]);
    if (alone) read_row(c.v, work.place(c.v, span.first + i), c.values, c.values, 1.0f, work.row);
    write_row(c.out, work.place(c.out, span.first + i), c.values, alone ? 1.0f : 1.0f / total[i],
              alone ? work.row : outs[i]);
  }
}

inline bool lsh_forward(const LshCall& c, const Pool& pool) {
  const int64_t lanes = c.batch * c.heads;
  parallel_parts(pool, lanes, c.rounds, [&](int64_t lane, int64_t round) {
    const int64_t at = (lane * c.rounds + round) * c.length, width_row = whole(c.width, W);
    Frame m;
    float* row = m.floats(width_row);
    arrange(c, c.buckets + at, c.order + at, c.codes + at);
    for (int64_t i = 0; i < c.length && round == 0; ++i) {  // a shorter one than c.shortest counts as that long
      read_row(c.q, c.q.at(lane / c.heads, lane % c.heads, i), c.width, width_row, 1.0f, row);
      c.lengths[lane * c.length + i] = std::max(std::sqrt(product_of_rows(row, row, width_row)), c.shortest);
    }
  });
  return parallel_parts(pool, lanes, (c.length + HASHED_SEGMENT - 1) / HASHED_SEGMENT, [&](int64_t lane, int64_t s) {
    lsh_forward_span(c, lane, span_of({0, c.length}, HASHED_SEGMENT, s));
  });
}

// dv = P^T dO, dS = P (dO v^T - D), D_i = dO_i out_i. With a = sum_j dS_ij k_j and b = sum_i dS_ij scale q_i the gradient
// of q_j is scale a_j + (b_j - (b_j k_j) k_j) / |q_j|, and b_j k_j = sum_i dS_ij s_ij. Too short ones lose that term.
inline void lsh_backward_head(const LshCall& c, int64_t lane) {
  HashedWork work(c, lane, true);
  const Rows dq = work.sums_of(c.dq, c.width, {0, c.length}), dv = work.sums_of(c.dv, c.values, {0, c.length});
  Frame m;
  const int64_t width_row = work.width_row, value_row = work.value_row;
  float *slopes = m.floats(HASHED_ROWS * HASHED_KEYS), *grad = m.floats(HASHED_ROWS * value_row);
  float *d_queries = m.floats(HASHED_ROWS * width_row), *d_keys = m.floats(HASHED_KEYS * width_row);
  float *d_values = m.floats(HASHED_KEYS * value_row), *key_along = m.floats(HASHED_KEYS);
  float *along = m.floats(c.length), *inner = m.floats(c.length);
  const float* logs = c.logs + lane * c.length;
  for (int64_t i = 0; i < c.length; ++i) {
    read_row(c.grad_out, work.place(c.grad_out, i), c.values, value_row, 1.0f, grad);
    read_row(c.out, work.place(c.out, i), c.values, value_row, 1.0f, work.row);
    inner[i] = product_of_rows(grad, work.row, value_row), along[i] = 0.0f;
    if (logs[i] == INFINITE) std::memcpy(dv[i], grad, static_cast<size_t>(value_row) * 4);
  }
  work.strips({0, c.length}, [&](const Strip& s) {
    const int64_t rows = s.last - s.first;
    work.read_queries(s);
    for (int64_t i = 0; i < rows; ++i)
      read_row(c.grad_out, work.place(c.grad_out, work.query_tokens[i]), c.values, value_row, 1.0f, grad + i * value_row);
    clear(d_queries, rows * width_row);
    work.blocks(s, [&](const HashedKeys& k) {
      work.times_columns(s, k, c.width, work.queries, width_row, k.panels, work.scores);
      work.times_columns(s, k, c.values, grad, value_row, k.value_panels, slopes);
      clear(key_along, k.padded);
      for (int64_t i = 0; i < rows; ++i) {  // P and dS in place of scores and dO v^T; zeros for keys that are not met
        const HashedWork::Visible visible = work.visible(s, k, i);
        const int64_t token = work.query_tokens[i], high = work.columns(s, k, i / ROWS * ROWS);
        float *line = work.scores + i * HASHED_KEYS, *slope = slopes + i * HASHED_KEYS;
        const float log = logs[token], mean = inner[token];
        for (int64_t j = 0; j < high; j += W) {
          const Vec score = load(line + j);
          const Vec weight = visible.weight(j, score, all(log));
          const Vec ds = weight > 0.0f ? weight * (load(slope + j) - mean) * LN2 : Vec{};  // queries have log2 e
          store(line + j, weight);
          store(slope + j, ds);
          store(key_along + j, load(key_along + j) + ds * score);
        }
        clear(line + high, k.padded - high), clear(slope + high, k.padded - high);
      }
      work.add_products(s, k, slopes, k.rows, width_row, d_queries);
      product(k.number, value_row, rows, work.scores, 1, HASHED_KEYS, grad, value_row, d_values, value_row, false);
      product(k.number, width_row, rows, slopes, 1, HASHED_KEYS, work.queries, width_row, d_keys, width_row, false);
      for (int64_t n = 0; n < k.number; ++n) {
        const int64_t token = k.tokens[n];
        add_row(dv[token], d_values + n * value_row, value_row);
        add_row(dq[token], d_keys + n * width_row, width_row);
        along[token] += key_along[n];
      }
    });
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t token = work.query_tokens[i];
      add_row(dq[token], d_queries + i * width_row, width_row, c.scale * LOG2E * work.lengths[token]);
    }
  });
  for (int64_t i = 0; i < c.length; ++i) {
    const float length = work.lengths[i], cosine = length > c.shortest ? along[i] / length : 0.0f;
    float* line = dq[i];
    read_row(c.q, work.place(c.q, i), c.width, width_row, cosine, work.row);
    for (int64_t e = 0; e < width_row; e += W) store(line + e, load(line + e) - load(work.row + e));
    write_row(c.dq, work.place(c.dq, i), c.width, 1.0f / length, line);
    write_row(c.dv, work.place(c.dv, i), c.values, 1.0f, dv[i]);
  }
}

inline bool lsh_backward(const LshCall& c, const Pool& pool) {
  return parallel_items(pool, c.batch * c.heads, [&](int64_t lane) { lsh_backward_head(c, lane); });
}

}  // namespace fast_attention::FAST_ATTENTION_NAMESPACE
