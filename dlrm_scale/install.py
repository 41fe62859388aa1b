"""Whether the installed torch, torchrec and fbgemm fit together, read from their metadata without importing them.

The three are built against one another: fbgemm 1.X and torchrec 1.X go with torch 2.(X+5). fbgemm comes as two
distributions, fbgemm-gpu (CUDA) and fbgemm-gpu-cpu, that own the same folder `fbgemm_gpu`.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlrm_scale.errors import InstallError

__all__ = ["InstallFault", "Installed", "check_install", "faults", "installed"]

TORCH_MINOR_AHEAD = 5
"""fbgemm 1.X goes with torch 2.(X + 5)."""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What is installed.

    Attributes:
        versions: version by distribution (torch, torchrec, fbgemm-gpu, fbgemm-gpu-cpu), without those that are absent.
        torch_cuda: CUDA version that torch was built for, or None for a CPU build.
    """

    versions: Mapping[str, str]
    torch_cuda: str | None


@dataclass(frozen=True, kw_only=True)
class InstallFault:
    """Something that can't work, and the commands that mend it."""

    message: str
    remedy: str


def installed() -> Installed:
    """Look up the versions in a few milliseconds; imports none of the packages."""
    versions = {}
    for name in ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Installed(versions=versions, torch_cuda=_torch_cuda())


def faults(found: Installed, *, device: Literal["cpu", "cuda"] = "cpu") -> list[InstallFault]:
    """List what keeps the packages from working together on `device`; empty when they fit."""
    versions = found.versions
    if "torch" not in versions:
        return [InstallFault(message="torch is not installed", remedy="make install")]
    torch = _release(versions["torch"])
    if torch is None or torch[0] != 2 or torch[1] < TORCH_MINOR_AHEAD:
        return [InstallFault(message=f"torch {versions['torch']} is not a version 2.X", remedy="make install")]
    minor = torch[1] - TORCH_MINOR_AHEAD
    build = "fbgemm-gpu" if found.torch_cuda else "fbgemm-gpu-cpu"
    fitting = f'"{build}==1.{minor}.*"'
    listed = []
    if "fbgemm-gpu" in versions and "fbgemm-gpu-cpu" in versions:
        listed.append(
            InstallFault(
                message="fbgemm-gpu and fbgemm-gpu-cpu are both installed; they own the same folder fbgemm_gpu, "
                "which now holds files of both",
                remedy=f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install --no-deps {fitting}",
            )
        )
    elif "fbgemm-gpu" not in versions and "fbgemm-gpu-cpu" not in versions:
        listed.append(InstallFault(message="fbgemm is not installed", remedy=f"pip install --no-deps {fitting}"))
    elif "fbgemm-gpu" in versions and found.torch_cuda is None:
        listed.append(
            InstallFault(
                message=f"fbgemm-gpu {versions['fbgemm-gpu']} is the CUDA build, torch {versions['torch']} a CPU build",
                remedy=f"pip uninstall -y fbgemm-gpu && pip install --no-deps {fitting}",
            )
        )
    for name in ("fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec"):
        if name in versions and _release(versions[name]) != (1, minor):
            listed.append(
                InstallFault(
                    message=f"{name} {versions[name]} does not go with torch {versions['torch']}, "
                    f"which needs {name} 1.{minor}",
                    remedy=f'pip install --no-deps "{name}==1.{minor}.*"',
                )
            )
    if "torchrec" not in versions:
        listed.append(
            InstallFault(message="torchrec is not installed", remedy=f'pip install --no-deps "torchrec==1.{minor}.*"')
        )
    if device == "cuda" and (found.torch_cuda is None or "fbgemm-gpu" not in versions):
        listed.append(
            InstallFault(
                message=f"training on GPUs needs the CUDA builds; torch {versions['torch']} is a "
                f"{'CUDA' if found.torch_cuda else 'CPU'} build and fbgemm-gpu is "
                f"{versions.get('fbgemm-gpu', 'not installed')}",
                remedy="make install DEVICE=cuda",
            )
        )
    return listed


def check_install(*, device: Literal["cpu", "cuda"] = "cpu") -> None:
    """Stop before an import that would crash or, worse, half work.

    Raises:
        InstallError: names every distribution that doesn't fit, with the commands that mend it.
    """
    listed = faults(installed(), device=device)
    if listed:
        raise InstallError(
            "; ".join(fault.message for fault in listed),
            remedy="; then ".join(dict.fromkeys(fault.remedy for fault in listed)),
        )


def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _torch_cuda() -> str | None:
    """Read the CUDA version from torch/version.py: `import torch` takes seconds and fails where this must not."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)", text, re.MULTILINE)
    return match[1] if match else None
