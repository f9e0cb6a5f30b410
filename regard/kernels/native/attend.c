/* Attention of one new token a row over keys and values where a cache left them. */
#include "vector.h"

enum {
    BLOCK = 64, /* keys whose scores are at hand at a time */
    TILE = 4,   /* queries that read a key or value together */
    CHUNK = LANES == 8 ? 2 : 4, /* vectors of a value that are summed together: AVX has half the registers */
    WORTH = 150000 /* products of two numbers that are worth a second thread */
};

/* What native_rows.attend_one packs; strides count numbers. */
struct attend {
    int64_t rows, heads, groups, d, e, half, stored, slots, share, window;
    const float *q;
    int64_t q_row, q_head;
    const char *k;
    int64_t k_row, k_slot, k_head;
    const char *v;
    int64_t v_row, v_slot, v_head;
    const int64_t *pos;
    const int32_t *place;
    int64_t place_row;
    const float *bias;
    int64_t bias_row, bias_head;
    float *out;
    double scale;
};

/* s[j][p] = q_j . k_p for `many` queries and n keys. Four sums are on the way at a time. */
INLINE void products(float s[][BLOCK], const float *q, const char *k, const int64_t *at_key, int64_t n, int64_t d,
                     const int many, const int half) {
    const int keys = many == 1 ? 4 : many == 2 ? 2 : 1;
    for (int64_t p = 0; p < n; p += keys) {
        vec sum[4] = {{0}}, odd[4] = {{0}};
        float dot[4];
        int64_t i = 0;
        for (; i + 2 * LANES <= d; i += 2 * LANES) {
#pragma GCC unroll 4
            for (int c = 0; c < keys; c++) {
                vec a, b;
                load_pair(k + at_key[p + c], i, &a, &b, half);
#pragma GCC unroll 4
                for (int j = 0; j < many; j++) {
                    sum[c * many + j] += load(q + j * d + i) * a;
                    odd[c * many + j] += load(q + j * d + i + LANES) * b;
                }
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sum[j] += odd[j];
        totals(sum, dot);
#pragma GCC unroll 4
        for (int c = 0; c < keys; c++) {
#pragma GCC unroll 4
            for (int j = 0; j < many; j++) {
                float rest = dot[c * many + j];
                for (int64_t t = i; t < d; t++) rest += q[j * d + t] * at(k + at_key[p + c], t, half);
                s[j][p + c] = rest;
            }
        }
    }
}

/* Scores to weights, relative to the largest score so far; returns what earlier sums must be multiplied by. */
INLINE float soften(float *s, int64_t n, const float *bias, float *most, float *sum) {
    for (int64_t p = 0; bias && p < n; p++) s[p] += bias[p];
    for (int64_t p = n; p % LANES; p++) s[p] = -INFINITY;
    vec top = splat(*most), fresh = splat(0);
    for (int64_t p = 0; p < n; p += LANES) top = larger(load(s + p), top);
    float now = largest(top), from = now > -INFINITY ? now : 0; /* with nothing but -inf: weights of 0, not of NaN */
    for (int64_t p = 0; p < n; p += LANES) {
        vec weight = exp_below(load(s + p) - from);
        store(s + p, weight);
        fresh += weight;
    }
    float keep = now > *most && *sum > 0 ? expf(*most - now) : 1;
    *most = now;
    *sum = *sum * keep + total(fresh);
    return keep;
}

/* o_j = keep_j o_j + sum over p of s[j][p] v_p, in `chunk` vectors from feature i on. */
INLINE void mix_chunk(float *o, int64_t e, int64_t i, float s[][BLOCK], const float *keep, const char *v,
                      const int64_t *at_value, int64_t n, const int many, const int chunk, const int half) {
    vec sum[TILE][CHUNK];
#pragma GCC unroll 4
    for (int j = 0; j < many; j++)
#pragma GCC unroll 4
        for (int c = 0; c < chunk; c++) sum[j][c] = load(o + j * e + i + c * LANES) * keep[j];
    for (int64_t p = 0; p < n; p++) {
        vec x[CHUNK];
#pragma GCC unroll 4
        for (int c = 0; c < chunk; c += 2) load_pair(v + at_value[p], i + c * LANES, x + c, x + c + 1, half);
#pragma GCC unroll 4
        for (int j = 0; j < many; j++)
#pragma GCC unroll 4
            for (int c = 0; c < chunk; c++) sum[j][c] += x[c] * s[j][p];
    }
#pragma GCC unroll 4
    for (int j = 0; j < many; j++)
#pragma GCC unroll 4
        for (int c = 0; c < chunk; c++) store(o + j * e + i + c * LANES, sum[j][c]);
}

INLINE void mix(float *o, int64_t e, float s[][BLOCK], const float *keep, const char *v, const int64_t *at_value,
                int64_t n, const int many, const int half) {
    int64_t i = 0;
    for (; i + CHUNK * LANES <= e; i += CHUNK * LANES)
        mix_chunk(o, e, i, s, keep, v, at_value, n, many, CHUNK, half);
    for (; i + 2 * LANES <= e; i += 2 * LANES) mix_chunk(o, e, i, s, keep, v, at_value, n, many, 2, half);
    for (; i < e; i++) {
        for (int j = 0; j < many; j++) {
            float sum = o[j * e + i] * keep[j];
            for (int64_t p = 0; p < n; p++) sum += s[j][p] * at(v + at_value[p], i, half);
            o[j * e + i] = sum;
        }
    }
}

/* The keys of a row that are at hand: slots from `first` on, and where they lie. */
struct keys {
    int64_t row, first, n, at_key[BLOCK], at_value[BLOCK];
};

/* `many` query heads from j on, which share a key head. */
INLINE void block(const struct attend *a, const struct keys *x, int64_t j, const float *q, float *most, float *sum,
                  const int many, const int half) {
    float s[TILE][BLOCK], keep[TILE];
    int64_t size = half ? 2 : 4, g = j / (a->heads / a->groups);
    products(s, q, a->k + g * a->k_head * size, x->at_key, x->n, a->d, many, half);
    for (int i = 0; i < many; i++) {
        const float *bias = a->bias ? a->bias + x->row * a->bias_row + (j + i) * a->bias_head + x->first : 0;
        keep[i] = soften(s[i], x->n, bias, most + i, sum + i);
    }
    float *o = a->out + (x->row * a->heads + j) * a->e;
    mix(o, a->e, s, keep, a->v + g * a->v_head * size, x->at_value, x->n, many, half);
}

INLINE void find(const struct attend *a, struct keys *x, int64_t last, const int half) {
    int64_t size = half ? 2 : 4, own = a->place ? 0 : x->row / a->share;
    const int32_t *place = a->place ? a->place + x->row * a->place_row : 0;
    x->n = last + 1 - x->first < BLOCK ? last + 1 - x->first : BLOCK;
    for (int64_t i = 0; i < (x->n + 3) / 4 * 4; i++) {
        int64_t p = x->first + (i < x->n ? i : x->n - 1); /* up to a multiple of four the last one again */
        int64_t from = place ? place[p] : own;
        x->at_key[i] = (from * a->k_row + p * a->k_slot) * size;
        x->at_value[i] = (from * a->v_row + p * a->v_slot) * size;
    }
}

/* y = scale x, the features in the order of `load_pair`, or back from it. */
INLINE void arrange(float *y, const float *x, int64_t n, float scale, const int back, const int half) {
    int64_t i = 0;
    for (; half && i + 2 * LANES <= n; i += 2 * LANES) {
        float old[2 * LANES];
        memcpy(old, x + i, sizeof old);
        for (int c = 0; c < LANES; c++) {
            y[i + (back ? 2 * c : c)] = scale * old[back ? c : 2 * c];
            y[i + (back ? 2 * c + 1 : LANES + c)] = scale * old[back ? LANES + c : 2 * c + 1];
        }
    }
    for (; i < n; i++) y[i] = scale * x[i];
}

/* Query heads from j to end of a row. */
INLINE void heads(const struct attend *a, int64_t row, int64_t j, int64_t end, const int half) {
    int64_t last = a->pos[row], each = a->heads / a->groups, count = end - j, done = 0;
    float q[count * a->d], most[count], sum[count];
    float *o = a->out + (row * a->heads + j) * a->e;
    memset(o, 0, (size_t)(count * a->e) * sizeof *o);
    for (int64_t i = 0; i < count; i++) {
        arrange(q + i * a->d, a->q + row * a->q_row + (j + i) * a->q_head, a->d, (float)a->scale, 0, half);
        most[i] = -INFINITY, sum[i] = 0;
    }
    struct keys x = {.row = row, .first = last - a->window + 1 > 0 ? last - a->window + 1 : 0};
    for (; x.first <= last; x.first += BLOCK) {
        find(a, &x, last, half);
        for (int64_t i = 0; i < count; i += done) {
            int64_t left = each - (j + i) % each;
            done = left < TILE ? left : TILE;
            const float *now = q + i * a->d;
            if (done == 1) block(a, &x, j + i, now, most + i, sum + i, 1, half);
            if (done == 2) block(a, &x, j + i, now, most + i, sum + i, 2, half);
            if (done == 3) block(a, &x, j + i, now, most + i, sum + i, 3, half);
            if (done == 4) block(a, &x, j + i, now, most + i, sum + i, 4, half);
        }
    }
    for (int64_t i = 0; i < count; i++)
        arrange(o + i * a->e, o + i * a->e, a->e, sum[i] == 0 ? 0 : 1 / sum[i], 1, half);
}

static void heads_full(const struct attend *a, int64_t row, int64_t j, int64_t end) { heads(a, row, j, end, 0); }
static void heads_half(const struct attend *a, int64_t row, int64_t j, int64_t end) { heads(a, row, j, end, 1); }

/* The products of two numbers that row takes, or -1 where it points outside of the cache. */
static int64_t work(const struct attend *a, int64_t row) {
    int64_t last = a->pos[row], first = last - a->window + 1 > 0 ? last - a->window + 1 : 0;
    if (last >= a->slots) return -1;
    int32_t low = 0, high = 0;
    if (a->place) {
        const int32_t *place = a->place + row * a->place_row;
        for (int64_t p = first; p <= last; p++) {
            low = place[p] < low ? place[p] : low;
            high = place[p] > high ? place[p] : high;
        }
    } else if (last >= 0) {
        high = (int32_t)(row / a->share);
    }
    return low < 0 || high >= a->stored ? -1 : (last + 1 - first) * a->heads * (a->d + a->e);
}

/* 0, or 1 where a position or place lies outside of the cache. */
int attend_one(const struct attend *a) {
    int64_t all = 0, threads = omp_get_max_threads(), each = a->heads / a->groups;
    for (int64_t row = 0; row < a->rows; row++) {
        int64_t mine = work(a, row);
        if (mine < 0) return 1;
        all += mine;
    }
    if (all < WORTH) threads = 1;
    int64_t parts = threads == 1 ? 1 : (4 * threads + a->rows - 1) / a->rows;
    if (parts > a->groups) parts = a->groups;
    int64_t tasks = a->rows * parts, run = tasks / (8 * threads) + 1; /* neighbours may share keys */
#pragma omp parallel for if (threads > 1) num_threads(threads) schedule(dynamic, run)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t row = task / parts, part = task % parts;
        int64_t j = a->groups * part / parts * each, end = a->groups * (part + 1) / parts * each;
        (a->half ? heads_half : heads_full)(a, row, j, end);
    }
    return 0;
}
