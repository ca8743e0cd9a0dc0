"""The table that the compiled driver reads: what each column of an operation's row means.

Places in the arena and sizes are counted in floats, unless a name says otherwise.
"""

from enum import IntEnum


class Kind(IntEnum):
    """What an operation does."""

    PACK = 0  # an image from outside into planes
    UNPACK = 1  # planes into an image outside
    SPREAD = 2  # an image's planes into its lane of a group's planes
    CONVOLVE = 3  # sparse rows over runs of positions
    MULTIPLY = 4  # sparse rows times a vector
    PHASES = 5  # planes into the planes of their phases, for strides
    MAX_POOL = 6
    AVERAGE_POOL = 7
    ADD = 8
    SCALE = 9  # two tensors, element by element
    ACTIVATE = 10
    COPY = 11  # planes to another place: concatenation


class Curve(IntEnum):
    """An activation function that is more than a clamp."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    HARDSWISH = 4


class Field(IntEnum):
    """The columns."""

    KIND = 0
    SOURCE = 1  # place of the first float of the input tensor
    OTHER = 2  # place of the second input tensor; -1: none
    TARGET = 3
    ROWS = 4  # output channels
    SOURCE_PLANE = 5
    TARGET_PLANE = 6
    OTHER_PLANE = 7
    SOURCE_LEAD = 8  # from a plane's first float to its first position
    TARGET_LEAD = 9
    SOURCE_STRIDE = 10  # positions from one row of the image to the next
    TARGET_STRIDE = 11
    HEIGHT = 12  # of the output; of the image for PACK, UNPACK, SPREAD and PHASES
    WIDTH = 13
    LANES = 14  # images side by side at each position
    OUTSIDE = 15  # which tensor outside
    STARTS = 16  # place in the longs of the table of where rows begin
    WEIGHTS = 17  # place of the first weight in offsets and values
    BIAS = 18  # place in the constants
    MASK = 19  # place in the masks
    VECTORS = 20  # in a run, or in a line
    TILES = 21  # that the run is cut into, or the lines
    SPLITS = 22  # place in the longs of the first row of each thread
    TABLE = 23  # place in the longs of a table of windows or phases
    ENTRIES = 24  # entries of that table
    CURVE = 25
    STEP_Y = 26  # the stride of PHASES
    STEP_X = 27  # also that of pooling with windows of one size
    SCRATCH = 28  # place of a row of floats per thread
    SCRATCH_SIZE = 29
    TARGET_LANES = 30
    SOURCE_WIDTH = 31  # of the image that is pooled
    WINDOW = 32  # columns of each window; 0: they differ
    BEFORE = 33  # columns of padding before the first
    LINES = 34  # rows of the image in a tile; 0: tiles are parts of the run
    BLOCKS = 35  # of input channels, whose weights come one after the other
    WHOLE = 36  # floats of a run, where the window is all of the image; 0: it is not
    DEPTH = 37  # rows of the deepest window


COLUMNS = len(Field)


_F = {field.name: int(field) for field in Field}


KIND, SOURCE, OTHER, TARGET, ROWS = (_F[n] for n in ("KIND", "SOURCE", "OTHER", "TARGET", "ROWS"))


SOURCE_PLANE, TARGET_PLANE = _F["SOURCE_PLANE"], _F["TARGET_PLANE"]


OTHER_PLANE = _F["OTHER_PLANE"]


SOURCE_LEAD, TARGET_LEAD = _F["SOURCE_LEAD"], _F["TARGET_LEAD"]


SOURCE_STRIDE, TARGET_STRIDE = _F["SOURCE_STRIDE"], _F["TARGET_STRIDE"]


HEIGHT, IMAGE_WIDTH, LANES, OUTSIDE = _F["HEIGHT"], _F["WIDTH"], _F["LANES"], _F["OUTSIDE"]


STARTS, WEIGHTS, BIAS, MASK = _F["STARTS"], _F["WEIGHTS"], _F["BIAS"], _F["MASK"]


VECTORS, TILES, SPLITS = _F["VECTORS"], _F["TILES"], _F["SPLITS"]


TABLE, ENTRIES, CURVE = _F["TABLE"], _F["ENTRIES"], _F["CURVE"]


STEP_Y, STEP_X = _F["STEP_Y"], _F["STEP_X"]


SCRATCH, SCRATCH_SIZE = _F["SCRATCH"], _F["SCRATCH_SIZE"]


TARGET_LANES, SOURCE_WIDTH = _F["TARGET_LANES"], _F["SOURCE_WIDTH"]


WINDOW, BEFORE = _F["WINDOW"], _F["BEFORE"]


LINES, BLOCKS, WHOLE = _F["LINES"], _F["BLOCKS"], _F["WHOLE"]


DEPTH = _F["DEPTH"]
