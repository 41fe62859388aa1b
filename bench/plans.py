"""Plans of three models that no constant of time was fitted to, measured on the ranks at hand beside their predictions.

The memory of a plan is another matter: its copies of pooled vectors were fitted to plans of these models on two ranks.

Calibrates the ranks first unless a cluster file is given, then measures every plan that `dlrm-scale bench` knows for
each model of plan_models.py, and tells how well our costs and TorchRec's order them, how far two halves of the rounds
agree with each other (no prediction can do better), and how far `auto` would end from the best plan: the best measured
of the three predicted best and table-wise with the longest first.

    python bench/plans.py --quick
    python bench/plans.py --save
    python bench/plans.py --ranks 4 --ranks-per-host 2 --save

On a machine that others use, `--processor-time` compares processor time in place of elapsed time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import stamp
from plan_models import MODELS

from dlrm_scale.planning.tables.tables_file import save_tables

GOALS = "goals: tau within 0.1 of the halves', 95 % of pairs, 10 % after one anchor, auto within 2 %, memory within 5 %"
AUTO = ("ours", "ours_2", "ours_3", "longest_first")

Found = dict[str, object]


def main() -> None:
    """Measure the models, print a table, and save it if asked."""
    options = _options()
    rows: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="bench-plans-") as name:
        folder = Path(name)
        cluster = options.cluster or _calibrated(folder, options)
        print(
            f"{'model':>5} | {'tau':>5} {'halves':>6} {'TorchRec':>8} | {'pairs':>5} {'TorchRec':>8} | {'error':>6} "
            f"{'anchored':>8} | {'regret':>6} {'top 3':>6} {'auto':>6} | {'memory':>6} | load"
        )
        for model in options.models.split(","):
            summary = _measured(model, cluster, folder, options)
            row = _row(model, summary)
            rows.append({**row, "summary": summary})
            print(_line(row), flush=True)
    print(f"\n{GOALS}")
    if options.save:
        kind = f"plans_{options.ranks}" + ("" if options.ranks_per_host is None else f"x{options.ranks_per_host}")
        result = {"stamp": stamp.stamp(), "options": {k: str(v) for k, v in vars(options).items()}, "rows": rows}
        print(f"saved {stamp.save(kind, result)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, help="ranks that count as one host; default all")
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, separated by commas")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="6 rounds and a quick calibration: shows that it works")
    parser.add_argument("--cluster", help="a file of `dlrm-scale calibrate`, in place of calibrating now")
    parser.add_argument("--processor-time", action="store_true", help="compare processor time")
    parser.add_argument("--save", action="store_true", help="write the result to bench/results")
    return parser.parse_args()


def _calibrated(folder: Path, options: argparse.Namespace) -> str:
    path = folder / "cluster.toml"
    command = ["calibrate", "--ranks", str(options.ranks), "--allow-noise", "-o", str(path), *_common(options)]
    _run([*command, *(["--quick"] if options.quick else [])])
    return str(path)


def _measured(model: str, cluster: str, folder: Path, options: argparse.Namespace) -> Found:
    tables = folder / f"{model}.toml"
    save_tables(MODELS[model].tables(model), tables)
    command = ["bench", "--tables", str(tables), "--cluster", cluster, "--ranks", str(options.ranks), "--json"]
    command += ["--batch-size-per-rank", str(MODELS[model].batch_size_per_rank), "--allow-split-row-state"]
    command += ["--rounds", str(6 if options.quick else options.rounds), *_common(options)]
    found: Found = json.loads(_run(command).splitlines()[-1])
    return found


def _common(options: argparse.Namespace) -> list[str]:
    hosts = [] if options.ranks_per_host is None else ["--ranks-per-host", str(options.ranks_per_host)]
    return [*hosts, *(["--processor-time"] if options.processor_time else [])]


def _run(arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_scale", *arguments], stdout=subprocess.PIPE, stderr=None, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"dlrm-scale {' '.join(arguments)} failed")
    return done.stdout


def _row(model: str, summary: Found) -> Found:
    plans = summary["plans"]
    assert isinstance(plans, list)
    times = {plan["name"]: plan["time"]["median_ms"] for plan in plans if plan["time"]}
    chosen = min(times[name] for name in AUTO if name in times)
    return {
        "model": model,
        "ours": summary["ours"],
        "torchrec": summary["torchrec"],
        "noise": summary["noise"],
        "auto_regret": chosen / min(times.values()) - 1,
        "memory_error": summary["memory_error"],
        "loads": summary["loads"],
        "busy": summary["busy"],
        "clock": summary["clock"],
    }


def _line(row: Found) -> str:
    ours, theirs, noise = row["ours"], row["torchrec"], row["noise"]
    assert isinstance(ours, dict)
    assert isinstance(theirs, dict)
    assert isinstance(noise, dict)
    loads = row["loads"]
    assert isinstance(loads, list)
    return (
        f"{row['model']:>5} | {ours['tau']:5.2f} {noise['tau']:6.2f} {theirs['tau']:8.2f} | {ours['pairs_right']:5.0%} "
        f"{theirs['pairs_right']:8.0%} | {ours['error']:6.1%} {ours['anchored_error']:8.1%} | {ours['regret']:6.1%} "
        f"{ours['top3_regret']:6.1%} {row['auto_regret']:6.1%} | {row['memory_error']:6.1%} | {loads[1]:.1f}"
        f"{' BUSY' if row['busy'] else ''}, {row['clock']} time"
    )


if __name__ == "__main__":
    main()
