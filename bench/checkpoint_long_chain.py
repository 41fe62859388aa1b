"""Chains that merges keep short: a thousand deltas with the real merger beside them, and what one merge takes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint_sides import Dcp, Ours, ZipfIds, load_in_turns

from dlrm_scale.checkpoint.saving.staging import HostStaging
from dlrm_scale.sharding.shard import ShardedModel

__all__ = ["long_chain", "merge_memory"]

KEEP_CHAINS = 2
END_SECONDS = 300
FIRST_DELTAS = 12
"""After these the merger has work; it takes as long to start as a hundred small saves."""


def long_chain(
    folder: Path,
    sharded: ShardedModel,
    staging: HostStaging,
    ids: ZipfIds,
    *,
    deltas: int,
    steps: int,
    batch_rows: int,
    rounds: int,
    watch_seconds: float,
) -> dict[str, object]:
    """Save many deltas with a merger beside, merge once more at the end, then restore in turns with `dcp.load`.

    Args:
        folder: where checkpoints go.
        sharded: the model.
        staging: of `staging_of`.
        ids: drawn by each step.
        deltas: how many.
        steps: between two of them; real ones have more, and the merger as much more time for each.
        batch_rows: of a step.
        rounds: of restores.
        watch_seconds: how often the merger looks for work.
    """
    ours, dcp = Ours(folder / "long", sharded, staging, merger=True, keep_baselines=KEEP_CHAINS), Dcp(folder, sharded)
    baseline_bytes = ours.save().bytes
    written_bytes, most_manifests = 0, 0
    began = time.perf_counter()
    with _merger(ours.folder, watch_seconds) as merges:
        for number in range(1, deltas + 1):
            for _ in range(steps - 1):
                ours.mark(ids.draw(batch_rows))
            ours.change(ids.draw(batch_rows))
            written_bytes += ours.save().bytes
            if number == FIRST_DELTAS:
                began += _await_first_merge(ours.folder)
            if number % 10 == 0:
                most_manifests = max(most_manifests, len(list((ours.folder / "manifests").glob("*.json"))))
    merges += _merge_once(ours.folder)
    seconds = time.perf_counter() - began
    chain = ours.chain()
    disk_bytes = sum(file.stat().st_size for file in ours.folder.rglob("*") if file.is_file())
    dcp_bytes = dcp.save("sync").bytes
    sizes = {"chain": chain.size_bytes, "dcp.load": dcp_bytes}
    found = load_in_turns(rounds, {"chain": ours, "dcp.load": dcp}, dcp.checking_loads(), sizes)
    for side in (ours, dcp):
        side.close()
    merged_bytes = sum(one["bytes"] for one in merges)
    return {
        "deltas": deltas,
        "steps_a_delta": steps,
        "saving_seconds": seconds,
        "delta_bytes": written_bytes,
        "merges": len(merges),
        "new_baselines": sum(one["kind"] == "baseline" for one in merges),
        "merged_bytes_to_deltas": merged_bytes / written_bytes,
        "most_manifests": most_manifests,
        "manifests_restored": len(chain.manifests),
        "disk_bytes_to_baseline": disk_bytes / baseline_bytes,
        "sides": found,
    }


def merge_memory(folder: Path) -> dict[str, Any]:
    """Merge the chain in a folder into a baseline, in a process that watches its memory."""
    script = Path(__file__).with_name("checkpoint_merge_memory.py")
    return json.loads(_output([sys.executable, str(script), str(folder)]))


@contextmanager
def _merger(folder: Path, watch_seconds: float) -> Iterator[list[dict[str, Any]]]:
    """Have `dlrm-scale checkpoint merge --watch` run beside the block; its merges are there at the end.

    Raises:
        SystemExit: it failed.
    """
    log, errors = folder.with_name("merger.out"), folder.with_name("merger.err")
    merges: list[dict[str, Any]] = []
    with log.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen([*_command(folder), "--watch", str(watch_seconds)], stdout=out, stderr=err)
        try:
            yield merges
            ended = process.poll()
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if ended is not None or "error" in errors.read_text():
        raise SystemExit(f"the merger failed: {errors.read_text()}")
    merges += _made(log.read_text().splitlines())


def _await_first_merge(folder: Path) -> float:
    """Wait until the merger is up and has merged; seconds."""
    start = time.perf_counter()
    while not list((folder / "manifests").glob("*m*.json")):
        if time.perf_counter() - start > END_SECONDS:
            raise SystemExit(f"the merger has merged nothing within {END_SECONDS} s")
        time.sleep(0.05)
    return time.perf_counter() - start


def _merge_once(folder: Path) -> list[dict[str, Any]]:
    return _made([_output(_command(folder))])


def _made(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [one for text in texts for one in json.loads(text)["merged"]]


def _command(folder: Path) -> list[str]:
    merge = ["-m", "dlrm_scale", "checkpoint", "merge", str(folder), "--keep", str(KEEP_CHAINS), "--json"]
    return [sys.executable, *merge]


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
    return done.stdout
