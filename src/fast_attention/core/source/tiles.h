// Softmax attention of tiles: some queries and the keys that they see, given as ranges of keys (interface.h).
//
// out_i = sum_j P_ij v_j, P_ij = exp(s_ij) / sum_j exp(s_ij), s_ij = scale q_i k_j + number[j - i].
// Scores are kept in units of log 2, so that an exponential is a power of two.
//
// Where every query chooses blocks of keys itself (Mixture of Block Attention, arXiv 2502.13189), a tile is some of the
// queries that see the same block, gathered, and a query's sums are those of all its tiles over a running maximum.
#pragma once
#include <cmath>
#include <vector>

#include "bf16.h"

namespace fast_attention::FAST_ATTENTION_NAMESPACE {

constexpr int64_t MOST_ROWS = 96;   // of a tile
constexpr int64_t MOST_KEYS = 512;  // that are packed together
constexpr int64_t SEGMENT = 288;    // queries of one item of work: they share packed keys
constexpr int64_t CHOOSING = 4096;  // queries of one item of work where they choose their keys
constexpr float NOTHING = -INFINITE;

// Keys that are packed together: 128 KiB, a part of the second cache. The scores of ROWS queries stay in the first.
inline int64_t chunk_keys(int64_t width) {
  const int64_t keys = 32768 / (width > 1 ? width : 1) / PANEL * PANEL;
  return std::clamp<int64_t>(keys, 2 * PANEL, MOST_KEYS);
}

// Keys that follow one another in whole panels, and the ranges in them; counted from the chunk's first key.
struct Run {
  int64_t low, high;
  int32_t range, range_end;
};

// One item of work: queries [row, row_end) of one head, which are consecutive tiles, or choose theirs, and the keys
// [low, high) that some of them may see.
struct Item {
  int64_t batch, head, row, row_end, low, high;
  const Tile* tiles;
  int64_t count;
};

// Keys or values of a chunk: in panels of columns, and in rows where those of the tensor do not serve. Both are made
// panel by panel at their first use, which `packed` and `copied` tell.
struct Side {
  const Tokens& x;
  int64_t numbers;
  float *panels, *rows;
  bool packed[MOST_KEYS / PANEL], copied[MOST_KEYS / PANEL];
};

class TileWork {
 public:
  TileWork(const TilesCall& call, const Item& item, bool backward)
      : c(call), it(item), chunk(chunk_keys(call.width)), row0(item.row),
        rows(item.row_end - item.row), group(item.head / (call.heads / call.groups)), width_row(whole(call.width, W)),
        value_row(whole(call.values, W)), score_row(chunk + PANEL), offset_row(chunk + MOST_ROWS + PANEL),
        mask(call.key_mask.at(item.batch, item.head)), ranges(call.ranges),
        sums(call.sums + ((item.batch * call.heads + item.head) * call.length + item.row) * 2) {
    if (c.block > 0) gather_tiles();
    tiles_end = places == nullptr ? it.count : 0;
    q = m.floats(rows * width_row);
    for (int64_t i = 0; i < rows; ++i)
      read_row(c.q, query(c.q, row0 + i), c.width, width_row, c.scale * LOG2E, q + i * width_row);
    scores = m.floats(MOST_ROWS * score_row), row = m.floats(std::max(width_row, value_row));
#ifdef FAST_ATTENTION_AMX
    bf16 = c.q.kind == BFLOAT16 && c.k.kind == BFLOAT16 && c.v.kind == BFLOAT16 && has_tile_registers();
    if (bf16) {
      part_row = whole(c.width, TERMS);
      queries = static_cast<uint16_t*>(m.bytes(rows * part_row * 2));
      weights = static_cast<uint16_t*>(m.bytes(2 * ROWS * chunk * 2));
      value_pairs = static_cast<uint16_t*>(m.bytes(chunk * value_row * 2));
      std::memset(queries, 0, static_cast<size_t>(rows * part_row) * 2);
      for (int64_t i = 0; i < rows; ++i)
        std::memcpy(queries + i * part_row, static_cast<const uint16_t*>(c.q.data) + query(c.q, row0 + i),
                    static_cast<size_t>(c.width) * 2);
    }
#endif
    keys.panels = m.floats(chunk * whole(c.width, TERMS)), values.panels = m.floats(backward ? chunk * c.values : 0);
    keys.rows = m.floats(whole_vectors(c.k, c.width) || !backward ? 0 : chunk * width_row);
    values.rows = m.floats(whole_vectors(c.v, c.values) || bf16 ? 0 : chunk * value_row);
    if (mask != nullptr) key_bias = m.floats(chunk);
    if (c.numbers != nullptr) numbers = m.floats(offset_row);
    if (c.vectors == nullptr) return;
    vectors = m.floats(offset_row * width_row), products = m.floats(MOST_ROWS * offset_row);
    vector_panel = m.floats(PANEL * c.width);
  }

  // Tiles of the queries that see the same block, their own or one that they chose, in the order of keys.
  void gather_tiles() {
    const int64_t first_position = c.keys - c.length, n = c.choice_count, blocks = (it.row_end - 1 + first_position) / c.block + 1;
    const int64_t* choices = c.choices + ((it.batch * c.heads + it.head) * c.length + row0) * n;
    int32_t *to = m.ints(rows * (n + 1)), *ends = m.ints(blocks);
    const auto every = [&](auto&& function) {
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t own = (row0 + i + first_position) / c.block;
        for (int64_t r = i * n; r < (i + 1) * n; ++r)
          if (choices[r] >= 0 && choices[r] < own) function(choices[r], i);
        function(own, i);
      }
    };
    std::memset(ends, 0, static_cast<size_t>(blocks) * 4);
    every([&](int64_t b, int64_t) { ++ends[b]; });
    for (int32_t b = 0, row = 0, end; b < blocks; ++b) {
      const int32_t first = static_cast<int32_t>(b * c.block), last = static_cast<int32_t>(std::min(first + c.block, c.keys));
      blocks_seen.push_back({first, last, INT32_MIN, static_cast<int32_t>(first_position), 0, 1});
      for (end = row + ends[b], ends[b] = row; row < end; row = tiles.back().row_end)
        tiles.push_back({row, std::min(end, row + static_cast<int32_t>(MOST_ROWS)), b, b + 1});
    }
    every([&](int64_t b, int64_t i) { to[ends[b]++] = static_cast<int32_t>(i); });
    places = to, ranges = blocks_seen.data(), it.tiles = tiles.data(), it.count = static_cast<int64_t>(tiles.size());
    it.low = ranges[tiles.front().range].first, it.high = ranges[tiles.back().range].end;
    gathered = m.floats(MOST_ROWS * std::max(width_row, whole(c.width, TERMS) / 2)), gathered_sums = m.floats(ROWS * std::max(width_row, value_row));
    gathered_grad = m.floats(MOST_ROWS * value_row), gathered_parts = m.floats(MOST_ROWS * whole(c.width, TERMS) / 2);
  }

  // The item's row that a tile's row i is, and its query.
  int64_t at(const Tile& tile, int64_t i) const { return places == nullptr ? tile.row - row0 + i : places[tile.row + i]; }
  int64_t query_of(const Tile& tile, int64_t i) const { return row0 + at(tile, i); }

  // A tile's rows of x, side by side: where they stand, or gathered.
  const float* rows_of(const Tile& tile, const float* x, int64_t n, float* to) const {
    if (places == nullptr) return x + (tile.row - row0) * n;
    for (int64_t i = 0; i < tile.row_end - tile.row; ++i)
      std::memcpy(to + i * n, x + at(tile, i) * n, static_cast<size_t>(n) * 4);
    return to;
  }

  // Calls add(rows) for M of a tile's rows of x from `first` on: where they stand, or elsewhere if they are gathered.
  template <class Function>
  void add_to(const Tile& tile, int64_t first, int64_t M, int64_t n, float* x, Function&& add) const {
    if (places == nullptr) return add(x + at(tile, first) * n);
    clear(gathered_sums, M * n);
    add(gathered_sums);
    for (int64_t i = 0; i < M; ++i) add_row(x + at(tile, first + i) * n, gathered_sums + i * n, n);
  }

  int64_t query(const Tokens& x, int64_t i) const { return x.at(it.batch, it.head, i); }
  int64_t key(const Tokens& x, int64_t j) const { return x.at(it.batch, group, j); }

  // Begins keys [first, first + chunk): nothing of them is packed yet.
  void begin_chunk(int64_t first) {
    start = first;
    size = std::min(c.keys - first, chunk);
    for (Side* side : {&keys, &values})
      for (int64_t p = 0; p < chunk / PANEL; ++p) side->packed[p] = side->copied[p] = false;
    if (places != nullptr) {
      while (tiles_end < it.count && ranges[it.tiles[tiles_end].range].first < start + size) ++tiles_end;
      while (tiles_begin < tiles_end && ranges[it.tiles[tiles_begin].range].end <= start) ++tiles_begin;
    }
    for (int64_t j = 0; j < chunk && mask != nullptr; ++j) key_bias[j] = j < size && mask[first + j] ? 0.0f : NOTHING;
  }

  // The runs of a tile in the chunk; false where it sees none of these keys.
  bool find_runs(const Tile& tile) {
    runs.clear();
    for (int32_t r = tile.range; r < tile.range_end; ++r) {
      const int64_t first = clamp(ranges[r].first - start), end = clamp(ranges[r].end - start);
      if (first >= end) continue;
      const Run run{first / PANEL * PANEL, whole(end, PANEL), r, r + 1};
      if (runs.empty() || run.low >= runs.back().high) {
        runs.push_back(run);
      } else {
        runs.back().high = std::max(runs.back().high, run.high);
        runs.back().range_end = r + 1;
      }
    }
    return !runs.empty();
  }

  int64_t clamp(int64_t key) const { return std::clamp<int64_t>(key, 0, size); }

  // The chunk's keys of a range that some of the queries [i, last] see; none unless first < end.
  Span seen(const Range& range, int64_t i, int64_t last) const {
    const int64_t first = std::max<int64_t>(i + range.low, range.first), end = std::min<int64_t>(last + range.high + 1, range.end);
    return {clamp(std::min<int64_t>(first, range.end - range.least) - start),
            clamp(std::max<int64_t>(end, range.first + range.least) - start)};
  }

  // The queries of a tile, and for every run and group of ROWS queries the hull of what they see, in whole vectors.
  void find_hulls(const Tile& tile) {
    tile_q = rows_of(tile, q, width_row, gathered);
    if (bf16) tile_parts = reinterpret_cast<const uint16_t*>(
        rows_of(tile, reinterpret_cast<const float*>(queries), part_row / 2, gathered_parts));
    number = tile.row_end - tile.row, groups = (number + ROWS - 1) / ROWS;
    hulls.clear();
    for (const Run& run : runs)
      in_steps({0, number}, ROWS, [&](int64_t i, int64_t n) {
        Span hull{run.high, run.low};
        for (int32_t r = run.range; r < run.range_end; ++r) {
          const Span keys = seen(ranges[r], query_of(tile, i), query_of(tile, i + n - 1));
          if (keys.first < keys.end) hull = {std::min(hull.first, keys.first), std::max(hull.end, keys.end)};
        }
        if (hull.first < hull.end) hull = {hull.first / W * W, whole(hull.end, W)};
        else hull.first = hull.end = run.high;
        hulls.push_back(hull);
      });
  }

  // What the group of row i of the tile sees of a run.
  const Span& hull_of(size_t run, int64_t i) const { return hulls[static_cast<int64_t>(run) * groups + i / ROWS]; }
  int64_t rows_from(int64_t i) const { return std::min<int64_t>(number - i, ROWS); }

  // Panel number p of the chunk: width * PANEL numbers, 8 KiB of the first cache; keys in bfloat16 are pairs of them.
  const float* panel(Side& side, int64_t p) {
    const bool pairs = bf16 && &side == &keys;
    const int64_t columns = pairs ? (side.numbers + 1) / 2 : side.numbers, padded = pairs ? part_row / 2 : columns;
    float* to = side.panels + p * PANEL * padded;
    if (side.packed[p]) return to;
    pack_panel(side.x, key(side.x, start + p * PANEL), size - p * PANEL, side.numbers, to, pairs);
    clear(to + columns * PANEL, (padded - columns) * PANEL);
    side.packed[p] = true;
    return to;
  }

  // Rows from the chunk's first key on, of which those of some keys are there.
  Rows key_rows(Side& side, int64_t low_key, int64_t high_key) {
    const Tokens& x = side.x;
    if (whole_vectors(x, side.numbers)) return {static_cast<float*>(x.data) + key(x, start), x.row};
    const Rows rows{side.rows, whole(side.numbers, W)};
    for (int64_t p = low_key / PANEL; p * PANEL < high_key; ++p) {
      for (int64_t j = p * PANEL; j < std::min((p + 1) * PANEL, size) && !side.copied[p]; ++j)
        read_row(x, key(x, start + j), side.numbers, rows.distance, 1.0f, rows[j]);
      side.copied[p] = true;
    }
    return rows;
  }

  // Products of the rows [from, to) of A, whole groups, and the keys or values of a run that some of a group see.
  void multiply(size_t r, int64_t from, int64_t to, const float* A, int64_t row, Side& side, float* C) {
    for (int64_t p = runs[r].low; p < runs[r].high; p += PANEL) {
      const float* packed = nullptr;  // it stays in the first cache for all groups
      for (int64_t i = from; i < to; i += ROWS) {
        const Span& hull = hull_of(r, i);
        if (hull.end <= p || hull.first >= p + PANEL) continue;
        if (packed == nullptr) packed = panel(side, p / PANEL);
        float* to_row = C + (i - from) * score_row + p;
#ifdef FAST_ATTENTION_AMX
        if (bf16 && &side == &keys) {
          registers.multiply(rows_from(i), part_row, c.scale * LOG2E, tile_parts + i * part_row,
                             reinterpret_cast<const uint16_t*>(packed), to_row, score_row);
          continue;
        }
#endif
        const int64_t half = hull.first >= p + W ? W : 0, N = hull.end <= p + W ? W : PANEL - half;  // of the columns, or all
        product(rows_from(i), N, side.numbers, A + i * row, row, 1, packed + half, PANEL, to_row + half, score_row, false);
      }
    }
  }

  // Scores of the rows [top_row, end_row) of a tile, whole groups, into `scores`, with what positions, caps and masks do;
  // minus infinity for keys that a row does not see.
  void write_scores(const Tile& tile, int64_t top_row, int64_t end_row, float* slope) {
    for (size_t r = 0; r < runs.size(); ++r) {
      const Run& run = runs[r];
      multiply(r, top_row, end_row, tile_q, width_row, keys, scores);
      const int64_t offsets = copy_offsets(tile, run, c.vectors, c.width, width_row, vectors);
      if (top_row == 0 || runs.size() > 1) copy_offsets(tile, run, c.numbers, 1, 1, numbers);
      for (int64_t o = 0; o < offsets; o += PANEL) {
        pack_panel({vectors, 0, 0, width_row, FLOAT32}, o * width_row, PANEL, c.width, vector_panel);
        column_panel<2>(number, c.width, tile_q, width_row, 1, vector_panel, PANEL, products + o, offset_row, false);
      }
      for (int64_t i = top_row; i < end_row; ++i) {
        const Span& hull = hull_of(r, i);
        if (hull.first >= hull.end) continue;
        float* line = scores + (i - top_row) * score_row;
        if (c.cap > 0.0f) cap_scores(line, hull, slope == nullptr ? nullptr : slope + (i - top_row) * score_row);
        const int64_t shift = number - 1 - i - run.low, seen_keys = hull.end - hull.first;  // of an offset and the key of it
        if (c.numbers != nullptr) add_row(line + hull.first, numbers + shift + hull.first, seen_keys, LOG2E);
        if (c.vectors != nullptr) add_row(line + hull.first, products + i * offset_row + shift + hull.first, seen_keys);
        int64_t position = hull.first;
        for (int32_t n = run.range; n < run.range_end; ++n) {
          const Span keys = seen(ranges[n], query_of(tile, i), query_of(tile, i));
          if (keys.first >= keys.end) continue;
          hide(line, position, keys.first);
          if (ranges[n].count != 1) {
            const float gain = std::log2(static_cast<float>(ranges[n].count));
            for (int64_t j = keys.first; j < keys.end; ++j) line[j] += gain;
          }
          position = std::max(position, keys.end);
        }
        hide(line, position, hull.end);
        if (mask != nullptr)
          for (int64_t j = hull.first; j < hull.end; j += W)
            store(line + j, load(key_bias + j) < 0.0f ? all(NOTHING) : load(line + j));
      }
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

  // In units of log 2: cap tanh(s / cap), and its slope.
  void cap_scores(float* line, const Span& hull, float* slope) const {
    const float unit = c.cap * LOG2E;
    for (int64_t j = hull.first; j < hull.end; j += W) {
      const Vec t = tanh(load(line + j) * (1.0f / unit));
      store(line + j, t * unit);
      if (slope != nullptr) store(slope + j, 1.0f - t * t);
    }
  }

  // The numbers or vectors of all offsets of a tile and a run (the first: of the last row and the run's first key), `width`
  // numbers each in rows of `row`, and zeros up to whole panels, which end at the number that is returned.
  int64_t copy_offsets(const Tile& tile, const Run& run, const float* from, int64_t width, int64_t row, float* to) const {
    if (from == nullptr) return 0;
    const int64_t first = start + run.low - (tile.row_end - 1) - c.first_offset;
    const int64_t n = run.high - run.low + number - 1, padded = whole(n + 1, PANEL);
    const int64_t low = std::max<int64_t>(0, -first), end = std::min(n, c.number_count - first);
    clear(to, padded * row);
    for (int64_t o = low, count; o < end; o += count) {
      count = row == width ? end - low : 1;
      std::memcpy(to + o * row, from + (it.head * c.number_count + first + o) * width, static_cast<size_t>(count * width) * 4);
    }
    return padded;
  }

  // W neighbouring weights of a row, or their gradients, times what dropout says by the hash of the row: 1 / (1 - dropout) or 0.
  Vec kept(Vec weights, uint32_t of_row, int64_t key) const {
    if (c.dropout == 0.0f) return weights;
    Words x = {};
    for (int i = 0; i < W; ++i) x[i] = static_cast<uint32_t>(key + i);
    x = mixed(x * 0x9e3779b1u ^ of_row);
    const Ints size = as<Ints>(x >> 8);  // 24 bits
    return weights * (size < c.keep ? all(1.0f / (1.0f - c.dropout)) : Vec{});
  }

  uint32_t hash_of_row(int64_t i) const {
    if (c.dropout == 0.0f) return 0;
    const uint32_t head = mixed(static_cast<uint32_t>(it.batch * c.heads + it.head) * 0x9e3779b1u ^
                                static_cast<uint32_t>(c.seed));
    return mixed(mixed(static_cast<uint32_t>(i) * 0x9e3779b1u ^ head) ^ static_cast<uint32_t>(c.seed >> 32));
  }

  // Adds weights times values to outputs: some rows of scores and the keys [low_key, high_key) of the chunk.
  void add_values(int64_t n, const float* line, int64_t low_key, int64_t high_key, float* to) {
    const int64_t end = std::min(high_key, size);
#ifdef FAST_ATTENTION_AMX
    if (bf16) {
      const int64_t first = low_key / PANEL * PANEL, terms = whole(high_key, PANEL) - first, before = low_key - first;
      uint16_t *high_parts = weights, *low_parts = weights + ROWS * chunk;
      for (int64_t i = 0; i < n; ++i) {
        uint16_t *high_part = high_parts + i * terms, *low_part = low_parts + i * terms;
        if (before > 0) split_row(line, 0, before, high_part, low_part);
        split_row(line + i * score_row + low_key, high_key - low_key, terms - before, high_part + before, low_part + before);
      }
      for (int64_t p = first / PANEL; p * PANEL < high_key; ++p) {
        uint16_t* pairs = value_pairs + p * PANEL * value_row;
        if (!values.packed[p]) pack_rows(c.v, key(c.v, start + p * PANEL), size - p * PANEL, c.values, value_row, pairs);
        values.packed[p] = true;
      }
      registers.add(n, value_row, terms, high_parts, low_parts, terms, value_pairs + first * value_row, to);
      return;
    }
#endif
    const Rows from = key_rows(values, low_key, end);
    product(n, value_row, end - low_key, line + low_key, score_row, 1, from[low_key], from.distance, to, value_row, true);
  }

  // Calls function(tile, first key of the chunk) for the tiles that see keys of a chunk, chunk by chunk.
  template <class Function>
  void each_tile(Function&& function) {
    for (int64_t first = it.low / PANEL * PANEL; first < it.high; first += chunk) {
      begin_chunk(first);
      for (int64_t t = tiles_begin; t < tiles_end; ++t) {
        if (!find_runs(it.tiles[t])) continue;
        find_hulls(it.tiles[t]);
        function(it.tiles[t], first);
      }
    }
  }

  Frame m;
  const TilesCall& c;
  Item it;
  std::vector<Run> runs;           // of a tile in the chunk
  std::vector<Span> hulls;         // of these, for every group of rows
  std::vector<Tile> tiles;         // where queries choose
  std::vector<Range> blocks_seen;
  const int64_t chunk, row0, rows, group, width_row, value_row, score_row, offset_row;
  int64_t start = 0, size = 0, number = 0, groups = 0;  // keys of the chunk; a tile's rows and groups of them
  int64_t tiles_begin = 0, tiles_end;  // that may see keys of the chunk
  const uint8_t* mask;
  const Range* ranges;
  float* sums;
  const int32_t* places = nullptr;  // the item's rows that rows of tiles are; nullptr: one after another
  const float* tile_q = nullptr;    // queries of a tile
  Side keys{c.k, c.width}, values{c.v, c.values};
  float *q, *scores, *row, *key_bias = nullptr, *numbers = nullptr, *vectors = nullptr, *products = nullptr, *vector_panel = nullptr,
      *gathered = nullptr, *gathered_sums = nullptr, *gathered_grad = nullptr, *gathered_parts = nullptr;
  bool bf16 = false;
  int64_t part_row = 0;
  uint16_t *queries = nullptr, *weights = nullptr, *value_pairs = nullptr;
  const uint16_t* tile_parts = nullptr;
#ifdef FAST_ATTENTION_AMX
  TileRegisters registers;
#endif
};

inline void forward_item(const TilesCall& c, const Item& item) {
  TileWork work(c, item, false);
  Frame m;
  const int64_t rows = work.rows, value_row = work.value_row;
  float *out = m.floats(rows * value_row), *sums = work.sums;
  for (int64_t i = 0; i < rows; ++i) sums[2 * i] = NOTHING, sums[2 * i + 1] = 0.0f;
  clear(out, rows * value_row);
  work.each_tile([&](const Tile& tile, int64_t first) {
    const int64_t number = work.number;
    const int64_t step = c.vectors != nullptr ? number : work.bf16 ? 2 * ROWS : ROWS;  // products with vectors: a whole tile
    in_steps({0, number}, step, [&](int64_t top_row, int64_t n) {
      const int64_t end_row = top_row + n;
      work.write_scores(tile, top_row, end_row, nullptr);
      for (int64_t i = top_row; i < end_row; ++i) {  // a row of scores is in the first cache
        float* line = work.scores + (i - top_row) * work.score_row;
        const int64_t at = work.at(tile, i);
        float &top = sums[2 * at], &total = sums[2 * at + 1];
        Vec most = all(NOTHING);
        for (size_t r = 0; r < work.runs.size(); ++r) {
          const Span& hull = work.hull_of(r, i);
          for (int64_t j = hull.first; j < hull.end; j += W) most = larger(load(line + j), most);
        }
        const float before = top, here = largest(most), now = here > before ? here : before;
        float added = 0.0f;
        for (size_t r = 0; r < work.runs.size(); ++r) {
          const Span& hull = work.hull_of(r, i);
          const bool drops = c.dropout > 0.0f;
          const uint32_t hash = work.hash_of_row(work.query_of(tile, i));
          Vec powers = {};
          for (int64_t j = hull.first; j < hull.end; j += W) {
            const Vec weight = exp2(load(line + j) - (now == NOTHING ? 0.0f : now));
            powers += weight;
            store(line + j, drops ? work.kept(weight, hash, first + j) : weight);
          }
          added += sum(powers);
        }
        if (before != now && before != NOTHING) {
          const float decay = exp2(before - now);
          total *= decay;
          scale_row(out + at * value_row, value_row, decay);
        }
        total += added;
        top = now;
      }
      for (size_t r = 0; r < work.runs.size(); ++r)
        for (int64_t i = top_row; i < end_row; i += ROWS) {
          const Span& hull = work.hull_of(r, i);
          if (hull.first >= hull.end) continue;
          work.add_to(tile, i, work.rows_from(i), value_row, out, [&](float* to) {
            work.add_values(work.rows_from(i), work.scores + (i - top_row) * work.score_row, hull.first, hull.end, to);
          });
        }
    });
  });
  for (int64_t i = 0; i < rows; ++i) {
    float &top = sums[2 * i], &total = sums[2 * i + 1];
    const bool none = total == 0.0f;
    float factor = none ? 0.0f : 1.0f / total;
    if (c.sinks != nullptr) {  // last, so that keys keep what digits they have beside a sink that is far above them
      const float sink = c.sinks[item.head] * LOG2E, most = !none && top > sink ? top : sink;
      const float share = none ? 0.0f : std::exp2(top - most);
      total = total * share + std::exp2(sink - most);
      top = most;
      factor = share / total;
    }
    if (total == 0.0f) top = 0.0f;
    write_row(c.out, work.query(c.out, work.row0 + i), c.values, factor, out + i * value_row);
  }
}

// The items of a call, and the first of every head.
struct Items {
  std::vector<Item> all;
  std::vector<size_t> firsts;
};

// Consecutive tiles of up to `rows` queries make one item.
inline Items find_items(const TilesCall& c, int64_t rows) {
  Items items;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads; ++h) {
      items.firsts.push_back(items.all.size());
      for (int64_t row = 0; c.block > 0 && row < c.length; row += CHOOSING)
        items.all.push_back({b, h, row, std::min(row + CHOOSING, c.length), 0, 0, nullptr, 0});
      const Tile* tiles = c.tiles + b * c.tile_batch + h * c.tile_head;
      for (int64_t t = 0; t < c.tile_count;) {
        Item item{b, h, tiles[t].row, 0, c.keys, 0, tiles + t, 0};
        for (; t < c.tile_count && (item.count == 0 || tiles[t].row_end - item.row <= rows); ++t, ++item.count)
          for (int32_t r = tiles[t].range; r < tiles[t].range_end; ++r) {
            item.low = std::min<int64_t>(item.low, c.ranges[r].first);
            item.high = std::max(item.high, std::min<int64_t>(c.ranges[r].end, c.keys));
          }
        item.row_end = tiles[t - 1].row_end;
        items.all.push_back(item);
      }
    }
  items.firsts.push_back(items.all.size());
  return items;
}

inline bool tiles_forward(const TilesCall& c, const Pool& pool) {
  const Items items = find_items(c, SEGMENT);
  return parallel_items(pool, static_cast<int64_t>(items.all.size()), [&](int64_t i) { forward_item(c, items.all[i]); });
}

// dV = P^T dO; dS = P (dO V^T - D), D_i = dO_i out_i; dQ = scale dS K; dK = scale dS^T Q. One query head of a group.
inline void backward_item(const TilesCall& c, const Item& item) {
  TileWork work(c, item, true);
  Frame m;
  const int64_t rows = work.rows, width_row = work.width_row, value_row = work.value_row, score_row = work.score_row;
  float *grad = m.floats(rows * value_row), *dq = m.floats(rows * width_row), *inner = m.floats(rows);
  float *slopes = m.floats(MOST_ROWS * score_row), *slope = c.cap > 0.0f ? m.floats(MOST_ROWS * score_row) : nullptr;
  float* d_numbers = c.d_numbers == nullptr ? nullptr : m.floats(work.offset_row);
  float* d_products = c.vectors == nullptr ? nullptr : m.floats(MOST_ROWS * work.offset_row);
  float* d_vectors = c.d_vectors == nullptr ? nullptr : m.floats(work.offset_row * width_row);
  float products[MOST_ROWS];  // sum_j P_ij dP_ij
  for (int64_t i = 0; i < rows; ++i) {
    float* line = grad + i * value_row;
    read_row(c.grad_out, work.query(c.grad_out, work.row0 + i), c.values, value_row, 1.0f, line);
    read_row(c.out, work.query(c.out, work.row0 + i), c.values, value_row, 1.0f, work.row);
    inner[i] = inner_product(line, work.row, value_row);
    if (c.part)
      read_row(c.dq, work.query(c.dq, work.row0 + i), c.width, width_row, 1.0f / (c.scale * LOG2E), dq + i * width_row);
    else
      clear(dq + i * width_row, width_row);
  }
  const int64_t head_numbers = (item.batch * c.heads + item.head) * c.number_count;
  work.each_tile([&](const Tile& tile, int64_t first) {
    float *dk = static_cast<float*>(c.dk.data) + work.key(c.dk, first), *dv = static_cast<float*>(c.dv.data) + work.key(c.dv, first);
    const int64_t number = work.number;
    const float *queries = work.tile_q, *tile_grad = work.rows_of(tile, grad, value_row, work.gathered_grad);
    work.write_scores(tile, 0, number, slope);
    const bool is_whole = !c.part && work.places == nullptr && work.ranges[tile.range].first >= first &&
                          work.ranges[tile.range_end - 1].end <= first + work.chunk;
    for (int64_t i = 0; i < number; ++i) products[i] = is_whole ? 0.0f : inner[work.at(tile, i)];
    for (size_t r = 0; r < work.runs.size(); ++r) {
      work.multiply(r, 0, number, tile_grad, value_row, work.values, slopes);  // dP = dO V^T
      for (int64_t i = 0; i < number; ++i) {  // P and dP, in place of scores and dO V^T
        const Span& hull = work.hull_of(r, i);
        float *line = work.scores + i * score_row, *slope_line = slopes + i * score_row;
        const float *of_row = work.sums + 2 * work.at(tile, i), top = of_row[0], total = of_row[1];
        const float share = total > 0.0f ? 1.0f / total : 0.0f;
        const uint32_t hash = work.hash_of_row(work.query_of(tile, i));
        Vec added = {};
        for (int64_t j = hull.first; j < hull.end; j += W) {
          const Vec weight = exp2(load(line + j) - top) * share;
          const Vec dp = work.kept(weight > 0.0f ? load(slope_line + j) : Vec{}, hash, first + j);
          added += weight * dp;
          store(line + j, weight);
          store(slope_line + j, dp);
        }
        if (is_whole) products[i] += sum(added);  // so rows of dS add up to 0 as nearly as can be
      }
    }
    for (size_t r = 0; r < work.runs.size(); ++r) {
      const Run& run = work.runs[r];
      if (d_numbers != nullptr) clear(d_numbers, run.high - run.low + number + W);
      for (int64_t i = 0; i < number; ++i) {  // dS in place of dP, and what dropout keeps of P; zeros beyond the group
        const int64_t low = work.hull_of(r, i).first, high = work.hull_of(r, i).end;
        float *line = work.scores + i * score_row, *slope_line = slopes + i * score_row;
        const uint32_t hash = work.hash_of_row(work.query_of(tile, i));
        for (float* x : {line, slope_line}) clear(x + run.low, low - run.low), clear(x + high, run.high - high);
        for (int64_t j = low; j < high; j += W) {
          const Vec weight = load(line + j);
          store(slope_line + j, weight * (load(slope_line + j) - products[i]) * LN2);  // queries have log2 e
          if (c.dropout > 0.0f) store(line + j, work.kept(weight, hash, first + j));
        }
        const int64_t shift = number - 1 - i - run.low;  // of an offset and the key of it
        if (d_numbers != nullptr) add_row(d_numbers + shift + low, slope_line + low, high - low);
        if (c.vectors != nullptr) {
          float* of_row = d_products + i * work.offset_row;
          clear(of_row, whole(run.high - run.low + number, PANEL));
          add_row(of_row + shift + low, slope_line + low, high - low);
        }
        for (int64_t j = low; j < high && slope != nullptr; j += W)
          store(slope_line + j, load(slope_line + j) * load(slope + i * score_row + j));
      }
      const int64_t begin = first + run.low - (tile.row_end - 1) - c.first_offset, n = run.high - run.low + number - 1;
      const Span given{std::max<int64_t>(0, -begin), std::min(n, c.number_count - begin)};  // offsets that have numbers
      if (d_numbers != nullptr)
        for (int64_t o = given.first; o < given.end; ++o) c.d_numbers[head_numbers + begin + o] += d_numbers[o] * LOG2E;
      if (c.vectors != nullptr) {
        if (work.runs.size() > 1)  // write_scores left those of the last run
          work.copy_offsets(tile, run, c.vectors, c.width, width_row, work.vectors);
        product(number, width_row, n, d_products, work.offset_row, 1, work.vectors, width_row,
                dq + work.at(tile, 0) * width_row, width_row, true);
        if (d_vectors != nullptr) {
          product(n, width_row, number, d_products, 1, work.offset_row, queries, width_row, d_vectors, width_row, false);
          for (int64_t o = given.first; o < given.end; ++o)
            for (int64_t e = 0; e < c.width; ++e)
              c.d_vectors[(head_numbers + begin + o) * c.width + e] += d_vectors[o * width_row + e];
        }
      }
      const int64_t end = std::min(run.high, work.size);
      in_steps({run.low, end}, ROWS, [&](int64_t j, int64_t keys_here) {  // ROWS keys, and the queries that see some of them
        int64_t first_row = number, last_row = 0;
        for (int64_t i = 0; i < number; i += ROWS) {
          const Span& hull = work.hull_of(r, i);
          if (hull.first >= j + ROWS || hull.end <= j) continue;
          first_row = std::min(first_row, i);
          last_row = i + work.rows_from(i);
        }
        if (first_row == number) return;
        const int64_t from = first_row * score_row + j;
        product(keys_here, value_row, last_row - first_row, work.scores + from, 1, score_row,
                tile_grad + first_row * value_row, value_row, dv + j * c.dv.row, c.dv.row, true);
        product(keys_here, width_row, last_row - first_row, slopes + from, 1, score_row, queries + first_row * width_row,
                width_row, dk + j * c.dk.row, c.dk.row, true);
      });
      const Rows keys = work.key_rows(work.keys, run.low, end);
      in_steps({0, number}, ROWS, [&](int64_t i, int64_t rows_here) {
        const Span& hull = work.hull_of(r, i);
        if (hull.first >= hull.end) return;
        work.add_to(tile, i, rows_here, width_row, dq, [&](float* to) {
          product(rows_here, width_row, std::min(hull.end, end) - hull.first, slopes + i * score_row + hull.first, score_row, 1,
                  keys[hull.first], keys.distance, to, width_row, true);
        });
      });
    }
  });
  for (int64_t i = 0; i < rows; ++i)
    write_row(c.dq, work.query(c.dq, work.row0 + i), c.width, c.scale * LOG2E, dq + i * width_row);
}

// Whether no two items of a head share a key unless they are neighbours, so that even and odd ones may run in turn.
inline bool neighbours_only(const Items& items) {
  for (size_t head = 0; head + 1 < items.firsts.size(); ++head) {
    int64_t low = INT64_MAX, next = INT64_MAX;  // the first key of all items behind the next one, and its own
    for (size_t n = items.firsts[head + 1]; n-- > items.firsts[head];) {
      if (low < items.all[n].high) return false;
      low = std::min(low, next), next = items.all[n].low;
    }
  }
  return true;
}

// Items of the heads of a group add to the same keys: one thread computes them one after another. So do neighbours,
// which take turns, and all items of a head whose queries choose their keys.
inline bool tiles_backward(const TilesCall& c, const Pool& pool) {
  const int64_t repeats = c.heads / c.groups;
  const bool by_head = c.block > 0 || c.d_numbers != nullptr || c.d_vectors != nullptr || (repeats > 1 && c.tile_head != 0);
  int64_t rows = by_head ? c.length : SEGMENT, most = 1;
  Items items = find_items(c, rows);
  while (rows < c.length && !neighbours_only(items)) items = find_items(c, rows *= 2);
  for (size_t head = 0; c.block == 0 && head + 1 < items.firsts.size(); ++head)
    most = std::max(most, static_cast<int64_t>(items.firsts[head + 1] - items.firsts[head]));
  for (int64_t turn = 0; turn < 2; ++turn)
    parallel_parts(pool, c.batch * c.groups, (most + 1 - turn) / 2, [&](int64_t group, int64_t n) {
      for (int64_t head = group * repeats; head < (group + 1) * repeats; ++head) {
        const size_t first = items.firsts[head] + 2 * n + turn, end = items.firsts[head + 1];
        for (size_t i = first; i < (c.block > 0 ? end : std::min(end, first + 1)); ++i) backward_item(c, items.all[i]);
      }
    });
  return true;
}

}  // namespace fast_attention::FAST_ATTENTION_NAMESPACE
