"""Preprocessing against torchrec's utilities, pandas, polars and a row-by-row pipeline, in alternating rounds.

Rows per CPU-second, threads and children included. Every run is a process of its own, so that peak memory is its own,
and runs a small input first: imports and numba's first compiling are not timed. Before anything is timed all contenders
must make the same of a small input: features, raw ids, and which ids share a table row.

Rows come from `dlrm-scale synth` with the published cardinalities; slow peers get fewer of them (--peer-rows), which
favours them, since their dictionaries stay smaller. "parse + transform" leaves nothing on disk on our side, as with
pandas and polars; "hashed dataset" is the whole command with a hashed vocabulary: mapped, summed up, checksummed and
fsynced. End to end, torchrec's third step shuffles the rows on disk; ours needn't, the loader does it while training.
Lines without a goal say what a feature costs or gains.

    python bench/preprocess.py --rounds 5 --save
"""

import argparse
import gzip
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stamp
import zstandard

from dlrm_scale.data.synthetic.synthetic import SyntheticParameters, generate

MIB = 1024 * 1024
THRESHOLD = 2
PRESETS = ("kaggle", "terabyte")
NEEDS = {"torchrec": "torchrec", "pandas": "pandas", "polars": "polars"}
GROUPS = ("parse", "dataset", "compressed", "jobs", "memory")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contender on one input.

    Attributes:
        contender: its name in `preprocess_contender.py`.
        input: name of an input set.
        options: of the contender, JSON.
    """

    contender: str
    input: str
    options: str = "{}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the table: `ours` over `peer`, by processor time or by wall time."""

    group: str
    what: str
    ours: Run
    peer: Run | None = None
    peer_name: str = ""
    goal: float | None = None
    memory_goal_bytes: int | None = None
    by: str = "cpu_seconds"


@dataclass
class Input:
    """Files, one a day, and how many rows they hold."""

    files: list[str]
    rows: int


@dataclass
class Measured:
    """What the rounds found for a run; `skipped` says why there is nothing."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    skipped: str = ""


def main() -> None:
    """Measure, print a table, and save it if asked."""
    options = _options()
    lines = [line for line in _lines(options.dlrm_clone) if not options.only or line.group in options.only]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        inputs = _Inputs(Path(folder), options)
        inputs.get("kaggle/tiny")
        _run(Run(contender="check", input="kaggle/tiny"), inputs, Path(folder))
        measured = _measure(lines, inputs, Path(folder), options.rounds)
        result: dict[str, Any] = {
            "stamp": stamp.stamp(),
            "options": {
                name: value for name, value in vars(options).items() if name not in ("dlrm_clone", "folder", "out")
            },
            "lines": [found for line in lines if (found := _result(line, measured, inputs)) is not None],
        }
    _show(result)
    for run, found in measured.items():
        if found.skipped:
            print(f"skipped: {run.contender} ({found.skipped})")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.save:
        print(stamp.save("preprocess", result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows for dlrm_scale, pandas and polars")
    parser.add_argument("--peer-rows", type=int, default=200_000, help="rows for torchrec and the per-row pipeline")
    parser.add_argument("--memory-rows", type=int, default=5_000_000, help="rows of the run under a memory limit")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    parser.add_argument("--only", choices=GROUPS, action="append", help="only these lines; may be repeated")
    parser.add_argument("--dlrm-clone", type=Path, help="a clone of facebookresearch/dlrm, to measure the original too")
    parser.add_argument("--folder", type=Path, help="where inputs and outputs go (default: the temporary folder)")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    parser.add_argument("--save", action="store_true", help="write it to bench/results")
    return parser.parse_args()


def _lines(dlrm_clone: Path | None) -> list[Line]:
    found = []
    for preset in PRESETS:
        found += _lines_of(preset, dlrm_clone)
    for days, what in ((1, "one file"), (4, "four files")):
        one, two = (
            _dataset_run(f"kaggle/{days}", vocabulary="frequency", threshold=THRESHOLD, jobs=jobs) for jobs in (1, 2)
        )
        text = f"frequency dataset, {what}: 2 jobs over 1, by wall time"
        found.append(Line(group="jobs", what=text, ours=two, peer=one, peer_name="1 job", by="seconds"))
    command = ["preprocess", "{input}", "--out", "{folder}/dataset", "--memory-limit", "1GiB", "--jobs", "2"]
    run = Run(contender="dlrm_scale command", input="kaggle/memory", options=json.dumps({"arguments": command}))
    found.append(Line(group="memory", what="under --memory-limit 1GiB", ours=run, memory_goal_bytes=1024 * MIB))
    return found


def _lines_of(preset: str, dlrm_clone: Path | None) -> list[Line]:
    large, small = f"{preset}/large", f"{preset}/small"
    parse = Run(contender="dlrm_scale parse", input=large)
    hashed = _dataset_run(large, vocabulary="hash", max_rows_per_table=1_000_000)
    counted = _dataset_run(large, vocabulary="frequency", threshold=THRESHOLD)
    npys = Run(contender="torchrec tsv_to_npys", input=small)
    threshold = json.dumps({"threshold": THRESHOLD})
    three = Run(contender="torchrec three steps", input=small, options=threshold)
    by_row, lean = (
        Run(contender=name, input=small, options=threshold) for name in ("per-row pipeline", "lean per-row pipeline")
    )
    originals = []
    if dlrm_clone is not None:
        clone = json.dumps({"clone": str(dlrm_clone.resolve())})
        originals = [Run(contender="facebookresearch/dlrm", input=small, options=clone)]

    def line(group: str, what: str, ours: Run, peer: Run, **rest: Any) -> Line:
        return Line(
            group=group,
            what=f"{preset}: {what}",
            ours=ours,
            peer=peer,
            peer_name=rest.pop("peer_name", peer.contender),
            **rest,
        )

    return [
        line("parse", "parse + transform", parse, npys, goal=25, memory_goal_bytes=300 * MIB),
        line("parse", "parse + transform", parse, Run(contender="polars", input=large)),
        line("parse", "parse + transform", parse, Run(contender="pandas", input=large)),
        line("dataset", "hashed dataset", hashed, npys),
        line("dataset", "frequency dataset", counted, three, goal=15),
        line("dataset", "frequency dataset", counted, by_row, goal=40),
        line("dataset", "frequency dataset", counted, lean),
        *(line("dataset", "frequency dataset", counted, original, goal=40) for original in originals),
        *(
            line(
                "compressed",
                f"parse + transform from {kind}",
                Run(contender="dlrm_scale parse", input=f"{preset}/{kind}"),
                parse,
                peer_name="plain text",
            )
            for kind in ("gzip", "zstd")
        ),
    ]


def _dataset_run(input_: str, **options: Any) -> Run:
    """`preprocess` with its default split, on one job unless the options say otherwise."""
    return Run(contender="dlrm_scale dataset", input=input_, options=json.dumps({"jobs": 1, **options}))


class _Inputs:
    """Input sets by name, `preset/kind`, made when they are first asked for."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder / "inputs"
        self._options = options
        self._made: dict[str, Input] = {}

    def get(self, name: str) -> Input:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Input:
        preset, kind = name.split("/")
        folder = self._folder / preset / kind
        if kind in ("gzip", "zstd"):
            plain = self.get(f"{preset}/large")
            folder.mkdir(parents=True)
            return Input([_compress(Path(file), folder, kind) for file in plain.files], plain.rows)
        o = self._options
        rows, days = {
            "tiny": (3_000, 2),
            "small": (o.peer_rows, 2),
            "large": (o.rows, 2),
            "1": (o.rows, 1),
            "4": (o.rows, 4),
            "memory": (o.memory_rows, 4),
        }[kind]
        scale = None if kind == "tiny" else 1.0
        generate(folder, SyntheticParameters(preset=preset, rows=rows, days=days, scale=scale))
        return Input([str(folder / f"day_{day}.tsv") for day in range(days)], rows)


def _compress(file: Path, folder: Path, kind: str) -> str:
    """Compress as the tools of those names do by default."""
    target = folder / f"{file.name}.{'gz' if kind == 'gzip' else 'zst'}"
    with file.open("rb") as source, target.open("wb") as out:
        if kind == "gzip":
            with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=6) as packed:
                shutil.copyfileobj(source, packed, MIB)
        else:
            zstandard.ZstdCompressor(level=3, write_checksum=True).copy_stream(source, out)
    return str(target)


def _measure(lines: list[Line], inputs: _Inputs, folder: Path, rounds: int) -> dict[Run, Measured]:
    """Run what the lines need, each run once a round; the run under a memory limit only once."""
    runs: dict[Run, Measured] = {}
    for line in lines:
        for run in (line.ours, line.peer):
            if run is not None:
                runs.setdefault(run, Measured(skipped=_absent(run)))
    once = {line.ours for line in lines if line.peer is None}
    for round_ in range(rounds):
        for run, found in runs.items():
            if found.skipped or (round_ > 0 and run in once):
                continue
            result = _run(run, inputs, folder)
            if isinstance(result, str):
                found.skipped = result
            else:
                found.rounds.append(result)
                if sys.stderr.isatty():
                    rate = inputs.get(run.input).rows / result["cpu_seconds"]
                    print(f"round {round_ + 1}: {run.contender}, {run.input}: {rate:,.0f}", file=sys.stderr)
    return runs


def _absent(run: Run) -> str:
    package = NEEDS.get(run.contender.split()[0])
    return f"{package} isn't installed" if package and importlib.util.find_spec(package) is None else ""


def _run(run: Run, inputs: _Inputs, folder: Path) -> dict[str, float] | str:
    """Return what one process measured, or why it couldn't."""
    request = {
        "name": run.contender,
        "files": inputs.get(run.input).files,
        "warm_up_files": inputs.get(f"{run.input.split('/')[0]}/tiny").files,
        "options": json.loads(run.options),
        "folder": str(folder),
    }
    script = Path(__file__).with_name("preprocess_contender.py")
    # One thread each, where a library would start as many as there are cores.
    environment = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(request)], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode == 0:
        measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return measured
    message = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
    if message.startswith("skipped: "):
        return message.removeprefix("skipped: ")
    sys.stderr.write(done.stderr)
    raise SystemExit(f"{run.contender} failed: {message}")


def _result(line: Line, measured: dict[Run, Measured], inputs: _Inputs) -> dict[str, Any] | None:
    """Return a line of the table, None where one of the two is missing."""
    runs = [run for run in (line.ours, line.peer) if run is not None]
    if any(not measured[run].rounds for run in runs):
        return None
    rates = [[inputs.get(run.input).rows / found[line.by] for found in measured[run].rounds] for run in runs]
    ratios = sorted(a / b for a, b in zip(*rates, strict=True)) if line.peer is not None else []
    peaks = [max(int(found["peak_bytes"]) for found in measured[run].rounds) for run in runs]
    ratio = statistics.median(ratios) if ratios else None
    met = None
    if line.goal is not None or line.memory_goal_bytes is not None:
        met = (line.goal is None or (ratio is not None and ratio >= line.goal)) and (
            line.memory_goal_bytes is None or peaks[0] <= line.memory_goal_bytes
        )
    return {
        "what": line.what,
        "peer_name": line.peer_name,
        "by": line.by,
        "rows": [inputs.get(run.input).rows for run in runs],
        "rows_per_second": [statistics.median(found) for found in rates],
        "seconds": [statistics.median(found["seconds"] for found in measured[run].rounds) for run in runs],
        "peak_bytes": peaks,
        "ratio": ratio,
        "ratios": ratios,
        "goal": line.goal,
        "memory_goal_bytes": line.memory_goal_bytes,
        "met": met,
    }


def _show(result: dict[str, Any]) -> None:
    print("thousand rows a CPU-second (peak memory of the process)")
    print("| what | ours | peer | ratio | goal | met? |\n|---|---|---|---|---|---|")
    for line in result["lines"]:
        cells = [
            f"{rate / 1e3:,.0f}{'/s' if line['by'] == 'seconds' else ''} ({peak / MIB:,.0f} MiB)"
            for rate, peak in zip(line["rows_per_second"], line["peak_bytes"], strict=True)
        ]
        peer = f"{line['peer_name']}: {cells[1]}" if len(cells) > 1 else ""
        ratio = f"{line['ratio']:.1f} ({line['ratios'][0]:.1f} to {line['ratios'][-1]:.1f})" if line["ratio"] else ""
        goals = [f"{line['goal']:.0f}"] if line["goal"] is not None else []
        if line["memory_goal_bytes"] is not None:
            goals.append(f"in {line['memory_goal_bytes'] / MIB:,.0f} MiB")
        met = "" if line["met"] is None else "yes" if line["met"] else "no"
        print(f"| {line['what']} | {cells[0]} | {peer} | {ratio} | {' '.join(goals)} | {met} |")


if __name__ == "__main__":
    main()
