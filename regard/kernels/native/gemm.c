/* y = act(x W^T + b) + add, x (m k) and y (m n) float32, W packed once by `linear_pack`.

   bf16 and int8 multiply in AMX tiles: W lies as stripes of 32 outputs, each a run of pairs of 1 KB tiles along k, in the
   order in which they are read, so that few rows stream W from memory once and many rows keep a stripe in the cache.
   float32 reads W as it is, with AVX-512. Called by native_linear.py, which says what it computes. */

#include "common.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FP32, BF16, INT8 };
enum { NONE, RELU, GELU, GELU_TANH, SILU };

typedef struct {
    int64_t kind, n, k, gated, act; /* n outputs of W: twice the outputs of y where gated */
    char *tiles;                    /* packed W; float32: W itself */
    const float *scale, *bias;      /* of each output; scale for int8 alone, bias or NULL */
} Linear;

typedef struct {
    uint8_t palette, start, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Config;

int amx_allowed(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

/* ---- activations: plain C that the compiler vectorises ---- */

static inline float exp_of(float x) { /* relative error below 2e-7; NaN stays NaN */
    x = x > 88.f ? 88.f : x;
    x = x < -87.f ? -87.f : x;
    float n = __builtin_rintf(x * 1.44269504f), r = __builtin_fmaf(n, -0.693359375f, x);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f), p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f), p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f), p = __builtin_fmaf(p, r * r, r + 1.f);
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return p * power.f;
}

static inline float erf_of(float x) { /* Abramowitz and Stegun 7.1.26, error below 2e-7 */
    float a = __builtin_fabsf(x), t = 1.f / (1.f + 0.3275911f * a), p = 1.061405429f;
    p = __builtin_fmaf(p, t, -1.453152027f), p = __builtin_fmaf(p, t, 1.421413741f);
    p = __builtin_fmaf(p, t, -0.284496736f), p = __builtin_fmaf(p, t, 0.254829592f);
    return __builtin_copysignf(1.f - p * t * exp_of(-a * a), x);
}

static void activate(float *y, int64_t n, int64_t act) {
    if (act == RELU)
        for (int64_t i = 0; i < n; i++) y[i] = y[i] < 0.f ? 0.f : y[i];
    else if (act == GELU)
        for (int64_t i = 0; i < n; i++) y[i] = 0.5f * y[i] * (1.f + erf_of(y[i] * 0.70710678f));
    else if (act == GELU_TANH)
        for (int64_t i = 0; i < n; i++)
            y[i] = y[i] / (1.f + exp_of(-1.5957691216f * (y[i] + 0.044715f * y[i] * y[i] * y[i])));
    else if (act == SILU)
        for (int64_t i = 0; i < n; i++) y[i] = y[i] / (1.f + exp_of(-y[i]));
}

/* Columns of a stripe: what their sums are multiplied by, what is added to them. */
typedef struct {
    float scale[32], bias[32];
    int64_t at, width; /* outputs of y: the first, how many */
} Stripe;

static inline __attribute__((always_inline)) void finish(
    float *got, const Stripe *s, int whole, int gated, int64_t act, float scale, int64_t width, const float *add, float *y) {
    if (whole)
        for (int j = 0; j < 32; j++) got[j] = (float)((int32_t *)got)[j] * (scale * s->scale[j]);
    for (int j = 0; j < 32; j++) got[j] += s->bias[j];
    activate(got, gated ? 16 : 32, act);
    if (gated)
        for (int j = 0; j < 16; j++) got[j] *= got[16 + j];
    if (add)
        for (int64_t j = 0; j < width; j++) y[j] = got[j] + add[j];
    else
        for (int64_t j = 0; j < width; j++) y[j] = got[j];
}

/* ---- packing ---- */

static int64_t depth(int64_t kind) { return kind == BF16 ? 32 : 64; } /* inputs of a tile */
static int64_t tiles_of(int64_t k, int64_t kind) { return (k + depth(kind) - 1) / depth(kind); }
static int64_t stripes(int64_t n, int64_t gated) { return gated ? (n / 2 + 15) / 16 : (n + 31) / 32; }
static uint16_t half_of(float x) { /* to nearest even */
    union { float f; uint32_t i; } u = {x};
    return x != x ? 0x7fc0 : (uint16_t)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}

int64_t linear_bytes(int64_t kind, int64_t n, int64_t k, int64_t gated) {
    return stripes(n, gated) * tiles_of(k, kind) * 2048;
}

void linear_pack(const Linear *l, const float *w) { /* tiles lie 2 MB aligned, untouched */
    madvise(l->tiles, linear_bytes(l->kind, l->n, l->k, l->gated), MADV_HUGEPAGE);
    int64_t many = tiles_of(l->k, l->kind), deep = depth(l->kind), each = deep / 16, half = l->n / 2;
#pragma omp parallel for
    for (int64_t s = 0; s < stripes(l->n, l->gated); s++)
        for (int64_t t = 0; t < many; t++)
            for (int64_t j = 0; j < 32; j++) {
                int64_t row = !l->gated ? 32 * s + j : (j < 16 ? 16 * s + j : half + 16 * s + j - 16);
                int real = !l->gated ? row < l->n : 16 * s + j % 16 < half;
                char *tile = l->tiles + (s * many + t) * 2048 + (j / 16) * 1024 + (j % 16) * 4;
                for (int64_t i = 0; i < deep; i++) {
                    float x = real && t * deep + i < l->k ? w[row * l->k + t * deep + i] : 0.f;
                    char *to = tile + (i / each) * 64;
                    if (l->kind == BF16)
                        ((uint16_t *)to)[i % each] = half_of(x);
                    else
                        to[i % each] = (int8_t)(real ? __builtin_rintf(x / l->scale[row]) : 0.f);
                }
            }
}

/* ---- x as rows of tiles ---- */

static void to_half(const float *x, int64_t k, int64_t room, uint16_t *to) {
    int64_t i = 0;
    for (; i + 32 <= k; i += 32)
        _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
    for (; i < k; i++) to[i] = half_of(x[i]);
    memset(to + k, 0, (room - k) * 2);
}

static float to_bytes(const float *x, int64_t k, int64_t room, int8_t *to) {
    float top = 0.f, sum = 0.f; /* the sum is NaN where a number is not finite */
    for (int64_t i = 0; i < k; i++) {
        float a = __builtin_fabsf(x[i]);
        top = a > top ? a : top, sum += a * 0.f;
    }
    float scale = sum == sum ? top / 127.f : NAN, back = top > 0.f && sum == sum ? 127.f / top : 0.f;
    for (int64_t i = 0; i < k; i++) to[i] = (int8_t)__builtin_rintf(sum == sum ? x[i] * back : 0.f);
    memset(to + k, 0, room - k);
    return scale;
}

/* ---- products ---- */

static void configure(Config *c, int rows) { /* 0-3 sums, 4-5 of x, 6-7 of W */
    memset(c, 0, sizeof *c);
    c->palette = 1;
    for (int i = 0; i < 8; i++) c->bytes[i] = 64, c->rows[i] = i < 6 ? rows : 16;
}

#define STEP(DP)                                                                                   \
    for (int64_t t = 0; t < many; t++, w += 2048, a += 64) {                                       \
        if (ahead)                                                                                 \
            for (int j = 0; j < 2048; j += 64) _mm_prefetch(w + ahead + j, _MM_HINT_T0);           \
        _tile_loadd(4, a, stride);                                                                 \
        _tile_loadd(6, w, 64);                                                                     \
        DP(0, 4, 6);                                                                               \
        _tile_loadd(7, w + 1024, 64);                                                              \
        DP(1, 4, 7);                                                                               \
        if (two) {                                                                                 \
            _tile_loadd(5, a + 16 * stride, stride);                                               \
            DP(2, 5, 6);                                                                           \
            DP(3, 5, 7);                                                                           \
        }                                                                                          \
    }

/* 32 outputs of 16 or 32 rows into sums (32 32) */
static void block(int kind, const char *a, int64_t stride, const char *w, int64_t many, int two, int64_t ahead, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (kind == BF16) { STEP(_tile_dpbf16ps) } else { STEP(_tile_dpbssd) }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    if (two) {
        _tile_stored(2, sums + 512, 128);
        _tile_stored(3, sums + 528, 128);
    }
}

static Stripe stripe_of(const Linear *l, int64_t number) {
    int64_t wide = l->gated ? 16 : 32, outs = l->gated ? l->n / 2 : l->n;
    Stripe s = {.at = number * wide};
    s.width = outs - s.at < wide ? outs - s.at : wide;
    for (int64_t j = 0; j < s.width * (l->gated ? 2 : 1); j++) {
        int64_t up = j >= s.width, row = up ? outs + s.at + j - s.width : s.at + j, to = up ? 16 + j - s.width : j;
        if (l->kind == INT8) s.scale[to] = l->scale[row];
        if (l->bias) s.bias[to] = l->bias[row];
    }
    return s;
}

static void rows_of(const Linear *l, const Stripe *s, int64_t count, float *sums, const float *scales, const float *add, float *y) {
    int64_t outs = l->gated ? l->n / 2 : l->n;
    for (int64_t i = 0; i < count; i++, sums += 32, y += outs, add = add ? add + outs : 0) {
        if (l->kind == INT8) {
            if (l->gated)
                finish(sums, s, 1, 1, l->act, scales[i], s->width, add, y);
            else if (s->width == 32)
                finish(sums, s, 1, 0, l->act, scales[i], 32, add, y);
            else
                finish(sums, s, 1, 0, l->act, scales[i], s->width, add, y);
        } else if (l->gated)
            finish(sums, s, 0, 1, l->act, 1.f, s->width, add, y);
        else if (s->width == 32)
            finish(sums, s, 0, 0, l->act, 1.f, 32, add, y);
        else
            finish(sums, s, 0, 0, l->act, 1.f, s->width, add, y);
    }
}

static void by_tiles(const Linear *l, const float *x, int64_t m, const float *add, float *y) {
    int64_t many = tiles_of(l->k, l->kind), room = (many | 1) * 64, all = stripes(l->n, l->gated);
    int64_t high = m <= 16 ? m : (m + 15) / 16 * 16, one = all * many * 2048 * (m < 64 ? 1 : m / 32) < 65536;
    int64_t outs = l->gated ? l->n / 2 : l->n;
    char *a = aligned_alloc(64, high * room);
    float *scales = malloc(m * sizeof(float));
    int threads = one ? 1 : omp_get_max_threads();
    if (high > m) memset(a + m * room, 0, (high - m) * room);
#pragma omp parallel num_threads(threads)
    {
        Config old, mine;
        float sums[1024] __attribute__((aligned(64)));
        _tile_storeconfig(&old);
        configure(&mine, high < 16 ? high : 16);
        _tile_loadconfig(&mine);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m; i++)
            if (l->kind == BF16)
                to_half(x + i * l->k, l->k, room / 2, (uint16_t *)(a + i * room));
            else
                scales[i] = to_bytes(x + i * l->k, l->k, room, (int8_t *)(a + i * room));
#pragma omp for schedule(dynamic, 4)
        for (int64_t number = 0; number < all; number++) {
            Stripe s = stripe_of(l, number);
            const char *w = l->tiles + number * many * 2048;
            for (int64_t i = 0; i < m; i += 32) {
                int64_t count = m - i < 32 ? m - i : 32, to = i * outs + s.at;
                block(l->kind, a + i * room, room, w, many, count > 16, i ? 0 : 8192, sums);
                rows_of(l, &s, count, sums, scales + i, add ? add + to : 0, y + to);
            }
        }
        if (old.palette)
            _tile_loadconfig(&old);
        else
            _tile_release();
    }
    free(a), free(scales);
}

/* float32: four outputs of up to six rows at a time */
static inline __attribute__((always_inline)) void dots(const float *const w[4], const float *x, int64_t k, int rows, float got[4][6]) {
    __m512 acc[4][6];
    for (int o = 0; o < 4; o++)
        for (int r = 0; r < rows; r++) acc[o][r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 16) {
        __mmask16 real = k - i < 16 ? (1 << (k - i)) - 1 : 0xffff;
        __m512 a[4];
        for (int o = 0; o < 4; o++) {
            a[o] = _mm512_maskz_loadu_ps(real, w[o] + i);
            _mm_prefetch((const char *)(w[o] + i) + 2048, _MM_HINT_T0);
        }
        for (int r = 0; r < rows; r++) {
            __m512 b = _mm512_maskz_loadu_ps(real, x + r * k + i);
            for (int o = 0; o < 4; o++) acc[o][r] = _mm512_fmadd_ps(a[o], b, acc[o][r]);
        }
    }
    for (int o = 0; o < 4; o++)
        for (int r = 0; r < rows; r++) got[o][r] = _mm512_reduce_add_ps(acc[o][r]);
}

static void by_rows(const Linear *l, const float *x, int64_t m, const float *add, float *y) {
    const float *w = (const float *)l->tiles;
    int64_t outs = l->gated ? l->n / 2 : l->n, each = l->gated ? 2 : 4;
    int threads = l->n * l->k < 65536 ? 1 : omp_get_max_threads();
#pragma omp parallel for schedule(dynamic, 32) num_threads(threads)
    for (int64_t g = 0; g < (outs + each - 1) / each; g++) {
        int64_t at = g * each, width = outs - at < each ? outs - at : each;
        const float *from[4];
        for (int o = 0; o < 4; o++) {
            int64_t row = l->gated ? at + o % 2 + (o / 2) * outs : at + o;
            int64_t most = l->gated ? outs * (1 + o / 2) : outs;
            from[o] = w + (row < most ? row : most - 1) * l->k;
        }
        for (int64_t i = 0; i < m; i += 6) {
            float got[4][6], line[4];
            switch (m - i) {
            case 1: dots(from, x + i * l->k, l->k, 1, got); break;
            case 2: dots(from, x + i * l->k, l->k, 2, got); break;
            case 3: dots(from, x + i * l->k, l->k, 3, got); break;
            case 4: dots(from, x + i * l->k, l->k, 4, got); break;
            case 5: dots(from, x + i * l->k, l->k, 5, got); break;
            default: dots(from, x + i * l->k, l->k, 6, got);
            }
            for (int64_t r = 0; r < 6 && i + r < m; r++) {
                int64_t to = (i + r) * outs + at;
                for (int o = 0; o < 4; o++) line[o] = got[o][r] + (l->bias ? l->bias[(from[o] - w) / l->k] : 0.f);
                activate(line, each, l->act);
                for (int64_t o = 0; o < width; o++)
                    y[to + o] = (l->gated ? line[o] * line[2 + o] : line[o]) + (add ? add[to + o] : 0.f);
            }
        }
    }
}

void linear(const Linear *l, const float *x, int64_t m, const float *add, float *y) {
    if (l->kind == FP32)
        by_rows(l, x, m, add, y);
    else
        by_tiles(l, x, m, add, y);
}

#else

int amx_allowed(void) { return 0; }

#endif
