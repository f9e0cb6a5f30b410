/* y = act(x W^T + b) + add, x (m k) and y (m n) float32, W packed once by `linear_pack`.

   One layout of W serves every kind of number and every instruction set: stripes of 32 outputs, each a run of pairs of
   1 KB tiles along k, in the order in which they are read, so that few rows stream W from memory once and many rows
   keep a stripe in the cache. A line of a tile is 16 outputs times 4 bytes: one float32, two bf16 or four int8 of
   neighbouring inputs. x is laid out as blocks of rows, in each the tiles' inputs row by row. A kernel gives the sums
   of a block of rows and a stripe; what follows a product is done while they are in the cache. AMX has a kernel of its
   own, the others are one kernel over `step`, which says what an instruction set is good at. Called by linear.py.

   int8 has a scale for each 64 inputs, a tile's, of x and of W, both turned first (`turn`): a few large numbers would
   leave the others of their tile few of its 255 steps; turned they are spread over all 64. Behind a pair of tiles lie
   their 32 scales in bf16. int4 is W alone: groups of 32 inputs, opened to float32 or bf16 stripe by stripe. */

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

enum { FP32, BF16, INT8, INT4, OPENED }; /* the last: int8 whose W was brought to 16 bits, for many rows */
enum { NONE, RELU, GELU, GELU_TANH, SILU };
enum {
    FAR = 1 << 20,  /* outputs that no cache near the core would keep */
    WORTH = 1 << 20 /* products of two numbers that are worth a second thread */
};

typedef struct {
    int64_t kind, n, k, gated, act; /* n outputs of W: twice the outputs of y where gated */
    char *tiles;                    /* packed W */
    const float *bias;              /* of each output, or NULL */
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
enum { TAKE = 1, WIDE = 2, ROWS = 14, BYTE_ROWS = WIDER ? 12 : 13 };
#elif LANES == 8
enum { TAKE = 1, WIDE = 2, ROWS = 6, BYTE_ROWS = WIDER ? 4 : 6 };
#elif defined(__ARM_NEON)
enum { TAKE = 4, WIDE = 4, ROWS = 5, BYTE_ROWS = 5 };
#else
enum { TAKE = 1, WIDE = 4, ROWS = 3, BYTE_ROWS = 2 };
#endif

/* What int4 is opened to. */
#if TILES || defined(__AVX512BF16__)
#define AS BF16
#else
#define AS FP32
#endif

/* What is computed up to here stays as it is written: the flags allow sums and products in another order. */
#if defined(__AVX512F__)
#define KEEP(x) __asm__("" : "+v"(x))
#elif defined(__SSE2__)
#define KEEP(x) __asm__("" : "+x"(x))
#elif defined(__ARM_NEON)
#define KEEP(x) __asm__("" : "+w"(x))
#else
#define KEEP(x) __asm__("" : "+m"(x))
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
    return 1 << FP32 | (AS == BF16) << BF16 | 1 << INT8 | 1 << INT4;
}

/* ---- packing ---- */

enum { GROUP = 32, FOURS = 640 }; /* inputs that share a scale in 4 bits; bytes of 32 outputs times as many inputs */

static int64_t seen(int64_t kind) { return kind == INT4 ? AS : kind; }                       /* by a kernel */
static int64_t depth(int64_t kind) { return kind == FP32 ? 16 : kind == BF16 ? 32 : 64; }    /* inputs of a tile */
static int64_t pair(int64_t kind) { return kind == INT8 ? 2112 : 2048; }                     /* bytes of two tiles */
static int64_t tiles_of(int64_t k, int64_t kind) { return (k + depth(kind) - 1) / depth(kind); }
static int64_t stripes(int64_t n, int64_t gated) { return gated ? (n / 2 + 15) / 16 : (n + 31) / 32; }
static int64_t piece(int64_t kind) { return kind == INT8 && WIDER ? 128 : 64; } /* bytes of a row of x for a tile */

static int64_t stripe_bytes(int64_t kind, int64_t k) {
    return kind == INT4 ? k / GROUP * FOURS : tiles_of(k, kind) * pair(kind);
}

int64_t linear_bytes(int64_t kind, int64_t n, int64_t k, int64_t gated) {
    return stripes(n, gated) * stripe_bytes(kind, k);
}

/* Memory that nobody has touched yet, 2 MB aligned: in huge pages W streams a fifth faster. */
void linear_room(char *start, int64_t bytes) { madvise(start, bytes, MADV_HUGEPAGE); }

/* The row of W that is output j of stripe s, or -1. */
static int64_t row_of(const Linear *l, int64_t s, int64_t j) {
    int64_t half = l->n / 2, at = 16 * s + j % 16;
    if (l->gated) return at < half ? (j < 16 ? at : half + at) : -1;
    return 32 * s + j < l->n ? 32 * s + j : -1;
}

/* Adjacent pairs are added and subtracted, then pairs of pairs, up to 32 and 32, after some signs are changed: 8 times
   an orthogonal transform of 64 numbers, the same for x and W, so that products come out 64 times as large. The signs
   are those of no pattern that numbers have. */
#if LANES == 16
#define EACH(X) X(0), X(1), X(2), X(3), X(4), X(5), X(6), X(7), X(8), X(9), X(10), X(11), X(12), X(13), X(14), X(15)
#elif LANES == 8
#define EACH(X) X(0), X(1), X(2), X(3), X(4), X(5), X(6), X(7)
#else
#define EACH(X) X(0), X(1), X(2), X(3)
#endif
#define WITH1(i) ((i) ^ 1)
#define WITH2(i) ((i) ^ 2)
#define WITH4(i) ((i) ^ 4)
#define WITH8(i) ((i) ^ 8)
#define LESS1(i) ((i) & 1 ? -1.f : 1.f)
#define LESS2(i) ((i) & 2 ? -1.f : 1.f)
#define LESS4(i) ((i) & 4 ? -1.f : 1.f)
#define LESS8(i) ((i) & 8 ? -1.f : 1.f)
#if defined(__clang__)
#define SWAPPED(x, WITH) __builtin_shufflevector(x, x, EACH(WITH))
#else
#define SWAPPED(x, WITH) __builtin_shuffle(x, (ints){EACH(WITH)})
#endif
#define WITHIN(STEP)                                                                               \
    for (int v = 0; LANES > STEP && v < 64 / LANES; v++) {                                         \
        h[v] = SWAPPED(h[v], WITH##STEP) + h[v] * (vec){EACH(LESS##STEP)};                         \
        KEEP(h[v]);                                                                                \
    }
/* Over all lanes, each of which gets it. */
#if LANES == 16
#define ACROSS(CALL, x) CALL(x, 1) CALL(x, 2) CALL(x, 4) CALL(x, 8)
#elif LANES == 8
#define ACROSS(CALL, x) CALL(x, 1) CALL(x, 2) CALL(x, 4)
#else
#define ACROSS(CALL, x) CALL(x, 1) CALL(x, 2)
#endif
#define LARGER(x, STEP) x = larger_int(x, SWAPPED(x, WITH##STEP));
#define SUM(x, STEP) x += SWAPPED(x, WITH##STEP);

INLINE void turn(const float *x, vec *h) {
    const uint64_t signs = 0x9B6D15E34C3A7F08u;
#pragma GCC unroll 16
    for (int v = 0; v < 64 / LANES; v++) {
        bits flip;
        for (int i = 0; i < LANES; i++) flip[i] = (uint32_t)(signs >> (v * LANES + i) & 1) << 31;
        h[v] = (vec)((bits)load(x + v * LANES) ^ flip);
    }
    WITHIN(1) WITHIN(2)
#if LANES > 4
    WITHIN(4)
#endif
#if LANES > 8
    WITHIN(8)
#endif
#pragma GCC unroll 4
    for (int step = 1; step < 64 / LANES; step *= 2)
#pragma GCC unroll 16
        for (int v = 0; v < 64 / LANES; v++)
            if (!(v & step)) {
                vec a = h[v], b = h[v + step];
                h[v] = a + b, h[v + step] = a - b;
                KEEP(h[v]);
                KEEP(h[v + step]);
            }
}

INLINE ints larger_int(ints x, ints y) {
#if defined(__AVX512F__)
    return (ints)_mm512_max_epi32((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
    return (ints)_mm256_max_epi32((__m256i)x, (__m256i)y);
#else
    ints over = x > y;
    return (x & over) | (y & ~over);
#endif
}

/* The largest size among turned numbers: sizes have the same order as whole numbers; what is not finite is above. */
INLINE uint32_t top_of(const vec *h) {
    ints top = (ints)h[0] & 0x7fffffff;
#pragma GCC unroll 16
    for (int v = 1; v < 64 / LANES; v++) top = larger_int(top, (ints)h[v] & 0x7fffffff);
    ACROSS(LARGER, top)
    return (uint32_t)top[0];
}

/* The nearest whole numbers, of halves the even ones. */
INLINE ints whole(vec x) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX__)
    return (ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (ints)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
    return (ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    ints y;
    for (int i = 0; i < LANES; i++) y[i] = (int32_t)__builtin_rintf(x[i]);
    return y;
#endif
}

static const float UNIT = 1.f / 127; /* of the largest number: a step of int8 */

/* Output j of a pair of tiles in int8: its scale is rounded up, so that no number is above 127 of them. What rounding
   input i leaves out is taken from those after it, back[64 i + ..] times. */
static void pack_bytes(const float *x, const float *back, char *pair, int64_t j) {
    vec h[64 / LANES];
    turn(x, h);
    uint32_t top = top_of(h), wide;
    float most, scale;
    memcpy(&most, &top, 4);
    scale = most * UNIT;
    scale = scale < 1e-30f ? 1e-30f : scale; /* what is no number stays so */
    memcpy(&wide, &scale, 4);
    wide = (wide + 0xffff) & 0xffff0000u;
    memcpy(&scale, &wide, 4);
    ((uint16_t *)(pair + 2048))[j] = (uint16_t)(wide >> 16);
    for (int i = 0; i < 64; i++) {
        float left = h[i / LANES][i % LANES], q = __builtin_rintf(left * (1.f / scale));
        q = q > 127 ? 127 : q > -127 ? q : -127;
        pair[j / 16 * 1024 + i / 4 * 64 + j % 16 * 4 + i % 4] = (char)((int)q + FLIP);
        vec off = splat(left - q * scale);
        for (int v = i / LANES; back && v < 64 / LANES; v++) h[v] -= off * load(back + 64 * i + v * LANES);
    }
}

static const double PARTS[] = {1, .95, .9, .85, .8, .75}; /* of a range, that 4 bits may keep to */

/* In 4 bits: q from -8 to 7. */
INLINE float fours_of(float x, float zero, float over) {
    float q = __builtin_rintf((x - zero) * over);
    return q > 7 ? 7 : q > -8 ? q : -8;
}

/* Scale and zero of a group, as floats that bf16 holds: of its whole range, or the part of it that rounds it best. */
static void range_of(const float *x, float *scale, float *zero) {
    float low = x[0], high = x[0], unreal = 0, least = 0;
    for (int i = 0; i < GROUP; i++) {
        low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
        unreal += x[i] * 0.f; /* NaN if a number is none, or not finite */
    }
    for (int part = 0; part < (int)(sizeof PARTS / sizeof *PARTS); part++) {
        float s = (high - low) * (float)(PARTS[part] / 15) + unreal, off = 0;
        s = from_bf16(to_bf16(s < 1e-8f ? 1e-8f : s));
        float z = from_bf16(to_bf16((low + high + s) / 2)), over = 1.f / s;
        for (int i = 0; i < GROUP; i++) {
            float left = x[i] - (z + fours_of(x[i], z, over) * s);
            off += left * left;
        }
        if (part == 0 || off < least) least = off, *scale = s, *zero = z;
    }
}

/* Output j of `groups` (one or two) in int4: w = (q - 8) scale + zero. A byte has inputs 2i and 2i + 1 of an output;
   after 16 lines of 32 bytes come 32 scales and 32 zeros in bf16. `back` as above. */
static void pack_fours(float *x, const float *back, char *to, int64_t groups, int64_t j) {
    for (int64_t g = 0; g < groups; g++, to += FOURS) {
        float scale, zero;
        range_of(x + g * GROUP, &scale, &zero);
        uint16_t *about = (uint16_t *)(to + 512);
        about[j] = to_bf16(scale), about[32 + j] = to_bf16(zero);
        for (int64_t i = g * GROUP; i < (g + 1) * GROUP; i++) {
            float q = fours_of(x[i], zero, 1.f / scale), off = x[i] - (zero + q * scale);
            char *byte = to + (i - g * GROUP) / 2 * 32 + j;
            *byte = (char)(i % 2 ? *byte | ((int)q + 8) << 4 : (int)q + 8);
            for (int64_t v = i + 1; back && v < 64; v++) x[v] -= off * back[64 * i + v];
        }
    }
}

/* Rows first.. of W, `count` of them, a multiple of 32 but for the last; all at once where gated. `back` is of int8 and
   int4 and may be NULL: 64 x 64 numbers for each 64 inputs. */
void linear_pack(const Linear *l, const float *w, const float *back, int64_t first, int64_t count) {
    int64_t deep = l->kind == INT4 ? 2 * GROUP : depth(l->kind), many = (l->k + deep - 1) / deep, each = deep / 16;
    int64_t apart = l->kind == INT4 ? 2 * FOURS : pair(l->kind), whole = stripe_bytes(l->kind, l->k);
#pragma omp parallel for
    for (int64_t s = first / 32; s < first / 32 + stripes(count, l->gated); s++)
        for (int64_t t = 0; t < many; t++)
            for (int64_t j = 0; j < 32; j++) {
                int64_t row = row_of(l, s, j), left = l->k - t * deep < deep ? l->k - t * deep : deep;
                char *to = l->tiles + s * whole + t * apart, *tile = to + j / 16 * 1024 + j % 16 * 4;
                const float *more = back ? back + t * 4096 : 0;
                float x[64] = {0};
                if (row >= 0) memcpy(x, w + (row - first) * l->k + t * deep, (size_t)left * 4);
                if (l->kind == INT8) pack_bytes(x, more, to, j);
                if (l->kind == INT4) pack_fours(x, more, to, left / GROUP, j);
                for (int64_t i = 0; (l->kind == FP32 || l->kind == BF16) && i < deep; i++) {
                    char *at = tile + i / each * 64;
                    if (l->kind == FP32)
                        memcpy(at, x + i, 4);
                    else
                        ((uint16_t *)at)[i % each] = to_bf16(x[i]);
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

/* A tile's inputs, turned and rounded, to 64 bytes or words. Gives the scale: largest / 127, NaN where a number is not
   finite, and 1/64 for what turning does to a product; and what sums begin with, lower by FLIP times the inputs. */
INLINE float to_bytes(const float *x, char *to, int32_t *begin) {
    vec h[64 / LANES];
    int8_t bytes[64];
    turn(x, h);
    uint32_t top = top_of(h);
    int finite = top < 0x7f800000u;
    float most;
    memcpy(&most, &top, 4);
    float back = finite && most > 1e-30f ? 127.f / most : 0.f;
    ints sum = {0};
#pragma GCC unroll 16
    for (int v = 0; v < 64 / LANES; v++) {
        typedef int8_t narrow __attribute__((vector_size(LANES)));
        ints q = finite ? whole(h[v] * back) : same(0);
        narrow low = __builtin_convertvector(q, narrow);
        memcpy(bytes + v * LANES, &low, sizeof low);
        sum += q;
    }
    ACROSS(SUM, sum)
    *begin = -FLIP * sum[0];
    if (WIDER) {
        int16_t *wide = (int16_t *)to;
        for (int j = 0; j < 64; j += 4)
            wide[j] = bytes[j], wide[j + 1] = bytes[j + 2], wide[j + 2] = bytes[j + 1], wide[j + 3] = bytes[j + 3];
    } else {
        memcpy(to, bytes, 64);
    }
    return finite ? most * UNIT * (1.f / 64) : NAN;
}

/* A row of x; scales and what sums begin with lie `high` numbers from tile to tile. */
static void to_blocks(const float *x, int64_t k, char *to, int64_t apart, float *scales, int32_t *begin, int64_t high) {
    for (int64_t i = 0; i < k; i += 64, to += apart, scales += high, begin += high) {
        if (k - i >= 64) {
            *scales = to_bytes(x + i, to, begin);
        } else {
            float rest[64] = {0};
            memcpy(rest, x + i, (size_t)(k - i) * 4);
            *scales = to_bytes(rest, to, begin);
        }
    }
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
    int64_t ahead;            /* how far before it is needed W is asked for: of memory farther than of a cache */
    float *sums;              /* rows of 32 */
    const float *scales;      /* of int8: of x in each tile, row by row, */
    const int32_t *begin;     /* what sums begin with there, */
    int64_t high;             /* how far tiles are from each other in both, */
    const char *steps;        /* and the scales of W in the first tile */
} Block;

/* The total with the sums of a tile, times both scales. The product of the scales is made first, whatever else is in
   the registers: a row's bits do not depend on its neighbours. */
INLINE vec add_tile(vec total, ints sum, vec step, float scale) {
    vec both = step * scale;
    KEEP(both);
    return total + __builtin_convertvector(sum, vec) * both;
}

/* The scales of W from output `at` on in tile t. */
INLINE vec steps_of(const char *steps, int64_t t, int at) {
    shorts half;
    memcpy(&half, steps + t * pair(INT8) + at * 2, sizeof half);
    return (vec)(__builtin_convertvector(half, bits) << 16);
}

/* `rows` of them. Few rows take the whole stripe at once, others as much of it as the registers hold. Sums of int8 are
   whole numbers within a tile, and begin anew in the next. */
INLINE void multiply(const Block *b, const int rows, const int kind) {
    const int bytes = kind == INT8 || kind == OPENED, line = kind == OPENED ? 128 : 64;
    const int wide = 2 * rows <= (bytes ? BYTE_ROWS : ROWS) ? 32 / LANES : WIDE, group = bytes && WIDER ? 8 : 4;
    const int64_t tile = kind == INT8 ? pair(INT8) : 32 * line;
    for (int part = 0; part < 32 / LANES; part += wide) {
        ints sum[ROWS][32 / LANES];
        vec total[ROWS][32 / LANES];
        const char *x = b->x, *w = b->w;
        const float *scales = b->scales;
        const int32_t *begin = b->begin;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < wide; v++) sum[r][v] = same(0), total[r][v] = splat(0);
        for (int64_t t = 0; t < b->many; t++, w += tile, x += b->apart, scales += b->high, begin += b->high) {
#pragma GCC unroll 16
            for (int r = 0; bytes && r < rows; r++)
#pragma GCC unroll 8
                for (int v = 0; v < wide; v++) sum[r][v] = same(FLIP ? begin[r] : 0);
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
#pragma GCC unroll 8
            for (int v = 0; bytes && v < wide; v++) {
                vec step = steps_of(b->steps, t, (part + v) * LANES);
                if (kind == INT8 && v == 0) __builtin_prefetch(b->steps + t * pair(INT8) + b->ahead);
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) total[r][v] = add_tile(total[r][v], sum[r][v], step, scales[r]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < wide; v++)
                store(b->sums + r * 32 + (part + v) * LANES, bytes ? total[r][v] : (vec)sum[r][v]);
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

#define PRODUCTS(DP)                                                                               \
    if (b->ahead)                                                                                  \
        for (int j = 0; j < 2048; j += 64) _mm_prefetch(w + b->ahead + j, _MM_HINT_T0);            \
    _tile_loadd(4, x, b->row);                                                                     \
    _tile_loadd(6, w, 64);                                                                         \
    DP(0, 4, 6);                                                                                   \
    _tile_loadd(7, w + 1024, 64);                                                                  \
    DP(1, 4, 7);                                                                                   \
    if (two) {                                                                                     \
        _tile_loadd(5, x + 16 * b->row, b->row);                                                   \
        DP(2, 5, 6);                                                                               \
        DP(3, 5, 7);                                                                               \
    }

static void empty_tiles(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

static void store_tiles(void *to, int two) {
    char *sums = to;
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 64, 128);
    if (two) {
        _tile_stored(2, sums + 2048, 128);
        _tile_stored(3, sums + 2112, 128);
    }
}

static APART void multiply_halves(const Block *b, int64_t rows) {
    const char *x = b->x, *w = b->w;
    int two = rows > 16;
    empty_tiles();
    for (int64_t t = 0; t < b->many; t++, w += 2048, x += b->apart) { PRODUCTS(_tile_dpbf16ps) }
    store_tiles(b->sums, two);
}

/* The sums of a tile are added by vectors while those of the next are made: two places for them. */
static APART void multiply_bytes(const Block *b, int64_t rows) {
    int32_t sums[2][1024] __attribute__((aligned(64)));
    const char *x = b->x, *w = b->w;
    int two = rows > 16;
    memset(b->sums, 0, rows * 32 * sizeof(float));
    for (int64_t t = 0; t < b->many; t++, w += pair(INT8), x += b->apart) {
        int32_t *now = sums[t % 2];
        empty_tiles();
        PRODUCTS(_tile_dpbssd)
        store_tiles(now, two);
        for (int at = 0; at < 32; at += LANES) {
            vec step = steps_of(b->steps, t, at);
            for (int64_t r = 0; r < rows; r++) {
                ints sum;
                memcpy(&sum, now + r * 32 + at, sizeof sum);
                float *to = b->sums + r * 32 + at;
                store(to, add_tile(load(to), sum, step, b->scales[t * b->high + r]));
            }
        }
    }
}
#endif

/* Rows that a kernel takes together. */
static int64_t most_rows(int64_t kind) { return kind == FP32 ? ROWS : TILES ? 32 : kind == INT8 ? BYTE_ROWS : ROWS; }

static void sums_of(const Block *b, int64_t rows, int64_t kind) {
    if (kind == FP32) multiply_floats(b, rows);
    if (kind == INT8) multiply_bytes(b, rows);
#if !TILES && defined(__SSE2__)
    if (WIDER && kind == OPENED) multiply_opened(b, rows);
#endif
#if TILES || defined(__AVX512BF16__)
    if (kind == BF16) multiply_halves(b, rows);
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
    float bias[32];
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

/* Sums (count 32) to y. */
INLINE void finish(const Stripe *s, const float *sums, int64_t count, const float *add, float *y, int64_t outs,
                   const int gated, const int act, const int past) {
    for (int64_t i = 0; i < count; i++, sums += 32, y += outs, add = add ? add + outs : 0)
        for (int v = 0; v < 16; v += LANES) {
            vec a = load(sums + v), b = load(sums + 16 + v);
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
            finish(s, sums, count, add, y, outs, 1, ACT, 0);                                       \
        else                                                                                       \
            finish(s, sums, count, add, y, outs, 0, ACT, 0);                                       \
        break;

/* To rows of y that lie `outs` numbers from each other. Once for all callers: another copy might round otherwise. */
static APART __attribute__((noclone)) void rows_of(const Linear *l, const Stripe *s, int64_t count, const float *sums,
                                                   const float *add, float *y, int64_t outs, int past) {
    if (past && s->left[0] == 16 && s->left[1] == 16) {
        finish(s, sums, count, add, y, outs, 0, NONE, 1);
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
    int64_t kind, many, high, blocks, row, apart, whole; /* the kind and the tiles that a kernel sees */
    char *x;
    float *scales; /* of int8: of each block, tile and row */
    int32_t *begin;
} Rows;

static void let_go(Rows *r) { free(r->x), free(r->scales), free(r->begin); }

/* Memory for m rows; 0 if there is none. */
static int make_room(const Linear *l, int64_t m, Rows *r) {
    int64_t kind = seen(l->kind), most = most_rows(kind), many = tiles_of(l->k, kind);
    int tiled = TILES && kind != FP32;
    /* Of the same height, but for tiles, which are best when they are full. A kernel finds the rows of a tile of inputs
       side by side; AMX takes them from afar, at a distance that is no power of two. */
    r->kind = kind, r->many = many;
    r->blocks = (m + most - 1) / most;
    r->high = tiled && m > 16 ? 32 : (m + r->blocks - 1) / r->blocks;
    r->row = tiled ? (many | 1) * 64 : piece(kind);
    r->apart = tiled ? 64 : r->high * r->row;
    r->whole = tiled ? r->high * r->row : many * r->apart;
    r->x = aligned_alloc(64, (size_t)(r->blocks * r->whole));
    size_t each = kind == INT8 ? (size_t)(r->blocks * r->high * many) : 1;
    r->scales = malloc(each * sizeof *r->scales);
    r->begin = malloc(each * sizeof *r->begin);
    if (r->x && r->scales && r->begin) return 1;
    let_go(r);
    return 0;
}

/* By all threads. */
static void fill(const Linear *l, const float *x, int64_t m, Rows *r) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < m; i++) {
        char *to = r->x + i / r->high * r->whole + i % r->high * r->row;
        int64_t first = i / r->high * r->high * r->many + i % r->high;
        if (r->kind == FP32) to_floats(x + i * l->k, l->k, to, r->apart);
        if (r->kind == BF16) to_half(x + i * l->k, l->k, to, r->apart);
        if (r->kind == INT8) to_blocks(x + i * l->k, l->k, to, r->apart, r->scales + first, r->begin + first, r->high);
    }
}

/* Memory in which a thread opens a stripe: of int4; and of int8 where that pays, its rows then need no shifts. Sets it
   to NULL where a stripe is read as it is; 0 if there is no memory. */
static int room_to_open(const Linear *l, int64_t m, char **room) {
    int64_t bytes = l->kind == INT4 ? tiles_of(l->k, AS) * 2048 : tiles_of(l->k, INT8) * 4096;
    int opens = l->kind == INT4 || (WIDER && l->kind == INT8 && m >= 16);
    *room = opens ? aligned_alloc(64, (size_t)bytes) : 0;
    return *room || !opens || l->kind == INT8;
}

static void open_bytes(const char *w, int64_t many, char *to) {
    typedef int16_t narrow __attribute__((vector_size(sizeof(ints))));
    for (int64_t t = 0; t < many; t++, w += pair(INT8))
        for (int j = 0; j < 2048; j += 64, to += 128) {
            __builtin_prefetch(w + j + 8192);
            for (int i = 0; i < 64; i += sizeof(narrow)) {
                narrow both, even, odd;
                memcpy(&both, w + j + i, sizeof both);
                even = both << 8 >> 8, odd = both >> 8;
                memcpy(to + i, &even, sizeof even);
                memcpy(to + 64 + i, &odd, sizeof odd);
            }
        }
}

/* The bits of bf16 in the lower half of each number, to nearest, ties to even. */
INLINE bits halves(vec x) { return ((bits)x + 0x7fff + ((bits)x >> 16 & 1)) >> 16; }

/* 32 outputs of a group of inputs after the other. */
static APART void open_fours(const char *w, int64_t groups, char *to) {
    typedef uint8_t narrow __attribute__((vector_size(LANES)));
    for (int64_t g = 0; g < groups; g++, w += FOURS, to += GROUP / depth(AS) * 2048)
        for (int at = 0; at < 32; at += LANES) {
            shorts pair[2];
            memcpy(pair, w + 512 + 2 * at, sizeof *pair);
            memcpy(pair + 1, w + 576 + 2 * at, sizeof *pair);
            vec scale = (vec)(__builtin_convertvector(pair[0], bits) << 16);
            vec zero = (vec)(__builtin_convertvector(pair[1], bits) << 16);
            char *tile = to + at / 16 * 1024 + at % 16 * 4;
#pragma GCC unroll 4
            for (int i = 0; i < 16; i++) {
                narrow both;
                memcpy(&both, w + 32 * i + at, sizeof both);
                ints q = __builtin_convertvector(both, ints);
                vec even = __builtin_convertvector((q & 15) - 8, vec) * scale + zero;
                vec odd = __builtin_convertvector((q >> 4) - 8, vec) * scale + zero;
                if (AS == BF16) {
                    bits line = halves(even) | halves(odd) << 16;
                    memcpy(tile + 64 * i, &line, sizeof line);
                } else {
                    char *line = tile + i / 8 * 2048 + i % 8 * 128;
                    memcpy(line, &even, sizeof even);
                    memcpy(line + 64, &odd, sizeof odd);
                }
            }
            if (at == 0) __builtin_prefetch(w + 8 * FOURS);
        }
}

static void open_stripe(const Linear *l, int64_t number, char *to) {
    const char *w = l->tiles + number * stripe_bytes(l->kind, l->k);
    if (l->kind == INT4)
        open_fours(w, l->k / GROUP, to);
    else
        open_bytes(w, tiles_of(l->k, INT8), to);
}

/* Outputs of a stripe, which may be opened, for rows i.. of m, at most `high`: to y, `outs` numbers from row to row. */
INLINE int64_t outputs(const Linear *l, const Rows *r, const Stripe *s, int64_t number, const char *opened, int64_t i,
                       int64_t m, const float *add, float *y, int64_t outs, int past) {
    float sums[1024] __attribute__((aligned(64)));
    int64_t count = m - i < r->high ? m - i : r->high;
    const char *w = l->tiles + number * stripe_bytes(l->kind, l->k);
    Block b = {r->x + i / r->high * r->whole, opened ? opened : w, r->many, r->row, r->apart, i ? 2048 : 8192, sums,
               r->scales + i * r->many, r->begin + i * r->many, r->high, w + 2048};
    if (opened) b.ahead = 4096;
    sums_of(&b, count, opened && r->kind == INT8 ? OPENED : r->kind);
    rows_of(l, s, count, sums, add, y, outs, past);
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
    int short_of = 0;
    int64_t all = stripes(l->n, l->gated), outs = l->gated ? l->n / 2 : l->n;
    int past = !l->gated && l->act == NONE && m * outs > FAR && outs % 16 == 0 && (uintptr_t)y % 64 == 0;
#pragma omp parallel num_threads(threads_for(l, m))
    {
        Config old;
        char *open;
        if (!room_to_open(l, m, &open)) {
#pragma omp atomic write
            short_of = 1;
        }
        take_tiles(&old, r.high);
        fill(l, x, m, &r);
#pragma omp for schedule(guided)
        for (int64_t number = 0; number < all; number++) {
            if (short_of) continue;
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
    return short_of;
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
        char *open;
        if (!room_to_open(l, m, &open)) {
#pragma omp atomic write
            short_of = 1;
        }
        take_tiles(&old, r.high);
        fill(l, t->x, m, &r);
        struct best *mine = each + omp_get_thread_num() * m;
        Share *share = shares + omp_get_thread_num() * m;
        float y[1024] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, 1)
        for (int64_t run = 0; run < runs; run++) {
            for (int64_t i = 0; i < m; i++) share[i] = (Share){splat(0), -FLT_MAX};
            if (short_of) continue;
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
            if (short_of) continue;
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
