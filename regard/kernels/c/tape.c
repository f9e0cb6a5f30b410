/* Calls of a decoding step, recorded once and played again: between them nobody else has to run. */
#include <stdint.h>

int linear(const void *l, const float *x, int64_t m, const float *add, float *y);
int norm(const void *a);
int update_cache(const void *a);
int attend_one(const void *a);

enum { LINEAR, NORM, UPDATE, ATTEND };

/* What tape.Tape packs: x to y are for products alone. */
struct call {
    int64_t kind;
    const void *a;
    const float *x;
    int64_t m;
    const float *add;
    float *y;
};

/* 0, or what the first call gave that failed. */
int play(const struct call *calls, int64_t count) {
    int failed = 0;
    for (const struct call *c = calls; c < calls + count && !failed; c++) {
        if (c->kind == LINEAR) failed = linear(c->a, c->x, c->m, c->add, c->y);
        if (c->kind == NORM) failed = norm(c->a);
        if (c->kind == UPDATE) failed = update_cache(c->a);
        if (c->kind == ATTEND) failed = attend_one(c->a);
    }
    return failed;
}
