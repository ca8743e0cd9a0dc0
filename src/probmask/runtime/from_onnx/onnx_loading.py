"""An ONNX file as a module and its inputs."""

import os
from collections.abc import Sequence
from dataclasses import replace

from probmask.runtime.from_onnx.onnx_batch import opened
from probmask.runtime.from_onnx.onnx_file import Input, OnnxGraph, read_onnx
from probmask.runtime.from_onnx.onnx_folding import folded
from probmask.runtime.from_onnx.onnx_network import OnnxNetwork
from probmask.runtime.from_onnx.onnx_operators import JOINED, OPERATORS
from probmask.runtime.from_onnx.onnx_patterns import joined_operations
from probmask.runtime.from_onnx.onnx_recurrent import RECURRENT, without_zero_states


def load_onnx(path: str | os.PathLike[str]) -> tuple[OnnxNetwork, Sequence[Input]]:
    """Return the network of an ONNX file in evaluation mode, and its inputs.

    Raise `InputError` if the file is damaged, or has an operator that is not known.
    """
    graph = read_onnx(path, (set(OPERATORS) | RECURRENT) - set(JOINED))
    graph = folded(without_zero_states(graph))
    return OnnxNetwork(_joined(opened(graph))).eval(), graph.inputs


def _joined(graph: OnnxGraph) -> OnnxGraph:
    return replace(graph, operations=joined_operations(graph))
