"""What a result needs to be compared later: versions, machine, load, commit."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

__all__ = ["save", "stamp"]

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numba", "numpy", "pyarrow")
_FOLDER = Path(__file__).resolve().parent


def stamp() -> dict[str, object]:
    """Describe this machine and installation."""
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else ""),
        "python": platform.python_version(),
        "packages": {name: v for name in _PACKAGES if (v := _version(name))},
        "processor": _processor(),
        "bf16_instructions": _bf16_instructions(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def save(name: str, result: dict[str, object]) -> Path:
    """Write a result to `results/<name>.json`, replacing the last one."""
    path = _FOLDER / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_FOLDER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _bf16_instructions() -> list[str]:
    """Which of the instructions that make bf16 fast this processor has; without them it is emulated, and slow."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return sorted(words & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
