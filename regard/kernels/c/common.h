/* What the C files share: exported names, bf16 bits, and how many threads a piece of work is worth. */
#ifndef REGARD_COMMON_H
#define REGARD_COMMON_H

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

/* To nearest, ties to even; a NaN stays a NaN, whatever bits it has. */
static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
