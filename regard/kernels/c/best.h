/* The k best of many numbers that come in the order of their ids: of equals the smaller id is better. */
#ifndef REGARD_BEST_H
#define REGARD_BEST_H

#include "vector.h"

/* The best so far, in descending order. */
struct best {
    int64_t count, k, bans;
    const int64_t *banned;
    float *values;
    int64_t *ids;
};

INLINE void offer(struct best *b, float x, int64_t id) {
    for (int64_t i = 0; i < b->bans; i++)
        if (b->banned[i] == id) return;
    int64_t at = b->count < b->k ? b->count++ : b->k - 1;
    for (; at > 0 && b->values[at - 1] < x; at--) {
        b->values[at] = b->values[at - 1];
        b->ids[at] = b->ids[at - 1];
    }
    b->values[at] = x;
    b->ids[at] = id;
}

/* Offers n logits of a strip whose first id is given; equals stay in the order of their ids. */
static __attribute__((noinline, unused)) void look(struct best *b, const float *x, int64_t id, int64_t n) {
    int64_t i = 0;
    for (; i < n && b->count < b->k; i++) offer(b, x[i], id + i);
    for (; i < n && i % LANES; i++)
        if (x[i] > b->values[b->k - 1]) offer(b, x[i], id + i);
    for (; i < n; i += LANES) {
        for (uint32_t found = above(load(x + i), b->values[b->k - 1]); found; found &= found - 1) {
            int64_t j = i + __builtin_ctz(found);
            if (x[j] > b->values[b->k - 1]) offer(b, x[j], id + j);
        }
    }
}

#endif
