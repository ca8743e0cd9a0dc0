"""Smooth functions as LLVM vector code: exp, erf, tanh, and activations that are built from them.

The errors are a few units in the last place of single precision, relative to the result of exp and
tanh, and to 1 for erf.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from probmask.runtime.kernels.operation_table import Curve
from probmask.runtime.kernels.vectors import (
    BITS,
    BYTE,
    LONG,
    VECTOR,
    WIDTH,
    ZERO,
    load,
    loop,
    multiply_add,
    splat,
    store,
)

# exp(r) = 1 + r + r² · (these coefficients, highest first), for |r| ≤ ln(2) / 2 (Cephes).
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# ln(2) as a short number, whose multiples are exact, and the rest.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Where the result of exp is neither infinite nor denormal.
_EXP_RANGE = (-87.0, 88.0)
# 2^r = 1 + r · (these coefficients, highest first), for |r| ≤ ½ (Cephes).
_EXP2 = (
    1.535336188e-4,
    1.339887440e-3,
    9.618437357e-3,
    5.550332471e-2,
    2.402264791e-1,
    6.931472028e-1,
)
_LOG2_E = 1.44269504
# 1.5 · 2²³: adding it to a small number rounds it to an integer, in the lowest bits of the sum.
_ROUND = 12582912.0
# erf(x) = x · P(x²) / Q(x²) for |x| ≤ 4, highest coefficients first (Eigen).
_ERF_ABOVE = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_BELOW = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)
# tanh(x) = x · P(x²) / Q(x²) for |x| ≤ 7.9, highest coefficients first (Eigen).
_TANH_ABOVE = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_BELOW = (
    1.19825839466702e-06,
    1.18534705686654e-04,
    2.26843463243900e-03,
    4.89352518554385e-03,
)
# Where tanh is 1 in single precision.
_TANH_RANGE = 7.90531110763549805


def number(value: float) -> ir.Value:
    """Return a vector of one number."""
    return ir.Constant(VECTOR, [value] * WIDTH)


def clamp(builder: ir.IRBuilder, x: ir.Value, low: float, high: float) -> ir.Value:
    """Emit min(max(x, low), high); NaN becomes ``low``."""
    x = builder.select(builder.fcmp_ordered(">", x, number(low)), x, number(low))
    return builder.select(builder.fcmp_ordered("<", x, number(high)), x, number(high))


def polynomial(builder: ir.IRBuilder, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """Emit a polynomial, highest coefficient first."""
    result = number(coefficients[0])
    for coefficient in coefficients[1:]:
        result = multiply_add(builder, result, x, number(coefficient))
    return result


def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit exp(x) = 2ⁿ · exp(r), with x clamped to [-87, 88]."""
    power, p = _power_and_rest(builder, clamp(builder, x, *_EXP_RANGE))
    return multiply_add(builder, power, p, power)


def exp_below_one(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit exp(x) for x ≤ 0, with x clamped at -87, in fewer operations than `exp`.

    The error is a few units in the last place of 1, not of the result.
    """
    low = number(_EXP_RANGE[0])
    x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    rounded = multiply_add(builder, x, number(_LOG2_E), number(_ROUND))
    n = builder.fsub(rounded, number(_ROUND))
    r = multiply_add(builder, x, number(_LOG2_E), builder.fneg(n))
    p = multiply_add(builder, polynomial(builder, r, _EXP2), r, number(1.0))
    # Multiply by 2ⁿ: shift n, the lowest bits of ``rounded``, to the exponent, and add it.
    exponent = builder.shl(builder.bitcast(rounded, BITS), ir.Constant(BITS, [23] * WIDTH))
    return builder.bitcast(builder.add(builder.bitcast(p, BITS), exponent), VECTOR)


def _power_and_rest(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Emit 2ⁿ and exp(r) - 1, for x = n · ln(2) + r."""
    kind = ir.FunctionType(VECTOR, [VECTOR])
    rint = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{WIDTH}f32")  # type: ignore[no-untyped-call]
    n = builder.call(rint, [builder.fmul(x, number(1.44269504))])
    r = multiply_add(builder, n, number(-_LN2_HIGH), x)
    r = multiply_add(builder, n, number(-_LN2_LOW), r)
    p = polynomial(builder, r, _EXP)
    p = multiply_add(builder, builder.fmul(p, r), r, r)
    biased = builder.add(builder.fptosi(n, BITS), ir.Constant(BITS, [127] * WIDTH))
    power = builder.bitcast(builder.shl(biased, ir.Constant(BITS, [23] * WIDTH)), VECTOR)
    return power, p


def expm1(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit exp(x) - 1 for x ≤ 0, precise near 0."""
    power, p = _power_and_rest(builder, clamp(builder, x, _EXP_RANGE[0], 0.0))
    return multiply_add(builder, power, p, builder.fsub(power, number(1.0)))


def erf(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit erf(x)."""
    x = clamp(builder, x, -4.0, 4.0)
    square = builder.fmul(x, x)
    above = polynomial(builder, square, _ERF_ABOVE)
    below = polynomial(builder, square, _ERF_BELOW)
    return builder.fdiv(builder.fmul(x, above), below)


def tanh_ratio(builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Emit two numbers whose ratio is tanh(x): a product of ratios needs one division."""
    x = clamp(builder, x, -_TANH_RANGE, _TANH_RANGE)
    square = builder.fmul(x, x)
    above = builder.fmul(x, polynomial(builder, square, _TANH_ABOVE))
    return above, polynomial(builder, square, _TANH_BELOW)


def inverse_sigmoid(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit 1 / sigmoid(x) = 1 + exp(-x)."""
    return builder.fadd(number(1.0), exp(builder, builder.fneg(x)))


def _times_sigmoid(builder: ir.IRBuilder, x: ir.Value, z: ir.Value) -> ir.Value:
    """Emit x · sigmoid(z), which is 0 where exp is clamped."""
    below = builder.fadd(number(1.0), exp(builder, builder.fneg(z)))
    value = builder.fdiv(x, below)
    return builder.select(builder.fcmp_ordered(">", z, number(-87.0)), value, ZERO)


def _silu(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return _times_sigmoid(builder, x, x)


def _gelu(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    half = builder.fmul(x, number(0.5))
    return multiply_add(builder, half, erf(builder, builder.fmul(x, number(0.70710678))), half)


def _gelu_tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    cubic = multiply_add(
        builder, builder.fmul(x, x), number(0.044715 * 1.5957691216), number(1.5957691216)
    )
    return _times_sigmoid(builder, x, builder.fmul(x, cubic))


def _hardswish(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    gate = clamp(builder, builder.fadd(x, number(3.0)), 0.0, 6.0)
    return builder.fmul(x, builder.fdiv(gate, number(6.0)))


def _tanh(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit tanh|x| = -t / (t + 2) with t = exp(-2 |x|) - 1, and the sign of x."""
    below = builder.fcmp_ordered("<", x, ZERO)
    t = expm1(builder, builder.fmul(builder.select(below, x, builder.fneg(x)), number(2.0)))
    size = builder.fdiv(t, builder.fadd(t, number(2.0)))
    return builder.select(below, size, builder.fneg(size))


def _mish(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit x · tanh(ln(1 + e)) = x · n / (n + 2) with e = exp(x) and n = e² + 2 e."""
    e = exp(builder, clamp(builder, x, _EXP_RANGE[0], 20.0))
    n = builder.fmul(e, builder.fadd(e, number(2.0)))
    return builder.fmul(x, builder.fdiv(n, builder.fadd(n, number(2.0))))


def _sigmoid(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return builder.fdiv(number(1.0), builder.fadd(number(1.0), exp(builder, builder.fneg(x))))


def _hardsigmoid(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    gate = clamp(builder, builder.fadd(x, number(3.0)), 0.0, 6.0)
    return builder.fdiv(gate, number(6.0))


_Emit = Callable[[ir.IRBuilder, ir.Value], ir.Value]
_CURVES: dict[Curve, _Emit] = {
    Curve.SILU: _silu,
    Curve.GELU: _gelu,
    Curve.GELU_TANH: _gelu_tanh,
    Curve.HARDSWISH: _hardswish,
    Curve.TANH: _tanh,
    Curve.MISH: _mish,
    Curve.LEAKY: lambda _, x: x,
    Curve.ELU: expm1,
    Curve.SIGMOID: _sigmoid,
    Curve.HARDSIGMOID: _hardsigmoid,
}
# These curves are multiples of x for positive numbers, and of the function for negative ones.
_TWO_SIDED = (Curve.LEAKY, Curve.ELU)


def _two_sided(emit: _Emit, positive: ir.Value, negative: ir.Value) -> _Emit:
    def both(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
        above = builder.fmul(x, splat(builder, positive))
        below = builder.fmul(emit(builder, x), splat(builder, negative))
        return builder.select(builder.fcmp_ordered(">", x, ZERO), above, below)

    return both


@intrinsic
def curve_of_vectors(
    typing_context: Any,
    curve: Any,
    source: Any,
    target: Any,
    count: Any,
    nonfinite: Any,
    positive: Any,
    negative: Any,
) -> Any:
    """target = curve(source) for ``count`` vectors; source and target are addresses in bytes.

    The last two arguments are the factors of the curves with two sides.
    """
    signature = types.void(*[types.int64] * 5, types.float32, types.float32)

    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        done = builder.append_basic_block("done")
        switch = builder.switch(given[0], done)
        for curve, emit in _CURVES.items():
            block = builder.append_basic_block(curve.name.lower())
            switch.add_case(ir.Constant(LONG, int(curve)), block)
            builder.position_at_end(block)
            emit = _two_sided(emit, *given[5:]) if curve in _TWO_SIDED else emit
            _map_vectors(builder, given[:5], emit)
            builder.branch(done)
        builder.position_at_end(done)
        return ir.Constant(BYTE.as_pointer(), None)

    return signature, generate


def _map_vectors(builder: ir.IRBuilder, given: Any, emit: _Emit) -> None:
    """Emit a loop over all vectors; 0 · (sum of the inputs) is added to ``nonfinite``."""
    _, source, target, count, nonfinite = given

    def body(index: ir.Value, carried: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        shift = builder.mul(index, ir.Constant(LONG, 4 * WIDTH))
        x = load(builder, builder.add(source, shift), 0, VECTOR)
        store(builder, emit(builder, x), builder.add(target, shift), 0)
        return (builder.fadd(carried[0], x),)

    (summed,) = loop(builder, ir.Constant(LONG, 0), count, 1, (ZERO,), body)
    noted = multiply_add(builder, summed, ZERO, load(builder, nonfinite, 0, VECTOR))
    store(builder, noted, nonfinite, 0)
