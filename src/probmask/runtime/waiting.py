"""What threads inside compiled code need to wait for each other."""

import sys
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

_LONG = ir.IntType(64)
# Rounds of looking before the processor is offered to others.
_PATIENCE = 4000


@intrinsic
def _arrive(typing_context: Any, address: Any) -> Any:
    """Add one to the counter at the address."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_LONG, 1), "seq_cst")

    return types.int64(types.int64), generate


@intrinsic
def _look(typing_context: Any, address: Any) -> Any:
    """Read the counter at the address."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.load_atomic(counter, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _offer_processor(typing_context: Any) -> Any:
    """Let another thread run, where the system knows how."""

    def generate(_: Any, builder: ir.IRBuilder, __: Any, ___: Any) -> Any:
        if sys.platform != "win32":
            kind = ir.FunctionType(ir.IntType(32), [])
            function = cgutils.get_or_insert_function(builder.module, kind, "sched_yield")
            builder.call(function, [])
        return ir.Constant(_LONG, 0)

    return types.int64(), generate


@njit(nogil=True)
def meet(address, threads, meeting):  # type: ignore[no-untyped-def]
    """Wait until all ``threads`` have come to the ``meeting``, counted from 1."""
    _arrive(address)
    rounds = 0
    while _look(address) < threads * meeting:
        rounds += 1
        if rounds > _PATIENCE:
            _offer_processor()
