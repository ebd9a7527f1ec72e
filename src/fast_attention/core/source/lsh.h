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

namespace fast_attention {
namespace FAST_ATTENTION_NAMESPACE {

constexpr int64_t HASHED_ROWS = 72;        // queries of a strip, at most
constexpr int64_t HASHED_KEYS = 128;       // keys of a block, at most
constexpr int64_t HASHED_SHORT = 192;      // tokens up to which all pairs cost less than sorting does
constexpr int64_t HASHED_SEGMENT = 4096;   // queries of one item of work
constexpr int64_t HASHING_SEGMENT = 512;   // tokens that are hashed as one item of work
constexpr int32_t HIDDEN = -5;             // as the code of a key it meets no query: those have -1 or 2 and more
constexpr float IN_RANGE = 46.0f;          // scores up to this need no maximum: 2^-92 is far above the smallest float
constexpr float UNSEEN = -INFINITE;
constexpr int64_t SOON = 12;               // rows ahead that are asked for

typedef uint32_t Counts __attribute__((vector_size(W * 4)));

inline Ints load(const int32_t* p) {
  Ints v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

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

// Buckets of tokens [first, end) of a head in all rounds; several factors make h_1 + b_1 h_2 + b_1 b_2 h_3 ...
inline void hash_item(const HashCall& c, int64_t batch, int64_t head, int64_t first, int64_t end) {
  static thread_local Buffer panels, rows, columns;
  float *panel = panels.floats(PANEL * c.width), *row = rows.floats(whole(c.width, W));
  float* scores = columns.floats(PANEL * c.columns);
  const float* rotations = c.rotations + head * c.rounds * c.width * c.columns;
  int32_t* to = c.buckets + (batch * c.heads + head) * c.rounds * c.length;
  for (int64_t t = first; t < end; t += PANEL) {  // a panel of tokens and the rotations of a round are in the first cache
    const int64_t number = end - t < PANEL ? end - t : PANEL;
    pack_panel(c.q, batch * c.q.batch + head * c.q.head + t * c.q.row, number, c.width, row, panel);
    for (int64_t r = 0; r < c.rounds; ++r) {
      product(c.columns, PANEL, c.width, rotations + r * c.width * c.columns, 1, c.columns, panel, PANEL, scores, PANEL,
              false);
      for (int64_t n = 0; n < number; n += W) {
        Ints bucket = {};
        int32_t column = 0, stride = 1;
        for (int64_t f = 0; f < c.factor_count; ++f) {
          const int32_t halves = static_cast<int32_t>(c.factors[f] / 2);
          bucket += hashed(scores + column * PANEL + n, halves) * all(stride);
          column += halves, stride *= 2 * halves;
        }
        const int64_t here = number - n < W ? number - n : W;
        std::memcpy(to + r * c.length + t + n, &bucket, static_cast<size_t>(here) * 4);
      }
    }
  }
}

inline void lsh_hash(const HashCall& c, const Pool& pool) {
  const int64_t segments = (c.length + HASHING_SEGMENT - 1) / HASHING_SEGMENT;
  parallel_items(pool, c.batch * c.heads * segments, [&](int64_t i) {
    const int64_t lane = i / segments, first = i % segments * HASHING_SEGMENT;
    const int64_t end = first + HASHING_SEGMENT < c.length ? first + HASHING_SEGMENT : c.length;
    hash_item(c, lane / c.heads, lane % c.heads, first, end);
  });
}

// One round of a head: a stable counting sort by bucket, and the codes. Bucket `number`, of masked tokens, comes last
// and has code -1. Codes rise by 2 where a bucket begins, and by 1 where a chunk of it does.
inline void arrange(const LshCall& c, const int32_t* bucket, int32_t* order, int32_t* codes) {
  static thread_local Buffer memory;
  const int64_t numbers = c.number + 2;
  int32_t* starts = memory.ints(numbers);
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

// The lengths of a head's tokens; a shorter one than c.shortest counts as that long.
inline void measure(const LshCall& c, int64_t batch, int64_t head, float* lengths) {
  static thread_local Buffer memory;
  const int64_t padded = whole(c.width, W);
  float* row = memory.floats(padded);
  for (int64_t i = 0; i < c.length; ++i) {
    read_row(c.q, batch * c.q.batch + head * c.q.head + i * c.q.row, c.width, padded, 1.0f, row);
    Vec squares = {};
    for (int64_t e = 0; e < padded; e += W) squares += load(row + e) * load(row + e);
    const float length = std::sqrt(sum(squares));
    lengths[i] = length < c.shortest ? c.shortest : length;
  }
}

// A row of whole vectors of float32 without read_row's cases, which cost as much as the copy.
inline void gather_row(const Tokens& x, int64_t offset, int64_t n, int64_t padded, float factor, float* to) {
  if (x.kind != FLOAT32 || n != padded) return read_row(x, offset, n, padded, factor, to);
  const float* from = static_cast<const float*>(x.data) + offset;
  for (int64_t e = 0; e < n; e += W) store(to + e, load(from + e) * factor);
}

// Asks for a row that is read soon: those of sorted tokens are all over the second cache and beyond it.
inline void expect_row(const Tokens& x, int64_t offset, int64_t n) {
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

struct HashedScratch {
  Buffer rows, panels, values, value_panels, codes, tokens, row, queries, query_codes, query_tokens, scores, slopes, out,
      grad, inner, logs, top, total, sums, d_keys, d_values, d_queries, along, key_along, d_rows;
};

inline HashedScratch& hashed_scratch() {
  static thread_local HashedScratch memory;
  return memory;
}

// What forward and backward of a head share: gathering, scores, who counts.
class HashedWork {
 public:
  HashedWork(const LshCall& call, int64_t batch_, int64_t head_, bool gradients, HashedScratch& memory)
      : c(call), m(memory), batch(batch_), head(head_), lane(batch_ * call.heads + head_),
        all_pairs(call.length <= HASHED_SHORT), backward(gradients), width_row(whole(call.width, W)),
        value_row(whole(call.values, W)) {
    order = c.order + lane * c.rounds * c.length;
    codes = c.codes + lane * c.rounds * c.length;
    lengths = c.lengths + lane * c.length;
    float *rows = m.rows.floats(2 * HASHED_KEYS * width_row), *panels = m.panels.floats(2 * HASHED_KEYS * width_row);
    float* values = m.values.floats(2 * HASHED_KEYS * value_row);
    float* value_panels = backward ? m.value_panels.floats(2 * HASHED_KEYS * value_row) : nullptr;
    int32_t *key_codes = m.codes.ints(2 * HASHED_KEYS * c.rounds), *tokens = m.tokens.ints(2 * HASHED_KEYS);
    for (int64_t s = 0; s < 2; ++s) {
      const int64_t at = s * HASHED_KEYS;
      slots[s] = {rows + at * width_row, panels + at * width_row, values + at * value_row,
                  backward ? value_panels + at * value_row : nullptr, key_codes + at * c.rounds, tokens + at, -1, 0, 0, 0};
    }
    queries = m.queries.floats(HASHED_ROWS * width_row);
    query_codes = m.query_codes.ints(HASHED_ROWS * c.rounds);
    query_tokens = m.query_tokens.ints(HASHED_ROWS);
    scores = m.scores.floats(HASHED_ROWS * HASHED_KEYS);
    steps = counting();
  }

  int64_t place(const Tokens& x, int64_t i) const { return batch * x.batch + head * x.head + i * x.row; }

  // Rows of sums: those of the tensor where they are whole vectors, else of a buffer; zeros at first.
  float* sums_of(const Tokens& x, int64_t n, int64_t first, int64_t last, Buffer& buffer, int64_t& distance) const {
    const bool direct = whole_vectors(x, n);
    distance = direct ? x.row : whole(n, W);
    float* sums = direct ? static_cast<float*>(x.data) + place(x, first) : buffer.floats((last - first) * distance);
    for (int64_t i = 0; i < last - first; ++i) std::memset(sums + i * distance, 0, static_cast<size_t>(whole(n, W)) * 4);
    return sums;
  }

  // Calls function(strip) for all queries in [first, last).
  template <class Function>
  void strips(int64_t first, int64_t last, Function&& function) {
    if (all_pairs) {
      for (int64_t a = first; a < last; a += HASHED_ROWS)
        function(Strip{0, a, a + HASHED_ROWS < last ? a + HASHED_ROWS : last, 0, 0, c.length});
      return;
    }
    for (int64_t r = 0; r < c.rounds; ++r) {
      const int32_t *sorted = order + r * c.length, *code = codes + r * c.length;
      int32_t code_before = HIDDEN;
      for (int64_t piece = 0, end, before = 0; piece < c.length; before = piece, piece = end) {
        const int32_t here = code[sorted[piece]];
        if (here < 0) break;
        for (end = piece + 1; end < c.length && code[sorted[end]] == here;) ++end;
        const int64_t keys = here == code_before + 1 ? before : piece;
        code_before = here;
        if (end - keys < 2) continue;
        for (int64_t a = piece, b; a < end; a = b) {
          if (sorted[a] < first || sorted[a] >= last) {
            b = a + 1;
            continue;
          }
          for (b = a + 1; b < end && b < a + HASHED_ROWS && sorted[b] >= first && sorted[b] < last;) ++b;
          function(Strip{r, a, b, keys, piece, end});
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
      const HashedKeys& k = keys(s.round, first, first + HASHED_KEYS < s.end ? first + HASHED_KEYS : s.end);
      for (const int64_t end = s.last < first + k.number ? s.last : first + k.number; i < end; ++i) {
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
    for (int64_t k = s.keys; k < s.piece; k += HASHED_KEYS)
      function(keys(s.round, k, k + HASHED_KEYS < s.piece ? k + HASHED_KEYS : s.piece));
    const int64_t end = c.causal ? s.last - 1 : s.end;
    for (int64_t k = s.piece; k < end; k += HASHED_KEYS)
      function(keys(s.round, k, k + HASHED_KEYS < s.end ? k + HASHED_KEYS : s.end));
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
      const int64_t t = k.tokens[n], place_soon = first + n + SOON;
      if (place_soon < c.length) {
        const int64_t soon = token(round, place_soon);
        expect_row(c.q, place(c.q, soon), c.width);
        expect_row(c.v, place(c.v, soon), c.values);
      }
      gather_row(c.q, place(c.q, t), c.width, width_row, 1.0f / lengths[t], k.rows + n * width_row);
      gather_row(c.v, place(c.v, t), c.values, value_row, 1.0f, k.values + n * value_row);
    }
    for (int64_t r = 0; r < compared; ++r) {
      int32_t* to = k.codes + r * HASHED_KEYS;
      for (int64_t n = 0; n < k.number; ++n) {
        const int32_t code = codes[r * c.length + k.tokens[n]];
        to[n] = code < 0 ? HIDDEN : code;
      }
      for (int64_t n = k.number; n < k.padded; ++n) to[n] = HIDDEN;
    }
    pack(k, k.rows, width_row, k.panels);
    if (backward) pack(k, k.values, value_row, k.value_panels);
    return k;
  }

  // Rows of whole vectors as columns, PANEL of them side by side; zeros stand for rows that do not exist.
  void pack(const HashedKeys& k, float* rows, int64_t row, float* to) const {
    std::memset(rows + k.number * row, 0, static_cast<size_t>((k.padded - k.number) * row) * 4);
    for (int64_t n = 0; n < k.padded; n += PANEL)
      pack_panel({rows, 0, 0, row, FLOAT32}, n * row, k.padded - n, row, nullptr, to + n * row);
  }

  // How many columns queries [i, i + ROWS) of a strip have, in whole vectors: later keys of their own piece are not met.
  int64_t columns(const Strip& s, const HashedKeys& k, int64_t i) const {
    if (!c.causal || k.first < s.piece) return k.padded;
    const int64_t last = s.first + i + ROWS < s.last ? s.first + i + ROWS : s.last, met = last - 1 - k.first;
    return met <= 0 ? 0 : met < k.number ? whole(met, W) : k.padded;
  }

  // A (rows of a strip, K) times packed columns: to[i * HASHED_KEYS + j]. A panel stays in the first cache for all rows.
  void times_columns(const Strip& s, const HashedKeys& k, int64_t K, const float* A, int64_t row, const float* panels,
                     int64_t panel_row, float* to) const {
    const int64_t number = s.last - s.first;
    for (int64_t p = 0; p < k.padded; p += PANEL)
      for (int64_t i = 0; i < number; i += ROWS) {
        const int64_t high = columns(s, k, i), rows = number - i < ROWS ? number - i : ROWS;
        const float *a = A + i * row, *panel = panels + p * panel_row;
        float* here = to + i * HASHED_KEYS + p;
        if (high - p > W) column_panel<2>(rows, K, a, row, 1, panel, PANEL, here, HASHED_KEYS, false);
        else if (high > p) column_panel<1>(rows, K, a, row, 1, panel, PANEL, here, HASHED_KEYS, false);
      }
  }

  // What tells which keys of a block query i counts: its codes and the keys', its own place, the end of those that it
  // may see. Kept by value, so that stores of weights do not make a compiler read it again.
  struct Sight {
    const int32_t *query, *keys;
    int64_t compared;
    Ints own, end, all_pairs, steps;

    // The scores of keys from j on; minus infinity where the query does not meet them, or met them in a round before.
    Vec counted(int64_t j, Vec score) const {
      Counts least = ~Counts{};
      for (int64_t r = 0; r < compared; ++r) {
        const Counts apart = reinterpret_cast<Counts>(all(query[r]) - load(keys + r * HASHED_KEYS + j));
        least = apart < least ? apart : least;
      }
      const Ints at = steps + all(static_cast<int32_t>(j)), met = reinterpret_cast<Ints>(least <= 1u);
      return (at >= end) | (at == own) | (met ^ all_pairs) ? all(UNSEEN) : score;
    }

    // In how many rounds the query meets keys from j on.
    Vec meetings(int64_t j) const {
      Ints often = {};
      for (int64_t r = 0; r < compared; ++r) {
        const Ints apart = all(query[r]) - load(keys + r * HASHED_KEYS + j);
        often -= reinterpret_cast<Ints>(reinterpret_cast<Counts>(apart) <= 1u);
      }
      return __builtin_convertvector(often, Vec);
    }
  };

  Sight sight(const Strip& s, const HashedKeys& k, int64_t i) const {
    const int32_t own = static_cast<int32_t>(s.first + i - k.first), number = static_cast<int32_t>(k.number);
    return {query_codes + i * c.rounds, k.codes, compared, all(own), all(c.causal && own < number ? own : number),
            all(all_pairs ? -1 : 0), steps};
  }

  // Whether a weight is to be multiplied by how often the key is met.
  bool repeated() const { return all_pairs && !c.distinct; }

  const LshCall& c;
  HashedScratch& m;
  int64_t batch, head, lane;
  bool all_pairs, backward;
  int64_t width_row, value_row, compared = 0, newest = 0;
  const int32_t *order, *codes;
  const float* lengths;
  HashedKeys slots[2];
  float *queries, *scores;
  int32_t *query_codes, *query_tokens;
  Ints steps;
};

// out = sum of exp2(s - top) v / total for the queries of a head in [first, last); rounds are added as they come.
inline void lsh_forward_item(const LshCall& c, int64_t batch, int64_t head, int64_t first, int64_t last) {
  HashedScratch& m = hashed_scratch();
  HashedWork work(c, batch, head, false, m);
  const bool repeated = work.repeated();
  const int64_t value_row = work.value_row, number = last - first;
  float *top = m.top.floats(number), *total = m.total.floats(number), *out = m.out.floats(HASHED_ROWS * value_row);
  float *tops = m.inner.floats(HASHED_ROWS), *sums = m.sums.floats(HASHED_ROWS * W);
  int64_t distance;
  float* outs = work.sums_of(c.out, c.values, first, last, m.d_rows, distance);
  const float factor = std::fabs(c.scale) * LOG2E;
  const auto small = [&](int64_t token) { return factor * work.lengths[token] <= IN_RANGE; };
  for (int64_t i = 0; i < number; ++i) {
    total[i] = 0.0f;
    top[i] = small(first + i) ? 0.0f : UNSEEN;
  }
  work.strips(first, last, [&](const Strip& s) {
    const int64_t rows = s.last - s.first;
    work.read_queries(s);
    bool in_range = true;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t token = work.query_tokens[i];
      in_range = in_range && small(token);
      tops[i] = top[token - first];
      for (int64_t e = 0; e < value_row; e += 16) __builtin_prefetch(outs + (token - first) * distance + e, 1);
      store(sums + i * W, Vec{});
    }
    std::memset(out, 0, static_cast<size_t>(rows * value_row) * 4);
    work.blocks(s, [&](const HashedKeys& k) {
      work.times_columns(s, k, c.width, work.queries, work.width_row, k.panels, work.width_row, work.scores);
      if (!in_range)
        for (int64_t i = 0; i < rows; ++i) {  // larger scores than before: what there is shrinks
          const HashedWork::Sight sight = work.sight(s, k, i);
          const float* line = work.scores + i * HASHED_KEYS;
          Vec most = all(UNSEEN);
          for (int64_t j = 0, high = work.columns(s, k, i / ROWS * ROWS); j < high; j += W)
            most = larger(sight.counted(j, load(line + j)), most);
          const float before = tops[i], now = largest(most);
          if (now <= before || small(work.query_tokens[i])) continue;
          const float shrunk = before == UNSEEN ? 0.0f : exp2(before - now);
          tops[i] = now;
          store(sums + i * W, load(sums + i * W) * shrunk);
          for (int64_t e = 0; e < value_row; e += W) store(out + i * value_row + e, load(out + i * value_row + e) * shrunk);
        }
      for (int64_t i = 0; i < rows; ++i) {  // weights in place of scores, in the first cache
        const HashedWork::Sight sight = work.sight(s, k, i);
        float* line = work.scores + i * HASHED_KEYS;
        const Vec highest = all(tops[i] == UNSEEN ? 0.0f : tops[i]);
        Vec added = load(sums + i * W);
        for (int64_t j = 0, high = work.columns(s, k, i / ROWS * ROWS); j < high; j += W) {
          Vec weight = exp2(sight.counted(j, load(line + j)) - highest);
          if (repeated) weight *= sight.meetings(j);
          store(line + j, weight);
          added += weight;
        }
        store(sums + i * W, added);
      }
      for (int64_t i = 0; i < rows; i += ROWS) {
        const int64_t high = work.columns(s, k, i), end = high < k.number ? high : k.number;
        product(rows - i < ROWS ? rows - i : ROWS, value_row, end, work.scores + i * HASHED_KEYS, HASHED_KEYS, 1,
                k.values, value_row, out + i * value_row, value_row, true);
      }
    });
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = work.query_tokens[i] - first;
      float *to = outs + at * distance, *from = out + i * value_row;
      if (tops[i] == top[at]) {
        for (int64_t e = 0; e < value_row; e += W) store(to + e, load(to + e) + load(from + e));
        total[at] += sum(load(sums + i * W));
      } else {
        const float shrunk = top[at] == UNSEEN ? 0.0f : exp2(top[at] - tops[i]);
        for (int64_t e = 0; e < value_row; e += W) store(to + e, load(to + e) * shrunk + load(from + e));
        total[at] = total[at] * shrunk + sum(load(sums + i * W));
        top[at] = tops[i];
      }
    }
  });
  float *logs = c.logs + work.lane * c.length + first, *row = m.row.floats(whole(c.values, W));
  for (int64_t i = 0; i < number; ++i) {
    const bool alone = total[i] == 0.0f;
    logs[i] = alone ? INFINITE : top[i] + std::log2(total[i]);
    if (alone) read_row(c.v, work.place(c.v, first + i), c.values, c.values, 1.0f, row);
    write_row(c.out, work.place(c.out, first + i), c.values, alone ? 1.0f : 1.0f / total[i], alone ? row : outs + i * distance);
  }
}

inline void lsh_forward(const LshCall& c, const Pool& pool) {
  const int64_t lanes = c.batch * c.heads, segments = (c.length + HASHED_SEGMENT - 1) / HASHED_SEGMENT;
  parallel_items(pool, lanes * c.rounds, [&](int64_t i) {
    arrange(c, c.buckets + i * c.length, c.order + i * c.length, c.codes + i * c.length);
    const int64_t lane = i / c.rounds;
    if (i % c.rounds == 0) measure(c, lane / c.heads, lane % c.heads, c.lengths + lane * c.length);
  });
  parallel_items(pool, lanes * segments, [&](int64_t i) {
    const int64_t lane = i / segments, first = i % segments * HASHED_SEGMENT;
    const int64_t last = first + HASHED_SEGMENT < c.length ? first + HASHED_SEGMENT : c.length;
    lsh_forward_item(c, lane / c.heads, lane % c.heads, first, last);
  });
}

// dv = P^T dO, dS = P (dO v^T - D), D_i = dO_i out_i. With a = sum_j dS_ij k_j and b = sum_i dS_ij scale q_i the gradient
// of q_j is scale a_j + (b_j - (b_j k_j) k_j) / |q_j|, and b_j k_j = sum_i dS_ij s_ij. Too short ones lose that term.
inline void lsh_backward_item(const LshCall& c, const LshGradients& d, int64_t batch, int64_t head) {
  HashedScratch& m = hashed_scratch();
  HashedWork work(c, batch, head, true, m);
  const bool repeated = work.repeated();
  const int64_t width_row = work.width_row, value_row = work.value_row;
  float *slopes = m.slopes.floats(HASHED_ROWS * HASHED_KEYS), *grad = m.grad.floats(HASHED_ROWS * value_row);
  float* d_queries = m.d_queries.floats(HASHED_ROWS * width_row);
  float *d_keys = m.d_keys.floats(HASHED_KEYS * width_row), *d_values = m.d_values.floats(HASHED_KEYS * value_row);
  float *along = m.along.floats(c.length), *key_along = m.key_along.floats(HASHED_KEYS), *inner = m.total.floats(c.length);
  float* row = m.row.floats(width_row > value_row ? width_row : value_row);
  const float* logs = c.logs + work.lane * c.length;
  int64_t q_distance, v_distance;
  float* dq = work.sums_of(d.dq, c.width, 0, c.length, m.d_rows, q_distance);
  float* dv = work.sums_of(d.dv, c.values, 0, c.length, m.out, v_distance);
  for (int64_t i = 0; i < c.length; ++i) {
    float* line = grad;
    read_row(d.grad_out, work.place(d.grad_out, i), c.values, value_row, 1.0f, line);
    read_row(c.out, work.place(c.out, i), c.values, value_row, 1.0f, row);
    Vec products = {};
    for (int64_t e = 0; e < value_row; e += W) products += load(line + e) * load(row + e);
    inner[i] = sum(products), along[i] = 0.0f;
    if (logs[i] == INFINITE)
      for (int64_t e = 0; e < value_row; e += W) store(dv + i * v_distance + e, load(line + e));
  }
  work.strips(0, c.length, [&](const Strip& s) {
    const int64_t rows = s.last - s.first;
    work.read_queries(s);
    for (int64_t i = 0; i < rows; ++i)
      gather_row(d.grad_out, work.place(d.grad_out, work.query_tokens[i]), c.values, value_row, 1.0f, grad + i * value_row);
    std::memset(d_queries, 0, static_cast<size_t>(rows * width_row) * 4);
    work.blocks(s, [&](const HashedKeys& k) {
      work.times_columns(s, k, c.width, work.queries, width_row, k.panels, width_row, work.scores);
      work.times_columns(s, k, c.values, grad, value_row, k.value_panels, value_row, slopes);
      std::memset(key_along, 0, static_cast<size_t>(k.padded) * 4);
      for (int64_t i = 0; i < rows; ++i) {  // P and dS in place of scores and dO v^T; zeros for keys that are not met
        const HashedWork::Sight sight = work.sight(s, k, i);
        const int64_t token = work.query_tokens[i], high = work.columns(s, k, i / ROWS * ROWS);
        float *line = work.scores + i * HASHED_KEYS, *slope = slopes + i * HASHED_KEYS;
        const float log = logs[token], mean = inner[token];
        for (int64_t j = 0; j < high; j += W) {
          const Vec score = load(line + j);
          Vec weight = exp2(sight.counted(j, score) - log);
          if (repeated) weight *= sight.meetings(j);
          const Vec ds = weight > 0.0f ? weight * (load(slope + j) - mean) * LN2 : Vec{};  // queries have log2 e
          store(line + j, weight);
          store(slope + j, ds);
          store(key_along + j, load(key_along + j) + ds * score);
        }
        for (int64_t j = high; j < k.padded; j += W) store(line + j, Vec{}), store(slope + j, Vec{});
      }
      for (int64_t i = 0; i < rows; i += ROWS) {
        const int64_t high = work.columns(s, k, i), end = high < k.number ? high : k.number;
        product(rows - i < ROWS ? rows - i : ROWS, width_row, end, slopes + i * HASHED_KEYS, HASHED_KEYS, 1, k.rows,
                width_row, d_queries + i * width_row, width_row, true);
      }
      product(k.number, value_row, rows, work.scores, 1, HASHED_KEYS, grad, value_row, d_values, value_row, false);
      product(k.number, width_row, rows, slopes, 1, HASHED_KEYS, work.queries, width_row, d_keys, width_row, false);
      for (int64_t n = 0; n < k.number; ++n) {
        const int64_t token = k.tokens[n];
        float *to_v = dv + token * v_distance, *to_q = dq + token * q_distance;
        for (int64_t e = 0; e < value_row; e += W) store(to_v + e, load(to_v + e) + load(d_values + n * value_row + e));
        for (int64_t e = 0; e < width_row; e += W) store(to_q + e, load(to_q + e) + load(d_keys + n * width_row + e));
        along[token] += key_along[n];
      }
    });
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t token = work.query_tokens[i];
      const float factor = c.scale * LOG2E * work.lengths[token];
      float* to = dq + token * q_distance;
      for (int64_t e = 0; e < width_row; e += W)
        store(to + e, load(to + e) + load(d_queries + i * width_row + e) * factor);
    }
  });
  for (int64_t i = 0; i < c.length; ++i) {
    const float length = work.lengths[i], cosine = length > c.shortest ? along[i] / length : 0.0f;
    float* line = dq + i * q_distance;
    read_row(c.q, work.place(c.q, i), c.width, width_row, cosine, row);
    for (int64_t e = 0; e < width_row; e += W) store(line + e, load(line + e) - load(row + e));
    write_row(d.dq, work.place(d.dq, i), c.width, 1.0f / length, line);
    write_row(d.dv, work.place(d.dv, i), c.values, 1.0f, dv + i * v_distance);
  }
}

inline void lsh_backward(const LshCall& c, const LshGradients& d, const Pool& pool) {
  parallel_items(pool, c.batch * c.heads,
                 [&](int64_t lane) { lsh_backward_item(c, d, lane / c.heads, lane % c.heads); });
}

}  // namespace FAST_ATTENTION_NAMESPACE
}  // namespace fast_attention
