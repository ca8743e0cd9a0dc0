/* Operations of a network on planes of floats.
 *
 * A tensor is stored as planes, one per channel, which are `…_plane` floats apart. A position of a
 * plane holds `lanes` images next to each other. The rows of a plane are `…_stride` positions apart.
 * The gaps between them are the padding of convolutions, and are always zero. A pointer to a tensor
 * points to the first position of its first channel, unless a comment says otherwise.
 */
#ifndef PM_KERNELS_H
#define PM_KERNELS_H

#include <stdint.h>

#if defined(__GNUC__)
#define PM_INFINITY __builtin_inff()
#define PM_NAN __builtin_nanf("")
#else
#include <math.h>
#define PM_INFINITY INFINITY
#define PM_NAN NAN
#endif

/* Layers: only non-zero weights are stored, row by row, in blocks of input channels. */
struct pm_layer {
    const float *source;
    const float *residual; /* added to the sums, or 0 */
    float *target;
    const int32_t *counts; /* number of weights, by block and row */
    const void *offsets;   /* by weight: where it reads its first input, relative to source */
    int wide;              /* whether offsets are int32_t, otherwise int16_t */
    const float *values;   /* by weight */
    const float *bias;     /* by row */
    int rows, blocks;
    int target_plane, residual_plane;
    int run;                      /* floats from the first to the last position */
    const signed char *positions; /* -1 at positions, 0 in padding; 0 if there is none */
    float low, high;              /* the results are clamped */
};
void pm_convolve(const struct pm_layer *op); /* sums over runs of positions */
void pm_linear(const struct pm_layer *op);   /* one position */

/* Copies. */
struct pm_image {
    float *tensor;
    int channels, plane, height, width, stride, lanes;
    int lead;   /* floats before the first position of a plane */
    int tokens; /* whether the channels are last outside */
};
void pm_pack(const struct pm_image *op, const float *image);
void pm_unpack(const struct pm_image *op, float *images);

struct pm_interleave {
    const float *source;
    float *target;
    int channels, source_plane, target_plane, source_stride, target_stride;
    int height, width, lanes;
};
void pm_interleave(const struct pm_interleave *op, int lane); /* an image into a lane of a group */

struct pm_phases {
    const float *source; /* start of the first plane */
    float *target;
    const int32_t *planes; /* four numbers each: offset in source and target, rows, columns */
    int count, source_stride, target_stride, step_y, step_x, lanes;
};
void pm_split_phases(const struct pm_phases *op); /* for strided layers: every n-th row, column */

struct pm_merge {
    const float *source; /* the phases of a channel are next to each other */
    float *target;
    int channels, source_plane, target_plane, source_stride, target_stride;
    int height, width, step_y, step_x, lanes;
};
void pm_merge_phases(const struct pm_merge *op); /* for transposed convolutions */

struct pm_embedding {
    const float *table;
    int rows, width, count; /* of the table, and number of indices */
};
/* Rows of a table. An index outside of the table gives zeros. */
void pm_embed(const struct pm_embedding *op, const int32_t *indices, float *target);

struct pm_comparison {
    const float *where_equal, *elsewhere; /* queries x (heads * keys) each */
    int number, images, queries, heads, keys;
};
/* A mask for an attention: one of two numbers, by whether a token equals a number. */
void pm_compare(const struct pm_comparison *op, const int32_t *tokens, float *target);

struct pm_rearrangement {
    int sizes[4], source_steps[4], target_steps[4]; /* of four nested loops */
};
void pm_rearrange(const struct pm_rearrangement *op, const float *source, float *target);

/* Pooling. */
struct pm_pool {
    const float *source;
    float *target;
    const int32_t *windows; /* start and end row of each output row, then columns */
    const float *factors;   /* by position: reciprocal of the divisor of a mean */
    float *scratch;         /* one row of the source */
    int channels, source_plane, target_plane, source_stride, target_stride;
    int height, width, source_width, lanes;
    int run;                /* the mean of a whole plane: floats in it, otherwise 0 */
    int size, step, before; /* regular columns: window, stride and padding; otherwise size is 0 */
};
void pm_max_pool(const struct pm_pool *op);
void pm_average_pool(const struct pm_pool *op);

/* Pooling of the slices of volumes, which are planes. */
struct pm_slices {
    const float *source;
    float *target;
    const int32_t *windows; /* start and end of each output slice */
    const float *factors;   /* by output slice, for a mean; 0 for a maximum */
    int channels, plane, slices, source_slices;
};
void pm_pool_slices(const struct pm_slices *op);

/* Interpolation: each output row is a mean of two input rows, and likewise for columns. */
struct pm_resize {
    const float *source;
    float *target;
    const int32_t *places; /* the first and the second row of each output row, then columns */
    const float *weights;  /* of the second row, then of the second column */
    float *scratch;        /* one row of the source */
    int channels, source_plane, target_plane, source_stride, target_stride;
    int height, width, source_width;
};
void pm_resize(const struct pm_resize *op);

/* Elementwise operations over whole planes: the padding stays zero. */
enum pm_curve {
    PM_CLAMP,
    PM_SILU,
    PM_GELU,
    PM_GELU_TANH,
    PM_HARDSWISH,
    PM_TANH,
    PM_MISH,
    PM_LEAKY, /* x · low for positive numbers, x · high for negative ones */
    PM_ELU,   /* x · low for positive numbers, (exp(x) - 1) · high for negative ones */
    PM_SIGMOID,
    PM_HARDSIGMOID
};
struct pm_elementwise {
    const float *source, *other;
    float *target;
    int size;
    enum pm_curve curve;
    float low, high;
};
void pm_add(const struct pm_elementwise *op);
void pm_multiply(const struct pm_elementwise *op);
void pm_activate(const struct pm_elementwise *op);
void pm_copy(const struct pm_elementwise *op);
void pm_clear_padding(const struct pm_image *op); /* after curves that do not map 0 to 0 */

/* A tensor and one number per channel. */
struct pm_channels {
    const float *source, *other;
    float *target;
    int channels, source_plane, other_plane, target_plane, source_stride, target_stride;
    int height, width, lanes;
    float low, high;
};
void pm_add_channels(const struct pm_channels *op);
void pm_multiply_channels(const struct pm_channels *op);
void pm_leaky_channels(const struct pm_channels *op); /* multiples of negative numbers */

/* LayerNorm, or RMSNorm if it is not centered, over the channels of each position. */
struct pm_norm {
    const float *source;
    float *target;
    const float *scale, *bias; /* by channel */
    int channels, source_plane, target_plane, run, centered;
    float epsilon;
    const signed char *positions;
};
void pm_normalize(const struct pm_norm *op);
void pm_softmax(const struct pm_norm *op); /* over the channels */

/* GroupNorm and InstanceNorm. */
struct pm_group_norm {
    const float *source;
    float *target;
    const float *scale, *bias; /* by channel */
    int groups, channels;      /* channels of a group */
    int source_plane, target_plane, source_stride, target_stride, height, width;
    float epsilon;
};
void pm_normalize_groups(const struct pm_group_norm *op);

/* Attention: softmax(scale · queries · keys + mask) · values, head by head. */
struct pm_attention {
    const float *queries, *keys, *values; /* starts of the tensors */
    float *target;
    const int32_t *heads; /* by head: offsets of its queries, keys, values and outputs */
    float *scratch;       /* PM_SCRATCH(number of keys) floats */
    const float *mask;    /* or 0 */
    int mask_plane;       /* floats from one key to the next; 1 if all queries have one mask */
    int mask_heads;
    int head_count, key_count, depth, causal;
    int query_plane, key_plane, value_plane, target_plane, run;
    float scale;
    int zeros; /* whether a query whose scores are all -infinity gives zeros, or NaN */
    const signed char *positions;
};
void pm_attend(const struct pm_attention *op);
#define PM_SCRATCH(keys) (64 * (keys))

/* The steps of one direction of a recurrent layer. */
enum pm_cell { PM_LSTM, PM_GRU, PM_RNN_TANH, PM_RNN_RELU };
struct pm_recurrence {
    enum pm_cell cell;
    int gates, units, steps, backwards;
    const float *source; /* the input's part of the gates: planes of steps */
    int source_plane;
    struct pm_layer weights; /* of the hidden state; its source is `hidden`, its target `sums` */
    float *hidden, *state;   /* hidden state and cell state */
    float *sums;             /* the hidden state's part of the gates */
    float *inputs;           /* the input's part, for PM_STEPS steps */
    const float *first_hidden, *first_state; /* initial states, or 0 */
    int first_plane;
    float *target; /* hidden states of all steps, or 0 */
    int target_plane;
    float *last_hidden, *last_state; /* final states, or 0 */
    int last_plane;
};
void pm_recur(const struct pm_recurrence *op);
#define PM_STEPS 8

#endif
