#include "kernels.h"
#include "vectors.h"

/* ---- Layers ------------------------------------------------------------------------------------
 *
 * A tile is up to MOST vectors of neighboring positions of one output channel. It stays in
 * registers while the kernel iterates over the non-zero weights of the channel.
 */
#define MOST 12
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)

INLINE int32_t offset_of(const void *offsets, int wide, int32_t i) {
    return wide ? ((const int32_t *)offsets)[i] : ((const int16_t *)offsets)[i];
}

/* Compute a tile of n vectors, `skipped` floats after the first position.
 *
 * With few vectors, multiply-adds would wait for each other. Then several weights are processed at
 * once: sum k belongs to vector k % n and to every at_once-th weight.
 */
INLINE void compute_tile(const struct pm_layer *op, int skipped, const int n, const int wide) {
    const int at_once = n == 1 ? 8 : n == 2 ? 4 : n <= 4 ? 2 : 1;
    const float *source = op->source + skipped, *values = op->values;
    const int32_t *counts = op->counts;
    const float low = op->low, high = op->high;
    const int has_low = low != -PM_INFINITY, has_high = high != PM_INFINITY;
    static const signed char nothing[WIDTH];
    bits kept[MOST];
#define EXPAND(k)                                                                                  \
    kept[k] = expand(k < n && op->positions ? op->positions + skipped + WIDTH * k : nothing);
    EACH(EXPAND)
    int32_t i = 0;
    for (int block = 0; block < op->blocks; ++block) {
        const int is_last = block == op->blocks - 1;
        float *target = op->target + skipped;
        /* The sums of earlier blocks are in the target; they are added like a residual. */
        const float *before = block ? target : op->residual ? op->residual + skipped : 0;
        const int before_plane = block ? op->target_plane : op->residual_plane;
        for (int row = 0; row < op->rows; ++row, target += op->target_plane) {
            const int32_t count = *counts++;
            const int32_t end = i + count;
            if (count || is_last || !block) {
                vec s[MOST];
                const vec bias = splat(block ? 0.0f : op->bias[row]);
#define START(k) s[k] = k < n ? bias : splat(0.0f);
                EACH(START)
                for (; i + at_once <= end; i += at_once) {
#define MULTIPLY(k)                                                                                \
    if (k < n * at_once) {                                                                         \
        const float *x = source + offset_of(op->offsets, wide, i + k / n);                         \
        s[k] = multiply_add(splat(values[i + k / n]), load(x + WIDTH * (k % n)), s[k]);            \
    }
                    EACH(MULTIPLY)
                }
                if (at_once > 1) {
                    for (; i < end; ++i) {
                        const float *x = source + offset_of(op->offsets, wide, i);
                        const vec weight = splat(values[i]);
#define MULTIPLY_ONE(k)                                                                            \
    if (k < n) s[k] = multiply_add(weight, load(x + WIDTH * k), s[k]);
                        EACH(MULTIPLY_ONE)
                    }
#define FOLD(k)                                                                                    \
    if (n <= k && k < n * at_once) s[k % n] = add(s[k % n], s[k]);
                    EACH(FOLD)
                }
                if (before) {
#define ADD_BEFORE(k)                                                                              \
    if (k < n) s[k] = add(s[k], load(before + WIDTH * k));
                    EACH(ADD_BEFORE)
                }
                if (is_last && has_low) {
#define CLAMP_LOW(k)                                                                               \
    if (k < n) s[k] = larger(s[k], splat(low));
                    EACH(CLAMP_LOW)
                }
                if (is_last && has_high) {
#define CLAMP_HIGH(k)                                                                              \
    if (k < n) s[k] = smaller(s[k], splat(high));
                    EACH(CLAMP_HIGH)
                }
                if (is_last && op->positions) {
#define KEEP(k)                                                                                    \
    if (k < n) s[k] = keep(s[k], kept[k]);
                    EACH(KEEP)
                }
#define STORE(k)                                                                                   \
    if (k < n) store(target + WIDTH * k, s[k]);
                EACH(STORE)
            }
            i = end;
            if (before) before += before_plane;
        }
    }
}

#define DEFINE_TILE(n)                                                                             \
    static void tile_##n(const struct pm_layer *op, int skipped) {                                 \
        compute_tile(op, skipped, n + 1, 0);                                                       \
    }                                                                                              \
    static void wide_tile_##n(const struct pm_layer *op, int skipped) {                            \
        compute_tile(op, skipped, n + 1, 1);                                                       \
    }
EACH(DEFINE_TILE)

void pm_convolve(const struct pm_layer *op) {
#define NAME_TILE(n) tile_##n,
#define NAME_WIDE_TILE(n) wide_tile_##n,
    static void (*const tiles[2][MOST])(const struct pm_layer *, int) = {
        {EACH(NAME_TILE)}, {EACH(NAME_WIDE_TILE)}};
    const int vectors = (op->run + WIDTH - 1) / WIDTH;
    const int count = (vectors + MOST - 1) / MOST;
    for (int tile = 0; tile < count; ++tile) {
        const int first = vectors * tile / count, last = vectors * (tile + 1) / count;
        tiles[op->wide][last - first - 1](op, WIDTH * first);
    }
}

static float clamped(float x, float low, float high) {
    x = x > low ? x : low;
    return x < high ? x : high;
}

INLINE void compute_rows(const struct pm_layer *op, const int wide) {
    int32_t i = 0;
    for (int row = 0; row < op->rows; ++row) {
        const int32_t end = i + op->counts[row];
        float s[4] = {0, 0, 0, 0};
        for (; i + 4 <= end; i += 4)
            for (int k = 0; k < 4; ++k)
                s[k] += op->values[i + k] * op->source[offset_of(op->offsets, wide, i + k)];
        for (; i < end; ++i)
            s[0] += op->values[i] * op->source[offset_of(op->offsets, wide, i)];
        float sum = (s[0] + s[1]) + (s[2] + s[3]) + op->bias[row];
        if (op->residual) sum += op->residual[row * op->residual_plane];
        op->target[row * op->target_plane] = clamped(sum, op->low, op->high);
    }
}

void pm_linear(const struct pm_layer *op) {
    if (op->wide)
        compute_rows(op, 1);
    else
        compute_rows(op, 0);
}

/* ---- Copies ---------------------------------------------------------------------------------- */

void pm_pack(const struct pm_image *op, const float *image) {
    for (int c = 0; c < op->channels; ++c)
        for (int y = 0; y < op->height; ++y) {
            float *target = op->tensor + c * op->plane + y * op->stride;
            for (int x = 0; x < op->width; ++x) target[x] = image[x];
            image += op->width;
        }
}

void pm_unpack(const struct pm_image *op, float *images) {
    const int positions = op->height * op->width;
    for (int lane = 0; lane < op->lanes; ++lane, images += op->channels * positions)
        for (int c = 0; c < op->channels; ++c)
            for (int y = 0; y < op->height; ++y) {
                const float *source = op->tensor + c * op->plane + y * op->stride * op->lanes + lane;
                const int step = op->tokens ? op->channels : 1;
                float *row = images + (op->tokens ? y * op->width * step + c
                                                  : (c * op->height + y) * op->width);
                for (int x = 0; x < op->width; ++x) row[x * step] = source[x * op->lanes];
            }
}

void pm_interleave(const struct pm_interleave *op, int lane) {
    for (int c = 0; c < op->channels; ++c)
        for (int y = 0; y < op->height; ++y) {
            const float *source = op->source + c * op->source_plane + y * op->source_stride;
            float *target =
                op->target + c * op->target_plane + y * op->target_stride * op->lanes + lane;
            for (int x = 0; x < op->width; ++x) target[x * op->lanes] = source[x];
        }
}

void pm_split_phases(const struct pm_phases *op) {
    const int lanes = op->lanes;
    for (int i = 0; i < op->count; ++i) {
        const int32_t *plane = op->planes + 4 * i;
        for (int y = 0; y < plane[2]; ++y) {
            const float *source = op->source + plane[0] + y * op->step_y * op->source_stride * lanes;
            float *target = op->target + plane[1] + y * op->target_stride * lanes;
            if (op->step_x == 1)
                for (int x = 0; x < plane[3] * lanes; ++x) target[x] = source[x];
            else if (op->step_x == 2 && lanes == 1)
                for (int x = 0; x < plane[3]; ++x) target[x] = source[2 * x];
            else
                for (int x = 0; x < plane[3]; ++x)
                    for (int lane = 0; lane < lanes; ++lane)
                        target[x * lanes + lane] = source[x * op->step_x * lanes + lane];
        }
    }
}

void pm_embed(const struct pm_embedding *op, const int32_t *indices, float *target) {
    for (int i = 0; i < op->count; ++i, target += op->width) {
        const int known = 0 <= indices[i] && indices[i] < op->rows;
        const float *row = op->table + (known ? indices[i] * (int64_t)op->width : 0);
        for (int k = 0; k < op->width; ++k) target[k] = known ? row[k] : 0.0f;
    }
}

void pm_compare(const struct pm_comparison *op, const int32_t *tokens, float *target) {
    for (int image = 0; image < op->images; ++image, tokens += op->keys)
        for (int row = 0, i = 0; row < op->queries * op->heads; ++row)
            for (int key = 0; key < op->keys; ++key, ++i)
                *target++ = tokens[key] == op->number ? op->where_equal[i] : op->elsewhere[i];
}

/* The third loop reads neighbors and the fourth writes neighbors, or the other way round. Blocks of
 * the third keep both in the cache.
 */
void pm_rearrange(const struct pm_rearrangement *op, const float *source, float *target) {
    const int *sizes = op->sizes, *from = op->source_steps, *to = op->target_steps;
    const int block_size = from[2] == 1 && to[2] == 1 ? sizes[2] : 16;
    for (int a = 0; a < sizes[0]; ++a)
        for (int b = 0; b < sizes[1]; ++b)
            for (int block = 0; block < sizes[2]; block += block_size) {
                const int rest = sizes[2] - block;
                const int count = rest < block_size ? rest : block_size;
                for (int row = 0; row < sizes[3]; ++row) {
                    const float *x = source + a * from[0] + b * from[1] + block * from[2] + row * from[3];
                    float *y = target + a * to[0] + b * to[1] + block * to[2] + row * to[3];
                    if (from[2] == 1 && to[2] == 1)
                        for (int i = 0; i < count; ++i) y[i] = x[i];
                    else
                        for (int i = 0; i < count; ++i) y[i * to[2]] = x[i * from[2]];
                }
            }
}

/* Output row y is row y / step of the phases y % step, and likewise for columns. */
void pm_merge_phases(const struct pm_merge *op) {
    const int lanes = op->lanes, step = op->step_x;
    for (int c = 0; c < op->channels; ++c)
        for (int y = 0; y < op->height; ++y) {
            const int plane = (c * op->step_y + y % op->step_y) * step;
            const float *source = op->source + plane * op->source_plane;
            source += y / op->step_y * op->source_stride * lanes;
            float *target = op->target + c * op->target_plane + y * op->target_stride * lanes;
            for (int phase = 0; phase < step; ++phase, source += op->source_plane)
                for (int x = phase; x < op->width; x += step)
                    for (int lane = 0; lane < lanes; ++lane)
                        target[x * lanes + lane] = source[x / step * lanes + lane];
        }
}

void pm_resize(const struct pm_resize *op) {
    const int32_t *upper = op->places, *lower = upper + op->height;
    const int32_t *left = lower + op->height, *right = left + op->width;
    const float *weights = op->weights + op->height;
    for (int c = 0; c < op->channels; ++c)
        for (int y = 0; y < op->height; ++y) {
            const float *plane = op->source + c * op->source_plane;
            const float *above = plane + upper[y] * op->source_stride;
            const float *below = plane + lower[y] * op->source_stride;
            float *target = op->target + c * op->target_plane + y * op->target_stride;
            const float weight = op->weights[y], rest = 1.0f - weight;
            for (int x = 0; x < op->source_width; ++x)
                op->scratch[x] = rest * above[x] + weight * below[x];
            for (int x = 0; x < op->width; ++x) {
                const float a = op->scratch[left[x]], b = op->scratch[right[x]];
                target[x] = (1.0f - weights[x]) * a + weights[x] * b;
            }
        }
}

/* ---- Pooling --------------------------------------------------------------------------------- */

/* Windows of 2 × 2 or 3 × 3 with stride two that the border does not cut: `count` of a row. */
static void max_of_squares(
    const float *upper, const float *middle, const float *lower, float *target, int size, int count) {
    if (size == 2) {
        for (int x = 0; x < count; ++x) {
            const float left = upper[2 * x] > middle[2 * x] ? upper[2 * x] : middle[2 * x];
            const float right =
                upper[2 * x + 1] > middle[2 * x + 1] ? upper[2 * x + 1] : middle[2 * x + 1];
            target[x] = left > right ? left : right;
        }
        return;
    }
    for (int x = 0; x < count; ++x) {
        float column[3];
        for (int k = 0; k < 3; ++k) {
            const float a = upper[2 * x + k], b = middle[2 * x + k], c = lower[2 * x + k];
            const float most = a > b ? a : b;
            column[k] = most > c ? most : c;
        }
        const float most = column[0] > column[1] ? column[0] : column[1];
        target[x] = most > column[2] ? most : column[2];
    }
}

static void reduce_rows(
    const float *restrict source, float *restrict sums, int step, int rows, int columns, int is_max) {
    for (int i = 0; i < columns; ++i) sums[i] = source[i];
    for (int k = 1; k < rows; ++k) {
        const float *row = source + k * step;
        if (is_max)
            for (int i = 0; i < columns; ++i) sums[i] = row[i] > sums[i] ? row[i] : sums[i];
        else
            for (int i = 0; i < columns; ++i) sums[i] += row[i];
    }
}

static float reduced(const float *numbers, int count, int step, int is_max) {
    float result = numbers[0];
    for (int i = 1; i < count; ++i) {
        const float x = numbers[i * step];
        result = !is_max ? result + x : x > result ? x : result;
    }
    return result;
}

/* Pool the windows of one output row, except those from column `begin` to `end`. */
static void pool_row(const struct pm_pool *op, const float *source, float *target, const float *factors,
                     int rows, int begin, int end, int is_max) {
    const int lanes = op->lanes;
    const int32_t *columns = op->windows + 2 * op->height;
    if (begin == 0 && end == op->width) return;
    reduce_rows(source, op->scratch, op->source_stride * lanes, rows, op->source_width * lanes, is_max);
    for (int x = 0; x < op->width; ++x) {
        if (begin <= x && x < end) continue;
        const int32_t left = columns[2 * x], count = columns[2 * x + 1] - left;
        for (int lane = 0; lane < lanes; ++lane) {
            const float result = reduced(op->scratch + left * lanes + lane, count, lanes, is_max);
            target[x * lanes + lane] = is_max ? result : result * factors[x];
        }
    }
}

void pm_max_pool(const struct pm_pool *op) {
    /* Columns whose windows are whole. */
    int begin = 0, end = 0;
    if (op->lanes == 1 && op->step == 2 && (op->size == 2 || op->size == 3)) {
        begin = (op->before + 1) / 2;
        end = (op->source_width - op->size + op->before) / 2 + 1;
        end = end < op->width ? end : op->width;
        end = end > begin ? end : begin;
    }
    const int step = op->source_stride;
    for (int c = 0; c < op->channels; ++c)
        for (int y = 0; y < op->height; ++y) {
            const int32_t top = op->windows[2 * y], rows = op->windows[2 * y + 1] - top;
            const float *source = op->source + c * op->source_plane + top * step * op->lanes;
            float *target = op->target + c * op->target_plane + y * op->target_stride * op->lanes;
            if (end > begin && rows <= op->size) {
                const float *upper = source + 2 * begin - op->before;
                const float *middle = upper + (rows > 1 ? step : 0);
                const float *lower = rows > 2 ? upper + 2 * step : middle;
                max_of_squares(upper, middle, lower, target + begin, op->size, end - begin);
                pool_row(op, source, target, 0, rows, begin, end, 1);
            } else {
                pool_row(op, source, target, 0, rows, 0, 0, 1);
            }
        }
}

static float sum_of(const float *x, int count) {
    vec sums = splat(0.0f);
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH) sums = add(sums, load(x + i));
    float lanes[WIDTH], total = 0.0f;
    store(lanes, sums);
    for (int k = 0; k < WIDTH; ++k) total += lanes[k];
    for (; i < count; ++i) total += x[i];
    return total;
}

void pm_average_pool(const struct pm_pool *op) {
    for (int c = 0; c < op->channels; ++c) {
        const float *plane = op->source + c * op->source_plane;
        float *result = op->target + c * op->target_plane;
        if (op->run) { /* the padding is zero */
            *result = sum_of(plane, op->run) * op->factors[0];
            continue;
        }
        for (int y = 0; y < op->height; ++y) {
            const int32_t top = op->windows[2 * y], rows = op->windows[2 * y + 1] - top;
            pool_row(op, plane + top * op->source_stride * op->lanes,
                     result + y * op->target_stride * op->lanes, op->factors + y * op->width, rows, 0,
                     0, 0);
        }
    }
}

void pm_pool_slices(const struct pm_slices *op) {
    for (int p = 0; p < op->channels * op->slices; ++p) {
        const int index = p % op->slices;
        const int32_t first = op->windows[2 * index], last = op->windows[2 * index + 1];
        const float *source = op->source + (p / op->slices * op->source_slices + first) * op->plane;
        float *target = op->target + p * op->plane;
        for (int i = 0; i < op->plane; ++i) {
            float result = source[i];
            for (int k = 1; k < last - first; ++k) {
                const float next = source[k * op->plane + i];
                if (op->factors)
                    result += next;
                else
                    result = next > result ? next : result;
            }
            target[i] = op->factors ? result * op->factors[index] : result;
        }
    }
}

/* ---- Elementwise operations ------------------------------------------------------------------ */

/* x · sigmoid(z), which is 0 where exp is clamped. */
INLINE vec times_sigmoid(vec x, vec z) {
    const vec below = add(splat(1.0f), exponential(negate(z)));
    return where_larger(z, splat(-87.0f), divide(x, below));
}

/* tanh|x| = -t / (t + 2) with t = exp(-2 |x|) - 1, and the sign of x. */
INLINE vec tanh_of(vec x) {
    const vec size = larger(x, negate(x));
    const vec t = exponential_minus_one(multiply(size, splat(-2.0f)));
    const vec result = divide(negate(t), add(t, splat(2.0f)));
    const vec zero = splat(0.0f);
    return subtract(where_larger(x, zero, result), where_larger(zero, x, result));
}

INLINE vec curve_of(vec x, float low, float high, const enum pm_curve curve) {
    const vec zero = splat(0.0f), one = splat(1.0f), two = splat(2.0f);
    switch (curve) {
    case PM_SILU: return times_sigmoid(x, x);
    case PM_GELU: {
        const vec half = multiply(x, splat(0.5f));
        return multiply_add(half, error_function(multiply(x, splat(0.70710678f))), half);
    }
    case PM_GELU_TANH: {
        const vec factor = splat(0.044715f * 1.5957691216f);
        const vec cubic = multiply_add(multiply(x, x), factor, splat(1.5957691216f));
        return times_sigmoid(x, multiply(x, cubic));
    }
    case PM_TANH: return tanh_of(x);
    case PM_MISH: { /* x · tanh(ln(1 + e)) = x · n / (n + 2) with e = exp(x) and n = e² + 2 e */
        const vec e = exponential(smaller(x, splat(20.0f)));
        const vec n = multiply(e, add(e, two));
        return multiply(x, divide(n, add(n, two)));
    }
    case PM_LEAKY:
    case PM_ELU: {
        const vec below = curve == PM_LEAKY ? x : exponential_minus_one(x);
        return add(where_larger(x, zero, multiply(x, splat(low))),
                   where_larger(zero, x, multiply(below, splat(high))));
    }
    case PM_SIGMOID: return divide(one, add(one, exponential(negate(x))));
    case PM_HARDSWISH:
    case PM_HARDSIGMOID: {
        const vec gate = divide(clamp(add(x, splat(3.0f)), 0.0f, 6.0f), splat(6.0f));
        return curve == PM_HARDSWISH ? multiply(x, gate) : gate;
    }
    default: return clamp(x, low, high);
    }
}

enum operation { ADD, MULTIPLY, ACTIVATE };

INLINE vec result_of(const struct pm_elementwise *op, vec x, vec z, const enum operation operation,
                     const enum pm_curve curve) {
    if (operation == ACTIVATE) return curve_of(x, op->low, op->high, curve);
    if (operation == ADD) x = add(x, z);
    if (operation == MULTIPLY) x = multiply(x, z);
    return clamp(x, op->low, op->high);
}

INLINE void map(
    const struct pm_elementwise *op, const enum operation operation, const enum pm_curve curve) {
    const float *other = operation == ACTIVATE ? op->source : op->other;
    int i = 0;
    for (; i + WIDTH <= op->size; i += WIDTH) {
        const vec x = load(op->source + i), z = load(other + i);
        store(op->target + i, result_of(op, x, z, operation, curve));
    }
    if (i < op->size) { /* less than a vector */
        float x[WIDTH] = {0}, z[WIDTH] = {0};
        const int rest = op->size - i;
        for (int k = 0; k < rest; ++k) {
            x[k] = op->source[i + k];
            z[k] = other[i + k];
        }
        store(x, result_of(op, load(x), load(z), operation, curve));
        for (int k = 0; k < rest; ++k) op->target[i + k] = x[k];
    }
}

void pm_add(const struct pm_elementwise *op) { map(op, ADD, PM_CLAMP); }
void pm_multiply(const struct pm_elementwise *op) { map(op, MULTIPLY, PM_CLAMP); }

void pm_activate(const struct pm_elementwise *op) {
    switch (op->curve) {
#define CASE(curve)                                                                                \
    case curve: map(op, ACTIVATE, curve); break;
        CASE(PM_CLAMP)
        CASE(PM_SILU)
        CASE(PM_GELU)
        CASE(PM_GELU_TANH)
        CASE(PM_HARDSWISH)
        CASE(PM_TANH)
        CASE(PM_MISH)
        CASE(PM_LEAKY)
        CASE(PM_ELU)
        CASE(PM_SIGMOID)
        CASE(PM_HARDSIGMOID)
    }
}

void pm_clear_padding(const struct pm_image *op) {
    for (int c = 0; c < op->channels; ++c) {
        float *plane = op->tensor + c * op->plane;
        for (int i = 0; i < op->lead; ++i) plane[i - op->lead] = 0.0f;
        for (int y = 0; y < op->height; ++y) {
            const int start = (y * op->stride + op->width) * op->lanes;
            const int is_last = y + 1 == op->height;
            const int end = is_last ? op->plane - op->lead : (y + 1) * op->stride * op->lanes;
            for (int i = start; i < end; ++i) plane[i] = 0.0f;
        }
    }
}

INLINE void combine_channels(const struct pm_channels *op, const int product) {
    const int lanes = op->lanes, count = op->width * lanes;
    for (int c = 0; c < op->channels; ++c)
        for (int y = 0; y < op->height; ++y) {
            const float *other = op->other + c * op->other_plane;
            const float *x = op->source + c * op->source_plane + y * op->source_stride * lanes;
            float *target = op->target + c * op->target_plane + y * op->target_stride * lanes;
            for (int i = 0; i < count; ++i) {
                const float z = lanes == 1 ? *other : other[i % lanes];
                target[i] = clamped(product ? x[i] * z : x[i] + z, op->low, op->high);
            }
        }
}

void pm_add_channels(const struct pm_channels *op) { combine_channels(op, 0); }
void pm_multiply_channels(const struct pm_channels *op) { combine_channels(op, 1); }

void pm_leaky_channels(const struct pm_channels *op) {
    for (int c = 0; c < op->channels; ++c) {
        const float slope = op->other[c];
        const float *x = op->source + c * op->source_plane;
        float *target = op->target + c * op->target_plane;
        for (int i = 0; i < op->source_plane; ++i) target[i] = x[i] < 0 ? x[i] * slope : x[i];
    }
}

void pm_copy(const struct pm_elementwise *op) {
    for (int i = 0; i < op->size; ++i) op->target[i] = op->source[i];
}

/* ---- Normalization --------------------------------------------------------------------------- */

/* Sum of (x - center)², or of x, over all channels of a vector of positions. */
INLINE vec sum_over_channels(const struct pm_norm *op, const float *x, vec center, const int squared) {
    vec s[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    const int plane = op->source_plane;
    int c = 0;
#define ADD_CHANNEL(k, channel)                                                                    \
    {                                                                                              \
        const vec v = subtract(load(x + (channel) * plane), center);                               \
        s[k] = squared ? multiply_add(v, v, s[k]) : add(s[k], v);                                  \
    }
    for (; c + 4 <= op->channels; c += 4) {
        ADD_CHANNEL(0, c)
        ADD_CHANNEL(1, c + 1)
        ADD_CHANNEL(2, c + 2)
        ADD_CHANNEL(3, c + 3)
    }
    for (; c < op->channels; ++c) ADD_CHANNEL(0, c)
    return add(add(s[0], s[1]), add(s[2], s[3]));
}

/* One position: its channels are next to each other. */
static void normalize_single(const struct pm_norm *op) {
    const int n = op->channels;
    float center = 0.0f, squares = 0.0f, root[WIDTH];
    if (op->centered) center = sum_of(op->source, n) / (float)n;
    for (int i = 0; i < n; ++i) squares += (op->source[i] - center) * (op->source[i] - center);
    store(root, inverse_root(splat(squares / (float)n + op->epsilon)));
    for (int i = 0; i < n; ++i)
        op->target[i] = (op->source[i] - center) * root[0] * op->scale[i] + op->bias[i];
}

void pm_normalize(const struct pm_norm *op) {
    if (op->source_plane == 1) {
        normalize_single(op);
        return;
    }
    const vec count = splat((float)op->channels);
    for (int start = 0; start < op->run; start += WIDTH) {
        const float *x = op->source + start;
        vec center = splat(0.0f);
        if (op->centered) center = divide(sum_over_channels(op, x, center, 0), count);
        const vec variance = divide(sum_over_channels(op, x, center, 1), count);
        const vec factor = inverse_root(add(variance, splat(op->epsilon)));
        for (int c = 0; c < op->channels; ++c) {
            const vec scaled = multiply(subtract(load(x + c * op->source_plane), center), factor);
            vec y = multiply_add(scaled, splat(op->scale[c]), splat(op->bias[c]));
            if (op->positions) y = keep(y, expand(op->positions + start));
            store(op->target + c * op->target_plane + start, y);
        }
    }
}

/* Sum of (x - center)², or of x, in a row. */
INLINE vec sum_of_row(const float *x, int count, float center, const int squared) {
    vec sum = splat(0.0f);
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        const vec v = subtract(load(x + i), splat(center));
        sum = squared ? multiply_add(v, v, sum) : add(sum, v);
    }
    if (i < count) {
        float rest[WIDTH] = {0};
        for (int k = 0; i + k < count; ++k) {
            const float v = x[i + k] - center;
            rest[k] = squared ? v * v : v;
        }
        sum = add(sum, load(rest));
    }
    return sum;
}

static float sum_of_group(const struct pm_group_norm *op, int group, float center, int squared) {
    vec sums = splat(0.0f);
    for (int c = 0; c < op->channels; ++c)
        for (int y = 0; y < op->height; ++y) {
            const float *x = op->source + (group * op->channels + c) * op->source_plane;
            x += y * op->source_stride;
            sums = add(sums, squared ? sum_of_row(x, op->width, center, 1)
                                     : sum_of_row(x, op->width, center, 0));
        }
    float lanes[WIDTH], total = 0.0f;
    store(lanes, sums);
    for (int k = 0; k < WIDTH; ++k) total += lanes[k];
    return total;
}

void pm_normalize_groups(const struct pm_group_norm *op) {
    const float count = (float)op->channels * (float)op->height * (float)op->width;
    for (int group = 0; group < op->groups; ++group) {
        const float center = sum_of_group(op, group, 0.0f, 0) / count;
        const float variance = sum_of_group(op, group, center, 1) / count;
        float factor[WIDTH];
        store(factor, inverse_root(splat(variance + op->epsilon)));
        for (int c = group * op->channels; c < (group + 1) * op->channels; ++c) {
            const float scale = factor[0] * op->scale[c], shift = op->bias[c] - center * scale;
            for (int y = 0; y < op->height; ++y) {
                const float *x = op->source + c * op->source_plane + y * op->source_stride;
                float *target = op->target + c * op->target_plane + y * op->target_stride;
                for (int i = 0; i < op->width; ++i) target[i] = x[i] * scale + shift;
            }
        }
    }
}

/* ---- Attention ---------------------------------------------------------------------------------
 *
 * Scores are stored key by key, with the queries of a block next to each other. So all three steps
 * work on vectors of queries: a score is a sum over features of (key, broadcast) · (queries), the
 * softmax runs over the keys of each query, and an output is a sum over keys of (value, broadcast) ·
 * (probabilities).
 */
#define ROWS_AT_ONCE 4
#define EACH_SUM(DO) EACH(DO) DO(12) DO(13) DO(14) DO(15)

struct product {
    int count;            /* products per sum */
    const float *scalars; /* broadcast numbers */
    int scalar_step, scalar_row;
    const float *vectors;
    int vector_step;
    float *target;
    int target_row;
    const float *factors;         /* the sums are multiplied with these vectors */
    const signed char *positions; /* or 0 */
};

INLINE void multiply_rows(const struct product *p, int row, const int rows, const int width) {
    const float *scalars = p->scalars + row * p->scalar_row;
    const float *vectors = p->vectors;
    float *target = p->target + row * p->target_row;
    vec s[4 * ROWS_AT_ONCE];
#define CLEAR(k) s[k] = splat(0.0f);
    EACH_SUM(CLEAR)
    for (int i = 0; i < p->count; ++i) {
#define MULTIPLY_SUM(k)                                                                            \
    if (k < rows * width)                                                                          \
        s[k] = multiply_add(splat(scalars[k / width * p->scalar_row]),                             \
                            load(vectors + WIDTH * (k % width)), s[k]);
        EACH_SUM(MULTIPLY_SUM)
        scalars += p->scalar_step;
        vectors += p->vector_step;
    }
#define WRITE_SUM(k)                                                                               \
    if (k < rows * width) {                                                                        \
        vec y = multiply(s[k], load(p->factors + WIDTH * (k % width)));                            \
        if (p->positions) y = keep(y, expand(p->positions + WIDTH * (k % width)));                         \
        store(target + k / width * p->target_row + WIDTH * (k % width), y);                        \
    }
    EACH_SUM(WRITE_SUM)
}

INLINE void multiply_all(const struct product *p, int rows, const int width) {
    int row = 0;
    for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE)
        multiply_rows(p, row, ROWS_AT_ONCE, width);
    for (; row < rows; ++row) multiply_rows(p, row, 1, width);
}

static void multiply_matrix(const struct product *p, int rows, int width) {
    switch (width) {
    case 1: multiply_all(p, rows, 1); break;
    case 2: multiply_all(p, rows, 2); break;
    case 3: multiply_all(p, rows, 3); break;
    default: multiply_all(p, rows, 4); break;
    }
}

/* Replace a vector of scores per key by exp(score - largest), and store 1 / sum.
 * Scores that are all -infinity give zeros or NaN. */
static void softmax(float *scores, int row, int keys, const float *mask, int mask_plane, int zeros,
                    float *reciprocal) {
    if (mask)
        for (int k = 0; k < keys; ++k) {
            const float *at = mask + k * mask_plane;
            const vec added = mask_plane > 1 ? load(at) : splat(*at);
            store(scores + k * row, add(load(scores + k * row), added));
        }
    vec top = load(scores), sum = splat(0.0f);
    for (int k = 1; k < keys; ++k) top = larger(load(scores + k * row), top);
    const vec undefined = subtract(top, top);        /* NaN for an infinity, otherwise 0 */
    if (zeros) top = larger(splat(-3.4028234e38f), top); /* the lowest number */
    for (int k = 0; k < keys; ++k) {
        const vec e = exponential(subtract(load(scores + k * row), top));
        store(scores + k * row, e);
        sum = add(sum, e);
    }
    /* The largest score adds 1 to the sum, unless all are -infinity. */
    const vec inverse = divide(splat(1.0f), larger(sum, splat(0.5f)));
    store(reciprocal, zeros ? inverse : add(inverse, undefined));
}

void pm_softmax(const struct pm_norm *op) {
    const int single = op->source_plane == 1; /* one position: its channels are neighbors */
    for (int start = 0; start < (single ? 1 : op->run); start += WIDTH) {
        const float *x = op->source + start;
        float *y = op->target + start;
        vec top = single ? splat(*x) : load(x), sum = splat(0.0f);
        for (int c = 1; c < op->channels; ++c) {
            const float *at = x + c * op->source_plane;
            top = larger(single ? splat(*at) : load(at), top);
        }
        for (int pass = 0; pass < 2; ++pass)
            for (int c = 0; c < op->channels; ++c) {
                const float *at = x + c * op->source_plane;
                vec e = exponential(subtract(single ? splat(*at) : load(at), top));
                if (!pass) {
                    sum = add(sum, e);
                    continue;
                }
                e = divide(e, sum);
                if (single) {
                    float lanes[WIDTH];
                    store(lanes, e);
                    y[c] = lanes[0];
                } else {
                    if (op->positions) e = keep(e, expand(op->positions + start));
                    store(y + c * op->target_plane, e);
                }
            }
    }
}

static void attend_block(const struct pm_attention *op, int head, int first, int width) {
    const int32_t *at = op->heads + 4 * head;
    const int skipped = WIDTH * first, row = WIDTH * width, end = skipped + row;
    const int keys = op->causal && end < op->key_count ? end : op->key_count;
    float factors[WIDTH * QUERY_VECTORS];
    for (int i = 0; i < row; ++i) factors[i] = op->scale;
    const struct product scores = {
        op->depth, op->keys + at[1], op->key_plane, 1, op->queries + at[0] + skipped,
        op->query_plane, op->scratch, row, factors, 0};
    multiply_matrix(&scores, keys, width);
    const int by_query = op->mask_plane > 1;
    const float *mask = op->mask;
    if (mask) {
        mask += (head % op->mask_heads) * op->key_count * op->mask_plane;
        if (by_query) mask += skipped;
    }
    for (int j = 0; j < width; ++j)
        softmax(op->scratch + WIDTH * j, row, keys, mask && by_query ? mask + WIDTH * j : mask,
                op->mask_plane, op->zeros, factors + WIDTH * j);
    const struct product outputs = {
        keys, op->values + at[2], 1, op->value_plane, op->scratch, row,
        op->target + at[3] + skipped, op->target_plane, factors,
        op->positions ? op->positions + skipped : 0};
    multiply_matrix(&outputs, op->depth, width);
}

void pm_attend(const struct pm_attention *op) {
    const int vectors = (op->run + WIDTH - 1) / WIDTH;
    const int blocks = (vectors + QUERY_VECTORS - 1) / QUERY_VECTORS;
    for (int head = 0; head < op->head_count; ++head)
        for (int block = 0; block < blocks; ++block) {
            const int first = vectors * block / blocks;
            attend_block(op, head, first, vectors * (block + 1) / blocks - first);
        }
}

/* ---- Recurrent layers -------------------------------------------------------------------------- */

/* x · sigmoid(z). */
INLINE vec gated(vec x, vec z) { return divide(x, add(splat(1.0f), exponential(negate(z)))); }

/* Compute the new state of a vector of units from both parts of their gates. */
INLINE void update_units(const struct pm_recurrence *op, const float *of_input, int unit,
                         const enum pm_cell cell) {
    const float *of_state = op->sums + unit;
    float *hidden = op->hidden + unit;
    of_input += unit;
#define GATE(k) add(load(of_input + k * op->units), load(of_state + k * op->units))
    if (cell == PM_LSTM) {
        const vec kept = gated(load(op->state + unit), GATE(1));
        const vec state = add(kept, gated(tanh_of(GATE(2)), GATE(0)));
        store(op->state + unit, state);
        store(hidden, gated(tanh_of(state), GATE(3)));
    } else if (cell == PM_GRU) {
        const vec reset = gated(load(of_state + 2 * op->units), GATE(0));
        const vec fresh = tanh_of(add(load(of_input + 2 * op->units), reset));
        store(hidden, add(fresh, gated(subtract(load(hidden), fresh), GATE(1))));
    } else {
        const vec x = GATE(0);
        store(hidden, cell == PM_RNN_TANH ? tanh_of(x) : where_larger(x, splat(0.0f), x));
    }
}

INLINE void update_all(const struct pm_recurrence *op, const float *of_input,
                       const enum pm_cell cell) {
    for (int unit = 0; unit < op->units; unit += WIDTH) update_units(op, of_input, unit, cell);
}

static void update(const struct pm_recurrence *op, const float *of_input) {
    switch (op->cell) {
    case PM_LSTM: update_all(op, of_input, PM_LSTM); break;
    case PM_GRU: update_all(op, of_input, PM_GRU); break;
    case PM_RNN_TANH: update_all(op, of_input, PM_RNN_TANH); break;
    case PM_RNN_RELU: update_all(op, of_input, PM_RNN_RELU); break;
    }
}

void pm_recur(const struct pm_recurrence *op) {
    const int rows = op->gates * op->units;
    for (int i = 0; i < op->units; ++i) {
        op->hidden[i] = op->first_hidden ? op->first_hidden[i * op->first_plane] : 0.0f;
        op->state[i] = op->first_state ? op->first_state[i * op->first_plane] : 0.0f;
    }
    for (int done = 0; done < op->steps; done += PM_STEPS) {
        const int rest = op->steps - done, count = rest < PM_STEPS ? rest : PM_STEPS;
        const int first = op->backwards ? op->steps - done - count : done;
        for (int i = 0; i < rows; ++i)
            for (int k = 0; k < count; ++k)
                op->inputs[k * rows + i] = op->source[i * op->source_plane + first + k];
        for (int i = 0; i < count; ++i) {
            const int k = op->backwards ? count - 1 - i : i;
            pm_linear(&op->weights);
            update(op, op->inputs + k * rows);
            if (op->target)
                for (int unit = 0; unit < op->units; ++unit)
                    op->target[unit * op->target_plane + first + k] = op->hidden[unit];
        }
    }
    for (int i = 0; i < op->units; ++i) {
        if (op->last_hidden) op->last_hidden[i * op->last_plane] = op->hidden[i];
        if (op->last_state) op->last_state[i * op->last_plane] = op->state[i];
    }
}
