"""Merges a chain into a new baseline in a process of its own and prints what that took, as JSON.

    python bench/checkpoint_merge_memory.py FOLDER

Peak memory is counted above what the process has just before: libraries loaded, the chain found.
"""

import json
import sys
import time
from pathlib import Path

import torch

from dlrm_scale.checkpoint import find_chain, open_storage
from dlrm_scale.checkpoint.upkeep.merge import merge_chain
from dlrm_scale.checkpoint.upkeep.merge_memory import merge_memory_bytes
from dlrm_scale.checkpoint.upkeep.merge_plan import plan_merge


def main(folder: Path) -> None:
    """Measure one merge."""
    torch.set_num_threads(1)  # as the command does
    storage = open_storage(folder)
    chain = find_chain(storage)
    plan = plan_merge(chain.manifests, chain.checkpoint, "baseline") if chain is not None else None
    if plan is None:
        raise SystemExit(f"{folder} holds no chain to merge")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, moved = _status_bytes("VmHWM"), _moved_bytes()
    start, cpu = time.perf_counter(), time.process_time()
    (merged,) = merge_chain(storage, lambda: find_chain(storage), "baseline")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    read, written = (after - begun for after, begun in zip(_moved_bytes(), moved, strict=True))
    print(
        json.dumps(
            {
                "memory_bytes": _status_bytes("VmHWM") - before,
                "memory_bound_bytes": merge_memory_bytes(plan.manifests),
                "process_bytes": _status_bytes("VmHWM"),
                "read_bytes": read,
                "source_bytes": plan.source_bytes,
                "written_bytes": written,
                "result_bytes": merged.manifest.size_bytes,
                "manifests": len(plan.manifests),
                "seconds": seconds,
                "cpu_seconds": cpu,
            }
        )
    )


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _moved_bytes() -> tuple[int, int]:
    """Bytes that this process has read and written by system calls."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["rchar"]), int(found["wchar"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
