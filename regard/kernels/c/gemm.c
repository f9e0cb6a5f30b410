/* y = act(x W^T + b) + add, x (m k) and y (m n) float32, W packed once by `linear_pack`.

   bf16 and int8 multiply in AMX tiles: W lies as stripes of 32 outputs, each a run of pairs of 1 KB tiles along k, in
   the order in which they are read, so that few rows stream W from memory once and many rows keep a stripe in the
   cache. float32 reads W as it is, with AVX-512. Called by native_linear.py, which says what it computes. */

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
enum { FAR = 1 << 20 }; /* outputs that no cache near the core would keep */

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

/* ---- what follows a product ---- */

static inline __m512 exp_of(__m512 x) { /* relative error below 2e-7; NaN stays NaN */
    x = _mm512_min_ps(_mm512_set1_ps(88.f), _mm512_max_ps(_mm512_set1_ps(-87.f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x), p = _mm512_set1_ps(1.9875691500e-4f);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.f)));
    return _mm512_scalef_ps(p, n);
}

static inline __m512 over(__m512 x, __m512 z) { /* x / (1 + e^-z) */
    __m512 low = _mm512_add_ps(_mm512_set1_ps(1.f), exp_of(_mm512_sub_ps(_mm512_setzero_ps(), z)));
    return _mm512_div_ps(x, low);
}

static inline __m512 erf_of(__m512 x) { /* Abramowitz and Stegun 7.1.26, error below 2e-7 */
    __m512 one = _mm512_set1_ps(1.f), a = _mm512_abs_ps(x), p = _mm512_set1_ps(1.061405429f);
    __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(_mm512_set1_ps(0.3275911f), a, one));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
    __m512 e = exp_of(_mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), a), a));
    __m512 y = _mm512_fnmadd_ps(_mm512_mul_ps(p, t), e, one);
    __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_sub_ps(y, below, _mm512_setzero_ps(), y);
}

static inline __attribute__((always_inline)) __m512 activate(__m512 x, int act) {
    if (act == RELU) return _mm512_max_ps(_mm512_setzero_ps(), x); /* NaN stays: the second one is taken */
    if (act == SILU) return over(x, x);
    if (act == GELU) {
        __m512 e = erf_of(_mm512_mul_ps(x, _mm512_set1_ps(0.70710678f)));
        return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), _mm512_add_ps(e, _mm512_set1_ps(1.f)));
    }
    if (act == GELU_TANH) { /* x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) */
        __m512 z = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.0713548162f), _mm512_set1_ps(1.5957691216f));
        return over(x, _mm512_mul_ps(x, z));
    }
    return x;
}

/* The 32 columns of a stripe: what their sums are multiplied by, what is added to them, and where they go. */
typedef struct {
    __m512 scale[2], bias[2];
    __mmask16 real[2];
    int64_t at;
} Stripe;

static inline __attribute__((always_inline)) void put(float *y, __mmask16 real, __m512 x, const float *add, int past) {
    if (add) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(real, add));
    if (past)
        _mm512_stream_ps(y, x);
    else
        _mm512_mask_storeu_ps(y, real, x);
}

/* Sums (count 32), of float32 or, with `scales` of the rows, int32, to y; `past` the cache if nobody reads it soon. */
static inline __attribute__((always_inline)) void finish(
    const Stripe *s, const float *sums, int64_t count, const float *scales, const float *add, float *y, int64_t outs,
    int gated, int act, int past) {
    for (int64_t i = 0; i < count; i++, sums += 32, y += outs, add = add ? add + outs : 0) {
        __m512 a = _mm512_load_ps(sums), b = _mm512_load_ps(sums + 16);
        if (scales) {
            __m512 each = _mm512_set1_ps(scales[i]);
            a = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(a)), _mm512_mul_ps(each, s->scale[0]));
            b = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(b)), _mm512_mul_ps(each, s->scale[1]));
        }
        a = activate(_mm512_add_ps(a, s->bias[0]), act), b = _mm512_add_ps(b, s->bias[1]);
        if (gated) {
            put(y, s->real[0], _mm512_mul_ps(a, b), add, past);
        } else {
            put(y, s->real[0], a, add, past);
            put(y + 16, s->real[1], activate(b, act), add ? add + 16 : 0, past);
        }
    }
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

/* Memory that nobody has touched yet, 2 MB aligned: in huge pages W streams a fifth faster. */
void linear_room(char *start, int64_t bytes) { madvise(start, bytes, MADV_HUGEPAGE); }

/* Rows first.. of W, `count` of them, a multiple of 32 but for the last; all at once where gated. */
void linear_pack(const Linear *l, const float *w, int64_t first, int64_t count) {
    int64_t many = tiles_of(l->k, l->kind), deep = depth(l->kind), each = deep / 16, half = l->n / 2;
#pragma omp parallel for
    for (int64_t s = first / 32; s < first / 32 + stripes(count, l->gated); s++)
        for (int64_t t = 0; t < many; t++)
            for (int64_t j = 0; j < 32; j++) {
                int64_t row = !l->gated ? 32 * s + j : (j < 16 ? 16 * s + j : half + 16 * s + j - 16);
                int real = !l->gated ? row < l->n : 16 * s + j % 16 < half;
                char *tile = l->tiles + (s * many + t) * 2048 + (j / 16) * 1024 + (j % 16) * 4;
                for (int64_t i = 0; i < deep; i++) {
                    float x = real && t * deep + i < l->k ? w[(row - first) * l->k + t * deep + i] : 0.f;
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

/* Returns the scale: largest / 127, NaN where a number is not finite. */
static float to_bytes(const float *x, int64_t k, int64_t room, int8_t *to) {
    __m512 top = _mm512_setzero_ps(), sum = top; /* 0 times a number is 0, or else NaN */
    for (int64_t i = 0; i < k; i += 16) {
        __m512 a = _mm512_maskz_loadu_ps(k - i < 16 ? (1 << (k - i)) - 1 : 0xffff, x + i);
        top = _mm512_max_ps(top, _mm512_abs_ps(a)), sum = _mm512_fmadd_ps(a, _mm512_setzero_ps(), sum);
    }
    float most = _mm512_reduce_max_ps(top), bad = _mm512_reduce_add_ps(sum);
    float back = most > 0.f && bad == bad ? 127.f / most : 0.f;
    memset(to + k, 0, room - k);
    if (bad != bad) {
        memset(to, 0, k);
        return NAN;
    }
    for (int64_t i = 0; i < k; i += 16) {
        __mmask16 real = k - i < 16 ? (1 << (k - i)) - 1 : 0xffff;
        __m512 a = _mm512_mul_ps(_mm512_maskz_loadu_ps(real, x + i), _mm512_set1_ps(back));
        _mm512_mask_cvtsepi32_storeu_epi8(to + i, real, _mm512_cvtps_epi32(a));
    }
    return most / 127.f;
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
static void block(
    int kind, const char *a, int64_t stride, const char *w, int64_t many, int two, int64_t ahead, float *sums) {
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
    int64_t outs = l->gated ? l->n / 2 : l->n, at = number * (l->gated ? 16 : 32);
    Stripe s = {.at = at};
    for (int i = 0; i < 2; i++) {
        int64_t first = l->gated ? at : at + 16 * i, left = outs - first < 16 ? outs - first : 16;
        int64_t row = l->gated ? first + i * outs : first;
        s.real[i] = left <= 0 ? 0 : (1 << left) - 1;
        s.scale[i] = l->kind == INT8 ? _mm512_maskz_loadu_ps(s.real[i], l->scale + row) : _mm512_setzero_ps();
        s.bias[i] = l->bias ? _mm512_maskz_loadu_ps(s.real[i], l->bias + row) : _mm512_setzero_ps();
    }
    return s;
}

#define FINISH(ACT)                                                                                \
    case ACT:                                                                                      \
        if (l->gated)                                                                              \
            finish(s, sums, count, scales, add, y, outs, 1, ACT, 0);                               \
        else                                                                                       \
            finish(s, sums, count, scales, add, y, outs, 0, ACT, 0);                               \
        break;

static void rows_of(
    const Linear *l, const Stripe *s, int64_t count, const float *sums, const float *scales, const float *add, float *y,
    int past) {
    int64_t outs = l->gated ? l->n / 2 : l->n;
    if (past && s->real[0] == 0xffff && s->real[1] == 0xffff) {
        finish(s, sums, count, scales, add, y, outs, 0, NONE, 1);
        return;
    }
    switch (l->act) {
        FINISH(NONE)
        FINISH(RELU)
        FINISH(GELU)
        FINISH(GELU_TANH)
        FINISH(SILU)
    }
}

/* 0, or 1 where there is no memory for the rows of x. */
static int by_tiles(const Linear *l, const float *x, int64_t m, const float *add, float *y) {
    int64_t many = tiles_of(l->k, l->kind), room = (many | 1) * 64, all = stripes(l->n, l->gated);
    int64_t high = m <= 16 ? m : (m + 15) / 16 * 16, one = all * many * 2048 * (m < 64 ? 1 : m / 32) < 65536;
    int64_t outs = l->gated ? l->n / 2 : l->n;
    char *a = aligned_alloc(64, high * room);
    float *scales = malloc(m * sizeof(float));
    if (!a || !scales) {
        free(a), free(scales);
        return 1;
    }
    int threads = one ? 1 : omp_get_max_threads();
    int past = !l->gated && l->act == NONE && m * outs > FAR && outs % 16 == 0 && (uintptr_t)y % 64 == 0;
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
                const float *each = l->kind == INT8 ? scales + i : 0;
                rows_of(l, &s, count, sums, each, add ? add + to : 0, y + to, past);
            }
        }
        if (past) _mm_sfence();
        if (old.palette)
            _tile_loadconfig(&old);
        else
            _tile_release();
    }
    free(a), free(scales);
    return 0;
}

/* float32: four outputs of up to six rows at a time */
static inline __attribute__((always_inline)) void dots(
    const float *const w[4], const float *x, int64_t k, int rows, float got[4][6]) {
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

static __m512 switched(__m512 x, int64_t act) {
    switch (act) {
    case RELU: return activate(x, RELU);
    case GELU: return activate(x, GELU);
    case GELU_TANH: return activate(x, GELU_TANH);
    case SILU: return activate(x, SILU);
    }
    return x;
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
                __m512 sums = _mm512_maskz_loadu_ps(15, line), done = switched(sums, l->act);
                if (l->gated) done = _mm512_mul_ps(done, _mm512_permutexvar_ps(_mm512_set1_epi64(0x300000002), sums));
                put(y + to, (1 << width) - 1, done, add ? add + to : 0, 0);
            }
        }
    }
}

/* 0, or 1 where there is no memory; y is as it was then. */
int linear(const Linear *l, const float *x, int64_t m, const float *add, float *y) {
    if (!m) return 0; /* no tile has no rows */
    if (l->kind != FP32) return by_tiles(l, x, m, add, y);
    by_rows(l, x, m, add, y);
    return 0;
}

#else

int amx_allowed(void) { return 0; }

#endif
