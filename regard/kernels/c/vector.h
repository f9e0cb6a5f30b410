/* Short vectors of floats, which gcc and clang turn into AVX-512, AVX or NEON, and the exponential of a softmax. */
#ifndef REGARD_VECTOR_H
#define REGARD_VECTOR_H

#include "common.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));

INLINE vec splat(float x) { return (vec){0} + x; }

INLINE vec load(const float *x) {
    vec y;
    memcpy(&y, x, sizeof y);
    return y;
}

INLINE void store(float *x, vec y) { memcpy(x, &y, sizeof y); }

/* 2 LANES numbers from place i on: of floats the first and the second half, of bf16 (half) the even and the odd ones,
   as that needs no more than a shift and a mask. */
INLINE void load_pair(const void *x, int64_t i, vec *a, vec *b, const int half) {
    if (half) {
        bits both;
        memcpy(&both, (const uint16_t *)x + i, sizeof both);
        *a = (vec)(both << 16);
        *b = (vec)(both & 0xffff0000u);
    } else {
        *a = load((const float *)x + i);
        *b = load((const float *)x + i + LANES);
    }
}

INLINE float at(const void *x, int64_t i, int half) {
    return half ? from_bf16(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

INLINE float total(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

/* The totals of four vectors, for less than four times the work. */
INLINE void totals(const vec x[4], float sum[4]) {
#if defined(__AVX512F__)
    __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
    __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 all = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(sum, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    for (int i = 0; i < 4; i++) sum[i] = total(x[i]);
#endif
}

/* The larger of each pair; y where one is NaN. */
INLINE vec larger(vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#else
    bits over = (bits)(x > y);
    return (vec)(((bits)x & over) | ((bits)y & ~over));
#endif
}

INLINE float largest(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
#endif
}

/* A bit for each number that is above `floor`. */
INLINE uint32_t above(vec x, float floor) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(floor), _CMP_GT_OQ);
#elif defined(__AVX__)
    return (uint32_t)_mm256_movemask_ps((__m256)(x > floor));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return vaddvq_u32((uint32x4_t)((bits)(x > floor) & (bits){1, 2, 4, 8}));
#else
    uint32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= (uint32_t)(x[i] > floor) << i;
    return found;
#endif
}

/* e^x for x <= 0, all that a softmax needs: 2^n e^r with |r| <= ln(2) / 2, and a polynomial for e^r, off by 1e-7; with
   fused products less than 5e-7 in all. 0 below -87; NaN stays NaN. */
INLINE vec exp_below(vec x) {
    ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    vec r = x - __builtin_convertvector(n, vec) * 0.693147182f;
    vec p = splat(0.00831250101f);
    p = p * r + 0.0418903306f;
    p = p * r + 0.166671157f;
    p = p * r + 0.499992311f;
    p = p * (r * r) + (r + 1.0f);
    vec power = (vec)(((bits)n + 127) << 23);
    return (vec)((bits)(p * power) & ~(bits)(x < -87.0f));
}

/* The nearest whole number. */
INLINE vec nearest(vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_roundscale_ps((__m512)x, 8);
#elif defined(__AVX__)
    return (vec)_mm256_round_ps((__m256)x, 8);
#elif defined(__ARM_NEON)
    return (vec)vrndnq_f32((float32x4_t)x);
#else
    vec half = (vec)(((bits)x & 0x80000000u) | 0x3f000000u);
    return __builtin_convertvector(__builtin_convertvector(x + half, ints), vec);
#endif
}

/* e^x, relative error below 2e-7, between e^-87 and e^88; NaN stays NaN. */
INLINE vec exp_of(vec x) {
#if defined(__ARM_NEON)
    x = (vec)vminq_f32(vmaxq_f32((float32x4_t)x, vdupq_n_f32(-87.f)), vdupq_n_f32(88.f));
#else
    x = -larger(splat(-88.f), -larger(splat(-87.f), x));
#endif
    vec n = nearest(x * 1.44269504f), p = splat(1.9875691500e-4f);
#if defined(__FMA__) || defined(__ARM_NEON)
    vec r = x - n * 0.693147182f;
#else
    vec r = x - n * 0.693359375f;
    __asm__("" : "+x"(r)); /* or the compiler joins the two constants, whose first product is exact */
    r += n * 2.12194440e-4f;
#endif
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.f);
#if defined(__AVX512F__)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
#endif
}

#endif
