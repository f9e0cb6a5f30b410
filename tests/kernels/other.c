/* Products of a file of cases, made on another machine: read, multiplied, compared. Called by test_native_other.py. */
#include "gemm.c"

#include <stdio.h>

static void *get(FILE *file, size_t bytes) {
    void *room = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (fread(room, 1, bytes, file) != bytes) exit(3);
    return room;
}

int main(int count, char **given) {
    FILE *file = fopen(given[count - 1], "rb");
    int64_t h[4], cases = 0, others = 0;
    double worst = 0;
    for (; fread(h, 8, 4, file) == 4; cases++) { /* kind, m, k, n */
        int64_t kind = h[0], m = h[1], k = h[2], n = h[3];
        float *x = get(file, m * k * 4), *w = get(file, n * k * 4), *b = get(file, n * 4), *want = get(file, m * n * 4);
        float *y = aligned_alloc(64, m * n * 4 + 64), *alone = aligned_alloc(64, n * 4 + 64);
        Linear l = {kind, n, k, 0, 0, aligned_alloc(4096, (linear_bytes(kind, n, k, 0) + 8191) / 4096 * 4096), b};
        linear_pack(&l, w, 0, 0, n);
        double off = 0, all = 0;
        if (linear(&l, x, m, 0, y) || linear(&l, x, 1, 0, alone)) return 4;
        for (int64_t i = 0; i < m * n; i++) off += (y[i] - want[i]) * (y[i] - want[i]), all += want[i] * want[i];
        worst = sqrt(off / all) > worst || off != off ? sqrt(off / all) : worst;
        others += memcmp(alone, y, n * 4) != 0;
    }
    printf("%ld %ld %g\n", (long)cases, (long)others, worst);
}
