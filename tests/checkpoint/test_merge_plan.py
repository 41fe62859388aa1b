"""What a merge makes of a chain follows from its sizes."""

import pytest

from dlrm_scale.checkpoint import Chain, find_chain
from dlrm_scale.checkpoint.files.manifest import Manifest
from dlrm_scale.checkpoint.upkeep.merge_plan import MOST_DELTAS, MergeTarget, plan_merge
from dlrm_scale.units import GIB, MIB
from tests.checkpoint.merging import go_on, start


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A baseline and a delta, whose sizes the tests replace."""
    root = tmp_path_factory.mktemp("plan") / "ck"
    go_on(start(root), range(2))
    chain = find_chain(root)
    assert chain is not None
    return chain


def _sized(manifest: Manifest, size_bytes: int) -> Manifest:
    first = manifest.files[0].model_copy(update={"size_bytes": size_bytes})
    rest = [file.model_copy(update={"size_bytes": 0}) for file in manifest.files[1:]]
    return manifest.model_copy(update={"files": (first, *rest)})


def _plan(
    saved: Chain, baseline_bytes: int, deltas_bytes: list[int], to: MergeTarget = "auto"
) -> tuple[str, int] | None:
    """Kind of the result, and how many manifests at the chain's end go into it."""
    baseline, delta = saved.manifests
    manifests = [_sized(baseline, baseline_bytes), *(_sized(delta, size_bytes) for size_bytes in deltas_bytes)]
    plan = plan_merge(manifests, saved.checkpoint, to)
    if plan is None:
        return None
    assert plan.equal_to == saved.checkpoint
    assert list(plan.manifests) == manifests[-len(plan.manifests) :]
    return plan.kind, len(plan.manifests)


def test_deltas_with_more_bytes_than_the_baseline_make_a_new_one(saved: Chain) -> None:
    assert _plan(saved, GIB, [GIB]) is None
    assert _plan(saved, GIB, [GIB + 1]) == ("baseline", 2)


def test_many_files_make_a_new_baseline_before_their_bytes_do(saved: Chain) -> None:
    # Each delta of three files and a manifest costs four MiB in opening them.
    assert _plan(saved, 100 * MIB, [1] * MOST_DELTAS) is None
    assert _plan(saved, 100 * MIB, [1] * 25) == ("delta", 25)
    assert _plan(saved, 100 * MIB, [1] * 26) == ("baseline", 27)


def test_a_long_chain_is_rolled_up_but_for_deltas_much_larger_than_what_follows(saved: Chain) -> None:
    assert _plan(saved, GIB, [MIB] * MOST_DELTAS) is None
    assert _plan(saved, GIB, [MIB] * (MOST_DELTAS + 1)) == ("delta", MOST_DELTAS + 1)
    # One that was merged before waits until those after it have half of its bytes.
    assert _plan(saved, GIB, [100 * MIB] + [MIB] * MOST_DELTAS) == ("delta", MOST_DELTAS)
    assert _plan(saved, GIB, [200 * MIB, 60 * MIB, 6 * MIB] + [2 * MIB] * MOST_DELTAS) == ("delta", MOST_DELTAS + 1)
    assert _plan(saved, GIB, [30 * MIB, 9 * MIB] + [2 * MIB] * MOST_DELTAS) == ("delta", MOST_DELTAS + 2)


def test_what_is_asked_for_is_done_if_there_is_something_to_merge(saved: Chain) -> None:
    assert _plan(saved, GIB, [], "baseline") is None
    assert _plan(saved, GIB, [1], "baseline") == ("baseline", 2)
    assert _plan(saved, GIB, [1], "delta") is None
    assert _plan(saved, GIB, [1, 1], "delta") == ("delta", 2)
