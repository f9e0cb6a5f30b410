/* y = act(x W^T + b) + add, x (m k) and y (m n) float32, W packed once by `linear_pack`.

   One layout of W serves every kind of number and every instruction set: stripes of 32 outputs, each a run of pairs of
   1 KB tiles along k, in the order in which they are read, so that few rows stream W from memory once and many rows
   keep a stripe in the cache. A line of a tile is 16 outputs times 4 bytes: one float32, two bf16 or four int8 of
   neighbouring inputs. x is laid out as blocks of rows, in each the tiles' inputs row by row. A kernel gives the sums of
   a block of rows and a stripe; what follows a product is done while they are in the cache. AMX has a kernel of its own,
   the others are one kernel over `step`, which says what an instruction set is good at. Called by linear.py. */

#include "best.h"

#include <float.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define TILES 1
#else
#define TILES 0
#endif

#define APART __attribute__((noinline)) /* large, and compiled faster alone */

enum { FP32, BF16, INT8, OPENED }; /* the last: int8 whose W was brought to 16 bits, for many rows */
enum { NONE, RELU, GELU, GELU_TANH, SILU };
enum {
    FAR = 1 << 20,  /* outputs that no cache near the core would keep */
    WORTH = 1 << 20 /* products of two numbers that are worth a second thread */
};

typedef struct {
    int64_t kind, n, k, gated, act; /* n outputs of W: twice the outputs of y where gated */
    char *tiles;                    /* packed W */
    const float *scale, *bias;      /* of each output; scale for int8 alone, bias or NULL */
} Linear;

/* ---- what instruction sets are good at ----

   `step` adds the products of a group of inputs, 4 bytes of each output in w, of a row in x:

   FLIP   int8 W is stored with this added, as the instruction takes one side unsigned; the sums begin lower by it
   WIDER  int8 x is stored in 16 bits, inputs 0 and 2 of a group before 1 and 3: sums of two products fit into 32 bits
   TAKE   groups of x that are read together, since a product can name one of them */

#if !TILES && (defined(__AVX512VNNI__) || defined(__AVXVNNI__))
enum { FLIP = 128, WIDER = 0 };
#elif !TILES && defined(__SSE2__)
enum { FLIP = 0, WIDER = 1 };
#else
enum { FLIP = 0, WIDER = 0 };
#endif

/* Rows and vectors of outputs whose sums fit into the registers. */
#if LANES == 16
enum { TAKE = 1, WIDE = 2, ROWS = 14, BYTE_ROWS = WIDER ? 12 : 14 };
#elif LANES == 8
enum { TAKE = 1, WIDE = 2, ROWS = 6, BYTE_ROWS = WIDER ? 4 : 6 };
#elif defined(__ARM_NEON)
enum { TAKE = 4, WIDE = 4, ROWS = 5, BYTE_ROWS = 5 };
#else
enum { TAKE = 1, WIDE = 4, ROWS = 3, BYTE_ROWS = 2 };
#endif

INLINE ints same(int32_t x) { return (ints){0} + x; }

#if defined(__SSE2__)
/* The sums of neighbouring pairs of 16-bit products. */
INLINE ints pairs(ints a, ints b) {
#if LANES == 16
    return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif LANES == 8
    return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
#endif

#if defined(__ARM_NEON) /* spelt out: the compiler would copy every sum, whose type changes */
#define NAMED(WORDS)                                                                               \
    {                                                                                              \
        if (lane == 0) __asm__(WORDS "[0]" : "+w"(sum) : "w"(w), "w"(four));                       \
        if (lane == 1) __asm__(WORDS "[1]" : "+w"(sum) : "w"(w), "w"(four));                       \
        if (lane == 2) __asm__(WORDS "[2]" : "+w"(sum) : "w"(w), "w"(four));                       \
        if (lane == 3) __asm__(WORDS "[3]" : "+w"(sum) : "w"(w), "w"(four));                       \
        return sum;                                                                                \
    }
#endif

INLINE ints step(ints sum, ints w, const char *x, const int lane, const int kind) {
#if defined(__ARM_NEON)
    ints four = (ints)vld1q_s8((const int8_t *)x);
    if (kind == FP32) NAMED("fmla %0.4s, %1.4s, %2.s")
#if defined(__ARM_FEATURE_DOTPROD)
    NAMED("sdot %0.4s, %1.16b, %2.4b")
#else
    for (int j = 0; j < 4; j++) sum += (w << (24 - 8 * j) >> 24) * (four[lane] << (24 - 8 * j) >> 24);
    return sum;
#endif
#else
    int32_t one, other;
    memcpy(&one, x, 4);
    (void)lane, (void)other;
    if (kind == FP32) return (ints)((vec)sum + (vec)w * (vec)same(one));
#if defined(__AVX512BF16__)
    if (kind == BF16) return (ints)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)same(one));
#endif
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)same(one));
#elif defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)same(one));
#else
    typedef int16_t narrow __attribute__((vector_size(sizeof(ints))));
    memcpy(&other, x + 4, 4);
    narrow even = (narrow)w << 8 >> 8, odd = (narrow)w >> 8;
    return sum + pairs((ints)even, same(one)) + pairs((ints)odd, same(other));
#endif
#endif
}

/* The same of W that is opened: the bytes of inputs 0 and 2, then of 1 and 3. */
INLINE ints step_opened(ints sum, ints even, ints odd, const char *x) {
#if defined(__SSE2__)
    int32_t one, other;
    memcpy(&one, x, 4);
    memcpy(&other, x + 4, 4);
    return sum + pairs(even, same(one)) + pairs(odd, same(other));
#else
    (void)even, (void)odd, (void)x;
    return sum;
#endif
}

/* Which kinds are multiplied, a bit each. */
int linear_kinds(void) {
#if TILES || defined(__AVX512BF16__)
    return 1 << FP32 | 1 << BF16 | 1 << INT8;
#else
    return 1 << FP32 | 1 << INT8;
#endif
}

/* ---- packing ---- */

static int64_t depth(int64_t kind) { return kind == FP32 ? 16 : kind == BF16 ? 32 : 64; } /* inputs of a tile */
static int64_t tiles_of(int64_t k, int64_t kind) { return (k + depth(kind) - 1) / depth(kind); }
static int64_t stripes(int64_t n, int64_t gated) { return gated ? (n / 2 + 15) / 16 : (n + 31) / 32; }
static int64_t piece(int64_t kind) { return kind == INT8 && WIDER ? 128 : 64; } /* bytes of a row of x for a tile */

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
                    if (l->kind == FP32)
                        memcpy(to, &x, 4);
                    else if (l->kind == BF16)
                        ((uint16_t *)to)[i % each] = to_bf16(x);
                    else
                        to[i % each] = (char)((int)(real ? __builtin_rintf(x / l->scale[row]) : 0.f) + FLIP);
                }
            }
}

/* ---- x as rows of tiles, which lie `apart` bytes from each other ---- */

static void to_half(const float *x, int64_t k, char *to, int64_t apart) {
    for (int64_t i = 0; i < k; i += 32, to += apart) {
        uint16_t *half = (uint16_t *)to;
#if defined(__AVX512BF16__)
        if (i + 32 <= k) {
            __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i));
            memcpy(half, &both, sizeof both);
            continue;
        }
#endif
        for (int64_t j = 0; j < 32; j++) half[j] = i + j < k ? to_bf16(x[i + j]) : 0;
    }
}

/* Adding this to a number below 2^22 leaves the nearest whole one in the lowest bits. */
static const float WHOLE = 12582912.f;

/* A tile's inputs, rounded; what sums begin with grows lower. */
INLINE void bytes_of(const float *x, float back, int8_t *to, int32_t *begin) {
    int8_t bytes[64];
    int32_t sum = 0;
    for (int j = 0; j < 64; j++) {
        float whole = x[j] * back + WHOLE;
        int32_t low;
        memcpy(&low, &whole, 4);
        bytes[j] = (int8_t)low;
    }
    if (WIDER) {
        int16_t *wide = (int16_t *)to;
        for (int j = 0; j < 64; j += 4) {
            wide[j] = bytes[j], wide[j + 1] = bytes[j + 2], wide[j + 2] = bytes[j + 1], wide[j + 3] = bytes[j + 3];
        }
    } else {
        memcpy(to, bytes, 64);
    }
    for (int j = 0; FLIP && j < 64; j++) sum += bytes[j];
    *begin -= FLIP * sum;
}

/* Returns the scale: largest / 127, NaN where a number is not finite. */
static float to_bytes(const float *x, int64_t k, char *to, int64_t apart, int32_t *begin) {
    int32_t top = 0, bits;
    for (int64_t i = 0; i < k; i++) { /* as whole numbers, sizes have the same order, and what is not finite is above */
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float most, rest[64] = {0};
    memcpy(&most, &top, 4);
    int finite = top < 0x7f800000;
    float back = finite && most > 1e-30f ? 127.f / most : 0.f;
    *begin = 0;
    for (int64_t i = 0; i < k; i += 64, to += apart) {
        const float *from = x + i;
        if (k - i < 64 || !finite) {
            memset(rest, 0, sizeof rest);
            if (finite) memcpy(rest, from, (size_t)(k - i < 64 ? k - i : 64) * 4);
            from = rest;
        }
        bytes_of(from, back, (int8_t *)to, begin);
    }
    return finite ? most / 127.f : NAN;
}

static void to_floats(const float *x, int64_t k, char *to, int64_t apart) {
    for (int64_t i = 0; i < k; i += 16, to += apart) {
        int64_t left = k - i < 16 ? k - i : 16;
        memcpy(to, x + i, (size_t)left * 4);
        memset(to + left * 4, 0, (size_t)(16 - left) * 4);
    }
}

/* ---- sums of a block of rows and a stripe ---- */

typedef struct {
    const char *x, *w;
    int64_t many, row, apart; /* tiles; bytes between the rows of x, and between its tiles */
    int64_t ahead;            /* how far before it is needed W is asked for: of memory farther than of the second cache */
    const int32_t *begin;     /* of each row */
    float *sums;              /* rows of 32 */
} Block;

/* `rows` of them. Few rows take the whole stripe at once, others as much of it as the registers hold. */
INLINE void multiply(const Block *b, const int rows, const int kind) {
    const int bytes = kind == INT8 || kind == OPENED, line = kind == OPENED ? 128 : 64;
    const int wide = 2 * rows <= (bytes ? BYTE_ROWS : ROWS) ? 32 / LANES : WIDE, group = bytes && WIDER ? 8 : 4;
    for (int part = 0; part < 32 / LANES; part += wide) {
        ints sum[ROWS][32 / LANES];
        const char *x = b->x, *w = b->w;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < wide; v++) sum[r][v] = same(kind == INT8 && FLIP ? b->begin[r] : 0);
        for (int64_t t = 0; t < b->many; t++, w += 32 * line, x += b->apart) {
#pragma GCC unroll 1
            for (int g = 0; g < 16; g += TAKE)
#pragma GCC unroll 4
                for (int lane = 0; lane < TAKE; lane++) {
                    ints now[32 / LANES], odd[32 / LANES];
#pragma GCC unroll 8
                    for (int v = 0; v < wide; v++) {
                        int at = (part + v) * LANES;
                        const char *from = w + (at / 16 * 16 + g + lane) * line + at % 16 * 4;
                        memcpy(now + v, from, sizeof(ints));
                        memcpy(odd + v, kind == OPENED ? from + 64 : from, sizeof(ints));
                        if (at % 16 == 0) __builtin_prefetch(from + b->ahead);
                    }
#pragma GCC unroll 16
                    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                        for (int v = 0; v < wide; v++) {
                            const char *from = x + (r * 16 + g) * group;
                            sum[r][v] = kind == OPENED ? step_opened(sum[r][v], now[v], odd[v], from)
                                                       : step(sum[r][v], now[v], from, lane, kind);
                        }
                }
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < wide; v++) memcpy(b->sums + r * 32 + (part + v) * LANES, &sum[r][v], sizeof(ints));
    }
}

#define CASE(ROWS_NOW, KIND)                                                                       \
    case ROWS_NOW: multiply(b, ROWS_NOW <= ROWS ? ROWS_NOW : ROWS, KIND); return;
#if LANES == 16
#define CASES(KIND)                                                                                \
    CASE(1, KIND) CASE(2, KIND) CASE(3, KIND) CASE(4, KIND) CASE(5, KIND) CASE(6, KIND)            \
    CASE(7, KIND) CASE(8, KIND) CASE(9, KIND) CASE(10, KIND) CASE(11, KIND) CASE(12, KIND)         \
    CASE(13, KIND) CASE(14, KIND)
#else
#define CASES(KIND) CASE(1, KIND) CASE(2, KIND) CASE(3, KIND) CASE(4, KIND) CASE(5, KIND) CASE(6, KIND)
#endif

static APART void multiply_floats(const Block *b, int64_t rows) {
    switch (rows) { CASES(FP32) }
}

#if !TILES
static APART void multiply_bytes(const Block *b, int64_t rows) {
    switch (rows) { CASES(INT8) }
}

#if defined(__SSE2__)
static APART void multiply_opened(const Block *b, int64_t rows) {
    switch (rows) { CASES(OPENED) }
}
#endif

#if defined(__AVX512BF16__)
static APART void multiply_halves(const Block *b, int64_t rows) {
    switch (rows) { CASES(BF16) }
}
#endif

#else

typedef struct {
    uint8_t palette, start, rest[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Config;

static void configure(Config *c, int rows) { /* 0-3 sums, 4-5 of x, 6-7 of W */
    memset(c, 0, sizeof *c);
    c->palette = 1;
    for (int i = 0; i < 8; i++) c->bytes[i] = 64, c->rows[i] = i < 6 ? rows : 16;
}

#define STEP(DP)                                                                                   \
    for (int64_t t = 0; t < b->many; t++, w += 2048, x += b->apart) {                              \
        if (b->ahead)                                                                              \
            for (int j = 0; j < 2048; j += 64) _mm_prefetch(w + b->ahead + j, _MM_HINT_T0);        \
        _tile_loadd(4, x, b->row);                                                                 \
        _tile_loadd(6, w, 64);                                                                     \
        DP(0, 4, 6);                                                                               \
        _tile_loadd(7, w + 1024, 64);                                                              \
        DP(1, 4, 7);                                                                               \
        if (two) {                                                                                 \
            _tile_loadd(5, x + 16 * b->row, b->row);                                               \
            DP(2, 5, 6);                                                                           \
            DP(3, 5, 7);                                                                           \
        }                                                                                          \
    }

static APART void multiply_tiles(const Block *b, int64_t rows, int64_t kind) {
    const char *x = b->x, *w = b->w;
    int two = rows > 16;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (kind == BF16) { STEP(_tile_dpbf16ps) } else { STEP(_tile_dpbssd) }
    _tile_stored(0, b->sums, 128);
    _tile_stored(1, b->sums + 16, 128);
    if (two) {
        _tile_stored(2, b->sums + 512, 128);
        _tile_stored(3, b->sums + 528, 128);
    }
}
#endif

/* Rows that a kernel takes together. */
static int64_t most_rows(int64_t kind) { return kind == FP32 ? ROWS : TILES ? 32 : kind == INT8 ? BYTE_ROWS : ROWS; }

static void sums_of(const Block *b, int64_t rows, int64_t kind) {
    if (kind == FP32) multiply_floats(b, rows);
#if TILES
    else
        multiply_tiles(b, rows, kind);
#else
    if (kind == INT8) multiply_bytes(b, rows);
#if defined(__SSE2__)
    if (WIDER && kind == OPENED) multiply_opened(b, rows);
#endif
#if defined(__AVX512BF16__)
    if (kind == BF16) multiply_halves(b, rows);
#endif
#endif
}

/* ---- what follows a product ---- */

INLINE vec over(vec x, vec z) { return x / (1.f + exp_of(-z)); } /* x / (1 + e^-z) */

INLINE vec erf_of(vec x) { /* Abramowitz and Stegun 7.1.26, error below 2e-7 */
    bits sign = (bits)x & 0x80000000u;
    vec a = (vec)((bits)x ^ sign), t = 1.f / (a * 0.3275911f + 1.f), p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    return (vec)((bits)(1.f - p * t * exp_of(-a * a)) | sign);
}

INLINE vec activate(vec x, const int act) {
    if (act == RELU) return larger(splat(0), x); /* NaN stays: the second one is taken */
    if (act == SILU) return over(x, x);
    if (act == GELU) return x * 0.5f * (erf_of(x * 0.70710678f) + 1.f);
    if (act == GELU_TANH) return over(x, x * (x * x * 0.0713548162f + 1.5957691216f));
    return x;
}

typedef struct {
    float scale[32], bias[32];
    int64_t at, left[2]; /* where its outputs go, and how many of each half are real */
} Stripe;

static Stripe stripe_of(const Linear *l, int64_t number) {
    int64_t outs = l->gated ? l->n / 2 : l->n, at = number * (l->gated ? 16 : 32);
    Stripe s = {.at = at};
    for (int i = 0; i < 2; i++) {
        int64_t first = l->gated ? at : at + 16 * i, left = outs - first < 16 ? outs - first : 16;
        int64_t row = l->gated ? first + i * outs : first;
        s.left[i] = left;
        size_t bytes = left > 0 ? (size_t)left * sizeof(float) : 0;
        if (l->kind == INT8) memcpy(s.scale + 16 * i, l->scale + row, bytes);
        if (l->bias) memcpy(s.bias + 16 * i, l->bias + row, bytes);
    }
    return s;
}

/* LANES outputs, or those that are left; `past` the cache if nobody reads it soon. */
INLINE void put(float *y, int64_t left, vec x, const float *add, const int past) {
    if (left >= LANES) {
        if (add) x += load(add);
#if LANES == 16
        if (past) _mm512_stream_ps(y, (__m512)x);
#elif LANES == 8
        if (past) _mm256_stream_ps(y, (__m256)x);
#endif
        if (!past || LANES == 4) store(y, x);
        return;
    }
    for (int64_t i = 0; i < left; i++) y[i] = x[i] + (add ? add[i] : 0.f);
}

/* Sums (count 32), of float32 or, with `scales` of the rows, int32, to y. */
INLINE void finish(const Stripe *s, const float *sums, int64_t count, const float *scales, const float *add, float *y,
                   int64_t outs, const int gated, const int act, const int past) {
    for (int64_t i = 0; i < count; i++, sums += 32, y += outs, add = add ? add + outs : 0)
        for (int v = 0; v < 16; v += LANES) {
            vec a = load(sums + v), b = load(sums + 16 + v);
            if (scales) {
                a = __builtin_convertvector((ints)a, vec) * (load(s->scale + v) * scales[i]);
                b = __builtin_convertvector((ints)b, vec) * (load(s->scale + 16 + v) * scales[i]);
            }
            a = activate(a + load(s->bias + v), act), b += load(s->bias + 16 + v);
            if (gated) {
                put(y + v, s->left[0] - v, a * b, add ? add + v : 0, past);
            } else {
                put(y + v, s->left[0] - v, a, add ? add + v : 0, past);
                put(y + 16 + v, s->left[1] - v, activate(b, act), add ? add + 16 + v : 0, past);
            }
        }
}

#define FINISH(ACT)                                                                                \
    case ACT:                                                                                      \
        if (l->gated)                                                                              \
            finish(s, sums, count, scales, add, y, outs, 1, ACT, 0);                               \
        else                                                                                       \
            finish(s, sums, count, scales, add, y, outs, 0, ACT, 0);                               \
        break;

/* To rows of y that lie `outs` numbers from each other. Once for all callers: another copy might round otherwise. */
static APART __attribute__((noclone)) void rows_of(const Linear *l, const Stripe *s, int64_t count, const float *sums, const float *scales,
                          const float *add, float *y, int64_t outs, int past) {
    if (past && s->left[0] == 16 && s->left[1] == 16) {
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

/* ---- rows of x as the kernels read them ---- */

/* Blocks of `high` rows, in memory of `whole` bytes each. */
typedef struct {
    int64_t high, blocks, row, apart, whole;
    char *x;
    float *scales;
    int32_t *begin;
} Rows;

static void let_go(Rows *r) { free(r->x), free(r->scales), free(r->begin); }

/* Memory for m rows; 0 if there is none. */
static int make_room(const Linear *l, int64_t m, Rows *r) {
    int64_t most = most_rows(l->kind), many = tiles_of(l->k, l->kind);
    int tiled = TILES && l->kind != FP32;
    /* Of the same height, but for tiles, which are best when they are full. A kernel finds the rows of a tile of inputs
       side by side; AMX takes them from afar, at a distance that is no power of two. */
    r->blocks = (m + most - 1) / most;
    r->high = tiled && m > 16 ? 32 : (m + r->blocks - 1) / r->blocks;
    r->row = tiled ? (many | 1) * 64 : piece(l->kind);
    r->apart = tiled ? 64 : r->high * r->row;
    r->whole = tiled ? r->high * r->row : many * r->apart;
    r->x = aligned_alloc(64, (size_t)(r->blocks * r->whole));
    r->scales = malloc((size_t)m * sizeof *r->scales);
    r->begin = malloc((size_t)m * sizeof *r->begin);
    if (r->x && r->scales && r->begin) return 1;
    let_go(r);
    return 0;
}

/* By all threads. */
static void fill(const Linear *l, const float *x, int64_t m, Rows *r) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < m; i++) {
        char *to = r->x + i / r->high * r->whole + i % r->high * r->row;
        if (l->kind == FP32) to_floats(x + i * l->k, l->k, to, r->apart);
        if (l->kind == BF16) to_half(x + i * l->k, l->k, to, r->apart);
        if (l->kind == INT8) r->scales[i] = to_bytes(x + i * l->k, l->k, to, r->apart, r->begin + i);
    }
}

/* Memory in which a thread opens a stripe of int8, where that pays: its rows then need no shifts. Or NULL. */
static char *room_to_open(const Linear *l, int64_t m) {
    return WIDER && l->kind == INT8 && m >= 16 ? aligned_alloc(64, (size_t)tiles_of(l->k, INT8) * 4096) : 0;
}

static void open_stripe(const Linear *l, int64_t number, char *to) {
    typedef int16_t narrow __attribute__((vector_size(sizeof(ints))));
    int64_t many = tiles_of(l->k, INT8);
    const char *w = l->tiles + number * many * 2048;
    for (const char *end = w + many * 2048; w < end; w += 64, to += 128) {
        __builtin_prefetch(w + 8192);
        for (int i = 0; i < 64; i += sizeof(narrow)) {
            narrow both, even, odd;
            memcpy(&both, w + i, sizeof both);
            even = both << 8 >> 8, odd = both >> 8;
            memcpy(to + i, &even, sizeof even);
            memcpy(to + 64 + i, &odd, sizeof odd);
        }
    }
}

/* Outputs of a stripe, which may be opened, for rows i.. of m, at most `high`: to y, `outs` numbers from row to row. */
INLINE int64_t outputs(const Linear *l, const Rows *r, const Stripe *s, int64_t number, const char *opened, int64_t i,
                       int64_t m, const float *add, float *y, int64_t outs, int past) {
    float sums[1024] __attribute__((aligned(64)));
    int64_t count = m - i < r->high ? m - i : r->high, many = tiles_of(l->k, l->kind);
    const char *w = l->tiles + number * many * 2048;
    Block b = {r->x + i / r->high * r->whole, w, many, r->row, r->apart, i ? 2048 : 8192, r->begin + i, sums};
    if (opened) b.w = opened, b.ahead = 4096;
    sums_of(&b, count, opened ? OPENED : l->kind);
    rows_of(l, s, count, sums, l->kind == INT8 ? r->scales + i : 0, add, y, outs, past);
    return count;
}

#if TILES
static void take_tiles(Config *old, int64_t high) {
    Config mine;
    _tile_storeconfig(old);
    configure(&mine, high < 16 ? high : 16);
    _tile_loadconfig(&mine);
}

static void give_tiles(const Config *old) {
    if (old->palette)
        _tile_loadconfig(old);
    else
        _tile_release();
}
#else
typedef int Config;
static void take_tiles(Config *old, int64_t high) { (void)old, (void)high; }
static void give_tiles(const Config *old) { (void)old; }
#endif

static int threads_for(const Linear *l, int64_t m) { return l->n * l->k * (m + 8) < WORTH ? 1 : omp_get_max_threads(); }

/* ---- the whole ---- */

/* 0, or 1 where there is no memory for the rows of x; y is as it was then. */
int linear(const Linear *l, const float *x, int64_t m, const float *add, float *y) {
    Rows r;
    if (!m) return 0;
    if (!make_room(l, m, &r)) return 1;
    int64_t all = stripes(l->n, l->gated), outs = l->gated ? l->n / 2 : l->n;
    int past = !l->gated && l->act == NONE && m * outs > FAR && outs % 16 == 0 && (uintptr_t)y % 64 == 0;
#pragma omp parallel num_threads(threads_for(l, m))
    {
        Config old;
        char *open = room_to_open(l, m);
        take_tiles(&old, r.high);
        fill(l, x, m, &r);
#pragma omp for schedule(dynamic, 4)
        for (int64_t number = 0; number < all; number++) {
            Stripe s = stripe_of(l, number);
            if (open) open_stripe(l, number, open);
            for (int64_t i = 0; i < m; i += r.high) {
                int64_t to = i * outs + s.at;
                outputs(l, &r, &s, number, open, i, m, add ? add + to : 0, y + to, outs, past);
            }
        }
#if defined(__SSE2__)
        if (past) _mm_sfence();
#endif
        give_tiles(&old);
        free(open);
    }
    let_go(&r);
    return 0;
}

/* ---- the best outputs of each row ---- */

enum { RUN = 16 }; /* stripes whose outputs are summed as floats, by one thread: a row's bits do not depend on threads */

/* What linear.best packs. */
struct top {
    int64_t m, k, bans, left; /* left: the sum is of what bans leave */
    const float *x;
    const int64_t *banned;
    float *norm, *values;
    int64_t *ids;
};

/* Of a row, over a run: the sum of e^(output - most). */
typedef struct {
    vec sum;
    float most;
} Share;

/* 32 outputs of a row, from number `id` on; those past the last one are -inf. */
INLINE void offer_stripe(struct best *b, Share *c, const float *x, int64_t id, int64_t left) {
    vec top = splat(-INFINITY);
#pragma GCC unroll 8
    for (int v = 0; v < 32; v += LANES) top = larger(load(x + v), top);
    if (b->count < b->k || above(top, b->values[b->k - 1])) look(b, x, id, left < 32 ? left : 32);
    if (above(top, c->most)) {
        float now = largest(top);
        c->sum *= expf(c->most - now);
        c->most = now;
    }
    vec sum = c->sum;
#pragma GCC unroll 8
    for (int v = 0; v < 32; v += LANES) sum += exp_below(load(x + v) - c->most);
    c->sum = sum;
}

/* The k best of what every thread found. */
static void merge(const struct top *t, struct best *each, int64_t threads, int64_t row) {
    int64_t next[threads];
    memset(next, 0, sizeof next);
    for (int64_t j = 0; j < t->k; j++) {
        int64_t from = -1;
        for (int64_t i = 0; i < threads; i++) {
            const struct best *b = each + i * t->m + row;
            if (next[i] == b->count) continue;
            const struct best *a = from < 0 ? b : each + from * t->m + row;
            float x = b->values[next[i]], y = from < 0 ? x : a->values[next[from]];
            if (from < 0 || x > y || (x == y && b->ids[next[i]] < a->ids[next[from]])) from = i;
        }
        const struct best *b = each + from * t->m + row;
        t->values[row * t->k + j] = b->values[next[from]];
        t->ids[row * t->k + j] = b->ids[next[from]++];
    }
}

/* Of act(x W^T + b), which is not written: log sum exp of each row, its k largest outputs and their numbers. 0, or 1
   where there is no memory. */
int linear_best(const Linear *l, const struct top *t) {
    Rows r;
    if (!t->m) return 0;
    if (!make_room(l, t->m, &r)) return 1;
    int64_t all = stripes(l->n, 0), runs = (all + RUN - 1) / RUN, threads = threads_for(l, t->m), m = t->m, k = t->k;
    float *most = malloc((size_t)(runs * m) * sizeof *most), *values = malloc((size_t)(threads * m * k) * sizeof *values);
    double *sum = malloc((size_t)(runs * m) * sizeof *sum);
    int64_t *ids = malloc((size_t)(threads * m * k) * sizeof *ids);
    struct best *each = malloc((size_t)(threads * m) * sizeof *each);
    Share *shares = aligned_alloc(64, (size_t)(threads * m * (int64_t)sizeof *shares + 63) / 64 * 64);
    int short_of = !most || !values || !sum || !ids || !each || !shares;
    for (int64_t i = 0; !short_of && i < threads * m; i++)
        each[i] = (struct best){0, k, t->bans, t->banned, values + i * k, ids + i * k};
#pragma omp parallel num_threads(short_of ? 1 : threads) if (!short_of)
    if (!short_of) {
        Config old;
        char *open = room_to_open(l, m);
        take_tiles(&old, r.high);
        fill(l, t->x, m, &r);
        struct best *mine = each + omp_get_thread_num() * m;
        Share *share = shares + omp_get_thread_num() * m;
        float y[1024] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, 1)
        for (int64_t run = 0; run < runs; run++) {
            for (int64_t i = 0; i < m; i++) share[i] = (Share){splat(0), -FLT_MAX};
            for (int64_t number = run * RUN; number < all && number < (run + 1) * RUN; number++) {
                Stripe s = stripe_of(l, number);
                int64_t left = l->n - s.at;
                if (open) open_stripe(l, number, open);
                for (int i = 0; left < 32 && i < 1024; i++) y[i] = -INFINITY;
                for (int64_t i = 0; i < m; i += r.high) {
                    int64_t count = outputs(l, &r, &s, number, open, i, m, 0, y, 32, 0);
                    for (int64_t b = 0; t->left && b < t->bans; b++)
                        for (int64_t j = 0, at = t->banned[b] - s.at; at >= 0 && at < 32 && j < count; j++)
                            y[32 * j + at] = -INFINITY;
                    for (int64_t j = 0; j < count; j++) offer_stripe(mine + i + j, share + i + j, y + 32 * j, s.at, left);
                }
            }
            for (int64_t i = 0; i < m; i++) most[run * m + i] = share[i].most, sum[run * m + i] = total(share[i].sum);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m; i++) {
            float top = -FLT_MAX;
            double whole = 0;
            for (int64_t run = 0; run < runs; run++) top = most[run * m + i] > top ? most[run * m + i] : top;
            for (int64_t run = 0; run < runs; run++) whole += sum[run * m + i] * exp(most[run * m + i] - top);
            t->norm[i] = (float)(top + log(whole));
            merge(t, each, threads, i);
        }
        give_tiles(&old);
        free(open);
    }
    free(most), free(values), free(sum), free(ids), free(each), free(shares);
    let_go(&r);
    return short_of;
}
