/* The activation GELU and its slope, while a CPU trains. Elements, and runs of rows, are independent: threads change no
   bit. */
#include "vector.h"

/* LANES numbers from place i on, of floats or of bf16 (half); `count` of them where fewer are left. */
INLINE vec take(const void *x, int64_t i, int64_t count, const int half) {
    if (half) {
        shorts y = {0};
        memcpy(&y, (const uint16_t *)x + i, (size_t)count * 2);
        return (vec)(__builtin_convertvector(y, bits) << 16);
    }
    vec y = {0};
    memcpy(&y, (const float *)x + i, (size_t)count * 4);
    return y;
}

/* To bf16 as to_bf16 does it. */
INLINE shorts narrow(vec x) {
    bits y = (bits)x, nan = (bits)(x != x);
    y = ((y + 0x7fff + (y >> 16 & 1)) & ~nan) | ((y | 0x400000) & nan);
    return __builtin_convertvector(y >> 16, shorts);
}

INLINE void put(void *x, int64_t i, vec y, int64_t count, const int half) {
    if (half) {
        shorts z = narrow(y);
        memcpy((uint16_t *)x + i, &z, (size_t)count * 2);
    } else {
        memcpy((float *)x + i, &y, (size_t)count * 4);
    }
}

/* What train.gelu packs: `dy` is 0 on the way forward. */
struct gelu {
    int64_t n, half;
    const void *x, *dy;
    void *out;
};

#define A 1.5957691216f  /* 2 sqrt(2 / pi) */
#define B 0.0713548163f  /* 0.044715 of it */

/* x s or dy (s + x s (1 - s) u'), with s = 1 / (1 + e^-u) and u = A x + B x^3, as (1 + tanh(u / 2)) / 2 = s. */
INLINE vec gelu_of(vec x, vec dy, const int back) {
    vec square = x * x, u = x * (A + B * square);
    vec e = exp_below((vec)((bits)u | 0x80000000u)); /* of -|u| */
    bits below = (bits)(u < 0.0f);
    vec top = (vec)(((bits)e & below) | ((bits)splat(1.0f) & ~below)), s = top / (1.0f + e);
    return back ? dy * (s + x * s * (1.0f - s) * (A + 3.0f * B * square)) : x * s;
}

INLINE void gelu_run(const struct gelu *a, const int half, const int back) {
    int64_t runs = (a->n + LANES - 1) / LANES;
#pragma omp parallel for schedule(static) if (runs > 512)
    for (int64_t r = 0; r < runs; r++) {
        int64_t i = r * LANES, left = a->n - i;
        if (left >= LANES) {
            vec dy = back ? take(a->dy, i, LANES, half) : splat(0);
            put(a->out, i, gelu_of(take(a->x, i, LANES, half), dy, back), LANES, half);
        } else {
            vec dy = back ? take(a->dy, i, left, half) : splat(0);
            put(a->out, i, gelu_of(take(a->x, i, left, half), dy, back), left, half);
        }
    }
}

int gelu(const struct gelu *a) {
    if (a->half) {
        a->dy ? gelu_run(a, 1, 1) : gelu_run(a, 1, 0);
    } else {
        a->dy ? gelu_run(a, 0, 1) : gelu_run(a, 0, 0);
    }
    return 0;
}

/* What train.bias_gelu packs: x (rows width), runs of `run` rows; `dy` is 0 on the way forward, and `sums` has a
   row for each run: what its rows of `out` add up to. */
struct bias_gelu {
    int64_t rows, width, run;
    const float *x, *bias, *dy;
    float *out, *sums;
};

int bias_gelu(const struct bias_gelu *a) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < (a->rows + a->run - 1) / a->run; r++) {
        int64_t end = (r + 1) * a->run < a->rows ? (r + 1) * a->run : a->rows;
        float *sums = a->sums + r * a->width;
        if (a->dy) memset(sums, 0, (size_t)a->width * 4);
        for (int64_t row = r * a->run; row < end; row++)
            for (int64_t j = 0, i = row * a->width; j < a->width; j += LANES, i += LANES) {
                vec x = load(a->x + i) + load(a->bias + j);
                vec y = a->dy ? gelu_of(x, load(a->dy + i), 1) : gelu_of(x, x, 0);
                store(a->out + i, y);
                if (a->dy) store(sums + j, load(sums + j) + y);
            }
    }
    return 0;
}
