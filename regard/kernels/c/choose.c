/* log sum exp and the k best of each row of logits, in one pass over memory. */
#include "best.h"

#include <float.h>

enum {
    BLOCK = 64 * LANES, /* logits that are read for their maximum, and again, out of the first cache, for their sum */
    STRIP = 4 * LANES,  /* logits that are looked at one by one if one of them may be among the best */
    WORTH = 65536       /* logits that are worth a second thread */
};

/* What rows.choose packs; the stride counts numbers. */
struct choose {
    int64_t rows, vocab, k, bans, logits_row;
    const float *logits;
    const int64_t *banned;
    float *norm, *values;
    int64_t *ids;
};

/* The largest of n logits, behind which -inf fills a strip; whatever is among the best is offered. */
static float survey(struct best *b, const float *x, int64_t id, int64_t n) {
    vec most = splat(-INFINITY);
    for (int64_t i = 0; i < n; i += STRIP) {
        vec top = larger(larger(load(x + i), load(x + i + LANES)),
                         larger(load(x + i + 2 * LANES), load(x + i + 3 * LANES)));
        most = larger(top, most);
        if (b->count < b->k || above(top, b->values[b->k - 1])) look(b, x + i, id + i, n - i < STRIP ? n - i : STRIP);
    }
    return largest(most);
}

static float log_sum_exp(struct best *b, const float *x, int64_t n) {
    float most = -FLT_MAX, last[BLOCK];
    double sum = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t size = n - i < BLOCK ? n - i : BLOCK;
        const float *y = x + i;
        if (size < BLOCK) {
            for (int64_t j = 0; j < BLOCK; j++) last[j] = j < size ? y[j] : -INFINITY;
            y = last;
        }
        float top = survey(b, y, i, size);
        if (top > most) {
            sum *= exp(most - top);
            most = top;
        }
        vec part[4] = {{0}}; /* few sums each: a float that has come to 1 rounds what is added to it */
        for (int64_t j = 0; j < size; j += STRIP)
            for (int c = 0; c < 4; c++) part[c] += exp_below(load(y + j + c * LANES) - most);
        sum += total((part[0] + part[1]) + (part[2] + part[3]));
    }
    if (most < INFINITY) return (float)(most + log(sum));
    for (int64_t i = 0; i < n; i++)
        if (x[i] != x[i]) return x[i];
    return most;
}

int choose(const struct choose *c) {
#pragma omp parallel for if (c->rows * c->vocab > WORTH) schedule(dynamic, 1)
    for (int64_t row = 0; row < c->rows; row++) {
        struct best b = {0, c->k, c->bans, c->banned, c->values + row * c->k, c->ids + row * c->k};
        c->norm[row] = log_sum_exp(&b, c->logits + row * c->logits_row, c->vocab);
    }
    return 0;
}
