"""Putting the measured speed of a run into its record."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probmask.runtime.speed import Speed


def record_latency(
    directory: Path, speeds: Sequence["Speed"], input_shape: Sequence[int]
) -> Path | None:
    """Write the speed into the record of the run in the directory, replacing an older one.

    The first batch size is what tables and pages show; all of them are kept. Nothing is written,
    and None returned, where no finished run is, or where its inputs have another shape.
    """
    from probmask.sweeps.sweep_directory import update_copy
    from probmask.training.record import cpu_name
    from probmask.training.run_directory import RunDirectory

    run = RunDirectory(directory)
    if not run.finished:
        return None
    record = run.read_record()
    if list(input_shape) != record.get("image_shape"):
        return None
    timed = [_timed(speed) for speed in speeds]
    record["latency"] = {**timed[0], "cpu": cpu_name(), "batches": timed}
    run.write_record(record)
    update_copy(run, record)
    return run.record


def _timed(speed: "Speed") -> dict[str, Any]:
    return {
        "milliseconds": round(speed.engine_ms, 4),
        "pytorch_milliseconds": round(speed.pytorch_ms, 4),
        "batch": speed.batch,
        "threads": speed.threads,
    }
