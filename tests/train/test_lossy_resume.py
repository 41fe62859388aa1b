"""Runs with rounded deltas say that a resume isn't exact, count such resumes, and stay close to the exact run."""

from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.chain.lossy import MOST_RESTORES, stored_codecs
from dlrm_scale.errors import ConfigError
from dlrm_scale.train.run_folder import resolve_run
from tests.support.command_line import run_command
from tests.support.datasets import make_dataset
from tests.support.training import losses, run_training

LOSSY = ["checkpoint.delta_rows=int8", "checkpoint.delta_state=bf16"]
SETTINGS = ["sharding.kind=row_wise", "checkpoint.baseline_ratio=100"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(path, 400, table_rows=40)
    return path


def test_a_lossy_resume_is_counted_close_and_stops_rounding_after_the_expected_restores(
    dataset: Path, tmp_path: Path
) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    run_training(2, straight, dataset, SETTINGS)
    run_training(2, run, dataset, [*SETTINGS, LOSSY[0], "checkpoint.expected_restores=2", "train.max_steps=5"])
    codecs = []
    for count, stop in ((1, 8), (2, 10), (2, 13)):
        run_training(2, run, dataset, [f"train.max_steps={stop}"], resume=True)
        chain = find_chain(run / "checkpoints")
        assert chain is not None
        assert chain.tip.lossy_restores == count
        codecs.append(stored_codecs([chain.tip]))
    # the second restore is the last expected one: nothing is rounded from there on, and restored exactly
    assert codecs == [["int8_rows"], [], []]
    expected = losses(straight)
    assert losses(run) != expected
    for step, loss in losses(run).items():
        assert loss == pytest.approx(expected[step], abs=2e-3)


def test_a_resume_from_rounded_rows_says_that_it_is_not_exact(
    dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rounded in (True, False):
        run = tmp_path / str(rounded)
        run_training(1, run, dataset, [*SETTINGS, *(LOSSY if rounded else []), "train.max_steps=5"])
        capfd.readouterr()
        more = ["--set", "train.max_steps=6", "--set", "checkpoint.expected_restores=1"]
        assert run_command("train", "--resume", "auto", "--set", f"run.path={run}", *more, "--nproc", 1) == 0
        said = capfd.readouterr()
        words = said.out + said.err
        assert ("not bit-exact: rows or state in this chain were rounded (bf16, int8_rows)" in words) is rounded
        assert ("lossy restores of the run so far: 1 of 1 expected" in words) is rounded
        assert ("warning: checkpoint.delta_rows = int8 is off: the run has had 1 lossy restores" in words) is rounded
        assert "restored the run at step 5 from a baseline and 1 delta" in words


def test_a_new_run_from_rounded_rows_takes_their_count_along(dataset: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_training(1, first, dataset, [*SETTINGS, *LOSSY, "train.max_steps=5"])
    run_training(1, second, dataset, [*SETTINGS, "train.max_steps=2"], init_from=str(first))
    chain = find_chain(second / "checkpoints")
    assert chain is not None
    assert (chain.tip.lossy, chain.tip.lossy_restores) == (False, 1)


def test_int8_for_more_restores_than_there_is_evidence_for_is_refused() -> None:
    settings = ["run.path=nowhere", "data.path=nowhere", "checkpoint.delta_rows=int8"]
    with pytest.raises(ConfigError, match=r"expected_restores = 11 .*10 \(logloss up by 0\.002 to 0\.03 %\)") as caught:
        resolve_run("sample", [*settings, f"checkpoint.expected_restores={MOST_RESTORES + 1}"])
    assert caught.value.remedy is not None
    resolve_run("sample", [*settings, f"checkpoint.expected_restores={MOST_RESTORES}"])
    resolve_run("sample", [*settings[:2], "checkpoint.delta_state=bf16", "checkpoint.expected_restores=99"])


@pytest.mark.slow
def test_ten_lossy_restores_move_the_logloss_by_less_than_a_20th_of_a_percent(tmp_path: Path) -> None:
    """Measured: 0.023 % with int8 rows, 0.004 % with bf16 state, 0.026 % with both.

    Without either the resumed run has the bits of the straight one, and a learning rate changed by 0.01 % moves the
    logloss by 0.026 %.
    """
    raw, dataset = tmp_path / "raw", tmp_path / "dataset"
    assert run_command("synth", raw, "--rows", 200_000, "--days", 4, "--seed", 7) == 0
    assert run_command("preprocess", *sorted(raw.glob("day_*")), "--out", dataset) == 0
    settings = [
        "model.dim=16",
        "data.batch_size=512",
        "data.window_rows=4096",
        "train.log_every_steps=50",
        "checkpoint.every_steps=0",
        "checkpoint.baseline_ratio=100",
    ]
    straight, run = tmp_path / "straight", tmp_path / "run"
    exact = run_training(1, straight, dataset, settings)[0].result
    assert exact.validation is not None
    start, restores = 20, 11
    run_training(1, run, dataset, [*settings, *LOSSY, f"train.max_steps={start}"])
    for restore in range(1, restores + 1):
        stop = start + (exact.step - start) * restore // restores
        rounded = run_training(1, run, dataset, [f"train.max_steps={stop}"], resume=True)[0].result
        chain = find_chain(run / "checkpoints")
        assert chain is not None
        # the first restore is of the baseline, which is exact
        assert chain.tip.lossy_restores == restore - 1
    assert rounded.validation is not None
    assert rounded.step == exact.step
    before, after = (float(str(result.validation["logloss"])) for result in (exact, rounded) if result.validation)
    assert float(str(exact.validation["auc"])) > 0.7
    assert after != before
    assert abs(after / before - 1) < 5e-4, (before, after)
