"""The table that the compiled driver reads: one row per operation, one column per field.

Offsets into the arena and sizes are counted in floats unless a comment says otherwise.
"""

from enum import IntEnum


class Kind(IntEnum):
    """Kind of an operation."""

    PACK = 0  # copy an image from an external tensor into planes
    UNPACK = 1  # copy planes into an external tensor
    INTERLEAVE = 2  # copy an image's planes into its lane of a group's planes
    CONVOLVE = 3  # sparse rows over runs of positions
    LINEAR = 4  # sparse rows times a vector
    SPLIT_PHASES = 5  # copy planes into one plane per phase, for strided layers
    MAX_POOL = 6
    AVERAGE_POOL = 7
    ADD = 8
    MULTIPLY = 9  # two tensors, elementwise
    ACTIVATE = 10
    COPY = 11  # copy planes to another offset, for concatenation
    ADD_CONSTANT = 12
    MULTIPLY_CONSTANT = 13
    REARRANGE = 14  # copy elements between tensors of any strides
    NORMALIZE = 15  # LayerNorm and RMSNorm
    ATTEND = 16
    RECUR = 17  # the steps of one layer of an LSTM, a GRU or an RNN
    PACK_TOKENS = 18  # copy the tokens of a group's images into their lanes
    MERGE_PHASES = 19  # write the phases of a transposed convolution between each other
    RESIZE = 20  # interpolate
    ADD_CHANNELS = 21  # a tensor and one number per channel
    MULTIPLY_CHANNELS = 22
    LEAKY_CHANNELS = 23  # multiples of negative numbers, one for each channel
    NORMALIZE_GROUPS = 24  # GroupNorm and InstanceNorm
    SOFTMAX = 25  # over the channels of each position
    MAX_SLICES = 26  # pool planes: the slices of a volume
    AVERAGE_SLICES = 27


class Place(IntEnum):
    """Where the elements of a REARRANGE come from or go to."""

    ARENA = 0
    CONSTANT = 1
    EXTERNAL = 2


class Curve(IntEnum):
    """Activation function that is more than a clamp."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    HARDSWISH = 4
    TANH = 5
    MISH = 6
    LEAKY = 7  # multiples of x, one for positive and one for negative numbers
    ELU = 8  # a multiple of x for positive numbers, of exp(x) - 1 for negative ones
    SIGMOID = 9  # this one and those after it do not map 0 to 0
    HARDSIGMOID = 10


class Cell(IntEnum):
    """What a recurrent layer computes at each step."""

    LSTM = 0
    GRU = 1
    TANH = 2
    RELU = 3


# Number of gates of each kind of cell.
GATES = (4, 3, 1, 1)


class Field(IntEnum):
    """Column of the table."""

    KIND = 0
    SOURCE = 1  # arena offset of the input tensor
    OTHER = 2  # arena offset of the second input tensor; -1 if there is none
    TARGET = 3  # arena offset of the output tensor
    ROWS = 4  # number of output channels
    SOURCE_PLANE = 5  # floats from one channel to the next
    TARGET_PLANE = 6
    OTHER_PLANE = 7
    SOURCE_LEAD = 8  # floats from the start of a plane to its first position
    TARGET_LEAD = 9
    SOURCE_STRIDE = 10  # positions from one image row to the next
    TARGET_STRIDE = 11
    HEIGHT = 12  # of the output; of the image for PACK, UNPACK, INTERLEAVE and SPLIT_PHASES
    WIDTH = 13
    LANES = 14  # number of images interleaved at each position
    EXTERNAL = 15  # index of the external tensor
    STARTS = 16  # offset in the longs: where the weights of each row start, in the order of rows
    WEIGHTS = 17  # offset of the first weight in the offsets and values
    BIAS = 18  # offset in the constants
    POSITION_BITS = 19  # offset in the position bits
    VECTORS = 20  # number of vectors in a run, or in a line of a tile
    TILES = 21  # number of tiles
    SPLITS = 22  # offset in the longs: first row of each thread
    TABLE = 23  # offset in the longs: table of windows or phases
    ENTRIES = 24  # number of entries in that table
    CURVE = 25
    STEP_Y = 26  # stride of SPLIT_PHASES and MERGE_PHASES
    STEP_X = 27  # likewise; also the column stride of pooling with windows of equal width
    SCRATCH = 28  # arena offset of the scratch rows, one per thread
    SCRATCH_SIZE = 29
    TARGET_LANES = 30
    SOURCE_WIDTH = 31  # width of the image that is pooled or interpolated
    WINDOW_WIDTH = 32  # width of every pooling window; 0 if the widths differ
    PADDING_LEFT = 33  # padding columns on the left of the pooled image
    LINES = 34  # image rows in a tile; 0 if a tile is a part of the run
    BLOCKS = 35  # number of blocks of input channels; each block has its own weights
    WHOLE_RUN = 36  # length of the run if one window covers the image; otherwise 0
    WINDOW_HEIGHT = 37  # height of the tallest pooling window
    SOURCE_IS = 38  # place of the source and of the target of REARRANGE
    TARGET_IS = 39
    IMAGE_SIZE = 40  # floats per image of the external tensor
    UNCHECKED = 41  # whether elements of REARRANGE may be infinite
    CHANNELS = 42  # number of channels that are normalized; ROWS counts vectors or groups
    CENTERED = 43  # whether the mean is subtracted
    VALUES = 44  # arena offset of the values of an attention; its keys are OTHER
    VALUES_PLANE = 45
    KEYS = 46  # number of keys; ROWS counts heads and blocks of queries
    DEPTH = 47  # number of channels per head; of source slices per channel of a volume
    CAUSAL = 48  # whether queries see only the keys up to their own position
    MASK = 49  # offset of the additive mask, in the arena or the constants; -1 if there is none
    MASK_PLANE = 50  # floats from one key to the next; 1 if all queries have the same mask
    MASK_HEADS = 51  # number of heads that have a mask of their own, or 1
    MASK_IS_CONSTANT = 52
    TOKENS = 53  # whether channels are last in the external tensor of UNPACK
    CELL = 54  # kind of cell; ROWS counts directions
    UNITS = 55  # number of hidden units
    STEPS = 56  # length of the sequence
    STATE = 57  # offset of the first direction's initial state in OTHER and VALUES
    FINALS = 58  # arena offset of the tensor that takes the final states
    FINALS_PLANE = 59
    FINAL_HIDDEN = 60  # offset of the final hidden state in its planes; -1 if it is not needed
    FINAL_CELL = 61
    OTHER_LEAD = 62
    ORDER = 63  # offset in the longs: output channel of each row
    FETCHED = 64  # number of input planes to prefetch for the next tile; 0 if none
    FURTHEST = 65  # floats from a position to the last input that it needs in a plane
    TOGETHER = 66  # number of phases that are copied together; their entries follow each other


COLUMNS = len(Field)
# The columns as plain integers: Numba cannot index by an IntEnum. The image's width is called
# IMAGE_WIDTH here, because WIDTH is the number of floats in a vector.
_COLUMN = {field.name: int(field) for field in Field}
KIND, SOURCE, OTHER, TARGET = (_COLUMN[name] for name in ("KIND", "SOURCE", "OTHER", "TARGET"))
ROWS = _COLUMN["ROWS"]
SOURCE_PLANE, TARGET_PLANE = _COLUMN["SOURCE_PLANE"], _COLUMN["TARGET_PLANE"]
OTHER_PLANE, OTHER_LEAD = _COLUMN["OTHER_PLANE"], _COLUMN["OTHER_LEAD"]
SOURCE_LEAD, TARGET_LEAD = _COLUMN["SOURCE_LEAD"], _COLUMN["TARGET_LEAD"]
SOURCE_STRIDE, TARGET_STRIDE = _COLUMN["SOURCE_STRIDE"], _COLUMN["TARGET_STRIDE"]
HEIGHT, IMAGE_WIDTH, LANES = _COLUMN["HEIGHT"], _COLUMN["WIDTH"], _COLUMN["LANES"]
EXTERNAL = _COLUMN["EXTERNAL"]
STARTS, WEIGHTS, BIAS = _COLUMN["STARTS"], _COLUMN["WEIGHTS"], _COLUMN["BIAS"]
POSITION_BITS = _COLUMN["POSITION_BITS"]
VECTORS, TILES, SPLITS = _COLUMN["VECTORS"], _COLUMN["TILES"], _COLUMN["SPLITS"]
TABLE, ENTRIES, CURVE = _COLUMN["TABLE"], _COLUMN["ENTRIES"], _COLUMN["CURVE"]
STEP_Y, STEP_X = _COLUMN["STEP_Y"], _COLUMN["STEP_X"]
SCRATCH, SCRATCH_SIZE = _COLUMN["SCRATCH"], _COLUMN["SCRATCH_SIZE"]
TARGET_LANES, SOURCE_WIDTH = _COLUMN["TARGET_LANES"], _COLUMN["SOURCE_WIDTH"]
WINDOW_WIDTH, WINDOW_HEIGHT = _COLUMN["WINDOW_WIDTH"], _COLUMN["WINDOW_HEIGHT"]
PADDING_LEFT = _COLUMN["PADDING_LEFT"]
LINES, BLOCKS, WHOLE_RUN = _COLUMN["LINES"], _COLUMN["BLOCKS"], _COLUMN["WHOLE_RUN"]
SOURCE_IS, TARGET_IS, IMAGE_SIZE = (
    _COLUMN[name] for name in ("SOURCE_IS", "TARGET_IS", "IMAGE_SIZE")
)
UNCHECKED, CHANNELS, CENTERED = (_COLUMN[name] for name in ("UNCHECKED", "CHANNELS", "CENTERED"))
VALUES, VALUES_PLANE, KEYS = _COLUMN["VALUES"], _COLUMN["VALUES_PLANE"], _COLUMN["KEYS"]
DEPTH, CAUSAL, TOKENS = _COLUMN["DEPTH"], _COLUMN["CAUSAL"], _COLUMN["TOKENS"]
MASK, MASK_PLANE = _COLUMN["MASK"], _COLUMN["MASK_PLANE"]
MASK_HEADS, MASK_IS_CONSTANT = _COLUMN["MASK_HEADS"], _COLUMN["MASK_IS_CONSTANT"]
CELL, UNITS, STEPS = _COLUMN["CELL"], _COLUMN["UNITS"], _COLUMN["STEPS"]
STATE, FINALS, FINALS_PLANE = (_COLUMN[name] for name in ("STATE", "FINALS", "FINALS_PLANE"))
FINAL_HIDDEN, FINAL_CELL = _COLUMN["FINAL_HIDDEN"], _COLUMN["FINAL_CELL"]
ORDER, TOGETHER = _COLUMN["ORDER"], _COLUMN["TOGETHER"]
FETCHED, FURTHEST = _COLUMN["FETCHED"], _COLUMN["FURTHEST"]
