"""The chain that is found is the cheapest valid one to the newest checkpoint that has any."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain, open_chain
from dlrm_scale.checkpoint.chain import chain_search
from dlrm_scale.checkpoint.chain.chain_search import ChainSearch
from dlrm_scale.checkpoint.files.manifest import Manifest
from dlrm_scale.checkpoint.files.manifest_text import serialize_manifest
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.errors import CheckpointError
from tests.checkpoint.merging import go_on, merge, start
from tests.checkpoint.simulated_run import TABLES, Run, load, make_layout, make_truth


@pytest.fixture
def merged(tmp_path: Path) -> tuple[Path, Run]:
    """Checkpoints 1 to 8; 2 to 4 merged into a delta, 1 to 6 into a baseline."""
    run = start(tmp_path / "ck")
    go_on(run, range(8))
    merge(tmp_path / "ck", "delta", step=3, number=1)
    merge(tmp_path / "ck", "baseline", step=5, number=2)
    return tmp_path / "ck", run


def _names(root: Path, verify: str = "full") -> list[str]:
    chain = find_chain(root, verify=verify)  # type: ignore[arg-type]
    assert chain is not None
    return [m.name.removeprefix("manifests/").removesuffix(".json") for m in chain.manifests]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_cheapest_chain_is_taken(merged: tuple[Path, Run]) -> None:
    root, run = merged
    assert _names(root) == ["00000006-s1m2", "00000007-s1", "00000008-s1"]
    assert load(root, make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_a_damaged_merge_costs_no_step_and_is_named(merged: tuple[Path, Run]) -> None:
    root, run = merged
    _flip(root / "data" / "00000006-s1m2-r0.safetensors")
    assert _names(root) == ["00000001-s1", "00000004-s1m1", "00000005-s1", "00000006-s1", "00000007-s1", "00000008-s1"]
    chain = find_chain(root, verify="full")
    assert chain is not None
    assert chain.skipped == ()
    assert len(chain.detours) == 1
    assert "data/00000006-s1m2-r0.safetensors" in chain.detours[0]
    assert load(root, make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_damage_to_a_delta_that_a_merge_covers_costs_no_step(merged: tuple[Path, Run]) -> None:
    root, run = merged
    (root / "data" / "00000006-s1m2-dense.safetensors").unlink()
    for seq in (2, 3):
        (root / "manifests" / f"0000000{seq}-s1.json").unlink()
    _flip(root / "manifests" / "00000004-s1.json")
    assert _names(root)[:2] == ["00000001-s1", "00000004-s1m1"]
    assert load(root, make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_a_missing_middle_delta_costs_the_steps_from_it_on_and_is_named(merged: tuple[Path, Run]) -> None:
    root, _ = merged
    (root / "manifests" / "00000007-s1.json").unlink()
    chain = find_chain(root)
    assert chain is not None
    assert (chain.step, [m.seq for m in chain.manifests]) == (5, [6])
    assert [(skip.name, skip.step) for skip in chain.skipped] == [("manifests/00000008-s1.json", 7)]
    assert "manifests/00000007-s1.json is missing" in chain.skipped[0].reason


def _forge(root: Path, source: str, **changes: object) -> Manifest:
    """Write a manifest with a right hash and other words than `source`."""
    document = json.loads((root / "manifests" / source).read_bytes())["manifest"]
    manifest = Manifest.model_validate_json(json.dumps({**document, **changes}))
    (root / manifest.name).write_bytes(serialize_manifest(manifest)[0])
    return manifest


def test_two_merges_that_claim_a_lost_checkpoint_with_different_hashes_are_both_refused_as_the_newest(
    tmp_path: Path,
) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(4))
    merge(root, "baseline", number=1)
    name = "manifests/00000004-s1.json"
    claim = {"number": 2, "equal_to": {"name": name, "sha256": "0" * 64}, "manifests": ["x"]}
    _forge(root, "00000004-s1m1.json", merge=claim)
    # The trainer's own manifest knows the right hash.
    assert _names(root) == ["00000004-s1m1"]
    kept = (root / name).read_bytes()
    (root / name).unlink()
    chain = find_chain(root)
    assert chain is not None
    assert chain.step == 2
    assert "claim to be equal to it and to different things" in chain.skipped[0].reason
    # And so does a delta on it.
    (root / name).write_bytes(kept)
    go_on(run, range(4, 5))
    (root / name).unlink()
    assert _names(root) == ["00000004-s1m1", "00000005-s1"]
    assert load(root, make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_manifests_in_a_circle_are_refused_and_the_search_ends(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(4))
    sha256 = "0" * 64
    for seq, parent in ((3, 4), (4, 3)):
        document = json.loads((root / f"manifests/0000000{seq}-s1.json").read_bytes())["manifest"]
        document["parent"] = {"name": f"manifests/0000000{parent}-s1.json", "sha256": sha256}
        manifest = Manifest.model_validate_json(json.dumps(document))
        data, sha256 = serialize_manifest(manifest)
        (root / manifest.name).write_bytes(data)
    chain = find_chain(root)
    assert chain is not None
    assert chain.step == 1
    assert "its parent has sequence number 4" in str(chain.skipped)


def test_a_merge_that_claims_to_be_equal_to_another_number_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(3))
    merge(root, "baseline", number=1)
    claim = {"number": 1, "equal_to": {"name": "manifests/00000002-s1.json", "sha256": "0" * 64}, "manifests": []}
    _forge(root, "00000003-s1m1.json", merge=claim)
    assert _names(root) == ["00000001-s1", "00000002-s1", "00000003-s1"]


class _CountingStorage(LocalStorage):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_names: list[str] = []

    def read(self, name: str, limit_bytes: int) -> bytes:
        self.read_names.append(name)
        return super().read(name, limit_bytes)


@pytest.fixture(scope="module")
def long_chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and 59 deltas, with a merged baseline in the middle."""
    root = tmp_path_factory.mktemp("long") / "ck"
    run = start(root, make_layout("table_wise", 1))
    go_on(run, range(60))
    merge(root, "baseline", step=39, number=1)
    return root


def test_manifests_before_the_newest_good_baseline_stay_unread(long_chain: Path) -> None:
    storage = _CountingStorage(long_chain)
    chain = find_chain(storage)
    assert chain is not None
    assert (chain.step, len(chain.manifests)) == (59, 21)
    read = [name for name in storage.read_names if name.startswith("manifests/")]
    # The 20 after it, itself, the trainer's of the same checkpoint, and at the same cost the one or two before it.
    assert 22 <= len(read) <= 26
    assert len(set(read)) == len(read)


def test_deltas_smaller_than_a_baseline_are_not_followed_past_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with tables of the real world: all deltas together are smaller than a baseline."""
    monkeypatch.setattr(chain_search, "FILE_COST_BYTES", 0)
    tables = (replace(TABLES[0], rows=20_000), *TABLES[1:])
    run = start(tmp_path, make_layout("table_wise", 1, tables), make_truth(tables, ["row"]))
    go_on(run, range(30))
    merge(tmp_path, "baseline", step=19, number=1)
    storage = _CountingStorage(tmp_path)
    chain = find_chain(storage)
    assert chain is not None
    assert len(chain.manifests) == 11
    assert 5 * chain.delta_bytes < chain.baseline_bytes
    read = [name for name in storage.read_names if name.startswith("manifests/")]
    # The 10, the merge and the trainer's own of its checkpoint; then no delta, as whatever it leads to is a baseline.
    assert len(read) == 12


@pytest.mark.parametrize("missing", [[2], [2, 30, 50], [*range(45, 60)]])
def test_every_manifest_is_read_once_whatever_is_missing(long_chain: Path, tmp_path: Path, missing: list[int]) -> None:
    root = tmp_path / "ck"
    shutil.copytree(long_chain, root)
    for seq in missing:
        (root / f"data/{seq:08d}-s1a{seq}-r0.safetensors").unlink()
    storage = _CountingStorage(root)
    chain = find_chain(storage)
    assert chain is not None
    assert chain.step == min([seq for seq in missing if seq > 40], default=61) - 2
    read = [name for name in storage.read_names if name.startswith("manifests/")]
    assert len(set(read)) == len(read)
    # Each checkpoint is visited once in all searches together, not once for each newer one.
    assert len(chain.skipped) == 59 - chain.step


def test_a_step_whose_own_manifest_is_gone_is_opened_by_its_name(merged: tuple[Path, Run]) -> None:
    root, _ = merged
    (root / "manifests" / "00000006-s1.json").unlink()
    for name in ("manifests/00000006-s1.json", "manifests/00000006-s1m2.json"):
        chain = open_chain(root, name)
        assert (chain.step, chain.name) == (5, "manifests/00000006-s1.json")
    with pytest.raises(CheckpointError, match=r"00000009-s1\.json is missing"):
        open_chain(root, "manifests/00000009-s1.json")


def test_a_chain_without_some_files_is_another_one_or_none(merged: tuple[Path, Run]) -> None:
    root, _ = merged
    search = ChainSearch(LocalStorage(root))
    checkpoint = search.named("manifests/00000006-s1.json")
    assert not isinstance(checkpoint, str)
    first = search.path_to(checkpoint)
    assert not isinstance(first, str)
    second = search.path_to(checkpoint, without=first.data_names)
    assert not isinstance(second, str)
    assert first.data_names.isdisjoint(second.data_names)
    third = search.path_to(checkpoint, without=first.data_names | second.data_names)
    assert isinstance(third, str)
    assert "isn't to be used" in third
