"""What was chosen for a network on a machine, and its file."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.runtime.nodes import Network


@dataclass(frozen=True)
class Choices:
    """The nodes that run on the sparse kernels, and where each step on them begins with groups.

    ``lone`` maps the first node of a step to the number of its nodes that run image by image.
    """

    sparse: frozenset[str]
    lone: Mapping[str, int]

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write them as JSON, with the processor that they were measured on."""
        content = {
            "processor": processor(),
            "sparse": sorted(self.sparse),
            "lone": dict(sorted(self.lone.items())),
        }
        write_atomically(path, json.dumps(content, indent=2).encode(), overwrite=overwrite)


def read_choices(path: str | os.PathLike[str], network: Network) -> Choices:
    """Read saved choices, and refuse those of another network or another processor."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        sparse = frozenset(str(name) for name in content["sparse"])
        lone = {str(name): int(count) for name, count in content["lone"].items()}
        measured_on = str(content["processor"])
    except OSError as error:
        raise InputError(f"choices={path}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"choices={path}: is not a file that Engine.choices.save wrote ({error!r})."
        ) from error
    known = {node.name for node in network.nodes if node.form is not None}
    unknown = sorted((sparse | set(lone)) - known)
    if unknown:
        raise InputError(
            f"choices={path}: was made for another network, with a node {unknown[0]!r}; compile "
            "without choices and save them anew."
        )
    if measured_on != processor():
        raise InputError(
            f"choices={path}: was measured on {measured_on}, this is {processor()}; compile "
            "without choices and save them anew."
        )
    return Choices(sparse, lone)


def processor() -> str:
    """The processor as LLVM knows it: what code is compiled for."""
    return f"{platform.machine()} {llvm.get_host_cpu_name()}"
