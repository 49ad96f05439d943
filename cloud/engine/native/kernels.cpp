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
    // Adding and taking off 1.5·2^23 rounds to an integer, which stays in the low bits.
    float shifted = x * 1.44269504f + 12582912.0f;
    int32_t n;
    std::memcpy(&n, &shifted, 4);
    float whole = shifted - 12582912.0f;
    float r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t scale_bits = int32_t((uint32_t(n) + 127u) << 23);
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

// One KV head of one request: the queries of its group over all of its keys and values.
// DIM is head_dim where it is known while compiling, else 0. `scores` holds
// group·length numbers, `sums` group·head_dim, `one` head_dim.
template <int DIM, typename T>
void attend_group(const T* query, const T* kv, const int64_t* blocks, int64_t length,
                  int64_t block_tokens, int64_t kv_width, int64_t value_offset, int64_t group,
                  int64_t any_dim, float* queries, float* scores, float* sums, float* one,
                  T* out) {
    const int64_t dim = DIM ? DIM : any_dim;
    const float scale = 1.0f / std::sqrt(float(dim));
    for (int64_t i = 0; i < group * dim; i++) queries[i] = load(query[i]) * scale, sums[i] = 0;
    auto row_of = [&](int64_t at) {
        return kv + (blocks[at / block_tokens] * block_tokens + at % block_tokens) * kv_width;
    };
    for (int64_t at = 0; at < length; at++) {
        const T* key = row_of(at);
        for (int64_t i = 0; i < dim; i++) one[i] = load(key[i]);
        for (int64_t g = 0; g < group; g++) {
            float sum = 0;
            for (int64_t i = 0; i < dim; i++) sum += queries[g * dim + i] * one[i];
            scores[g * length + at] = sum;
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float *own = scores + g * length, best = own[0], total = 0;
        for (int64_t at = 1; at < length; at++) best = own[at] > best ? own[at] : best;
        for (int64_t at = 0; at < length; at++) own[at] = exponential(own[at] - best);
        for (int64_t at = 0; at < length; at++) total += own[at];
        for (int64_t at = 0; at < length; at++) own[at] /= total;
    }
    for (int64_t at = 0; at < length; at++) {
        const T* value = row_of(at) + value_offset;
        for (int64_t i = 0; i < dim; i++) one[i] = load(value[i]);
        for (int64_t g = 0; g < group; g++) {
            const float share = scores[g * length + at];
            for (int64_t i = 0; i < dim; i++) sums[g * dim + i] += share * one[i];
        }
    }
    for (int64_t i = 0; i < group * dim; i++) store(out[i], sums[i]);
}

// One new position of each of `num` requests over its own paged KV. `first_blocks` says
// where in `blocks` each one's table begins. `query_width` is that of a row of `qkv`.
template <typename T>
void attend(const T* qkv, int64_t query_width, const T* kv, const int64_t* blocks,
            const int64_t* first_blocks, const int64_t* lengths, int64_t num, int64_t longest,
            int64_t block_tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, T* out) {
    const int64_t group = heads / kv_heads, kv_width = 2 * kv_heads * head_dim;
    auto* attend_one = head_dim == 64    ? attend_group<64, T>
                       : head_dim == 128 ? attend_group<128, T>
                                         : attend_group<0, T>;
#pragma omp parallel
    {
        float* queries = new float[group * (longest + 2 * head_dim) + head_dim];
        float *sums = queries + group * head_dim, *one = sums + group * head_dim;
        float* scores = one + head_dim;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < num * kv_heads; task++) {
            int64_t row = task / kv_heads, head = task % kv_heads;
            attend_one(qkv + row * query_width + head * group * head_dim, kv + head * head_dim,
                       blocks + first_blocks[row], lengths[row], block_tokens, kv_width,
                       kv_heads * head_dim, group, head_dim, queries, scores, sums, one,
                       out + (row * heads + head * group) * head_dim);
        }
        delete[] queries;
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
        const T* qkv, int64_t query_width, const T* kv, const int64_t* blocks,                  \
        const int64_t* first_blocks, const int64_t* lengths, int64_t num, int64_t longest,      \
        int64_t block_tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, T* out) {      \
        attend(qkv, query_width, kv, blocks, first_blocks, lengths, num, longest, block_tokens, \
               heads, kv_heads, head_dim, out);                                                 \
    }

EXPORT(float32, float)
EXPORT(bfloat16, BFloat16)
