// What lies between a step's matrix multiplies, each in one pass over its data.
// Plain functions on pointers: built in a second, called through ctypes (library.py).
// Sums are kept in float32 whatever the numbers are stored in. Shapes are those of
// cloud/engine/torch_ops.py, which says the same in torch.

#include <cstdint>
#include <cstring>
#include <cmath>

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float load(const float& x) { return x; }

inline float load(const BFloat16& x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Sixteen numbers at once, in whatever registers the processor has for them.
constexpr int64_t LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Floats load_lanes(const float* x) {
    Floats values;
    std::memcpy(&values, x, sizeof values);
    return values;
}

inline Floats load_lanes(const BFloat16* x) {
    Halves bits;
    std::memcpy(&bits, x, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float& target, float x) { target = x; }

// To the nearest, of two as near to the even one.
inline void store(BFloat16& target, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    // Rounding would carry a NaN's bits over into another number.
    target.bits = uint16_t((x == x ? rounded : bits | 0x400000) >> 16);
}

// e^x to 2 units in the last place, without branches so that loops over it are vectorised:
// 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes, expf.c). A NaN stays one.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float whole = std::rint(x * 1.44269504f);
    float r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t scale_bits = (int32_t(whole) + 127) << 23;
    float scale;
    std::memcpy(&scale, &scale_bits, 4);
    return p * scale;
}

template <typename T>
float mean_square(const T* x, int64_t width) {
    float sum = 0;
    for (int64_t i = 0; i < width; i++) sum += load(x[i]) * load(x[i]);
    return sum / width;
}

template <typename T>
void normalise(const T* x, const T* weight, T* out, int64_t width, float eps) {
    float scale = 1.0f / std::sqrt(mean_square(x, width) + eps);
    for (int64_t i = 0; i < width; i++) store(out[i], load(x[i]) * scale * load(weight[i]));
}

// x += delta where there is a delta; out = RMS norm of x.
template <typename T>
void rms_norm(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t width,
              float eps) {
#pragma omp parallel for if (rows > 8)
    for (int64_t row = 0; row < rows; row++) {
        T* own = x + row * width;
        if (delta)
            for (int64_t i = 0; i < width; i++)
                store(own[i], load(own[i]) + load(delta[row * width + i]));
        normalise(own, weight, out + row * width, width, eps);
    }
}

// silu(gate)·up of rows [gate, up].
template <typename T>
void gated(const T* gate_up, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows > 8)
    for (int64_t row = 0; row < rows; row++) {
        const T* gate = gate_up + 2 * row * width;
        for (int64_t i = 0; i < width; i++) {
            float x = load(gate[i]);
            store(out[row * width + i], x / (1.0f + exponential(-x)) * load(gate[width + i]));
        }
    }
}

// Turns queries and keys in place, behind their norm where there is one, and writes keys
// and values to the tokens' KV rows.
template <typename T>
void rotate(T* qkv, const T* cosine, const T* sine, const T* norm, float eps, T* kv,
            const int64_t* kv_rows, int64_t rows, int64_t heads, int64_t kv_heads,
            int64_t head_dim) {
    int64_t half = head_dim / 2, row_width = (heads + 2 * kv_heads) * head_dim;
    int64_t kv_width = 2 * kv_heads * head_dim;
#pragma omp parallel for if (rows > 8)
    for (int64_t row = 0; row < rows; row++) {
        T* own = qkv + row * row_width;
        const T *c = cosine + row * head_dim, *s = sine + row * head_dim;
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            T* x = own + head * head_dim;
            if (norm) normalise(x, norm + head * head_dim, x, head_dim, eps);
            for (int64_t i = 0; i < half; i++) {
                float low = load(x[i]), high = load(x[i + half]);
                store(x[i], low * load(c[i]) + high * load(s[i]));
                store(x[i + half], high * load(c[i + half]) + low * load(s[i + half]));
            }
        }
        std::memcpy(kv + kv_rows[row] * kv_width, own + heads * head_dim, kv_width * sizeof(T));
    }
}

// Where one thread keeps what it is at: float32 throughout.
struct Scratch {
    float* queries;  // [heads, head_dim], scaled.
    float* sums;     // [heads, head_dim].
    float* totals;   // [heads].
    float* scores;   // [heads, length].
};

struct Shape {
    int64_t heads, kv_heads, head_dim, block_tokens;
};

// Scores of some positions of one block, for each head: query times key.
template <int DIM, typename T>
void score_block(const T* rows, int64_t at, int64_t num, int64_t length, const Shape& shape,
                 const Scratch& scratch) {
    const int64_t dim = DIM ? DIM : shape.head_dim, row_width = 2 * shape.kv_heads * dim;
    for (int64_t head = 0; head < shape.heads; head++) {
        const float* query = scratch.queries + head * dim;
        const T* keys = rows + head / (shape.heads / shape.kv_heads) * dim;
        float* scores = scratch.scores + head * length + at;
        for (int64_t i = 0; i < num; i++) {
            float sum = 0;
            for (int64_t d = 0; d < dim; d++) sum += query[d] * load(keys[i * row_width + d]);
            scores[i] = sum;
        }
    }
}

// Adds some positions' values, each by its share, to each head's sums.
template <int DIM, typename T>
void sum_block(const T* rows, int64_t at, int64_t num, int64_t length, const Shape& shape,
               const Scratch& scratch) {
    const int64_t dim = DIM ? DIM : shape.head_dim, row_width = 2 * shape.kv_heads * dim;
    for (int64_t head = 0; head < shape.heads; head++) {
        const T* values = rows + (shape.kv_heads + head / (shape.heads / shape.kv_heads)) * dim;
        const float* shares = scratch.scores + head * length + at;
        float* sums = scratch.sums + head * dim;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            Floats sum = load_lanes(sums + d);
            for (int64_t i = 0; i < num; i++)
                sum += shares[i] * load_lanes(values + i * row_width + d);
            std::memcpy(sums + d, &sum, sizeof sum);
        }
        for (; d < dim; d++)
            for (int64_t i = 0; i < num; i++) sums[d] += shares[i] * load(values[i * row_width + d]);
    }
}

// One request's new position over all of its keys and values: a block at a time, which
// stays in the nearest cache for all heads. DIM is head_dim where it is known while
// compiling, else 0.
template <int DIM, typename T>
void attend_one(const T* query, const T* kv, const int64_t* blocks, int64_t length,
                const Shape& shape, const Scratch& scratch, T* out) {
    const int64_t dim = DIM ? DIM : shape.head_dim, size = shape.block_tokens;
    const float scale = 1.0f / std::sqrt(float(dim));
    for (int64_t i = 0; i < shape.heads * dim; i++) {
        scratch.queries[i] = load(query[i]) * scale;
        scratch.sums[i] = 0;
    }
    auto for_each_block = [&](auto work) {
        for (int64_t at = 0; at < length; at += size)
            work(kv + blocks[at / size] * size * 2 * shape.kv_heads * dim, at,
                 length - at < size ? length - at : size, length, shape, scratch);
    };
    for_each_block(score_block<DIM, T>);
    for (int64_t head = 0; head < shape.heads; head++) {
        float *own = scratch.scores + head * length, best = own[0], total = 0;
        for (int64_t at = 1; at < length; at++) best = own[at] > best ? own[at] : best;
        for (int64_t at = 0; at < length; at++) own[at] = exponential(own[at] - best);
        for (int64_t at = 0; at < length; at++) total += own[at];
        scratch.totals[head] = total;
    }
    for_each_block(sum_block<DIM, T>);
    // Divided only here: a small share of a large total would be a subnormal number, and slow.
    for (int64_t head = 0; head < shape.heads; head++)
        for (int64_t i = head * dim; i < (head + 1) * dim; i++)
            store(out[i], scratch.sums[i] / scratch.totals[head]);
}

// One new position of each of `num` requests over its own paged KV. `first_blocks` says
// where in `blocks` each one's table begins; a row of `qkv` begins with the queries.
template <typename T>
void attend(const T* qkv, const T* kv, const int64_t* blocks, const int64_t* first_blocks,
            const int64_t* lengths, int64_t num, int64_t longest, const Shape& shape, T* out) {
    const int64_t width = shape.heads * shape.head_dim;
    const int64_t row_width = width + 2 * shape.kv_heads * shape.head_dim;
    auto* attend_of = shape.head_dim == 64    ? attend_one<64, T>
                      : shape.head_dim == 128 ? attend_one<128, T>
                                              : attend_one<0, T>;
#pragma omp parallel if (num > 1)
    {
        float* memory = new float[2 * width + shape.heads * (1 + longest)];
        float* rest = memory + 2 * width;
        Scratch scratch{memory, memory + width, rest, rest + shape.heads};
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < num; row++)
            attend_of(qkv + row * row_width, kv, blocks + first_blocks[row], lengths[row], shape,
                      scratch, out + row * width);
        delete[] memory;
    }
}

}  // namespace

#define EXPORT(NAME, T)                                                                         \
    extern "C" void rms_norm_##NAME(T* x, const T* delta, const T* weight, T* out,              \
                                    int64_t rows, int64_t width, float eps) {                   \
        rms_norm(x, delta, weight, out, rows, width, eps);                                      \
    }                                                                                           \
    extern "C" void gated_##NAME(const T* gate_up, T* out, int64_t rows, int64_t width) {       \
        gated(gate_up, out, rows, width);                                                       \
    }                                                                                           \
    extern "C" void rotate_##NAME(T* qkv, const T* cosine, const T* sine, const T* norm,        \
                                  float eps, T* kv, const int64_t* kv_rows, int64_t rows,       \
                                  int64_t heads, int64_t kv_heads, int64_t head_dim) {          \
        rotate(qkv, cosine, sine, norm, eps, kv, kv_rows, rows, heads, kv_heads, head_dim);     \
    }                                                                                           \
    extern "C" void attend_##NAME(                                                              \
        const T* qkv, const T* kv, const int64_t* blocks, const int64_t* first_blocks,          \
        const int64_t* lengths, int64_t num, int64_t longest, int64_t heads,                    \
        int64_t kv_heads, int64_t head_dim, int64_t block_tokens, T* out) {                     \
        attend(qkv, kv, blocks, first_blocks, lengths, num, longest,                            \
               Shape{heads, kv_heads, head_dim, block_tokens}, out);                            \
    }

EXPORT(float32, float)
EXPORT(bfloat16, BFloat16)
