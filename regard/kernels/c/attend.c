/* Attention of one new token a row over keys and values where a cache left them. */
#include "vector.h"

#include <stdlib.h>

enum {
    SPAN = 1024,                /* slots after which sums begin anew, however many threads: a row's bits are its own */
    BLOCK = 64,                 /* keys whose scores are at hand at a time */
    TILE = 4,                   /* queries that read a key or value together */
    CHUNK = LANES == 8 ? 2 : 4, /* vectors of a value that are summed together: AVX has half the registers */
    WORTH = 40000               /* products of two numbers that are worth a second thread */
};

/* What rows.attend_one packs; strides count numbers. `page` slots lie together in the row that `place` names, one name
   for them all. */
struct attend {
    int64_t rows, heads, groups, d, e, half, stored, slots, share, window, page;
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

/* Where sums of a row's heads from j to end go: over p of e^(s_p - most) v_p and of e^(s_p - most). */
struct sums {
    int64_t j, end;
    float *o, *most, *sum;
};

/* The slots of a row that are at hand, from `first` on, and how many bytes into k and v they lie. */
struct slots {
    int64_t row, first, n, key[BLOCK], value[BLOCK];
};

/* The keys or values of one head: n pieces of `width` numbers. */
struct pieces {
    const char *data;
    const int64_t *at;
    int64_t n, width;
};

/* Asks for a piece that is needed soon: pieces lie apart, which the processor does not foresee. */
INLINE void fetch(struct pieces x, int64_t p, const int half) {
    for (int64_t i = 0; i < x.width * (half ? 2 : 4); i += 64) __builtin_prefetch(x.data + x.at[p] + i);
}

/* s[j][p] = q_j . k_p for `many` queries. Four of them are on the way at a time. */
INLINE void products(float s[][BLOCK], const float *q, struct pieces k, struct pieces soon, const int many,
                     const int half) {
    const int keys = many == 1 ? 4 : many == 2 ? 2 : 1;
    const int64_t d = k.width, whole = d / (2 * LANES) * (2 * LANES);
    for (int64_t p = 0; p < k.n; p += keys) {
        vec sum[4] = {{0}}, other[4] = {{0}};
        float dot[4];
        for (int64_t i = 0; i < whole; i += 2 * LANES) {
#pragma GCC unroll 4
            for (int c = 0; c < keys; c++) {
                vec a, b;
                load_pair(k.data + k.at[p + c], i, &a, &b, half);
#pragma GCC unroll 4
                for (int j = 0; j < many; j++) {
                    sum[c * many + j] += load(q + j * d + i) * a;
                    other[c * many + j] += load(q + j * d + i + LANES) * b;
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sum[i] += other[i];
        totals(sum, dot);
#pragma GCC unroll 4
        for (int i = 0; i < keys * many; i++) {
            int c = i / many, j = i % many;
            for (int64_t rest = whole; rest < d; rest++)
                dot[i] += q[j * d + rest] * at(k.data + k.at[p + c], rest, half);
            s[j][p + c] = dot[i];
            if (j == 0) fetch(soon, p + c, half);
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
INLINE void mix_chunk(float *o, int64_t i, float s[][BLOCK], const float *keep, struct pieces v, struct pieces soon,
                      const int chunk, const int many, const int half) {
    vec sum[TILE][CHUNK];
#pragma GCC unroll 4
    for (int j = 0; j < many; j++)
#pragma GCC unroll 4
        for (int c = 0; c < chunk; c++) sum[j][c] = load(o + j * v.width + i + c * LANES) * keep[j];
    for (int64_t p = 0; p < v.n; p++) {
        vec x[CHUNK];
        fetch(soon, p, half);
#pragma GCC unroll 4
        for (int c = 0; c < chunk; c += 2) load_pair(v.data + v.at[p], i + c * LANES, x + c, x + c + 1, half);
#pragma GCC unroll 4
        for (int j = 0; j < many; j++)
#pragma GCC unroll 4
            for (int c = 0; c < chunk; c++) sum[j][c] += x[c] * s[j][p];
    }
#pragma GCC unroll 4
    for (int j = 0; j < many; j++)
#pragma GCC unroll 4
        for (int c = 0; c < chunk; c++) store(o + j * v.width + i + c * LANES, sum[j][c]);
}

INLINE void mix(float *o, float s[][BLOCK], const float *keep, struct pieces v, struct pieces soon, const int many,
                const int half) {
    int64_t i = 0;
    for (; i + CHUNK * LANES <= v.width; i += CHUNK * LANES, soon.width = 0)
        mix_chunk(o, i, s, keep, v, soon, CHUNK, many, half);
    for (; i + 2 * LANES <= v.width; i += 2 * LANES, soon.width = 0)
        mix_chunk(o, i, s, keep, v, soon, 2, many, half);
    for (; i < v.width; i++) {
        for (int j = 0; j < many; j++) {
            float sum = o[j * v.width + i] * keep[j];
            for (int64_t p = 0; p < v.n; p++) sum += s[j][p] * at(v.data + v.at[p], i, half);
            o[j * v.width + i] = sum;
        }
    }
}

/* `many` query heads from j on, which share a key head, over the slots at hand. */
INLINE void block(const struct attend *a, const struct slots *x, const struct sums *y, int64_t j, const float *q,
                  const int many, const int half) {
    float s[TILE][BLOCK], keep[TILE];
    int64_t size = half ? 2 : 4, g = j / (a->heads / a->groups), at = j - y->j;
    struct pieces k = {a->k + g * a->k_head * size, x->key, x->n, a->d};
    struct pieces v = {a->v + g * a->v_head * size, x->value, x->n, a->e};
    struct pieces next = {k.data + a->k_head * size, x->key, x->n, g + 1 < a->groups ? a->d : 0};
    products(s, q, k, v, many, half);
    for (int i = 0; i < many; i++) {
        const float *bias = a->bias ? a->bias + x->row * a->bias_row + (j + i) * a->bias_head + x->first : 0;
        keep[i] = soften(s[i], x->n, bias, y->most + at + i, y->sum + at + i);
    }
    mix(y->o + at * a->e, s, keep, v, next, many, half);
}

/* Finds the slots from x->first on to the last one. */
INLINE void find(const struct attend *a, struct slots *x, int64_t last, const int half) {
    int64_t size = half ? 2 : 4, own = x->row / a->share;
    const int32_t *place = a->place ? a->place + own * a->place_row : 0;
    x->n = last + 1 - x->first < BLOCK ? last + 1 - x->first : BLOCK;
    int64_t slot = a->page ? x->first % a->page : x->first, at = a->page ? x->first / a->page : slot;
    for (int64_t i = 0; i < (x->n + 3) / 4 * 4; i++) {
        int64_t from = place ? place[at] : own;
        x->key[i] = (from * a->k_row + slot * a->k_slot) * size;
        x->value[i] = (from * a->v_row + slot * a->v_slot) * size;
        if (i + 1 >= x->n) continue; /* up to a multiple of four the last one again */
        slot++;
        if (!a->page) at = slot;
        if (slot == a->page) slot = 0, at++;
    }
}

/* y = scale x, the features put in the order of `load_pair`, or back from it. */
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

/* The sums over the slots of a row from `first` to `last`. */
INLINE void sum_up(const struct attend *a, int64_t row, int64_t first, int64_t last, struct sums y, const int half) {
    int64_t each = a->heads / a->groups, count = y.end - y.j, done = 0;
    float q[count * a->d];
    memset(y.o, 0, (size_t)(count * a->e) * sizeof *y.o);
    for (int64_t i = 0; i < count; i++) {
        arrange(q + i * a->d, a->q + row * a->q_row + (y.j + i) * a->q_head, a->d, (float)a->scale, 0, half);
        y.most[i] = -INFINITY, y.sum[i] = 0;
    }
    struct slots x = {.row = row, .first = first};
    for (; x.first <= last; x.first += BLOCK) {
        find(a, &x, last, half);
        for (int64_t j = y.j; j < y.end; j += done) {
            const float *now = q + (j - y.j) * a->d;
            done = each - j % each < TILE ? each - j % each : TILE;
            if (done == 1) block(a, &x, &y, j, now, 1, half);
            if (done == 2) block(a, &x, &y, j, now, 2, half);
            if (done == 3) block(a, &x, &y, j, now, 3, half);
            if (done == 4) block(a, &x, &y, j, now, 4, half);
        }
    }
}

static void sum_full(const struct attend *a, int64_t row, int64_t first, int64_t last, struct sums y) {
    sum_up(a, row, first, last, y, 0);
}

static void sum_half(const struct attend *a, int64_t row, int64_t first, int64_t last, struct sums y) {
    sum_up(a, row, first, last, y, 1);
}

/* The output of head j from its sums over each span, which lie `step` floats apart. */
static void finish(const struct attend *a, int64_t row, int64_t j, struct sums y, int64_t spans, int64_t step) {
    float o[a->e], sum = 0, top = -INFINITY, *out = a->out + (row * a->heads + j) * a->e;
    int64_t at = j - y.j;
    memset(o, 0, sizeof o);
    for (int64_t s = 0; s < spans; s++) top = y.most[at + s * step] > top ? y.most[at + s * step] : top;
    for (int64_t s = 0; s < spans; s++) {
        float most = y.most[at + s * step], weight = most == top ? 1 : expf(most - top);
        for (int64_t i = 0; i < a->e; i++) o[i] += weight * y.o[at * a->e + s * step + i];
        sum += weight * y.sum[at + s * step];
    }
    float scale = sum == 0 ? 0 : 1 / sum;
    if (a->half) {
        arrange(out, o, a->e, scale, 1, 1);
    } else {
        arrange(out, o, a->e, scale, 1, 0);
    }
}

/* The products of two numbers that a row takes, or -1 where it points outside of the cache. */
static int64_t work(const struct attend *a, int64_t row) {
    int64_t last = a->pos[row], first = last - a->window + 1 > 0 ? last - a->window + 1 : 0;
    if (last >= a->slots) return -1;
    int32_t low = 0, high = 0;
    if (a->place) {
        const int32_t *place = a->place + row / a->share * a->place_row;
        int64_t each = a->page ? a->page : 1;
        for (int64_t p = first / each; p <= (last < 0 ? -1 : last / each); p++) {
            low = place[p] < low ? place[p] : low;
            high = place[p] > high ? place[p] : high;
        }
    } else if (last >= 0) {
        high = (int32_t)(row / a->share);
    }
    return low < 0 || high >= a->stored ? -1 : (last + 1 - first) * a->heads * (a->d + a->e);
}

/* How the work is cut: each row into `spans` of `span` slots, its groups into `parts`. With more than one span the sums
   wait in `scratch`, `step` floats for each; else they are the output's own memory. */
struct plan {
    int64_t spans, span, parts, step;
    float *scratch;
};

static void run(const struct attend *a, const struct plan *c, int64_t task) {
    int64_t piece = task / c->parts, part = task % c->parts, row = piece / c->spans, h = a->heads;
    int64_t seen = a->pos[row] + 1, each = h / a->groups;
    int64_t first = (seen > a->window ? seen - a->window : 0) + piece % c->spans * c->span;
    int64_t last = seen < first + c->span ? seen - 1 : first + c->span - 1;
    int64_t j = a->groups * part / c->parts * each, end = a->groups * (part + 1) / c->parts * each;
    float local[2 * h], *base = c->scratch ? c->scratch + piece * c->step : a->out + row * h * a->e;
    float *most = c->scratch ? base + h * a->e : local;
    struct sums y = {j, end, base + j * a->e, most + j, most + h + j};
    (a->half ? sum_half : sum_full)(a, row, first, last, y);
    for (; !c->scratch && j < end; j++) finish(a, row, j, y, 1, 0);
}

/* 0, or 1 where a position or place lies outside of the cache. */
int attend_one(const struct attend *a) {
    int64_t all = 0, longest = 0, threads = omp_get_max_threads(), h = a->heads;
    for (int64_t row = 0; row < a->rows; row++) {
        int64_t mine = work(a, row);
        if (mine < 0) return 1;
        all += mine;
        longest = a->pos[row] < longest ? longest : a->pos[row] + 1;
    }
    if (longest > a->window) longest = a->window;
    struct plan c = {longest > SPAN ? (longest + SPAN - 1) / SPAN : 1, SPAN, 1, h * (a->e + 2), 0};
    if (c.spans > 1) c.scratch = malloc((size_t)(a->rows * c.spans * c.step) * sizeof *c.scratch);
    if (!c.scratch) c.spans = 1, c.span = longest;
    int64_t pieces = a->rows * c.spans;
    if (all < WORTH) threads = 1;
    if (threads > 1) c.parts = (2 * threads + pieces - 1) / pieces;
    if (c.parts > a->groups) c.parts = a->groups;
    int64_t tasks = pieces * c.parts, batch = tasks / (8 * threads) + 1; /* neighbours may share keys */
#pragma omp parallel for if (threads > 1) num_threads(threads) schedule(dynamic, batch)
    for (int64_t task = 0; task < tasks; task++) run(a, &c, task);
    for (int64_t j = 0; c.scratch && j < a->rows * h; j++) {
        float *base = c.scratch + j / h * c.spans * c.step, *most = base + h * a->e;
        finish(a, j / h, j % h, (struct sums){0, h, base, most, most + h}, c.spans, c.step);
    }
    free(c.scratch);
    return 0;
}
