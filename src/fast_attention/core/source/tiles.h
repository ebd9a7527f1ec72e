// Softmax attention of tiles: some queries and the keys that they see, given as ranges of keys (interface.h).
//
// out_i = sum_j P_ij v_j, P_ij = exp(s_ij) / sum_j exp(s_ij), s_ij = scale q_i k_j + number[j - i].
// Scores are kept in units of log 2, so that an exponential is a power of two.
//
// Where every query chooses blocks of keys itself (Mixture of Block Attention, arXiv 2502.13189), a tile is some of the
// queries that see the same block, gathered, and a query's sums are those of all its tiles over a running maximum.
#pragma once
#include <vector>

#include "bf16.h"

namespace fast_attention {
namespace FAST_ATTENTION_NAMESPACE {

constexpr int64_t MOST_ROWS = 96;   // of a tile
constexpr int64_t SEGMENT = 288;    // queries of one item of work: they share packed keys
constexpr int64_t CHOOSING = 4096;  // queries of one item of work where they choose their keys
constexpr float NOTHING = -INFINITE;

// Keys that are packed together: 128 KiB, a part of the second cache. The scores of ROWS queries stay in the first.
inline int64_t chunk_keys(int64_t width) {
  const int64_t keys = 32768 / (width > 1 ? width : 1) / PANEL * PANEL;
  return keys < 2 * PANEL ? 2 * PANEL : keys > 512 ? 512 : keys;
}

// Keys that stand one behind another in whole panels, and the ranges in them; counted from the chunk's first key.
struct Run {
  int64_t low, high;
  int32_t range, range_end;
};

struct Rows {
  int64_t low, high;  // keys that some query of a group sees, hull of the ranges of its rows
};

struct Scratch {
  Buffer q, out, top, total, panels, value_panels, values, keys, scores, gradients, slopes, row, d_numbers,
      vectors, products, vector_panel, d_products, d_vectors, key_bias, flags, grad, dq, inner, places, ends, tile_q,
      tile_grad, tile_sums, tile_parts, queries, weights, value_pairs;
  std::vector<Run> runs;
  std::vector<Rows> groups;
  std::vector<Tile> tiles;
  std::vector<Range> ranges;
};

inline Scratch& scratch() {
  static thread_local Scratch memory;
  return memory;
}

// One item of work: queries [row, row_end) of one head, which are consecutive tiles, or choose theirs.
struct Item {
  int64_t batch, head, row, row_end;
  const Tile* tiles;
  int64_t count;
};

// Widens keys [low, high) by those of a tile.
inline void add_keys(const Tile& tile, const Range* ranges, int64_t& low, int64_t& high) {
  for (int32_t r = tile.range; r < tile.range_end; ++r) {
    if (ranges[r].first < low) low = ranges[r].first;
    if (ranges[r].end > high) high = ranges[r].end;
  }
}

class TileWork {
 public:
  TileWork(const TilesCall& call, const Item& item, Scratch& memory)
      : c(call), it(item), m(memory), chunk(chunk_keys(call.width)), row0(item.row), rows(item.row_end - item.row),
        group(item.head / (call.heads / call.groups)), width_row(whole(call.width, W)),
        value_row(whole(call.values, W)), ranges(call.ranges) {
    if (c.block > 0) gather_tiles();
    low = call.keys, high = 0;
    for (int64_t t = 0; t < it.count; ++t) add_keys(it.tiles[t], ranges, low, high);
    high = high < c.keys ? high : c.keys;
    tiles_end = places == nullptr ? it.count : 0;
    score_row = chunk + PANEL;
    q = m.q.floats(rows * width_row);
    for (int64_t i = 0; i < rows; ++i)
      read_row(c.q, query(c.q, row0 + i), c.width, width_row, c.scale * LOG2E, q + i * width_row);
    panels = m.panels.floats(chunk * whole(c.width, TERMS));
    scores = m.scores.floats(MOST_ROWS * score_row);
    row = m.row.floats(whole(c.width > c.values ? c.width : c.values, W));
    flags = static_cast<uint8_t*>(m.flags.bytes(2 * (chunk / PANEL)));
    find_parts();
    if (!whole_vectors(c.v, c.values) && !bf16) copied_values = m.values.floats(chunk * value_row);
    if (c.key_mask != nullptr) key_bias = m.key_bias.floats(chunk);
    offset_row = chunk + MOST_ROWS + PANEL;
    if (c.vectors != nullptr) {
      vectors = m.vectors.floats(offset_row * width_row);
      products = m.products.floats(MOST_ROWS * offset_row);
      vector_panel = m.vector_panel.floats(PANEL * c.width);
    }
  }

  // Whether products are of bfloat16.
  void find_parts() {
#ifdef FAST_ATTENTION_AMX
    bf16 = c.q.kind == BFLOAT16 && c.k.kind == BFLOAT16 && c.v.kind == BFLOAT16 && has_tile_registers();
    if (!bf16) return;
    part_row = whole(c.width, TERMS);
    queries = static_cast<uint16_t*>(m.queries.bytes(rows * part_row * 2));
    weights = static_cast<uint16_t*>(m.weights.bytes(2 * ROWS * chunk * 2));
    value_pairs = static_cast<uint16_t*>(m.value_pairs.bytes(chunk * value_row * 2));
    std::memset(queries, 0, static_cast<size_t>(rows * part_row) * 2);
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(queries + i * part_row, static_cast<const uint16_t*>(c.q.data) + query(c.q, row0 + i),
                  static_cast<size_t>(c.width) * 2);
#endif
  }

  // Tiles of the queries that see the same block, their own or one that they chose, in the order of keys.
  void gather_tiles() {
    const int64_t behind = c.keys - c.length, n = c.choice_count, blocks = (it.row_end - 1 + behind) / c.block + 1;
    const int64_t* choices = c.choices + ((it.batch * c.heads + it.head) * c.length + row0) * n;
    int32_t *to = m.places.ints(rows * (n + 1)), *ends = m.ends.ints(blocks);
    const auto every = [&](auto&& function) {
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t own = (row0 + i + behind) / c.block;
        for (int64_t r = i * n; r < (i + 1) * n; ++r)
          if (choices[r] >= 0 && choices[r] < own) function(choices[r], i);
        function(own, i);
      }
    };
    std::memset(ends, 0, static_cast<size_t>(blocks) * 4);
    every([&](int64_t b, int64_t) { ++ends[b]; });
    m.tiles.clear(), m.ranges.clear();
    for (int32_t b = 0, row = 0, end; b < blocks; ++b) {
      const int64_t first = b * c.block, last = first + c.block < c.keys ? first + c.block : c.keys;
      m.ranges.push_back({static_cast<int32_t>(first), static_cast<int32_t>(last), INT32_MIN, static_cast<int32_t>(behind), 0, 1});
      for (end = row + ends[b], ends[b] = row; row < end; row = m.tiles.back().row_end)
        m.tiles.push_back({row, end - row < MOST_ROWS ? end : row + static_cast<int32_t>(MOST_ROWS), b, b + 1});
    }
    every([&](int64_t b, int64_t i) { to[ends[b]++] = static_cast<int32_t>(i); });
    places = to, ranges = m.ranges.data(), it.tiles = m.tiles.data(), it.count = static_cast<int64_t>(m.tiles.size());
  }

  // The item's row that a tile's row i is, and its query.
  int64_t at(const Tile& tile, int64_t i) const { return places == nullptr ? tile.row - row0 + i : places[tile.row + i]; }
  int64_t query_of(const Tile& tile, int64_t i) const { return row0 + at(tile, i); }

  // A tile's rows of x, side by side.
  const float* rows_of(const Tile& tile, const float* x, int64_t n, Buffer& buffer) const {
    if (places == nullptr) return x + (tile.row - row0) * n;
    float* to = buffer.floats(MOST_ROWS * n);
    for (int64_t i = 0; i < tile.row_end - tile.row; ++i)
      for (int64_t e = 0; e < n; e += W) store(to + i * n + e, load(x + at(tile, i) * n + e));
    return to;
  }

  // Calls add(rows) for M of a tile's rows of x from `first` on: where they stand, or elsewhere if they are gathered.
  template <class Function>
  void add_to(const Tile& tile, int64_t first, int64_t M, int64_t n, float* x, Function&& add) const {
    if (places == nullptr) return add(x + at(tile, first) * n);
    float* sums = m.tile_sums.floats(ROWS * (width_row > value_row ? width_row : value_row));
    std::memset(sums, 0, static_cast<size_t>(M * n) * 4);
    add(sums);
    for (int64_t i = 0; i < M; ++i)
      for (int64_t e = 0, to = at(tile, first + i) * n; e < n; e += W) store(x + to + e, load(x + to + e) + load(sums + i * n + e));
  }

  int64_t query(const Tokens& x, int64_t i) const { return it.batch * x.batch + it.head * x.head + i * x.row; }
  int64_t key(const Tokens& x, int64_t j) const { return it.batch * x.batch + group * x.head + j * x.row; }

  // Begins keys [first, first + chunk): nothing of them is packed yet.
  void begin_chunk(int64_t first) {
    start = first;
    size = c.keys - first < chunk ? c.keys - first : chunk;
    std::memset(flags, 0, static_cast<size_t>(2 * (chunk / PANEL)));
    if (places != nullptr) {
      while (tiles_end < it.count && ranges[it.tiles[tiles_end].range].first < start + size) ++tiles_end;
      while (tiles_begin < tiles_end && ranges[it.tiles[tiles_begin].range].end <= start) ++tiles_begin;
    }
    if (c.key_mask != nullptr) {
      const uint8_t* seen = c.key_mask + it.batch * c.mask_batch + it.head * c.mask_head + first;
      for (int64_t j = 0; j < chunk; ++j) key_bias[j] = j < size && seen[j] ? 0.0f : NOTHING;
    }
  }

  // The runs of a tile in the chunk; false where it sees none of these keys.
  bool find_runs(const Tile& tile) {
    m.runs.clear();
    for (int32_t r = tile.range; r < tile.range_end; ++r) {
      const int64_t first = clamp(ranges[r].first - start), end = clamp(ranges[r].end - start);
      if (first >= end) continue;
      const int64_t run_low = first / PANEL * PANEL, run_high = whole(end, PANEL);
      if (!m.runs.empty() && run_low < m.runs.back().high) {
        m.runs.back().high = run_high > m.runs.back().high ? run_high : m.runs.back().high;
        m.runs.back().range_end = r + 1;
      } else {
        m.runs.push_back({run_low, run_high, r, r + 1});
      }
    }
    return !m.runs.empty();
  }

  int64_t clamp(int64_t key) const { return key < 0 ? 0 : key > size ? size : key; }

  // The chunk's keys [first, end) of a range that some of the queries [i, last] see; none unless first < end.
  void seen(const Range& range, int64_t i, int64_t last, int64_t& first, int64_t& end) const {
    first = i + range.low > range.first ? i + range.low : range.first;
    end = last + range.high + 1 < range.end ? last + range.high + 1 : range.end;
    first = clamp((first > range.end - range.least ? range.end - range.least : first) - start);
    end = clamp((end < range.first + range.least ? range.first + range.least : end) - start);
  }

  // The queries of a tile, and for every run and group of ROWS queries the hull of what they see, in whole vectors.
  void find_groups(const Tile& tile) {
    tile_q = rows_of(tile, q, width_row, m.tile_q);
    if (bf16) tile_parts = reinterpret_cast<const uint16_t*>(
        rows_of(tile, reinterpret_cast<const float*>(queries), part_row / 2, m.tile_parts));
    groups_of_run = (tile.row_end - tile.row + ROWS - 1) / ROWS;
    m.groups.clear();
    for (const Run& run : m.runs)
      for (int64_t g = 0, number = tile.row_end - tile.row; g < number; g += ROWS) {
        Rows hull{run.high, run.low};
        const int64_t first_query = query_of(tile, g), last_query = query_of(tile, (g + ROWS < number ? g + ROWS : number) - 1);
        for (int32_t r = run.range; r < run.range_end; ++r) {
          int64_t first, end;
          seen(ranges[r], first_query, last_query, first, end);
          if (first >= end) continue;
          if (first < hull.low) hull.low = first;
          if (end > hull.high) hull.high = end;
        }
        if (hull.low < hull.high) {
          hull.low = hull.low / W * W;
          hull.high = whole(hull.high, W);
        }
        m.groups.push_back(hull);
      }
  }

  // Panels number p of the chunk, packed at their first use: width * PANEL numbers, 8 KiB of the first cache.
  const float* key_panel(int64_t p) {
#ifdef FAST_ATTENTION_AMX
    if (bf16) {
      uint16_t* to = reinterpret_cast<uint16_t*>(panels) + p * PANEL * part_row;
      if (!(flags[p] & 1)) pack_pairs(c.k, key(c.k, start + p * PANEL), size - p * PANEL, c.width, part_row, to);
      flags[p] |= 1;
      return reinterpret_cast<const float*>(to);
    }
#endif
    return packed(c.k, c.width, panels, 1, p);
  }
  const float* value_panel(int64_t p) { return packed(c.v, c.values, value_panels, 2, p); }

  const float* packed(const Tokens& x, int64_t n, float* all_panels, uint8_t bit, int64_t p) {
    float* to = all_panels + p * PANEL * n;
    if (!(flags[p] & bit)) {
      flags[p] |= bit;
      pack_panel(x, key(x, start + p * PANEL), size - p * PANEL, n, row, to);
    }
    return to;
  }

  // Rows of values, or of keys, that stand from the chunk's first key on, and the distance between them.
  const float* value_rows(int64_t low_key, int64_t high_key, int64_t& distance) {
    return key_by_key(c.v, c.values, copied_values, 1, low_key, high_key, distance);
  }
  const float* key_rows(int64_t low_key, int64_t high_key, int64_t& distance) {
    return key_by_key(c.k, c.width, copied_keys, 2, low_key, high_key, distance);
  }

  const float* key_by_key(const Tokens& x, int64_t n, float* copied, uint8_t bit, int64_t low_key, int64_t high_key,
                          int64_t& distance) {
    const bool direct = whole_vectors(x, n);
    distance = direct ? x.row : whole(n, W);
    if (direct) return static_cast<const float*>(x.data) + key(x, start);
    uint8_t* done = flags + chunk / PANEL;
    for (int64_t p = low_key / PANEL; p * PANEL < high_key; ++p) {
      if (done[p] & bit) continue;
      done[p] |= bit;
      const int64_t end = (p + 1) * PANEL < size ? (p + 1) * PANEL : size;
      for (int64_t j = p * PANEL; j < end; ++j) read_row(x, key(x, start + j), n, distance, 1.0f, copied + j * distance);
    }
    return copied;
  }

  // The columns of panel p that a group sees: one half of it, or both.
  static void half_panels(const Rows& hull, int64_t p, int64_t M, int64_t K, const float* A, int64_t row,
                          const float* panel, float* to, int64_t to_row) {
    const int64_t half = hull.high <= p + W ? 0 : hull.low >= p + W ? W : -1;
    if (half < 0)
      column_panel<2>(M, K, A, row, 1, panel, PANEL, to + p, to_row, false);
    else
      column_panel<1>(M, K, A, row, 1, panel + half, PANEL, to + p + half, to_row, false);
  }

  // Calls multiply(first row, rows, hull, p, panel) for the groups [from, to) that see some of a panel of a run.
  template <class Packed, class Function>
  void each_panel(const Run& run, int64_t of_run, int64_t from, int64_t to, int64_t end_row, Packed&& packed, Function&& multiply) {
    for (int64_t p = run.low; p < run.high; p += PANEL) {
      const float* panel = nullptr;  // it stays in the first cache for all groups
      for (int64_t g = from; g < to; ++g) {
        const Rows& hull = m.groups[of_run + g];
        if (hull.high <= p || hull.low >= p + PANEL) continue;
        if (panel == nullptr) panel = packed(p / PANEL);
        multiply(g * ROWS, end_row - g * ROWS < ROWS ? end_row - g * ROWS : ROWS, hull, p, panel);
      }
    }
  }

  // Scores of the groups [from, to) of a tile into `scores`, with what positions, caps and masks do; minus infinity for
  // keys that a row does not see.
  void write_scores(const Tile& tile, int64_t from, int64_t to, float* slope) {
    const int64_t top_row = from * ROWS, end_row = to * ROWS < tile.row_end - tile.row ? to * ROWS : tile.row_end - tile.row;
    int64_t of_run = 0;
    for (const Run& run : m.runs) {
      each_panel(run, of_run, from, to, end_row, [&](int64_t p) { return key_panel(p); },
                 [&](int64_t first, int64_t number, const Rows& hull, int64_t p, const float* panel) {
        float* to_row = scores + (first - top_row) * score_row;
#ifdef FAST_ATTENTION_AMX
        if (bf16)
          return registers.multiply(number, part_row, c.scale * LOG2E, tile_parts + first * part_row,
                                    reinterpret_cast<const uint16_t*>(panel), to_row + p, score_row);
#endif
        half_panels(hull, p, number, c.width, tile_q + first * width_row, width_row, panel, to_row, score_row);
      });
      if (c.vectors != nullptr) multiply_vectors(tile, run);
      for (int64_t i = top_row; i < end_row; ++i) {
        const Rows& hull = m.groups[of_run + i / ROWS];
        if (hull.low >= hull.high) continue;
        float* line = scores + (i - top_row) * score_row;
        if (c.cap > 0.0f) cap_scores(line, hull, slope == nullptr ? nullptr : slope + (i - top_row) * score_row);
        if (c.numbers != nullptr) add_numbers(line, hull, query_of(tile, i));
        if (c.vectors != nullptr) {  // products[0]: the last row and the run's first key
          const float* offset = products + i * offset_row + (tile.row_end - tile.row - 1 - i) - run.low;
          for (int64_t j = hull.low; j < hull.high; j += W) store(line + j, load(line + j) + load(offset + j));
        }
        int64_t position = hull.low;
        for (int32_t r = run.range; r < run.range_end; ++r) {
          int64_t first, end;
          seen(ranges[r], query_of(tile, i), query_of(tile, i), first, end);
          if (first >= end) continue;
          hide(line, position, first);
          if (ranges[r].count != 1) {
            const float gain = std::log2(static_cast<float>(ranges[r].count));
            for (int64_t j = first; j < end; ++j) line[j] += gain;
          }
          position = end > position ? end : position;
        }
        hide(line, position, hull.high);
        if (c.key_mask != nullptr)
          for (int64_t j = hull.low; j < hull.high; j += W)
            store(line + j, load(key_bias + j) < 0.0f ? all(NOTHING) : load(line + j));
      }
      of_run += groups_of_run;
    }
  }

  // Makes the scores of keys [from, to) minus infinity.
  static void hide(float* line, int64_t from, int64_t to) {
    for (int64_t j = from / W * W; j < to; j += W) {
      const Ints key = counting() + static_cast<int32_t>(j);
      const Ints seen = (key < static_cast<int32_t>(from)) | (key >= static_cast<int32_t>(to));
      store(line + j, seen ? load(line + j) : all(NOTHING));
    }
  }

  // Adds the numbers of the offsets of query i; those that are not given are zero.
  void add_numbers(float* line, const Rows& hull, int64_t i) const {
    const float* from = c.numbers + it.head * c.numbers_head;
    const int64_t shift = start - i - c.first_offset;  // of the number that belongs to key 0 of the chunk
    int64_t j = hull.low < -shift ? -shift : hull.low;
    const int64_t end = hull.high < c.number_count - shift ? hull.high : c.number_count - shift;
    for (; j + W <= end; j += W) store(line + j, load(line + j) + load(from + shift + j) * LOG2E);
    for (; j < end; ++j) line[j] += from[shift + j] * LOG2E;
  }

  // In units of log 2: cap tanh(s / cap), and its slope.
  void cap_scores(float* line, const Rows& hull, float* slope) const {
    const float unit = c.cap * LOG2E;
    for (int64_t j = hull.low; j < hull.high; j += W) {
      const Vec t = tanh(load(line + j) * (1.0f / unit));
      store(line + j, t * unit);
      if (slope != nullptr) store(slope + j, 1.0f - t * t);
    }
  }

  // The vectors of all offsets of a tile and a run (the first: of the last row and the run's first key), and zeros up to
  // whole panels, which end at the number that is returned.
  int64_t copy_vectors(const Tile& tile, const Run& run) {
    const float* from = c.vectors + it.head * c.number_count * c.width;
    const int64_t first = start + run.low - (tile.row_end - 1) - c.first_offset;
    const int64_t n = run.high - run.low + (tile.row_end - tile.row) - 1, padded = whole(n + 1, PANEL);
    for (int64_t o = 0; o < padded; ++o) {
      const int64_t at = first + o;
      float* to = vectors + o * width_row;
      if (o < n && at >= 0 && at < c.number_count) {
        std::memcpy(to, from + at * c.width, static_cast<size_t>(c.width) * 4);
        std::memset(to + c.width, 0, static_cast<size_t>(width_row - c.width) * 4);
      } else {
        std::memset(to, 0, static_cast<size_t>(width_row) * 4);
      }
    }
    return padded;
  }

  // The products of a tile's queries with these vectors.
  void multiply_vectors(const Tile& tile, const Run& run) {
    const int64_t number = tile.row_end - tile.row, padded = copy_vectors(tile, run);
    const Tokens rows_of_vectors{vectors, 0, 0, width_row, FLOAT32};
    for (int64_t o = 0; o < padded; o += PANEL) {
      pack_panel(rows_of_vectors, o * width_row, PANEL, c.width, row, vector_panel);
      column_panel<2>(number, c.width, tile_q, width_row, 1, vector_panel, PANEL, products + o, offset_row, false);
    }
  }

  // Which of W neighbouring weights of a row are kept by dropout, from the hash of the row: 1 / (1 - dropout) or 0.
  Vec kept(uint32_t of_row, int64_t key) const {
    Words x = {};
    for (int i = 0; i < W; ++i) x[i] = static_cast<uint32_t>(key + i);
    x = mixed(x * 0x9e3779b1u ^ of_row);
    const Ints size = from_words(x >> 8);  // 24 bits
    return size < c.keep ? all(1.0f / (1.0f - c.dropout)) : Vec{};
  }

  uint32_t hash_of_row(int64_t i) const {
    const uint32_t head = mixed(static_cast<uint32_t>(it.batch * c.heads + it.head) * 0x9e3779b1u ^
                                static_cast<uint32_t>(c.seed));
    return mixed(mixed(static_cast<uint32_t>(i) * 0x9e3779b1u ^ head) ^ static_cast<uint32_t>(c.seed >> 32));
  }

  // Adds weights times values to outputs: some rows of scores and the keys [low_key, high_key) of the chunk.
  void add_values(int64_t number, const float* line, int64_t low_key, int64_t high_key, float* to) {
    const int64_t end = high_key < size ? high_key : size;
#ifdef FAST_ATTENTION_AMX
    if (bf16) {
      const int64_t first = low_key / PANEL * PANEL, n = whole(high_key, PANEL) - first, before = low_key - first;
      uint16_t *high_parts = weights, *low_parts = weights + ROWS * chunk;
      for (int64_t i = 0; i < number; ++i) {
        if (before > 0) split_row(line, 0, before, high_parts + i * n, low_parts + i * n);
        split_row(line + i * score_row + low_key, high_key - low_key, n - before, high_parts + i * n + before,
                  low_parts + i * n + before);
      }
      for (int64_t p = first / PANEL; p * PANEL < high_key; ++p) {
        if (flags[p] & 2) continue;
        flags[p] |= 2;
        pack_rows(c.v, key(c.v, start + p * PANEL), size - p * PANEL, c.values, value_row,
                  value_pairs + p * PANEL * value_row);
      }
      registers.add(number, value_row, n, high_parts, low_parts, n, value_pairs + first * value_row, to);
      return;
    }
#endif
    int64_t distance;
    const float* values = value_rows(low_key, end, distance);
    product(number, value_row, end - low_key, line + low_key, score_row, 1, values + low_key * distance, distance, to,
            value_row, true);
  }

  const TilesCall& c;
  Item it;
  Scratch& m;
  int64_t chunk, row0, rows, group, width_row, value_row, score_row = 0, low, high, start = 0, size = 0,
                                                          groups_of_run = 0, offset_row = 0;
  int64_t tiles_begin = 0, tiles_end;  // that may see keys of the chunk
  const Range* ranges;
  const int32_t* places = nullptr;  // the item's rows that rows of tiles are; nullptr: one after another
  const float* tile_q = nullptr;    // queries of a tile
  float *q, *panels, *value_panels = nullptr, *scores, *row, *copied_values = nullptr, *copied_keys = nullptr,
                                *key_bias = nullptr, *vectors = nullptr, *products = nullptr,
                                *vector_panel = nullptr;
  uint8_t* flags;
  bool bf16 = false;
  int64_t part_row = 0;
  uint16_t *queries = nullptr, *weights = nullptr, *value_pairs = nullptr;
  const uint16_t* tile_parts = nullptr;
#ifdef FAST_ATTENTION_AMX
  TileRegisters registers;
#endif
};

// Powers of two of a row of scores below `top`, in place; their sum.
inline float powers(float* line, const Rows& hull, float top) {
  Vec added = {};
  for (int64_t j = hull.low; j < hull.high; j += W) {
    const Vec weight = exp2(load(line + j) - top);
    store(line + j, weight);
    added += weight;
  }
  return sum(added);
}

inline void forward_item(const TilesCall& c, const Item& item) {
  Scratch& m = scratch();
  TileWork work(c, item, m);
  const int64_t rows = work.rows, value_row = work.value_row;
  float* out = m.out.floats(rows * value_row);
  float *top = m.top.floats(rows), *total = m.total.floats(rows);
  for (int64_t i = 0; i < rows; ++i) top[i] = NOTHING, total[i] = 0.0f;
  std::memset(out, 0, static_cast<size_t>(rows * value_row) * 4);
  for (int64_t first = work.low / PANEL * PANEL; first < work.high; first += work.chunk) {
    work.begin_chunk(first);
    for (int64_t t = work.tiles_begin; t < work.tiles_end; ++t) {
      const Tile& tile = work.it.tiles[t];
      if (!work.find_runs(tile)) continue;
      work.find_groups(tile);
      const int64_t number = tile.row_end - tile.row, groups = work.groups_of_run;
      const int64_t step = c.vectors == nullptr ? (work.bf16 ? 2 : 1) : groups;  // products with vectors are of a whole tile
      for (int64_t g = 0; g < groups; g += step) {
        const int64_t end_group = g + step < groups ? g + step : groups;
        work.write_scores(tile, g, end_group, nullptr);
        const int64_t end_row = end_group * ROWS < number ? end_group * ROWS : number;
        for (int64_t i = g * ROWS; i < end_row; ++i) {  // a row of scores is in the first cache
          float* line = work.scores + (i - g * ROWS) * work.score_row;
          const int64_t at = work.at(tile, i);
          Vec most = all(NOTHING);
          for (size_t r = 0; r < m.runs.size(); ++r) {
            const Rows& hull = m.groups[r * groups + i / ROWS];
            for (int64_t j = hull.low; j < hull.high; j += W) most = larger(load(line + j), most);
          }
          const float before = top[at], here = largest(most), now = here > before ? here : before;
          float added = 0.0f;
          for (size_t r = 0; r < m.runs.size(); ++r) {
            const Rows& hull = m.groups[r * groups + i / ROWS];
            added += powers(line, hull, now == NOTHING ? 0.0f : now);
            if (c.dropout > 0.0f) {
              const uint32_t hash = work.hash_of_row(work.query_of(tile, i));
              for (int64_t j = hull.low; j < hull.high; j += W)
                store(line + j, load(line + j) * work.kept(hash, first + j));
            }
          }
          if (before != now && before != NOTHING) {
            const float decay = exp2(before - now);
            total[at] *= decay;
            for (int64_t e = 0; e < value_row; e += W) store(out + at * value_row + e, load(out + at * value_row + e) * decay);
          }
          total[at] += added;
          top[at] = now;
        }
        for (size_t r = 0; r < m.runs.size(); ++r)
          for (int64_t n = g; n < end_group; ++n) {
            const Rows& hull = m.groups[r * groups + n];
            if (hull.low >= hull.high) continue;
            const int64_t first_row = n * ROWS, rows_here = number - first_row < ROWS ? number - first_row : ROWS;
            work.add_to(tile, first_row, rows_here, value_row, out, [&](float* to) {
              work.add_values(rows_here, work.scores + (first_row - g * ROWS) * work.score_row, hull.low, hull.high, to);
            });
          }
      }
    }
  }
  float* sums = c.sums + ((item.batch * c.heads + item.head) * c.length + work.row0) * 2;
  for (int64_t i = 0; i < rows; ++i) {
    const bool none = total[i] == 0.0f;
    float factor = none ? 0.0f : 1.0f / total[i];
    if (c.sinks != nullptr) {  // last, so that keys keep what digits they have beside a sink that is far above them
      const float sink = c.sinks[item.head] * LOG2E, most = !none && top[i] > sink ? top[i] : sink;
      const float share = none ? 0.0f : std::exp2(top[i] - most);
      total[i] = total[i] * share + std::exp2(sink - most);
      top[i] = most;
      factor = share / total[i];
    }
    sums[2 * i] = total[i] == 0.0f ? 0.0f : top[i];
    sums[2 * i + 1] = total[i];
    write_row(c.out, work.query(c.out, work.row0 + i), c.values, factor, out + i * value_row);
  }
}

// Consecutive tiles of at least `rows` queries make one item.
inline void find_items(const TilesCall& c, int64_t rows, std::vector<Item>& items) {
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t row = 0; c.block > 0 && row < c.length; row += CHOOSING)
        items.push_back({b, h, row, row + CHOOSING < c.length ? row + CHOOSING : c.length, nullptr, 0});
      const Tile* tiles = c.tiles + b * c.tile_batch + h * c.tile_head;
      for (int64_t t = 0; t < c.tile_count;) {
        const int64_t first = t;
        for (++t; t < c.tile_count && tiles[t].row_end - tiles[first].row <= rows;) ++t;
        items.push_back({b, h, tiles[first].row, tiles[t - 1].row_end, tiles + first, t - first});
      }
    }
}

inline void tiles_forward(const TilesCall& c, const Pool& pool) {
  std::vector<Item> items;
  find_items(c, SEGMENT, items);
  parallel_items(pool, static_cast<int64_t>(items.size()), [&](int64_t i) { forward_item(c, items[i]); });
}

// dV = P^T dO; dS = P (dO V^T - D), D_i = dO_i out_i; dQ = scale dS K; dK = scale dS^T Q. One query head of a group.
inline void backward_item(const TilesCall& c, const TilesGradients& d, const Item& item) {
  Scratch& m = scratch();
  TileWork work(c, item, m);
  const int64_t rows = work.rows, width_row = work.width_row, value_row = work.value_row, chunk = work.chunk;
  work.value_panels = m.value_panels.floats(chunk * c.values);
  if (!whole_vectors(c.k, c.width)) work.copied_keys = m.keys.floats(chunk * width_row);
  float *grad = m.grad.floats(rows * value_row), *dq = m.dq.floats(rows * width_row);
  float *inner = m.inner.floats(rows), *slopes = m.gradients.floats(MOST_ROWS * work.score_row);
  float* slope = c.cap > 0.0f ? m.slopes.floats(MOST_ROWS * work.score_row) : nullptr;
  if (!d.part) std::memset(dq, 0, static_cast<size_t>(rows * width_row) * 4);
  for (int64_t i = 0; d.part && i < rows; ++i)
    read_row(d.dq, work.query(d.dq, work.row0 + i), c.width, width_row, 1.0f / (c.scale * LOG2E), dq + i * width_row);
  const float* sums = c.sums + ((item.batch * c.heads + item.head) * c.length + work.row0) * 2;
  for (int64_t i = 0; i < rows; ++i) {
    float* line = grad + i * value_row;
    read_row(d.grad_out, work.query(d.grad_out, work.row0 + i), c.values, value_row, 1.0f, line);
    read_row(c.out, work.query(c.out, work.row0 + i), c.values, value_row, 1.0f, work.row);
    inner[i] = inner_product(line, work.row, value_row);
  }
  float products[MOST_ROWS];  // sum_j P_ij dP_ij
  const int64_t head_keys = (item.batch * c.groups + work.group) * c.keys;
  float* d_numbers = nullptr;
  if (d.d_numbers != nullptr) d_numbers = m.d_numbers.floats(work.offset_row);
  float* d_products = c.vectors == nullptr ? nullptr : m.d_products.floats(MOST_ROWS * work.offset_row);
  float* d_vectors = d.d_vectors == nullptr ? nullptr : m.d_vectors.floats(work.offset_row * width_row);
  for (int64_t first = work.low / PANEL * PANEL; first < work.high; first += chunk) {
    work.begin_chunk(first);
    float *dk = d.dk + (head_keys + first) * d.dk_row, *dv = d.dv + (head_keys + first) * d.dv_row;
    for (int64_t t = work.tiles_begin; t < work.tiles_end; ++t) {
      const Tile& tile = work.it.tiles[t];
      if (!work.find_runs(tile)) continue;
      work.find_groups(tile);
      const int64_t number = tile.row_end - tile.row, groups = work.groups_of_run;
      const float *queries = work.tile_q, *tile_grad = work.rows_of(tile, grad, value_row, m.tile_grad);
      work.write_scores(tile, 0, groups, slope);
      const bool is_whole = !d.part && work.places == nullptr && work.ranges[tile.range].first >= first &&
                            work.ranges[tile.range_end - 1].end <= first + chunk;
      for (int64_t i = 0; i < number; ++i) products[i] = is_whole ? 0.0f : inner[work.at(tile, i)];
      for (size_t r = 0; r < m.runs.size(); ++r) {
        const Run& run = m.runs[r];
        work.each_panel(run, r * groups, 0, groups, number, [&](int64_t p) { return work.value_panel(p); },
                        [&](int64_t top_row, int64_t some, const Rows& hull, int64_t p, const float* panel) {  // dP = dO V^T
          work.half_panels(hull, p, some, c.values, tile_grad + top_row * value_row, value_row, panel,
                           slopes + top_row * work.score_row, work.score_row);
        });
        for (int64_t i = 0; i < number; ++i) {  // P and dP, in place of scores and dO V^T
          const Rows& hull = m.groups[r * groups + i / ROWS];
          float *line = work.scores + i * work.score_row, *slope_line = slopes + i * work.score_row;
          const float *of_row = sums + 2 * work.at(tile, i), top = of_row[0], total = of_row[1];
          const float share = total > 0.0f ? 1.0f / total : 0.0f;
          const uint32_t hash = c.dropout > 0.0f ? work.hash_of_row(work.query_of(tile, i)) : 0;
          Vec added = {};
          for (int64_t j = hull.low; j < hull.high; j += W) {
            const Vec weight = exp2(load(line + j) - top) * share;
            Vec dp = weight > 0.0f ? load(slope_line + j) : Vec{};
            if (c.dropout > 0.0f) dp *= work.kept(hash, first + j);
            added += weight * dp;
            store(line + j, weight);
            store(slope_line + j, dp);
          }
          if (is_whole) products[i] += sum(added);  // so rows of dS add up to 0 as nearly as can be
        }
      }
      for (size_t r = 0; r < m.runs.size(); ++r) {
        const Run& run = m.runs[r];
        if (d_numbers != nullptr) std::memset(d_numbers, 0, static_cast<size_t>(run.high - run.low + number + W) * 4);
        int64_t run_low = run.high, run_high = run.low;
        for (int64_t g = 0; g < groups; ++g) {
          const Rows& hull = m.groups[r * groups + g];  // an empty one is [run.high, run.low)
          if (hull.low < run_low) run_low = hull.low;
          if (hull.high > run_high) run_high = hull.high;
        }
        if (run_low >= run_high) continue;
        for (int64_t i = 0; i < number; ++i) {  // dS in place of dP, and what dropout keeps of P; zeros beyond the group
          const Rows& hull = m.groups[r * groups + i / ROWS];
          float *line = work.scores + i * work.score_row, *slope_line = slopes + i * work.score_row;
          const int64_t low = hull.low < hull.high ? hull.low : run_high, high = hull.low < hull.high ? hull.high : run_high;
          for (int64_t j = run_low; j < low; j += W) store(line + j, Vec{}), store(slope_line + j, Vec{});
          const uint32_t hash = c.dropout > 0.0f ? work.hash_of_row(work.query_of(tile, i)) : 0;
          for (int64_t j = low; j < high; j += W) {
            const Vec weight = load(line + j);
            store(slope_line + j, weight * (load(slope_line + j) - products[i]) * LN2);  // queries have log2 e
            if (c.dropout > 0.0f) store(line + j, weight * work.kept(hash, first + j));
          }
          for (int64_t j = high; j < run_high; j += W) store(line + j, Vec{}), store(slope_line + j, Vec{});
          if (d_numbers != nullptr) {
            float* offset = d_numbers + (number - 1 - i) - run.low;
            for (int64_t j = low; j < high; j += W) store(offset + j, load(offset + j) + load(slope_line + j));
          }
          if (c.vectors != nullptr) {
            float* of_row = d_products + i * work.offset_row;
            std::memset(of_row, 0, static_cast<size_t>(whole(run.high - run.low + number, PANEL)) * 4);
            for (int64_t j = low; j < high; j += W) store(of_row + (number - 1 - i) - run.low + j, load(slope_line + j));
          }
          if (slope != nullptr)
            for (int64_t j = low; j < high; j += W)
              store(slope_line + j, load(slope_line + j) * load(slope + i * work.score_row + j));
        }
        const int64_t begin = first + run.low - (tile.row_end - 1) - c.first_offset, n = run.high - run.low + number - 1;
        if (d_numbers != nullptr) {
          float* to = d.d_numbers + (item.batch * c.heads + item.head) * c.number_count;
          for (int64_t o = 0; o < n; ++o)
            if (begin + o >= 0 && begin + o < c.number_count) to[begin + o] += d_numbers[o] * LOG2E;
        }
        if (c.vectors != nullptr) {
          if (m.runs.size() > 1) work.copy_vectors(tile, run);  // write_scores left those of the last run
          product(number, width_row, n, d_products, work.offset_row, 1, work.vectors, width_row,
                  dq + work.at(tile, 0) * width_row, width_row, true);
          if (d.d_vectors != nullptr) {
            product(n, width_row, number, d_products, 1, work.offset_row, queries, width_row, d_vectors, width_row, false);
            float* to = d.d_vectors + (item.batch * c.heads + item.head) * c.number_count * c.width;
            for (int64_t o = 0; o < n; ++o)
              if (begin + o >= 0 && begin + o < c.number_count)
                for (int64_t e = 0; e < c.width; ++e) to[(begin + o) * c.width + e] += d_vectors[o * width_row + e];
          }
        }
        const int64_t end = run_high < work.size ? run_high : work.size;
        for (int64_t j = run_low; j < end; j += ROWS) {  // a row of ROWS keys, and the queries that see some of them
          int64_t first_group = groups, last_group = 0;
          for (int64_t g = 0; g < groups; ++g) {
            const Rows& hull = m.groups[r * groups + g];
            if (hull.low >= j + ROWS || hull.high <= j) continue;
            if (first_group == groups) first_group = g;
            last_group = g;
          }
          if (first_group == groups) continue;
          const int64_t top_row = first_group * ROWS, keys_here = end - j < ROWS ? end - j : ROWS;
          const int64_t end_row = (last_group + 1) * ROWS < number ? (last_group + 1) * ROWS : number;
          const int64_t from = top_row * work.score_row + j;
          product(keys_here, value_row, end_row - top_row, work.scores + from, 1, work.score_row,
                  tile_grad + top_row * value_row, value_row, dv + j * d.dv_row, d.dv_row, true);
          product(keys_here, width_row, end_row - top_row, slopes + from, 1, work.score_row, queries + top_row * width_row,
                  width_row, dk + j * d.dk_row, d.dk_row, true);
        }
        int64_t distance;
        const float* keys = work.key_rows(run_low, end, distance);
        for (int64_t g = 0; g < groups; ++g) {
          const Rows& hull = m.groups[r * groups + g];
          if (hull.low >= hull.high) continue;
          const int64_t last = hull.high < end ? hull.high : end;
          const int64_t first_row = g * ROWS, rows_here = number - first_row < ROWS ? number - first_row : ROWS;
          work.add_to(tile, first_row, rows_here, width_row, dq, [&](float* to) {
            product(rows_here, width_row, last - hull.low, slopes + first_row * work.score_row + hull.low, work.score_row, 1,
                    keys + hull.low * distance, distance, to, width_row, true);
          });
        }
      }
    }
  }
  for (int64_t i = 0; i < rows; ++i)
    write_row(d.dq, work.query(d.dq, work.row0 + i), c.width, c.scale * LOG2E, dq + i * width_row);
}

// Whether no two items of a head share a key unless they are neighbours, so that even and odd ones may run in turn.
inline bool neighbours_only(const TilesCall& c, const std::vector<Item>& items) {
  std::vector<int64_t> lows(items.size() + 2, c.keys);  // the first key of an item and of all later ones of its head
  std::vector<int64_t> highs(items.size(), 0);
  const auto same_head = [&](size_t a, size_t b) {
    return b < items.size() && items[a].head == items[b].head && items[a].batch == items[b].batch;
  };
  for (size_t n = items.size(); n-- > 0;) {
    if (same_head(n, n + 1)) lows[n] = lows[n + 1];
    for (int64_t t = 0; t < items[n].count; ++t) add_keys(items[n].tiles[t], c.ranges, lows[n], highs[n]);
  }
  for (size_t n = 0; n < items.size(); ++n)
    if (same_head(n, n + 2) && lows[n + 2] < highs[n]) return false;
  return true;
}

// Items of the heads of a group add to the same keys: one thread computes them one after another. So do neighbours,
// which take turns.
inline void tiles_backward(const TilesCall& c, const TilesGradients& d, const Pool& pool) {
  const int64_t repeats = c.heads / c.groups;
  std::vector<Item> items;
  if (c.block > 0 || d.d_numbers != nullptr || d.d_vectors != nullptr || (repeats > 1 && c.tile_head != 0)) {
    find_items(c, c.length, items);
  } else {
    for (int64_t rows = SEGMENT;; rows *= 2) {
      items.clear();
      find_items(c, rows, items);
      if (rows >= c.length || neighbours_only(c, items)) break;
    }
  }
  std::vector<std::vector<Item>> turns[2];  // what one thread computes one after another
  for (size_t i = 0; i < items.size();) {
    std::vector<std::vector<Item>> places;  // the items of the heads of a group, by their place in the sequence
    const Item first = items[i];
    for (size_t place = 0; i < items.size() && items[i].batch == first.batch &&
                           items[i].head / repeats == first.head / repeats; ++i, ++place) {
      if (place > 0 && (c.block > 0 || items[i].head != items[i - 1].head)) place = 0;
      if (place == places.size()) places.emplace_back();
      places[place].push_back(items[i]);
    }
    for (size_t place = 0; place < places.size(); ++place) turns[place % 2].push_back(std::move(places[place]));
  }
  for (const auto& turn : turns)
    if (!turn.empty())
      parallel_items(pool, static_cast<int64_t>(turn.size()), [&](int64_t n) {
        for (const Item& item : turn[n]) backward_item(c, d, item);
      });
}

}  // namespace FAST_ATTENTION_NAMESPACE
}  // namespace fast_attention
