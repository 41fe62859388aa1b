"""Damaged, missing and foreign files are detected, named and stepped over."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlrm_scale.checkpoint import Chain, find_chain, list_checkpoints, open_chain, verify
from dlrm_scale.checkpoint.saving.commit import ChainState
from dlrm_scale.cli.checkpoint import app
from dlrm_scale.errors import CheckpointError
from tests.checkpoint.simulated_run import TABLES, Run, Truth, load_chain, make_layout, make_truth

OPTIMIZER = "rowwise_adagrad"
TARGET = make_layout("table_wise", 1)
TIPS = ("manifests/00000003-s1.json", "manifests/00000006-s2.json")


def _copy(truth: Truth) -> Truth:
    return Truth(
        weight={t: w.clone() for t, w in truth.weight.items()},
        state={t: {n: v.clone() for n, v in s.items()} for t, s in truth.state.items()},
    )


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Truth]]:
    """Two chains of a baseline and two deltas, and the tables at each step."""
    root = tmp_path_factory.mktemp("history") / "checkpoints"
    truths: dict[int, Truth] = {}
    truth = make_truth(TABLES, ["row"])
    for start in (0, 1):
        run = Run(root, make_layout("row_wise", 2), truth, resumed_from=find_chain(root))
        for engine in run.engines:
            engine._chain = ChainState()
        for step in range(3 * start, 3 * start + 3):
            run.change("C1", [step, 60 + step], 0.5)
            run.change("C3", range(step, 30), 0.25)
            run.save(step)
            truths[step] = _copy(truth)
    return root, truths


@pytest.fixture
def damaged(history: tuple[Path, dict[int, Truth]], tmp_path: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(history[0], tmp_path / "run" / "checkpoints")
    return tmp_path / "run" / "checkpoints"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    position = random.Random(path.name).randrange(len(data))
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


def _zero(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": _flip,
    "zeroed": _zero,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "emptied": lambda path: path.write_bytes(b""),
    "extended": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "deleted": lambda path: path.unlink(),
}


def _names(root: Path) -> list[str]:
    return [str(p.relative_to(root)) for folder in ("data", "manifests") for p in sorted((root / folder).iterdir())]


@pytest.mark.parametrize("kind", DAMAGE)
def test_whatever_file_is_damaged_is_named_and_the_best_sound_checkpoint_loads(
    history: tuple[Path, dict[int, Truth]], damaged: Path, kind: str
) -> None:
    original, truths = history
    for name in _names(original):
        if name.startswith("manifests") and kind == "extended":
            continue  # a manifest's hash covers its content; see the next test
        DAMAGE[kind](damaged / name)
        problems = verify(damaged, "full")
        if kind != "deleted" or name not in TIPS:  # nothing points at the last manifest of a chain
            assert [p.file for p in problems] == [name]
        chain = find_chain(damaged, verify="full")
        assert chain is not None
        assert load_chain(chain, TARGET, truths[0], optimizer=OPTIMIZER).equals(truths[chain.step])
        hurt = int(name.split("/")[1].split("-")[0]) - 1  # its step
        newest_sound = 5 if hurt < 3 else (hurt - 1 if hurt > 3 else 2)
        assert chain.step == newest_sound
        if kind != "deleted" or not name.startswith("manifests"):
            assert len(chain.skipped) == 5 - newest_sound
        assert all(name in skip.reason for skip in chain.skipped)
        shutil.copy(original / name, damaged / name)
    assert verify(damaged, "full") == []


def test_a_manifest_with_bytes_after_its_end_is_refused(damaged: Path) -> None:
    path = damaged / "manifests" / "00000006-s2.json"
    path.write_bytes(path.read_bytes() + b"\0")
    assert [p.file for p in verify(damaged, "manifest")] == ["manifests/00000006-s2.json"]


def test_a_restore_notices_damage_that_a_size_check_does_not(
    history: tuple[Path, dict[int, Truth]], damaged: Path
) -> None:
    chain = find_chain(damaged, verify="size")
    assert chain is not None
    for file in chain.manifests[0].files:
        for tensor in [t for e in file.entries for t in e.tensors.values()] + list(file.tensors.values()):
            if tensor.size_bytes == 0 or (file.role == "dense" and chain.manifests[0] is not chain.tip):
                continue
            if tensor.name.startswith("rank_state"):
                continue
            path = damaged / file.name
            data = bytearray(path.read_bytes())
            data[tensor.offset_bytes + tensor.size_bytes - 1] ^= 64
            path.write_bytes(data)
            with pytest.raises(CheckpointError, match=file.name):
                load_chain(chain, TARGET, history[1][0], optimizer=OPTIMIZER)
            shutil.copy(history[0] / file.name, path)
    load_chain(chain, TARGET, history[1][0], optimizer=OPTIMIZER)


def test_two_swapped_data_files_are_noticed_though_their_sizes_fit(damaged: Path) -> None:
    first, second = (damaged / "data" / f"0000000{seq}-s2a{seq - 3}-r0.safetensors" for seq in (5, 6))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes((b + a)[: len(a)])
    second.write_bytes((a + b)[: len(b)])
    assert {p.file.split("/")[1] for p in verify(damaged, "full")} == {first.name, second.name}
    chain = find_chain(damaged, verify="full")
    assert chain is not None
    assert chain.step == 3


def test_a_manifest_under_another_name_is_refused(damaged: Path) -> None:
    folder = damaged / "manifests"
    shutil.copy(folder / "00000002-s1.json", folder / "00000009-s2.json")
    chain = find_chain(damaged)
    assert chain is not None
    assert chain.step == 5
    assert "holds the manifest manifests/00000002-s1.json" in chain.skipped[0].reason


def test_a_parent_that_was_replaced_breaks_its_children(history: tuple[Path, dict[int, Truth]], damaged: Path) -> None:
    other = Run(damaged.parent / "other", make_layout("row_wise", 2), make_truth(TABLES, ["row"], seed=1))
    for step in range(5):
        other.save(step)
    replaced = damaged / "manifests" / "00000004-s2.json"
    document = json.loads(replaced.read_bytes())
    document["manifest"]["step"] = 77
    _write_with_hash(replaced, document["manifest"])
    with pytest.raises(CheckpointError, match=r"00000004-s2\.json isn't the one"):
        open_chain(damaged, "manifests/00000005-s2.json")
    assert any("isn't the one" in p.reason for p in verify(damaged, "manifest"))


def _write_with_hash(path: Path, manifest: dict[str, object]) -> None:
    import hashlib

    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(json.dumps({"manifest": manifest, "sha256": digest}))


HOSTILE: dict[str, Callable[[dict[str, object]], object]] = {
    "breaks the format at files": lambda m: m["files"][0].update(name="data/../../secret.safetensors"),
    "breaks the format at parent": lambda m: m["parent"].update(name="manifests/../../x-s1.json"),
    "reads up to 1": lambda m: m.update(major=2),
    "breaks the format at step": lambda m: m.update(step=-1),
    "wrong size or place": lambda m: m["files"][0]["entries"][0]["tensors"]["weight"].update(offset_bytes=2**60),
    "rows in the range": lambda m: m["files"][0]["entries"][0].update(rows=10**15),
    "are missing": lambda m: m["files"][0].update(entries=m["files"][0]["entries"][1:]),
    "are there twice": lambda m: m["files"][0]["entries"].append(m["files"][0]["entries"][0]),
    "files of ranks": lambda m: m.update(ranks=3),
    "its parent has sequence number": lambda m: m["parent"].update(name="manifests/00000006-s2.json"),
    "a delta without parent": lambda m: m.update(parent=None),
    "unknown table": lambda m: m["files"][0]["entries"][0].update(table="C9"),
    "is listed twice": lambda m: m["tables"].append(m["tables"][0]),
    "lie outside": lambda m: m["tables"][0].update(rows=50),
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_a_hostile_manifest_with_a_right_hash_is_refused(damaged: Path, reason: str) -> None:
    path = damaged / "manifests" / "00000006-s2.json"
    manifest = json.loads(path.read_bytes())["manifest"]
    HOSTILE[reason](manifest)
    _write_with_hash(path, manifest)
    chain = find_chain(damaged)
    assert chain is not None
    assert chain.step == 4
    assert reason in chain.skipped[0].reason
    assert "00000006-s2.json" in chain.skipped[0].reason


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"manifest": 3, "sha256": 4}', b"\xff\xfe", b"[" * 100000])
def test_junk_in_place_of_a_manifest_is_refused(damaged: Path, content: bytes) -> None:
    (damaged / "manifests" / "00000006-s2.json").write_bytes(content)
    chain = find_chain(damaged)
    assert chain is not None
    assert chain.step == 4


def test_a_link_in_place_of_a_data_file_is_not_followed(damaged: Path) -> None:
    chain = find_chain(damaged)
    assert chain is not None
    path = damaged / chain.tip.files[0].name
    path.rename(damaged / "elsewhere")
    path.symlink_to(damaged / "elsewhere")
    assert [p.file for p in verify(damaged, "full")] == [chain.tip.files[0].name]


def test_a_folder_of_a_newer_format_is_refused(damaged: Path) -> None:
    (damaged / "FORMAT").write_text('{"format": "dlrm_scale.checkpoint", "major": 2, "minor": 0}')
    for call in (find_chain, list_checkpoints, verify):
        with pytest.raises(CheckpointError, match="format version 2"):
            call(damaged)


def test_unfinished_checkpoints_are_never_picked(damaged: Path) -> None:
    data, manifests = damaged / "data", damaged / "manifests"
    shutil.copy(data / "00000006-s2a3-r0.safetensors", data / "00000007-s2a4-r0.safetensors")
    shutil.copy(manifests / "00000006-s2.json", manifests / ".00000007-s2a4.tmp")
    chain = find_chain(damaged, verify="full")
    assert chain is not None
    assert (chain.step, chain.skipped) == (5, ())
    assert verify(damaged, "full") == []
    Run(damaged, make_layout("row_wise", 1), make_truth(TABLES, ["row"]), resumed_from=chain)
    assert not (data / "00000007-s2a4-r0.safetensors").exists()
    assert not (manifests / ".00000007-s2a4.tmp").exists()
    again = find_chain(damaged, verify="full")
    assert again is not None
    assert again.step == 5


def test_nothing_is_none_and_only_damage_is_an_error_that_names_it(damaged: Path, tmp_path: Path) -> None:
    assert find_chain(tmp_path / "nowhere") is None
    for path in (damaged / "data").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="is missing") as caught:
        find_chain(damaged)
    assert caught.value.exit_code == 4
    assert caught.value.remedy is not None


def test_data_that_an_unreadable_manifest_may_name_is_not_swept(damaged: Path) -> None:
    (damaged / "manifests" / "00000006-s2.json").write_bytes(b"junk")
    before = sorted((damaged / "data").iterdir())
    chain = find_chain(damaged)
    Run(damaged, make_layout("row_wise", 1), make_truth(TABLES, ["row"]), resumed_from=chain)
    assert sorted((damaged / "data").iterdir()) == before


def test_after_a_resume_past_damage_new_checkpoints_are_the_newest(
    history: tuple[Path, dict[int, Truth]], damaged: Path
) -> None:
    _flip(damaged / "data" / "00000006-s2a3-r0.safetensors")
    chain = find_chain(damaged, verify="full")
    assert isinstance(chain, Chain)
    assert chain.step == 4
    truth = _copy(history[1][4])
    run = Run(damaged, make_layout("row_wise", 1), truth, resumed_from=chain)
    run.change("C1", [1], 1.0)
    assert run.save(5).seq == 7
    found = find_chain(damaged, verify="full")
    assert found is not None
    assert (found.tip.seq, found.skipped) == (7, ())
    assert load_chain(found, TARGET, truth, optimizer=OPTIMIZER).equals(truth)


def test_a_format_file_that_the_crash_of_a_first_start_has_torn_is_written_anew(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "FORMAT").write_text('{"form')
    assert find_chain(root) is None
    run = Run(root, make_layout("row_wise", 1), make_truth(TABLES, ["row"]))
    run.save(1)
    assert json.loads((root / "FORMAT").read_text())["major"] == 1
    assert verify(root) == []


def test_the_command_exits_with_4_and_names_the_damaged_file(damaged: Path) -> None:
    _zero(damaged / "data" / "00000006-s2a3-r1.safetensors")
    runner = CliRunner()
    result = runner.invoke(app, ["verify", str(damaged.parent)])
    assert isinstance(result.exception, CheckpointError)
    assert result.exception.exit_code == 4
    assert "data/00000006-s2a3-r1.safetensors is damaged" in str(result.exception)
    result = runner.invoke(app, ["verify", str(damaged.parent), "--level", "full", "--json"])
    assert result.exit_code == 4
    assert json.loads(result.output)["problems"][0]["breaks"] == ["manifests/00000006-s2.json"]
    assert runner.invoke(app, ["verify", str(damaged.parent), "--level", "size"]).exit_code == 0
    (damaged / "data" / "00000005-s2a2-r1.safetensors").unlink()
    result = runner.invoke(app, ["ls", str(damaged.parent), "--json"])
    assert result.exit_code == 4
    states = [row["state"] for row in json.loads(result.output)]
    assert states[:4] == ["ok"] * 4
    assert all("data/00000005-s2a2-r1.safetensors is missing" in state for state in states[4:])


def test_the_commands_list_and_show_a_sound_run(history: tuple[Path, dict[int, Truth]]) -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["ls", str(history[0].parent)])
    assert listed.exit_code == 0
    assert listed.output.count("baseline") == 2
    assert listed.output.count("delta") == 4
    rows = json.loads(runner.invoke(app, ["ls", str(history[0]), "--json"]).output)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert {row["state"] for row in rows} == {"ok"}
    shown = json.loads(runner.invoke(app, ["show", str(history[0].parent), "1", "--json"]).output)
    assert (shown["kind"], shown["step"]) == ("delta", 1)
    assert {table["name"]: table["rows_written"] for table in shown["tables"]} == {"C1": 2, "C2": 0, "C3": 30, "C4": 0}
    assert runner.invoke(app, ["show", str(history[0].parent), "1"]).exit_code == 0
    missing = runner.invoke(app, ["show", str(history[0].parent), "99"])
    assert isinstance(missing.exception, CheckpointError)
    ok = runner.invoke(app, ["verify", str(history[0].parent)])
    assert "ok (full, " in ok.output
