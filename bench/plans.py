"""Plans of four models that no constant of time was fitted to, measured on the ranks at hand beside their predictions.

The memory of a plan is another matter: its copies of pooled vectors were fitted to plans of A, B and C on two ranks. D
was added after that.

Calibrates the ranks first unless a cluster file is given, then measures every plan that `dlrm-scale bench` knows for
each model of plan_models.py, and tells how well our costs and TorchRec's order them, how far two halves of the rounds
agree with each other, and how far `auto` would end from the best plan: of the plans that it measures it takes the best.

Everything is measured in two launches: no prediction can agree with a measurement better than launches do with one
another. Predictions are held against the mean of a plan's two medians, and what `auto` takes by one launch is judged by
the other, and by the mean of both: a median of 30 rounds has an interval of 5 to 10 % to each side on two shared cores,
so that one launch alone can't resolve 2 %.

    python bench/plans.py --quick
    python bench/plans.py --save                                     # a quarter of an hour
    python bench/plans.py --ranks 4 --ranks-per-host 2 --save

On a machine that others use, `--processor-time` compares processor time in place of elapsed time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import stamp
from plan_models import MODELS

from dlrm_scale.planning.measuring.ranking import agreement, kendall_tau
from dlrm_scale.planning.tables.tables_file import save_tables

LAUNCHES = 2
GOALS = "goals: tau within 0.1 of the launches', 95 % of pairs, 10 % anchored, auto within 2 %, memory within 5 %"
AUTO = ("ours", "ours_2", "ours_3", "torchrec", "longest_first")

Found = dict[str, object]


def main() -> None:
    """Measure the models, print a table, and save it if asked."""
    options = _options()
    rows: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="bench-plans-") as name:
        folder = Path(name)
        cluster = options.cluster or _calibrated(folder, options)
        print(
            f"{'model':>5} | {'tau':>5} {'launches':>8} {'halves':>6} {'TorchRec':>8} | {'pairs':>5} {'TorchRec':>8} | "
            f"{'error':>6} "
            f"{'anchored':>8} | {'regret':>6} {'top 3':>6} {'auto':>6} {'means':>6} | {'memory':>6} | load"
        )
        for model in options.models.split(","):
            launches = [_measured(model, cluster, folder, options) for _ in range(LAUNCHES)]
            row = _row(model, launches)
            rows.append({**row, "launches": launches})
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
    if not tables.exists():
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


def _row(model: str, launches: list[Found]) -> Found:
    medians = [
        {plan["name"]: plan["time"]["median_ms"] for plan in _plans(launch) if plan["time"]} for launch in launches
    ]
    names = [name for name in medians[0] if name in medians[1]]
    means = {name: (medians[0][name] + medians[1][name]) / 2 for name in names}
    predicted = {
        costs: {plan["name"]: plan[f"{costs}_ms"] for plan in _plans(launches[0])} for costs in ("ours", "torchrec")
    }
    anchor = str(launches[0]["anchor"])
    regrets, mean_regrets = [], []
    for chosen_by, judge in (medians, medians[::-1]):
        chosen = min((name for name in AUTO if name in names), key=chosen_by.__getitem__)
        regrets.append(judge[chosen] / min(judge[name] for name in names) - 1)
        mean_regrets.append(means[chosen] / min(means.values()) - 1)
    ours, theirs = (agreement(predicted[costs], means, anchor=anchor) for costs in ("ours", "torchrec"))
    assert ours is not None
    assert theirs is not None
    return {
        "model": model,
        "plans": len(names),
        "ours": asdict(ours),
        "torchrec": asdict(theirs),
        "launches_tau": kendall_tau([medians[0][name] for name in names], [medians[1][name] for name in names]),
        "halves_tau": _mean([launch["noise"]["tau"] for launch in launches]),  # type: ignore[index]
        "auto_regret": _mean(regrets),
        "auto_regrets": regrets,
        "auto_mean_regret": _mean(mean_regrets),
        "memory_error": _mean([launch["memory_error"] for launch in launches]),  # type: ignore[misc]
        "load": max(launch["loads"][1] for launch in launches),  # type: ignore[index]
        "busy": any(launch["busy"] for launch in launches),
        "clock": launches[0]["clock"],
    }


def _plans(launch: Found) -> list[dict[str, Any]]:
    plans = launch["plans"]
    assert isinstance(plans, list)
    return plans


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _line(row: dict[str, Any]) -> str:
    ours, theirs = row["ours"], row["torchrec"]
    return (
        f"{row['model']:>5} | {ours['tau']:5.2f} {row['launches_tau']:8.2f} {row['halves_tau']:6.2f} "
        f"{theirs['tau']:8.2f} | {ours['pairs_right']:5.0%} {theirs['pairs_right']:8.0%} | {ours['error']:6.1%} "
        f"{ours['anchored_error']:8.1%} | {ours['regret']:6.1%} {ours['top3_regret']:6.1%} {row['auto_regret']:6.1%} "
        f"{row['auto_mean_regret']:6.1%} | "
        f"{row['memory_error']:6.1%} | {row['load']:.1f}{' BUSY' if row['busy'] else ''}, {row['clock']} time"
    )


if __name__ == "__main__":
    main()
