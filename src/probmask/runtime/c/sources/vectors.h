/* Vectors of floats, by the vector extensions of GCC and Clang or in plain C99.
 *
 * Define PM_PLAIN to compile without the extensions. WIDTH is the number of floats in a vector.
 */
#ifndef PM_VECTORS_H
#define PM_VECTORS_H

#include <stdint.h>
#if defined(__SSE__) && !defined(PM_PLAIN)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(PM_PLAIN)
#define INLINE static inline __attribute__((always_inline, unused))
#else
#define INLINE static inline
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

/* Vectors of sums that fit into the registers, with two to spare. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define QUERY_VECTORS 4
#else
#define QUERY_VECTORS 3
#endif

#if defined(__GNUC__) && !defined(PM_PLAIN)

/* Tensors are aligned to single floats only: shifted inputs start anywhere. */
typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t bits __attribute__((vector_size(4 * WIDTH)));
typedef float unaligned_vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef signed char unaligned_bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));

INLINE vec load(const float *at) { return *(const unaligned_vec *)at; }
INLINE void store(float *at, vec x) { *(unaligned_vec *)at = x; }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec add(vec a, vec b) { return a + b; }
INLINE vec subtract(vec a, vec b) { return a - b; }
INLINE vec multiply(vec a, vec b) { return a * b; }
INLINE vec divide(vec a, vec b) { return a / b; }
INLINE vec multiply_add(vec a, vec b, vec c) { return a * b + c; }

/* a where a > b, otherwise b: the instructions of x86, which GCC does not derive. */
#if defined(__AVX512F__)
INLINE vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec smaller(vec a, vec b) { return _mm512_min_ps(a, b); }
#elif defined(__AVX__)
INLINE vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec smaller(vec a, vec b) { return _mm256_min_ps(a, b); }
#elif defined(__SSE__)
INLINE vec larger(vec a, vec b) { return _mm_max_ps(a, b); }
INLINE vec smaller(vec a, vec b) { return _mm_min_ps(a, b); }
#else
INLINE vec larger(vec a, vec b) {
    const bits is_larger = a > b;
    return (vec)(((bits)a & is_larger) | ((bits)b & ~is_larger));
}
INLINE vec smaller(vec a, vec b) {
    const bits is_smaller = a < b;
    return (vec)(((bits)a & is_smaller) | ((bits)b & ~is_smaller));
}
#endif

/* x where a > b, otherwise 0. */
INLINE vec where_larger(vec a, vec b, vec x) { return (vec)((bits)x & (bits)(a > b)); }

/* The bits of positions, all ones or all zeros, from bytes of -1 and 0. */
INLINE bits expand(const signed char *positions) {
    return __builtin_convertvector(*(const unaligned_bytes *)positions, bits);
}
INLINE vec keep(vec x, bits kept) { return (vec)((bits)x & kept); }

/* x · 2ⁿ, where n are the lowest bits of t. */
INLINE vec add_exponent(vec x, vec t) { return (vec)((bits)x + ((bits)t << 23)); }

/* An estimate of 1 / √x with two correct digits. */
INLINE vec estimate_inverse_root(vec x) { return (vec)(0x5f3759df - ((bits)x >> 1)); }

#else /* plain C99 */

typedef struct {
    float x[WIDTH];
} vec;

typedef struct {
    signed char kept[WIDTH];
} bits;

typedef union {
    float number;
    int32_t integer;
} number_bits;

#define PM_EACH(expression)                                                                        \
    vec result;                                                                                    \
    for (int i = 0; i < WIDTH; ++i) result.x[i] = (expression);                                    \
    return result

INLINE vec load(const float *at) { PM_EACH(at[i]); }
INLINE void store(float *at, vec v) {
    for (int i = 0; i < WIDTH; ++i) at[i] = v.x[i];
}
INLINE vec splat(float number) { PM_EACH(number); }
INLINE vec add(vec a, vec b) { PM_EACH(a.x[i] + b.x[i]); }
INLINE vec subtract(vec a, vec b) { PM_EACH(a.x[i] - b.x[i]); }
INLINE vec multiply(vec a, vec b) { PM_EACH(a.x[i] * b.x[i]); }
INLINE vec divide(vec a, vec b) { PM_EACH(a.x[i] / b.x[i]); }
INLINE vec multiply_add(vec a, vec b, vec c) { PM_EACH(a.x[i] * b.x[i] + c.x[i]); }
INLINE vec larger(vec a, vec b) { PM_EACH(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
INLINE vec smaller(vec a, vec b) { PM_EACH(a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
INLINE vec where_larger(vec a, vec b, vec v) { PM_EACH(a.x[i] > b.x[i] ? v.x[i] : 0); }
INLINE bits expand(const signed char *positions) {
    bits result;
    for (int i = 0; i < WIDTH; ++i) result.kept[i] = positions[i];
    return result;
}
INLINE vec keep(vec v, bits positions) { PM_EACH(positions.kept[i] ? v.x[i] : 0); }

INLINE float shifted_exponent(float x, float t) {
    number_bits result, shift;
    result.number = x;
    shift.number = t;
    result.integer = (int32_t)((uint32_t)result.integer + ((uint32_t)shift.integer << 23));
    return result.number;
}
INLINE vec add_exponent(vec v, vec t) { PM_EACH(shifted_exponent(v.x[i], t.x[i])); }

INLINE float inverse_root_of(float x) {
    number_bits result;
    result.number = x;
    result.integer = 0x5f3759df - (result.integer >> 1);
    return result.number;
}
INLINE vec estimate_inverse_root(vec v) { PM_EACH(inverse_root_of(v.x[i])); }

#endif

INLINE vec negate(vec x) { return subtract(splat(0.0f), x); }

/* 1 / √x by three steps of Newton's method; each doubles the correct digits. */
INLINE vec inverse_root(vec x) {
    vec y = estimate_inverse_root(x);
    for (int i = 0; i < 3; ++i) {
        const vec square = multiply(multiply(multiply(x, splat(0.5f)), y), y);
        y = multiply(y, subtract(splat(1.5f), square));
    }
    return y;
}

INLINE vec clamp(vec x, float low, float high) {
    return smaller(larger(x, splat(low)), splat(high));
}

/* t, whose lowest bits are n, and exp(r) - 1, for x = n · ln(2) + r (polynomial of Cephes). */
struct power {
    vec t, rest;
};
INLINE struct power power_and_rest(vec x) {
    const vec rounding = splat(12582912.0f); /* adding it leaves n in the lowest bits */
    const vec t = multiply_add(x, splat(1.44269504f), rounding);
    const vec n = subtract(t, rounding);
    vec r = multiply_add(n, splat(-0.693359375f), x);
    r = multiply_add(n, splat(2.12194440e-4f), r);
    vec p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    const struct power result = {t, multiply_add(multiply(p, r), r, r)};
    return result;
}

/* exp(x) = 2ⁿ · exp(r), with x clamped to [-87, 88]. */
INLINE vec exponential(vec x) {
    const struct power p = power_and_rest(clamp(x, -87.0f, 88.0f));
    return add_exponent(add(p.rest, splat(1.0f)), p.t);
}

/* exp(x) - 1 for x ≤ 0, precise near 0. */
INLINE vec exponential_minus_one(vec x) {
    const struct power p = power_and_rest(clamp(x, -87.0f, 0.0f));
    const vec power = add_exponent(splat(1.0f), p.t);
    return multiply_add(power, p.rest, subtract(power, splat(1.0f)));
}

/* erf(x) = x · P(x²) / Q(x²) (polynomials of Eigen). */
INLINE vec error_function(vec x) {
    x = clamp(x, -4.0f, 4.0f);
    const vec square = multiply(x, x);
    vec p = splat(-2.72614225801306e-10f);
    p = multiply_add(p, square, splat(2.77068142495902e-08f));
    p = multiply_add(p, square, splat(-2.10102402082508e-06f));
    p = multiply_add(p, square, splat(-5.69250639462346e-05f));
    p = multiply_add(p, square, splat(-7.34990630326855e-04f));
    p = multiply_add(p, square, splat(-2.95459980854025e-03f));
    p = multiply_add(p, square, splat(-1.60960333262415e-02f));
    vec q = splat(-1.45660718464996e-05f);
    q = multiply_add(q, square, splat(-2.13374055278905e-04f));
    q = multiply_add(q, square, splat(-1.68282697438203e-03f));
    q = multiply_add(q, square, splat(-7.37332916720468e-03f));
    q = multiply_add(q, square, splat(-1.42647390514189e-02f));
    return divide(multiply(x, p), q);
}

#endif
