"""`dlrm-scale doctor`: is this machine ready, and if not, what to do."""

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dlrm_scale.host_cores import usable_cores
from dlrm_scale.host_memory import host_memory
from dlrm_scale.install import Installed, faults, installed
from dlrm_scale.load_probe import Probe, probe
from dlrm_scale.units import GIB, format_bytes

__all__ = ["Finding", "doctor", "examine"]

LOW_MEMORY_BYTES = 4 * GIB
LOW_DISK_BYTES = 5 * GIB


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        state: ok; note: works, but could be better; fault: training can't work.
        found: what was found.
        remedy: what to do, empty when ok.
    """

    name: str
    state: Literal["ok", "note", "fault"]
    found: str
    remedy: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Check the installation and this machine; exits with 1 when training can't work."""
    findings = examine(installed(), probe())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            typer.echo(f"{finding.state:5}  {finding.name:8}  {finding.found}")
            if finding.remedy:
                typer.echo(f"{'':17}to do: {finding.remedy}")
    if any(finding.state == "fault" for finding in findings):
        raise typer.Exit(1)


def examine(found: Installed, loaded: Probe) -> list[Finding]:
    """Judge what is installed, what a fresh process could load, and the machine."""
    torch: dict[str, Any] = loaded.facts.get("torch", {})
    return [
        _python(),
        *_versions(found, "cuda" if torch.get("gpus") else "cpu"),
        *_loads(found, loaded),
        *([_nccl(torch), _gpus(torch)] if torch else []),
        _cores(torch.get("threads")),
        _memory(),
        _disk(Path.cwd()),
    ]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding(name="python", state="ok", found=version)
    return Finding(
        name="python",
        state="fault",
        found=f"{version}; 3.11, 3.12 or 3.13 is needed",
        remedy="make install PYTHON=python3.12",
    )


def _versions(found: Installed, device: Literal["cpu", "cuda"]) -> list[Finding]:
    listed = faults(found, device=device)
    if listed:
        return [Finding(name="versions", state="fault", found=fault.message, remedy=fault.remedy) for fault in listed]
    return [
        Finding(
            name="versions",
            state="ok",
            found=", ".join(f"{name} {version}" for name, version in found.versions.items()) + " fit together",
        )
    ]


def _loads(found: Installed, loaded: Probe) -> list[Finding]:
    rebuild = "mend the versions first" if faults(found) else "rm -r .venv && make install"
    remedies = {
        "torch": "rm -r .venv && make install",
        "gloo": "make this host's name resolve (/etc/hosts), or name the network card in GLOO_SOCKET_IFNAME",
        "fbgemm": rebuild,
        "torchrec": rebuild,
    }
    listed = []
    for stage, remedy in remedies.items():
        if stage == loaded.failed:
            listed.append(Finding(name=stage, state="fault", found=f"does not work: {loaded.reason}", remedy=remedy))
        elif stage in loaded.facts:
            listed.append(Finding(name=stage, state="ok", found=_stage_text(stage, loaded.facts[stage])))
    return listed


def _stage_text(stage: str, facts: dict[str, Any]) -> str:
    if stage == "torch":
        return f"{facts['version']}, built for {'CUDA ' + facts['cuda'] if facts['cuda'] else 'CPU'}"
    return {"gloo": "joins a process group", "fbgemm": "loads and runs a kernel", "torchrec": "loads"}[stage]


def _nccl(torch: dict[str, Any]) -> Finding:
    if torch["nccl"]:
        return Finding(name="nccl", state="ok", found="available")
    if torch["gpus"]:
        return Finding(
            name="nccl", state="fault", found="not in this torch, which sees GPUs", remedy="make install DEVICE=cuda"
        )
    return Finding(name="nccl", state="ok", found="not in this torch; only GPUs need it")


def _gpus(torch: dict[str, Any]) -> Finding:
    gpus = torch["gpus"]
    if gpus:
        text = ", ".join(f"{gpu['name']} ({format_bytes(gpu['memory_bytes'])})" for gpu in gpus)
        return Finding(name="gpus", state="ok", found=f"{len(gpus)}: {text}")
    if not Path("/dev/nvidiactl").exists():
        return Finding(name="gpus", state="ok", found="none; training runs on CPU")
    return Finding(
        name="gpus",
        state="note",
        found="this machine has an NVIDIA GPU that torch doesn't see; training runs on CPU",
        remedy="make install DEVICE=cuda" if torch["cuda"] is None else "update the NVIDIA driver; see nvidia-smi",
    )


def _cores(threads: int | None) -> Finding:
    cores, affinity = usable_cores(), len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS", "")
    found = f"{cores}" + (f" by a container's quota, {affinity} by affinity" if cores < affinity else "")
    found += f", torch uses {threads} threads in one process" if threads else ""
    if asked.isdigit() and int(asked) > cores:
        return Finding(
            name="cores",
            state="note",
            found=f"{cores}, but OMP_NUM_THREADS is {asked}",
            remedy="unset OMP_NUM_THREADS, or set it to cores / ranks on this host",
        )
    return Finding(name="cores", state="ok", found=found)


def _memory() -> Finding:
    memory = host_memory()
    how = "under a limit of" if memory.limited else "of"
    found = f"{format_bytes(memory.free_bytes)} free {how} {format_bytes(memory.total_bytes)}"
    if memory.free_bytes >= LOW_MEMORY_BYTES:
        return Finding(name="memory", state="ok", found=found)
    return Finding(
        name="memory",
        state="note",
        found=found,
        remedy=f"end other programs; the demo needs about {LOW_MEMORY_BYTES // GIB} GiB",
    )


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    found = f"{format_bytes(free)} free at {folder}"
    if free >= LOW_DISK_BYTES:
        return Finding(name="disk", state="ok", found=found)
    return Finding(name="disk", state="note", found=found, remedy="free some space, or put data and runs elsewhere")
