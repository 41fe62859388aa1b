"""What trainers go on from is kept by a removal that had begun before they started, however many start meanwhile."""

import copy
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain, verify
from dlrm_scale.checkpoint.chain.chain import open_step
from dlrm_scale.checkpoint.upkeep.retention import remove_old_chains
from dlrm_scale.errors import CheckpointError
from tests.checkpoint.faulty_storage import Trace
from tests.checkpoint.merging import ADAGRAD, go_on, merge, start, truth_of
from tests.checkpoint.simulated_run import Run, load_chain, make_layout
from tests.checkpoint.test_races import WatchedStorage

LAYOUT = make_layout("row_wise", 1)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 3, with merged baselines of steps 1 and 3."""
    root = tmp_path_factory.mktemp("starts") / "before"
    run = start(root, LAYOUT)
    go_on(run, range(4))
    merge(root, "baseline", step=1, number=1)
    merge(root, "baseline", step=3, number=2)
    return root


def _resume(root: Path, step: int | None) -> Run:
    chain = open_step(root, step) if step is not None else find_chain(root)
    assert chain is not None
    return Run(root, LAYOUT, copy.deepcopy(truth_of(chain.step)), resumed_from=chain, merger=True)


@pytest.mark.filterwarnings("ignore:.*has been removed since it was restored:RuntimeWarning")
@pytest.mark.parametrize(
    ("saves", "stride"), [(1, 4), *(pytest.param(saves, 1, marks=pytest.mark.slow) for saves in (0, 1, 2))]
)
def test_one_trainer_goes_back_and_saves_and_a_second_goes_on_from_it(
    before: Path, tmp_path: Path, saves: int, stride: int
) -> None:
    """All of it before one operation of a removal that keeps the newest chain alone."""
    root = tmp_path / "ck"
    index, went_back = 1, 0
    while True:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(before, root)
        trace = Trace()
        last: list[Run] = []
        ended: list[bool] = []

        def act(now: int, operation: str, name: str, at: int = index, ended: list[bool] = ended) -> None:
            if now != at:
                return
            ended.append(True)
            with suppress(CheckpointError):  # what it would go back to is gone by now
                run = _resume(root, 1)
                last.append(run)  # noqa: B023
                go_on(run, range(2, 2 + saves))
                if saves:
                    last.append(_resume(root, None))  # noqa: B023

        trace.act = act
        newest = find_chain(before)
        assert newest is not None
        with suppress(CheckpointError):
            remove_old_chains(WatchedStorage(root, trace), tip_name=newest.name, keep_baselines=1)
        if not ended:
            break
        index += stride
        if last:
            step = 1 + saves + 1
            go_on(last[-1], range(step, step + 1))
            chain = find_chain(root, verify="full")
            assert chain is not None
            assert (chain.step, chain.tip.start) == (step, len(last) + 1), index
            assert load_chain(chain, LAYOUT, truth_of(step), optimizer=ADAGRAD).equals(truth_of(step)), index
            assert verify(root) == [], index
            went_back += 1
    assert went_back >= (4 if stride > 1 else 10)
