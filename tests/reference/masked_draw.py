"""Slow, obvious reference of `probmask.core.relaxation.masked_draw`, in Python numbers."""

import math

WORD = 2**32


def uniform(position, key):
    """Return the uniform of a position: the hash on Python's unbounded integers."""
    first, second = key
    x = (position + first) % WORD
    x ^= x >> 16
    x = (x * 0x21F0AAAD + second) % WORD
    x ^= x >> 15
    x = x * 0x735A2D97 % WORD
    x ^= x >> 15
    x = x * 0x31848BAB % WORD
    x ^= x >> 14
    return (2 * (x >> 9) + 1) / 2**24


def mask_and_slope(s, u, tau):
    """Return m = r^(1/τ) / (1 + r^(1/τ)) with r = s u / ((1 - s)(1 - u)), and dm/ds, in fp64."""
    if s in (0.0, 1.0):
        if tau < 1:
            return s, 0.0
        return s, (u / (1 - u) if s == 0 else (1 - u) / u)
    x = (math.log(s) - math.log1p(-s) + math.log(u) - math.log1p(-u)) / tau
    t = math.exp(-abs(x))
    m = (t if x < 0 else 1.0) / (1 + t)
    return m, t / (1 + t) ** 2 / (tau * s * (1 - s))


def masked_draw(weight, prob, grad, key, tau):
    """Return lists of w m, of dL/dw = g m and of dL/ds = g w dm/ds."""
    rows = []
    for i, (w, s, g) in enumerate(zip(weight, prob, grad, strict=True)):
        m, slope = mask_and_slope(s, uniform(i, key), tau)
        rows.append((w * m, g * m, g * w * slope))
    return tuple(map(list, zip(*rows, strict=True)))
