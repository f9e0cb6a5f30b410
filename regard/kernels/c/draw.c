/* The next token of each row, drawn without sorting the vocabulary: what a mask allows, temperature, top-k, top-p and min-p
   in this order, then the inverse of the cumulative probability. decode/sampling.py has the plain form.

   A filter keeps the best tokens up to a number or a mass. Its threshold is found digit by digit: a histogram of the first 11
   bits of the sort keys tells those of the threshold; one of the next 11, over the keys that begin with these, tells more of
   them, and one of the last 10 the rest. Of equal keys the lowest ids are kept. */
#include "vector.h"

#include <stdlib.h>

enum {
    BLOCK = 16 * LANES, /* weights whose sum is one step of the search for the token */
    BINS = 2048,
    WORTH = 65536 /* logits that are worth a second thread */
};

/* What rows.draw packs. The row counts numbers; settings that are not used are NULL, all of them where all is greedy. */
struct draw {
    int64_t rows, vocab, logits_row;
    const float *logits;
    const uint32_t *mask; /* (rows, words of 32 tokens) */
    const float *temperature;
    const int64_t *top_k;
    const float *top_p, *min_p;
    const int64_t *seed, *key, *count;
    int64_t *tokens;
};

static uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* Bits that sort as -x does: the largest x first. -0 equals 0. */
INLINE uint32_t descending(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    if (b << 1 == 0) b = 0;
    return b >> 31 ? b : ~(b | 0x80000000u);
}

INLINE double sum_of(const float *w, int64_t n) {
    double sum = 0;
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        vec part = {0};
        for (int j = 0; j < BLOCK; j += LANES) part += load(w + i + j);
        sum += total(part);
    }
    for (; i < n; i++) sum += w[i];
    return sum;
}

/* Weights become 0 behind the best tokens, those with the smallest keys: behind the first `most` of them, or, where that
   is 0, behind the token with which their weights come to `mass`. */
static void keep_best(float *w, const uint32_t *keys, int64_t n, int64_t most, double mass) {
    static const int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
    double goal = most ? (double)most : fmax(mass, 1e-300), before = 0, size[BINS];
    uint32_t threshold = 0;
    for (int level = 0; level < 3; level++) {
        int shift = shifts[level], width = widths[level], above = shift + width;
        memset(size, 0, sizeof size);
        for (int64_t i = 0; i < n; i++)
            if (w[i] > 0 && (above == 32 || keys[i] >> above == threshold))
                size[keys[i] >> shift & ((1u << width) - 1)] += most ? 1 : w[i];
        uint32_t bin = 0, last = 0; /* the last bin that holds something */
        for (; bin < 1u << width; bin++) {
            if (!(size[bin] > 0)) continue;
            last = bin;
            if (before + size[bin] >= goal) break;
            before += size[bin];
        }
        if (bin == 1u << width) {
            if (!level) return;   /* all of it is less than the goal */
            before -= size[last]; /* sums of another order round to less than the goal */
        }
        threshold = threshold << width | last;
    }
    for (int64_t i = 0; i < n; i++) {
        if (keys[i] < threshold || w[i] == 0) continue;
        if (keys[i] == threshold && before < goal)
            before += most ? 1 : w[i];
        else
            w[i] = 0;
    }
}

/* Of the tokens from i on, 32 to a word. Most words are all of one kind. */
INLINE uint32_t word_of(const uint32_t *mask, int64_t i) { return mask ? mask[i / 32] : ~0u; }

/* The largest x that may be chosen. */
static float top_of(const float *x, const uint32_t *mask, int64_t n) {
    vec most = splat(-INFINITY);
    float top = -INFINITY;
    for (int64_t i = 0; i < n; i += 32) {
        uint32_t word = word_of(mask, i);
        if (word == ~0u && n - i >= 32)
            for (int j = 0; j < 32; j += LANES) most = larger(load(x + i + j), most);
        else if (word)
            for (int64_t j = 0; j < 32 && i + j < n; j++)
                if (word >> j & 1 && x[i + j] > top) top = x[i + j];
    }
    return fmaxf(largest(most), top);
}

static int64_t first_of(const float *x, const uint32_t *mask, int64_t n, float wanted) {
    int64_t i = 0;
    while (i < n - 1 && (x[i] != wanted || !(word_of(mask, i) >> i % 32 & 1))) i++;
    return i;
}

/* exp((x - top) scale), 0 for what may not be chosen. */
static void weigh(float *w, const float *x, const uint32_t *mask, int64_t n, float top, float scale) {
    for (int64_t i = 0; i < n; i += 32) {
        uint32_t word = word_of(mask, i);
        int64_t size = n - i < 32 ? n - i : 32;
        float last[32];
        if (size < 32) {
            for (int j = 0; j < 32; j++) last[j] = j < size ? x[i + j] : -INFINITY;
        }
        const float *from = size < 32 ? last : x + i;
        float *to = size < 32 ? last : w + i;
        for (int j = 0; word && j < 32; j += LANES) store(to + j, exp_below((load(from + j) - top) * scale));
        if (to == last) memcpy(w + i, last, (size_t)size * 4);
        for (int64_t j = 0; word != ~0u && j < size; j++) w[i + j] = word >> j & 1 ? w[i + j] : 0;
    }
}

/* w and keys are room for n numbers each. */
static int64_t draw_row(const struct draw *c, int64_t row, float *w, uint32_t *keys) {
    int64_t n = c->vocab, i = 0;
    const float *x = c->logits + row * c->logits_row;
    const uint32_t *mask = c->mask ? c->mask + row * ((n + 31) / 32) : NULL;
    float hot = c->temperature ? c->temperature[row] : 0, top = top_of(x, mask, n);
    if (top == -INFINITY) return -1;
    if (!(hot > 0)) return first_of(x, mask, n, top);
    int64_t k = c->top_k ? c->top_k[row] : 0;
    float p = c->top_p ? c->top_p[row] : 1;
    if (k > 0 || p < 1)
        for (i = 0; i < n; i++) keys[i] = descending(x[i]);
    float scale = 1 / (hot > 1e-6f ? hot : 1e-6f);
    weigh(w, x, mask, n, top, scale);
    if (k > 0 && k < n) keep_best(w, keys, n, k, 0);
    if (p < 1) keep_best(w, keys, n, 0, p * sum_of(w, n));
    float least = c->min_p ? c->min_p[row] : 0;
    for (i = 0; least > 0 && i < n; i++) w[i] = w[i] < least ? 0 : w[i];
    uint64_t bits = mix(mix(mix((uint64_t)c->seed[row]) ^ (uint64_t)c->key[row]) ^ (uint64_t)c->count[row]);
    double goal = (double)(bits >> 11) * 0x1p-53 * sum_of(w, n), before = 0, part = 0;
    int64_t found = 0;
    for (i = 0; i < n; i += BLOCK, before += part) {
        int64_t size = n - i < BLOCK ? n - i : BLOCK;
        part = sum_of(w + i, size);
        if (before + part <= goal) continue;
        for (int64_t j = 0; j < size; j++) {
            if (w[i + j] > 0) found = i + j;
            if ((before += w[i + j]) > goal) break;
        }
        return found;
    }
    for (i = 0; i < n; i++)
        if (w[i] > 0) found = i;
    return found;
}

/* 1 where there is no memory. */
int draw(const struct draw *c) {
    int short_of = 0;
#pragma omp parallel if (c->rows * c->vocab > WORTH) reduction(| : short_of)
    {
        float *room = malloc((size_t)c->vocab * 8);
        short_of |= !room;
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < c->rows; row++)
            if (room) c->tokens[row] = draw_row(c, row, room, (uint32_t *)(room + c->vocab));
        free(room);
    }
    return short_of;
}
