"""Precision, micro-batches, clipping and compilation in whole runs: resumed, evaluated, refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError
from dlrm_scale.layout import ShardLayout, ShardRegion, TableLayout
from dlrm_scale.models import compiled_layers
from dlrm_scale.schema import TableSpec
from dlrm_scale.train import setup
from dlrm_scale.train.report import RunReport
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.tf32 import check_tf32
from dlrm_scale.train.trainer import train_rank
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, log_records, losses, read_tables, run_training, same_tables

BF16 = 'train.precision="bf16"'


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(path, (300, 100, 200), table_rows=40, split={"train": [(0, 400)], "validation": [(400, 600)]})
    return path


@pytest.mark.parametrize(
    "settings",
    [
        [BF16],
        ["train.micro_batches=3", "train.gradient_clip_norm=0.05", 'dense_optimizer.kind="adam"'],
        [BF16, "train.micro_batches=2", 'sharding.kind="row_wise"', 'sharding.all_to_all_precision="fp16"'],
    ],
)
def test_runs_resume_bit_for_bit_under_both_pipelines(settings: list[str], dataset: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    run_training(2, straight, dataset, settings)
    for pipeline in ("plain", "sparse_dist"):
        run = tmp_path / pipeline
        run_training(2, run, dataset, [*settings, f"train.pipeline={pipeline}", "train.max_steps=5"])
        run_training(2, run, dataset, ["train.max_steps=0"], resume=True)
        assert losses(run) == losses(straight)
        assert same_tables(read_tables(run), read_tables(straight))


def test_a_run_may_change_its_readers_and_trains_on_the_same_rows(dataset: Path, tmp_path: Path) -> None:
    run_training(1, tmp_path / "straight", dataset)
    run_training(1, tmp_path / "run", dataset, ["data.readers=3", "train.max_steps=5"])
    run_training(1, tmp_path / "run", dataset, ["data.readers=2", "train.max_steps=0"], resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert same_tables(read_tables(tmp_path / "run"), read_tables(tmp_path / "straight"))


def test_the_norm_of_the_gradients_is_logged_before_clipping_with_the_share_that_was_clipped(
    dataset: Path, tmp_path: Path
) -> None:
    """A norm that is never reached changes nothing, so one run's norms tell what others must log."""

    def logged(name: str, *settings: str) -> list[dict[str, object]]:
        run_training(2, tmp_path / name, dataset, ["train.max_steps=9", 'dense_optimizer.kind="sgd"', *settings])
        return log_records(tmp_path / name, "train")

    plain = logged("plain")
    assert not any("gradient_norm" in record or "clipped_share" in record for record in plain)
    loose = logged("loose", "train.gradient_clip_norm=1e6")
    norms = [float(str(record["gradient_norm"])) for record in loose]
    assert [record["clipped_share"] for record in loose] == [0.0] * 9
    assert [record["loss"] for record in loose] == [record["loss"] for record in plain]
    assert min(norms) > 0
    # the first step's gradients don't depend on the norm that they are clipped to
    tight = logged("tight", f"train.gradient_clip_norm={norms[0] / 2}")
    assert tight[0]["gradient_norm"] == norms[0]
    assert tight[0]["clipped_share"] == 1.0
    assert tight[0]["loss"] == loose[0]["loss"]
    assert tight[1]["loss"] != loose[1]["loss"]
    pairs = logged("pairs", "train.gradient_clip_norm=1e6", "train.log_every_steps=3")
    means = [sum(norms[first : first + 3]) / 3 for first in (0, 3, 6)]
    assert [record["gradient_norm"] for record in pairs] == pytest.approx(means, rel=1e-12)
    curves = EventAccumulator(str(tmp_path / "tight" / "tensorboard")).Reload()
    assert [event.step for event in curves.Scalars("train/clipped_share")] == list(range(1, 10))
    assert curves.Scalars("train/gradient_norm")[0].value == pytest.approx(norms[0])


def test_bf16_learns_what_fp32_learns_and_evaluates_in_bf16(tmp_path: Path) -> None:
    data = tmp_path / "dataset"
    make_dataset(data, 24000, table_rows=20, split={"train": [(0, 16000)], "validation": [(16000, 24000)]})
    settings = ["data.batch_size=128", "train.log_every_steps=100", "checkpoint.every_steps=0"]
    results = {}
    for precision in ("fp32", "bf16"):
        (observed,) = run_training(1, tmp_path / precision, data, [*settings, f'train.precision="{precision}"'])
        results[precision] = observed.result.validation
    exact, rounded = results["fp32"], results["bf16"]
    assert exact["auc"] > 0.6
    assert rounded["auc"] == pytest.approx(exact["auc"], abs=3e-3)
    assert rounded["logloss"] == pytest.approx(exact["logloss"], abs=3e-3)
    assert rounded["logloss"] != exact["logloss"]


def _train_noting(run: str, dataset: str, settings: list[str], resume: bool, broken_compiler: bool) -> list[str]:
    """Train on this rank and return what the run said."""
    if not resume:
        settings = [f"data.path={dataset}", *SMALL_MODEL, *settings]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunReport, "say", lambda _, text: said.append(text))
        if broken_compiler:
            patch.setattr(compiled_layers.torch, "compile", _no_compiler)
        request = resolve_run(None if resume else "sample", [f"run.path={run}", *settings], resume=resume)
        train_rank(request, StopRequest())
    return said


def _no_compiler(function: object) -> object:
    raise RuntimeError("no C++ compiler found\nlong story")


def _notes(
    run: Path, dataset: Path, settings: list[str], *, resume: bool = False, broken_compiler: bool = False
) -> str:
    (said,) = run_ranks(1, _train_noting, str(run), str(dataset), settings, resume, broken_compiler)
    return "\n".join(said)


def test_a_resumed_run_may_change_its_precision_and_says_so(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "precision" not in _notes(run, dataset, ["train.max_steps=4"])
    before = read_tables(run)
    said = _notes(run, dataset, [BF16, "train.max_steps=8"], resume=True)
    assert "changed by --set: train.precision from fp32 to bf16" in said
    assert "trained with train.precision = 'fp32'; from here on the dense part runs in bf16" in said
    assert {name: v.dtype for name, v in read_tables(run).items()} == {name: v.dtype for name, v in before.items()}


def test_a_run_without_a_compiler_trains_uncompiled_and_says_so(dataset: Path, tmp_path: Path) -> None:
    _notes(tmp_path / "plain", dataset, ["train.max_steps=3"])
    said = _notes(tmp_path / "run", dataset, ["train.max_steps=3", 'train.compile="dense"'], broken_compiler=True)
    assert (
        "warning: train.compile: torch.compile fails on rank 0, training uncompiled: "
        "RuntimeError: no C++ compiler found" in said
    )
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_layers_whose_compilation_fails_after_the_trial_are_named_at_the_end(dataset: Path, tmp_path: Path) -> None:
    (said,) = run_ranks(1, _train_with_a_late_failure, str(tmp_path / "run"), str(dataset))
    warning = "train.compile: compiled layers failed on rank 0 and were replaced by plain ones: RuntimeError: too many"
    assert f"warning: {warning} shapes" in said
    assert json.loads((tmp_path / "run" / "result.json").read_text())["warnings"][0] == f"{warning} shapes"


def _train_with_a_late_failure(run: str, dataset: str) -> list[str]:
    def works_once(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        calls: list[int] = []

        def compiled(*arguments: torch.Tensor) -> torch.Tensor:
            if calls:
                raise RuntimeError("too many shapes")
            calls.append(1)
            return function(*arguments)

        return compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_layers.torch, "compile", works_once)
        return _train_noting(run, dataset, ["train.max_steps=3", 'train.compile="dense"'], False, False)


def test_an_exchange_precision_that_nothing_heeds_is_told(dataset: Path, tmp_path: Path) -> None:
    said = _notes(tmp_path / "run", dataset, ["train.max_steps=2", 'sharding.all_to_all_precision="fp16"'])
    assert 'sharding.all_to_all_precision = "fp16" does nothing: with one rank nothing travels' in said
    half = Config.model_validate({"sharding": {"all_to_all_precision": "fp16"}})
    spec = TableSpec(name="C1", rows=2, dim=4)
    whole = ShardRegion(table="C1", row_start=0, row_end=2, column_start=0, column_end=4, rank=0)
    for kind, told in (("data_parallel", True), ("table_wise", False)):
        table = TableLayout(spec=spec, sharding_type=kind, regions=(whole,), replicated=kind == "data_parallel")
        notes = setup.exchange_notes(half, ShardLayout(ranks=2, tables=(table,)))
        assert any("every table of the plan is data_parallel" in note for note in notes) == told
    assert setup.exchange_notes(Config(), ShardLayout(ranks=1, tables=(table,))) == []


def test_tf32_on_cpu_is_refused_with_the_reason(dataset: Path, tmp_path: Path) -> None:
    settings = [f"run.path={tmp_path / 'run'}", f"data.path={dataset}", *SMALL_MODEL, "train.tf32=true"]
    with pytest.raises(ConfigError, match=r"train\.tf32 = true: TF32 is a format of CUDA devices"):
        resolve_run("sample", settings)
    with pytest.raises(ConfigError, match="TF32"):
        check_tf32(Config.model_validate({"train": {"tf32": True}}), "cpu")
    check_tf32(Config.model_validate({"train": {"tf32": True}}), "cuda")


def test_a_cpu_without_bf16_instructions_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"train": {"precision": "bf16"}})
    monkeypatch.setattr(setup.platform, "machine", lambda: "x86_64")
    for flags, warned in (("avx512f", True), ("avx512f avx512_bf16", False), ("amx_bf16", False)):
        monkeypatch.setattr(setup.Path, "read_text", lambda _, flags=flags: f"flags: {flags}\n")
        assert bool(setup.precision_notes(config, torch.device("cpu"))) == warned
    assert setup.precision_notes(Config(), torch.device("cpu")) == []
    assert setup.precision_notes(config, torch.device("cuda")) == []
