"""Loads torch, fbgemm and torchrec in a process of their own, so that a crash there is a finding and not our end.

parent: probe() ──► python -m dlrm_scale.load_probe      prints a JSON line after each stage that worked
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

__all__ = ["STAGES", "Probe", "probe"]

_MARK = "dlrm-scale-probe "


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a fresh process could do.

    Attributes:
        facts: what each stage that worked found, by stage.
        failed: the stage that failed, or None.
        reason: why, in one line.
    """

    facts: dict[str, dict[str, object]] = field(default_factory=dict)
    failed: str | None = None
    reason: str = ""


def probe(*, timeout_seconds: float = 120) -> Probe:
    """Run the stages in a fresh interpreter; raises nothing when they fail."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
        out, err, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        # Bytes even in text mode, as the documentation of subprocess says.
        out, err, code = _text(late.stdout), _text(late.stderr), None
    return _read(out, err, code, timeout_seconds)


def _read(out: str, err: str, code: int | None, timeout_seconds: float) -> Probe:
    facts: dict[str, dict[str, object]] = {}
    for line in out.splitlines():
        if line.startswith(_MARK):
            stage, found = json.loads(line.removeprefix(_MARK))
            facts[stage] = found
    failed = next((stage for stage in STAGES if stage not in facts), None)
    if failed is None:
        return Probe(facts=facts)
    if code is None:
        reason = f"no answer within {timeout_seconds:.0f} s"
    elif code < 0:
        reason = f"the process died of {signal.Signals(-code).name}"
    else:
        reason = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"exit code {code}")
    return Probe(facts=facts, failed=failed, reason=reason)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _load_torch() -> dict[str, object]:
    torch = import_module("torch")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
    }


def _join_gloo() -> dict[str, object]:
    """A group of one: gloo looks up this host's name and binds to its address, which fails on odd networks."""
    dist = import_module("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    return {}


def _load_fbgemm() -> dict[str, object]:
    torch = import_module("torch")
    import_module("fbgemm_gpu")
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([2, 1]))
    if offsets.tolist() != [0, 2, 3]:
        raise RuntimeError(f"fbgemm's cumulative sum of [2, 1] is {offsets.tolist()}")
    return {}


def _load_torchrec() -> dict[str, object]:
    import_module("torchrec")
    return {}


STAGES: dict[str, Callable[[], dict[str, object]]] = {
    "torch": _load_torch,
    "gloo": _join_gloo,
    "fbgemm": _load_fbgemm,
    "torchrec": _load_torchrec,
}
"""What is tried, in this order; the first failure ends it."""


def _main() -> None:
    for stage, run in STAGES.items():
        try:
            found = run()
        except Exception as error:
            sys.exit(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        os.write(1, (f"\n{_MARK}" + json.dumps([stage, found]) + "\n").encode())


if __name__ == "__main__":
    _main()
