// One step of a decoder-only transformer on a CPU: some tokens of some requests in, logits of some of them out.
//
// Compiled at first use by `serve.native`, which also says what the structures hold. Weights stand as float, bfloat16,
// or integers of 8 or 4 bits with scales; sums are of floats. A weight is read from memory once for all tokens of a
// step, which is what decoding waits for. The numbers of a token are summed in an order that depends on nothing else,
// so that an answer is the same, to the last bit, whatever is computed beside it.
//
// M tokens of a step, K inputs and N outputs of a matrix, D size of a head. Every K is a multiple of 16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 8;
constexpr int64_t kBlock = 8;  // rows of a matrix that are multiplied with all tokens, then the next
typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef float LooseVector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));

inline Vector load(const float* from) { return *reinterpret_cast<const LooseVector*>(from); }

// Eight small integers as wide ones. GCC makes several instructions of what the processor does in one.
#ifdef __AVX2__
inline Integers widen(const uint16_t* from) {
  return reinterpret_cast<Integers>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline Integers widen(const int8_t* from) {
  return reinterpret_cast<Integers>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Integers widen(const uint8_t* from) {
  return reinterpret_cast<Integers>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
#else
template <class Number>
inline Integers widen(const Number* from) {
  Integers wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = from[i];
  return wide;
}
#endif

inline float total(Vector v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

enum Kind : int64_t { kFloat = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

}  // namespace

extern "C" {

struct Matrix {  // N x K, row after row
  const void* data;
  const float* scales;  // of integers: one a row (int8), or N x K / group (int4)
  const float* bias;    // or null
  int64_t kind, rows, columns, group;
};

struct Layer {
  Matrix query, key, value, output, gate, up, down;
  const float *norm_before, *norm_after, *query_norm, *key_norm;  // the last two may be null
  float *keys, *values;                                           // slots x key heads x capacity x D
  int64_t window;                                                 // positions seen; 0: all
};

struct Model {
  int64_t layers, hidden, heads, key_heads, head_size, inner, capacity;
  float epsilon, scaling;
  const float* final_norm;
  Matrix head;
  Layer* layer;
};

}  // extern "C"

namespace {

// Eight weights of a row: those at column k (half 0), or the eight after them (half 1).
struct Floats {
  const float* data;
  int64_t columns;
  explicit Floats(const Matrix& m) : data(static_cast<const float*>(m.data)), columns(m.columns) {}
  inline const void* place(int64_t n, int64_t k) const { return data + n * columns + k; }
  template <int half>
  inline Vector eight(int64_t n, int64_t k) const {
    return load(data + n * columns + k + half * kLanes);
  }
  inline float after(int64_t) const { return 1.0f; }
};

struct Bfloats {
  const uint16_t* data;
  int64_t columns;
  explicit Bfloats(const Matrix& m) : data(static_cast<const uint16_t*>(m.data)), columns(m.columns) {}
  inline const void* place(int64_t n, int64_t k) const { return data + n * columns + k; }
  template <int half>
  inline Vector eight(int64_t n, int64_t k) const {
    return reinterpret_cast<Vector>(widen(data + n * columns + k + half * kLanes) << 16);
  }
  inline float after(int64_t) const { return 1.0f; }
};

struct Int8s {
  const int8_t* data;
  const float* scales;
  int64_t columns;
  explicit Int8s(const Matrix& m) : data(static_cast<const int8_t*>(m.data)), scales(m.scales), columns(m.columns) {}
  inline const void* place(int64_t n, int64_t k) const { return data + n * columns + k; }
  template <int half>
  inline Vector eight(int64_t n, int64_t k) const {
    return __builtin_convertvector(widen(data + n * columns + k + half * kLanes), Vector);
  }
  inline float after(int64_t n) const { return scales[n]; }
};

struct Int4s {  // byte i of eight holds the codes k + i (low) and k + 8 + i (high), each plus 8
  const uint8_t* data;
  const float* scales;
  int64_t columns, groups, group;
  explicit Int4s(const Matrix& m)
      : data(static_cast<const uint8_t*>(m.data)), scales(m.scales), columns(m.columns),
        groups(m.columns / m.group), group(m.group) {}
  inline const void* place(int64_t n, int64_t k) const { return data + (n * columns + k) / 2; }
  template <int half>
  inline Vector eight(int64_t n, int64_t k) const {
    const Integers both = widen(data + (n * columns + k) / 2);
    const Integers code = half ? both >> 4 : both & 15;
    return __builtin_convertvector(code - 8, Vector) * scales[n * groups + k / group];
  }
  inline float after(int64_t) const { return 1.0f; }
};

template <int half, class Weights, int R, int C>
inline void accumulate(const Weights& w, int64_t n, const float* x, int64_t columns, int64_t k, Vector (&sums)[R][C]) {
  Vector inputs[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) inputs[c] = load(x + c * columns + k + half * kLanes);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if (!half) __builtin_prefetch(w.place(n + r + kBlock, k));  // of the next rows, while these are multiplied
    const Vector weights = w.template eight<half>(n + r, k);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r][c] += weights * inputs[c];
  }
}

// R rows of weights times C tokens; sums stay in registers.
template <class Weights, int R, int C>
inline void tile(const Weights& w, const float* bias, int64_t n, const float* x, int64_t columns, float* y,
                 int64_t width) {
  Vector sums[R][C] = {};
  for (int64_t k = 0; k < columns; k += 2 * kLanes) {
    accumulate<0>(w, n, x, columns, k, sums);
    accumulate<1>(w, n, x, columns, k, sums);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      y[c * width + n + r] = total(sums[r][c]) * w.after(n + r) + (bias ? bias[n + r] : 0.0f);
}

// Rows first..last of the outputs, all tokens: a few rows of weights stay in the nearest cache for all of them.
template <class Weights>
void rows(const Matrix& m, const float* x, int64_t tokens, float* y, int64_t first, int64_t last) {
  const Weights w(m);
  const int64_t columns = m.columns, width = m.rows;
  for (int64_t block = first; block < last; block += kBlock) {
    const int64_t end = std::min(block + kBlock, last);
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4) {
      int64_t n = block;
      for (; n + 2 <= end; n += 2) tile<Weights, 2, 4>(w, m.bias, n, x + t * columns, columns, y + t * width, width);
      for (; n < end; ++n) tile<Weights, 1, 4>(w, m.bias, n, x + t * columns, columns, y + t * width, width);
    }
    for (; t + 2 <= tokens; t += 2) {
      int64_t n = block;
      for (; n + 4 <= end; n += 4) tile<Weights, 4, 2>(w, m.bias, n, x + t * columns, columns, y + t * width, width);
      for (; n < end; ++n) tile<Weights, 1, 2>(w, m.bias, n, x + t * columns, columns, y + t * width, width);
    }
    for (; t < tokens; ++t) {
      int64_t n = block;
      for (; n + 8 <= end; n += 8) tile<Weights, 8, 1>(w, m.bias, n, x + t * columns, columns, y + t * width, width);
      for (; n < end; ++n) tile<Weights, 1, 1>(w, m.bias, n, x + t * columns, columns, y + t * width, width);
    }
  }
}

struct Share {
  int64_t first, last;
};

// This thread's part of `count` things, in whole blocks.
inline Share share(int64_t count, int64_t block) {
  const int64_t blocks = (count + block - 1) / block, threads = omp_get_num_threads(), me = omp_get_thread_num();
  return {std::min(count, blocks * me / threads * block), std::min(count, blocks * (me + 1) / threads * block)};
}

// y (M x N) = x (M x K) times the matrix; every thread its rows of the matrix.
void multiply(const Matrix& m, const float* x, int64_t tokens, float* y) {
  const Share mine = share(m.rows, kBlock);
  switch (m.kind) {
    case kFloat: return rows<Floats>(m, x, tokens, y, mine.first, mine.last);
    case kBfloat16: return rows<Bfloats>(m, x, tokens, y, mine.first, mine.last);
    case kInt8: return rows<Int8s>(m, x, tokens, y, mine.first, mine.last);
    default: return rows<Int4s>(m, x, tokens, y, mine.first, mine.last);
  }
}

inline void normalize(const float* x, const float* weight, int64_t size, float epsilon, float* y) {
  Vector squares = {};
  for (int64_t i = 0; i < size; i += kLanes) squares += load(x + i) * load(x + i);
  const float factor = 1.0f / std::sqrt(total(squares) / size + epsilon);
  for (int64_t i = 0; i < size; ++i) y[i] = x[i] * factor * weight[i];
}

// Rotates the two halves of a head by the angles of its position.
inline void rotate(float* x, const float* cosines, const float* sines, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = b * cosines[i + half] + a * sines[i + half];
  }
}

inline float dot(const float* a, const float* b, int64_t size) {
  Vector sum = {};
  for (int64_t i = 0; i < size; i += kLanes) sum += load(a + i) * load(b + i);
  return total(sum);
}

// One head of one token over positions first..last of its request; `scores` has room for all of them.
void attend(const float* query, const float* keys, const float* values, int64_t first, int64_t last, int64_t size,
            float scaling, float* scores, float* out) {
  float largest = -INFINITY;
  for (int64_t j = first; j <= last; ++j) {
    scores[j] = dot(query, keys + j * size, size) * scaling;
    largest = std::max(largest, scores[j]);
  }
  float sum = 0;
#pragma omp simd
  for (int64_t j = first; j <= last; ++j) scores[j] = expf(scores[j] - largest);
  for (int64_t j = first; j <= last; ++j) sum += scores[j];
  std::fill(out, out + size, 0.0f);
  for (int64_t j = first; j <= last; ++j) {
    const float weight = scores[j] / sum;
    const float* value = values + j * size;
    for (int64_t i = 0; i < size; ++i) out[i] += weight * value[i];
  }
}

}  // namespace

// `x` is M x hidden, the embedded tokens, and is overwritten; `cosines` and `sines` are M x D; `slots` and `positions`
// say where each token belongs. Tokens of one slot come in order and follow what the slot holds. `wanted` names the
// tokens whose logits (each as wide as the head) are written. `scratch` has M * (2 * hidden + (2 * heads +
// 2 * key_heads) * D + 2 * inner) floats and threads * capacity more.
extern "C" void onecard_step(const Model* model, int64_t tokens, float* x, const float* cosines, const float* sines,
                             const int64_t* slots, const int64_t* positions, int64_t wanted_count,
                             const int64_t* wanted, float* logits, float* scratch, int64_t threads) {
  const int64_t hidden = model->hidden, size = model->head_size, heads = model->heads, key_heads = model->key_heads;
  const int64_t inner = model->inner, capacity = model->capacity, width = heads * size, key_width = key_heads * size;
  float* const normed = scratch;
  float* const added = normed + tokens * hidden;
  float* const query = added + tokens * hidden;
  float* const key = query + tokens * width;
  float* const value = key + tokens * key_width;
  float* const mixed = value + tokens * key_width;
  float* const gate = mixed + tokens * width;
  float* const up = gate + tokens * inner;
  float* const scores = up + tokens * inner;

#pragma omp parallel num_threads(threads)
  {
    float* const my_scores = scores + omp_get_thread_num() * capacity;
    const Share my_tokens = share(tokens, 1), my_heads = share(tokens * heads, 1);
    for (int64_t l = 0; l < model->layers; ++l) {
      const Layer& layer = model->layer[l];
      for (int64_t t = my_tokens.first; t < my_tokens.last; ++t)
        normalize(x + t * hidden, layer.norm_before, hidden, model->epsilon, normed + t * hidden);
#pragma omp barrier
      multiply(layer.query, normed, tokens, query);
      multiply(layer.key, normed, tokens, key);
      multiply(layer.value, normed, tokens, value);
#pragma omp barrier
      for (int64_t t = my_tokens.first; t < my_tokens.last; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
          float* const one = query + t * width + h * size;
          if (layer.query_norm) normalize(one, layer.query_norm, size, model->epsilon, one);
          rotate(one, cosines + t * size, sines + t * size, size);
        }
        for (int64_t h = 0; h < key_heads; ++h) {
          float* const one = key + t * key_width + h * size;
          if (layer.key_norm) normalize(one, layer.key_norm, size, model->epsilon, one);
          rotate(one, cosines + t * size, sines + t * size, size);
          const int64_t place = ((slots[t] * key_heads + h) * capacity + positions[t]) * size;
          std::memcpy(layer.keys + place, one, size * sizeof(float));
          std::memcpy(layer.values + place, value + t * key_width + h * size, size * sizeof(float));
        }
      }
#pragma omp barrier
      for (int64_t i = my_heads.first; i < my_heads.last; ++i) {
        const int64_t t = i / heads, h = i % heads, last = positions[t];
        const int64_t first = layer.window ? std::max<int64_t>(0, last - layer.window + 1) : 0;
        const int64_t place = (slots[t] * key_heads + h * key_heads / heads) * capacity * size;
        attend(query + i * size, layer.keys + place, layer.values + place, first, last, size, model->scaling,
               my_scores, mixed + i * size);
      }
#pragma omp barrier
      multiply(layer.output, mixed, tokens, added);
#pragma omp barrier
      for (int64_t t = my_tokens.first; t < my_tokens.last; ++t) {
        for (int64_t i = t * hidden; i < (t + 1) * hidden; ++i) x[i] += added[i];
        normalize(x + t * hidden, layer.norm_after, hidden, model->epsilon, normed + t * hidden);
      }
#pragma omp barrier
      multiply(layer.gate, normed, tokens, gate);
      multiply(layer.up, normed, tokens, up);
      // A thread has the same rows of both, so it needs to wait for nobody.
      const Share mine = share(inner, kBlock);
      for (int64_t t = 0; t < tokens; ++t) {
        float* const g = gate + t * inner;
        const float* const u = up + t * inner;
#pragma omp simd
        for (int64_t i = mine.first; i < mine.last; ++i) g[i] = g[i] / (1.0f + expf(-g[i])) * u[i];
      }
#pragma omp barrier
      multiply(layer.down, gate, tokens, added);
#pragma omp barrier
      for (int64_t t = my_tokens.first; t < my_tokens.last; ++t)
        for (int64_t i = t * hidden; i < (t + 1) * hidden; ++i) x[i] += added[i];
    }
#pragma omp barrier
    const Share my_wanted = share(wanted_count, 1);
    for (int64_t i = my_wanted.first; i < my_wanted.last; ++i)
      normalize(x + wanted[i] * hidden, model->final_norm, hidden, model->epsilon, normed + i * hidden);
#pragma omp barrier
    if (wanted_count) multiply(model->head, normed, wanted_count, logits);
  }
}
