/* What a decoding step does to each row besides products and attention: norms, rotation, the cache. */
#include "vector.h"

enum {
    WORTH = 60000,    /* numbers that are worth a second thread */
    PART = 32 * LANES /* numbers that are summed as floats */
};

/* What rows.norm packs. */
struct norm {
    int64_t rows, width, rms;
    const float *x, *weight, *bias;
    float *out;
    double eps;
};

/* The sum of x - mean, or of its square; in parts, as a long sum of floats rounds too often. */
INLINE float spread(const float *x, int64_t m, float mean, const int plain) {
    double sum = 0;
    int64_t i = 0;
    while (i + LANES <= m) {
        vec a = splat(0), b = splat(0);
        int64_t end = m < i + PART ? m : i + PART;
        for (; i + 2 * LANES <= end; i += 2 * LANES) {
            vec y = load(x + i) - mean, z = load(x + i + LANES) - mean;
            a += plain ? y : y * y;
            b += plain ? z : z * z;
        }
        if (i + LANES <= end) {
            vec y = load(x + i) - mean;
            a += plain ? y : y * y;
            i += LANES;
        }
        sum += total(a + b);
    }
    for (; i < m; i++) sum += plain ? x[i] - mean : (x[i] - mean) * (x[i] - mean);
    return (float)sum;
}

static void norm_row(const struct norm *a, const float *x, float *y) {
    int64_t m = a->width, i = 0;
    float mean = 0;
    if (!a->rms) mean = spread(x, m, 0, 1) / (float)m;
    float over = 1 / sqrtf(spread(x, m, mean, 0) / (float)m + (float)a->eps);
    for (; i + LANES <= m; i += LANES) {
        vec z = (load(x + i) - mean) * over * load(a->weight + i);
        store(y + i, a->bias ? z + load(a->bias + i) : z);
    }
    for (; i < m; i++) y[i] = (x[i] - mean) * over * a->weight[i] + (a->bias ? a->bias[i] : 0);
}

int norm(const struct norm *a) {
#pragma omp parallel for if (a->rows * a->width > WORTH)
    for (int64_t row = 0; row < a->rows; row++) norm_row(a, a->x + row * a->width, a->out + row * a->width);
    return 0;
}

/* What rows.update_cache packs; strides count numbers. */
struct update_cache {
    int64_t rows, heads, groups, d, e, interleaved, half, stored, slots, pairs;
    const float *cos, *sin;
    int64_t angle_row;
    float *qkv;
    int64_t qkv_row;
    void *k;
    int64_t k_row, k_slot, k_head;
    void *v;
    int64_t v_row, v_slot, v_head;
    const int64_t *pos;
    const int32_t *place; /* in pages of `page` slots: the rows that hold them */
    int64_t place_row, page;
};

/* The row that holds the new token of a row. */
INLINE int64_t home(const struct update_cache *a, int64_t row) {
    return a->place && a->pos[row] >= 0 ? a->place[row * a->place_row + a->pos[row] / a->page] : row;
}

/* Turns the first 2n features of x by n angles: (a, b) -> (a cos - b sin, b cos + a sin). */
INLINE void rotate(float *restrict x, const float *restrict cos, const float *restrict sin, int64_t n, int64_t second,
                 const int64_t step) {
    for (int64_t i = 0; i < n; i++) {
        float a = x[i * step], b = x[i * step + second];
        x[i * step] = a * cos[i] - b * sin[i];
        x[i * step + second] = b * cos[i] + a * sin[i];
    }
}

static void file(void *store, int64_t at, const float *x, int64_t n, int64_t half) {
    if (!half) {
        memcpy((float *)store + at, x, (size_t)n * sizeof *x);
        return;
    }
    uint16_t *y = (uint16_t *)store + at;
    for (int64_t i = 0; i < n; i++) y[i] = to_bf16(x[i]);
}

static void update_cache_row(const struct update_cache *a, int64_t row) {
    float *q = a->qkv + row * a->qkv_row, *k = q + a->heads * a->d, *v = k + a->groups * a->d;
    const float *cos = a->cos + row * a->angle_row, *sin = a->sin + row * a->angle_row;
    for (int64_t j = 0; a->pairs && j < a->heads + a->groups; j++) {
        if (a->interleaved) {
            rotate(q + j * a->d, cos, sin, a->pairs, 1, 2);
        } else {
            rotate(q + j * a->d, cos, sin, a->pairs, a->pairs, 1);
        }
    }
    int64_t pos = a->pos[row], slot = a->place ? pos % a->page : pos, to = home(a, row);
    for (int64_t j = 0; pos >= 0 && j < a->groups; j++) {
        file(a->k, to * a->k_row + slot * a->k_slot + j * a->k_head, k + j * a->d, a->d, a->half);
        file(a->v, to * a->v_row + slot * a->v_slot + j * a->v_head, v + j * a->e, a->e, a->half);
    }
}

/* 0, or 1 where a position lies outside of the cache. */
int update_cache(const struct update_cache *a) {
    int64_t width = (a->heads + a->groups) * a->d + a->groups * a->e;
    for (int64_t row = 0; row < a->rows; row++) {
        if (a->pos[row] >= a->slots) return 1;
        int64_t to = a->pos[row] < 0 ? 0 : home(a, row);
        if (to < 0 || to >= a->stored) return 1;
    }
#pragma omp parallel for if (a->rows * width > WORTH)
    for (int64_t row = 0; row < a->rows; row++) update_cache_row(a, row);
    return 0;
}
