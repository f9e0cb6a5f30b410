/* Causal attention in float32 and its way back, while a CPU trains: query i of a head sees the keys up to i.

   A block of queries, two vectors of them, lies across: scores are kept as (keys, queries), so that the softmax goes
   down the keys and no vector is ever summed within. Everything else is one small product, `multiply`. A head is one
   thread's from beginning to end: threads change no bit. Called by train.py, which says what is computed. */
#include "vector.h"

#include <stdlib.h>

enum { ACROSS = 2 * LANES, DOWN = LANES == 16 ? 8 : 4 };

/* Of a tensor (b h t d), and how far apart its rows lie along b, h and t; the last axis has no gaps. */
struct rows {
    float *x;
    int64_t by_b, by_h, by_t;
};

/* What train packs: the last five are 0 on the way forward, where out and lse are written. */
struct causal {
    int64_t b, h, t, d;
    struct rows q, k, v, out, slope, dq, dk, dv;
    float *lse;
    double scale;
};

static float *head_of(const struct rows *r, int64_t head, int64_t heads) {
    return r->x + head / heads * r->by_b + head % heads * r->by_h;
}

/* c_i (+)= sum over k < n of a_ik b_k for `down` rows i, each two vectors wide. */
INLINE void multiply_rows(
    const float *a, int64_t a_i, int64_t a_k, const float *b, int64_t b_k, int64_t n, float *c, int64_t c_i,
    const int add, const int down) {
    vec sum[DOWN][2];
    for (int i = 0; i < down; i++)
        for (int j = 0; j < 2; j++) sum[i][j] = add ? load(c + i * c_i + j * LANES) : splat(0);
    for (int64_t k = 0; k < n; k++, a += a_k, b += b_k) {
        vec left = load(b), right = load(b + LANES);
        for (int i = 0; i < down; i++) {
            vec each = splat(a[i * a_i]);
            sum[i][0] += each * left;
            sum[i][1] += each * right;
        }
    }
    for (int i = 0; i < down; i++)
        for (int j = 0; j < 2; j++) store(c + i * c_i + j * LANES, sum[i][j]);
}

/* The same for m rows, `width` numbers wide. */
INLINE void multiply(
    const float *a, int64_t a_i, int64_t a_k, const float *b, int64_t b_k, int64_t n, float *c, int64_t c_i,
    int64_t m, int64_t width, const int add) {
    for (int64_t j = 0; j < width; j += ACROSS) {
        int64_t i = 0;
        for (; i + DOWN <= m; i += DOWN)
            multiply_rows(a + i * a_i, a_i, a_k, b + j, b_k, n, c + i * c_i + j, c_i, add, DOWN);
        for (; i < m; i++) multiply_rows(a + i * a_i, a_i, a_k, b + j, b_k, n, c + i * c_i + j, c_i, add, 1);
    }
}

/* `count` rows of d numbers become d rows of ACROSS, the missing ones zeros. */
static void turn(const float *x, int64_t by_t, int64_t count, int64_t d, float *to) {
    for (int64_t i = 0; i < d; i++)
        for (int64_t r = 0; r < ACROSS; r++) to[i * ACROSS + r] = r < count ? x[r * by_t + i] : 0.0f;
}

/* Which of a vector of queries, whose first is `row`, see this key. */
INLINE bits sees(int64_t row, int64_t key) {
    ints place;
    for (int l = 0; l < LANES; l++) place[l] = l;
    return (bits)(place >= (int32_t)(key - row));
}

static void forward(const struct causal *a, int64_t head, float *room) {
    const float *q = head_of(&a->q, head, a->h), *k = head_of(&a->k, head, a->h), *v = head_of(&a->v, head, a->h);
    float *out = head_of(&a->out, head, a->h), *lse = a->lse + head * a->t, *across = room, *p = room + a->d * ACROSS;
    const vec scale = splat((float)a->scale), low = splat(-INFINITY);
    for (int64_t row = 0; row < a->t; row += ACROSS) {
        int64_t count = a->t - row < ACROSS ? a->t - row : ACROSS, keys = row + count;
        turn(q + row * a->q.by_t, a->q.by_t, count, a->d, across);
        multiply(k, a->k.by_t, 1, across, ACROSS, a->d, p, ACROSS, keys, ACROSS, 0);
        for (int j = 0; j < 2; j++) {
            vec top = low, sum = splat(0);
            float *mine = p + j * LANES, line[LANES];
            for (int64_t key = 0; key < keys; key++) {
                vec x = load(mine + key * ACROSS) * scale;
                bits seen = sees(row + j * LANES, key);
                x = (vec)(((bits)x & seen) | ((bits)low & ~seen));
                store(mine + key * ACROSS, x);
                top = larger(x, top);
            }
            for (int64_t key = 0; key < keys; key++) {
                vec x = exp_below(load(mine + key * ACROSS) - top);
                store(mine + key * ACROSS, x);
                sum += x;
            }
            for (int64_t key = 0; key < keys; key++) store(mine + key * ACROSS, load(mine + key * ACROSS) / sum);
            for (int l = 0; l < LANES; l++) line[l] = top[l] + logf(sum[l]);
            int64_t left = count - j * LANES;
            if (left > 0) memcpy(lse + row + j * LANES, line, (size_t)(left < LANES ? left : LANES) * 4);
        }
        multiply(p, 1, ACROSS, v, a->v.by_t, keys, out + row * a->out.by_t, a->out.by_t, count, a->d, 0);
    }
}

/* p = e^(scale q.k - lse), ds = scale p (slope.v - slope.out); dq = ds k, dk = ds^T q, dv = p^T slope. */
static void backward(const struct causal *a, int64_t head, float *room) {
    const float *q = head_of(&a->q, head, a->h), *k = head_of(&a->k, head, a->h), *v = head_of(&a->v, head, a->h);
    const float *out = head_of(&a->out, head, a->h), *slope = head_of(&a->slope, head, a->h), *lse = a->lse + head * a->t;
    float *dq = head_of(&a->dq, head, a->h), *dk = head_of(&a->dk, head, a->h), *dv = head_of(&a->dv, head, a->h);
    float *across = room, *p = room + a->d * ACROSS, *ds = p + (a->t + ACROSS) * ACROSS;
    const vec scale = splat((float)a->scale);
    for (int64_t i = 0; i < a->t; i++)
        memset(dk + i * a->dk.by_t, 0, (size_t)a->d * 4), memset(dv + i * a->dv.by_t, 0, (size_t)a->d * 4);
    for (int64_t row = 0; row < a->t; row += ACROSS) {
        int64_t count = a->t - row < ACROSS ? a->t - row : ACROSS, keys = row + count;
        const float *queries = q + row * a->q.by_t, *slopes = slope + row * a->slope.by_t;
        float inner[ACROSS] = {0}, total_of[ACROSS] = {0};
        turn(queries, a->q.by_t, count, a->d, across);
        multiply(k, a->k.by_t, 1, across, ACROSS, a->d, p, ACROSS, keys, ACROSS, 0);
        turn(slopes, a->slope.by_t, count, a->d, across);
        multiply(v, a->v.by_t, 1, across, ACROSS, a->d, ds, ACROSS, keys, ACROSS, 0);
        for (int64_t r = 0; r < count; r++) {
            vec sum = splat(0);
            for (int64_t i = 0; i < a->d; i += LANES)
                sum += load(slopes + r * a->slope.by_t + i) * load(out + (row + r) * a->out.by_t + i);
            inner[r] = total(sum), total_of[r] = lse[row + r];
        }
        for (int j = 0; j < 2; j++) {
            vec less = load(total_of + j * LANES), minus = load(inner + j * LANES);
            for (int64_t key = 0; key < keys; key++) {
                float *x = p + key * ACROSS + j * LANES, *y = ds + key * ACROSS + j * LANES;
                vec power = load(x) * scale - less;
                /* Above 0 by rounding alone, but of huge scores by as much as e^x cannot hold. */
                power = (vec)((bits)power & ~(bits)(power > 0.0f));
                vec each = (vec)((bits)exp_below(power) & sees(row + j * LANES, key));
                store(x, each);
                store(y, scale * each * (load(y) - minus));
            }
        }
        multiply(ds, 1, ACROSS, k, a->k.by_t, keys, dq + row * a->dq.by_t, a->dq.by_t, count, a->d, 0);
        multiply(ds, ACROSS, 1, queries, a->q.by_t, count, dk, a->dk.by_t, keys, a->d, 1);
        multiply(p, ACROSS, 1, slopes, a->slope.by_t, count, dv, a->dv.by_t, keys, a->d, 1);
    }
}

int causal(const struct causal *a) {
    int failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        float *room = aligned_alloc(64, (size_t)(a->d + 2 * (a->t + ACROSS)) * ACROSS * 4);
        failed = !room;
#pragma omp for schedule(dynamic)
        for (int64_t head = 0; head < a->b * a->h; head++)
            if (room) a->slope.x ? backward(a, head, room) : forward(a, head, room);
        free(room);
    }
    return failed;
}
