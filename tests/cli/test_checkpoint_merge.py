"""`checkpoint merge | gc | pin | unpin` as commands: words in, files and exit codes out."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import Chain, find_chain, verify
from dlrm_scale.checkpoint.chain.changes import Changes, find_changes
from dlrm_scale.checkpoint.chain.leases import Lease, read_leases
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from tests.checkpoint.merging import files_of, go_on, start
from tests.checkpoint.simulated_run import Run, load, make_layout
from tests.support.command_line import run_command, run_json


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Run]:
    """A baseline and four deltas in a run's folder."""
    run = start(tmp_path / "run" / "checkpoints", make_layout("row_wise", 1))
    go_on(run, range(5))
    return tmp_path / "run", run


def test_merge_says_what_it_made_and_what_that_is_equal_to(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = saved
    tip = find_chain(folder / "checkpoints")
    assert tip is not None
    found = run_json(capsys, "checkpoint", "merge", folder, "--to", "delta")
    (one,) = found["merged"]
    assert (one["kind"], one["step"], one["equal_to"], one["sha256"]) == ("delta", 4, tip.name, tip.tip_sha256)
    assert one["made_of"] == [manifest.name for manifest in tip.manifests[1:]]
    assert one["bytes"] < one["read_bytes"]
    assert run_command("checkpoint", "merge", folder, "--to", "baseline", "--step", "3") == 0
    text = capsys.readouterr().out
    assert "baseline of step 3 made of 4 checkpoints" in text
    assert load(folder / "checkpoints", make_layout("row_wise", 3), run.truth).equals(run.truth)


def test_a_dry_run_of_merge_writes_nothing(saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = saved
    before = files_of(folder / "checkpoints")
    found = run_json(capsys, "checkpoint", "merge", folder, "--to", "baseline", "--dry-run")
    assert (found["kind"], len(found["made_of"]), found["reason"]) == ("baseline", 5, "asked for")
    assert found["memory_bytes"] > 0
    assert run_command("checkpoint", "merge", folder, "--to", "baseline", "--dry-run", "--memory-limit", "30KiB") == 0
    assert "several at a time within 30.0 KiB" in capsys.readouterr().out
    assert files_of(folder / "checkpoints") == before


def test_nothing_to_merge_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path).save(0)
    assert run_json(capsys, "checkpoint", "merge", tmp_path) == {"merged": [], "removed": []}
    assert run_command("checkpoint", "merge", tmp_path, "--dry-run") == 0
    assert capsys.readouterr().out == "nothing to merge\n"


def test_auto_makes_a_baseline_when_a_restore_costs_twice_as_much(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    (one,) = run_json(capsys, "checkpoint", "merge", folder)["merged"]
    assert (one["kind"], one["reason"]) == ("baseline", "a restore is predicted to cost more than twice the baseline's")


def test_merge_with_keep_removes_what_is_older_than_the_chains_kept(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = saved
    root = folder / "checkpoints"
    assert run_json(capsys, "checkpoint", "merge", folder, "--to", "baseline", "--keep", "2")["removed"] == []
    go_on(run, range(5, 8))
    removed = run_json(capsys, "checkpoint", "merge", folder, "--to", "baseline", "--keep", "2")["removed"]
    assert "manifests/00000001-s1.json" in removed
    assert verify(root) == []
    assert load(root, make_layout("row_wise", 2), run.truth).equals(run.truth)


def test_gc_says_what_it_keeps_and_removes(saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = saved
    assert run_command("checkpoint", "gc", folder) == 0
    assert "keeps all checkpoints: 1 of 2 chains that share no data file" in capsys.readouterr().out
    for step in (2, 4):
        run_json(capsys, "checkpoint", "merge", folder, "--to", "baseline", "--step", step)
    assert run_command("checkpoint", "pin", folder, "0") == 0
    assert capsys.readouterr().out == "pinned manifests/00000001-s1.json (step 0)\n"
    lease = Lease(LocalStorage(folder / "checkpoints"), "restore")
    lease.take(["manifests/00000003-s1.json"])
    would = run_json(capsys, "checkpoint", "gc", folder, "--dry-run")
    did = run_json(capsys, "checkpoint", "gc", folder)
    assert (would["dry_run"], did["dry_run"]) == (True, False)
    assert sorted(would["removed"]) == sorted(did["removed"]) != []
    assert did["pinned"] == ["manifests/00000001-s1.json"]
    assert [user.split(" by ")[0] for user in did["users"]] == ["restore"]
    lease.release()
    assert [name for name in did["removed"] if name.startswith("manifests/")] == ["manifests/00000002-s1.json"]
    assert run_command("checkpoint", "unpin", folder, "0") == 0
    assert run_command("checkpoint", "gc", folder) == 0
    assert "removed manifests/00000001-s1.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["merge", "--step", "9"], 2, "has no checkpoint of step 9"),
        (["merge", "--step", "last"], 2, "--step last is no step"),
        (["merge", "--memory-limit", "much"], 2, "'much' is not a size"),
        (["merge", "--to", "baseline", "--memory-limit", "1KiB"], 2, "remedy: raise --memory-limit"),
        (["merge", "--keep", "1"], 2, "--keep 1: at least 2 chains are kept, as one damaged file"),
        (["gc", "--keep", "1"], 2, "--keep 1: at least 2 chains are kept, as one damaged file"),
        (["pin", "9"], 2, "has no checkpoint of step 9"),
        (["unpin", "2"], 2, "step 2 isn't pinned"),
        (["show", "9"], 2, "has no checkpoint of step 9"),
        (["show", "best"], 2, "has no best checkpoint"),
        (["show", "3", "1"], 2, "1 (step 1) is earlier than 3 (step 3)"),
        (["show", "latest", "1"], 2, "run 1 latest`"),
        (["pin", "newest"], 2, "newest is no step"),
        (["verify", "--level", "restore", "--step", "9"], 2, "has no checkpoint of step 9"),
    ],
)
def test_a_wrong_word_is_named_and_changes_nothing(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    folder, _ = saved
    before = files_of(folder / "checkpoints")
    assert run_command("checkpoint", words[0], folder, *words[1:]) == code
    assert says in capsys.readouterr().err
    assert files_of(folder / "checkpoints") == before


def test_a_folder_without_checkpoints_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("merge", "gc"):
        assert run_command("checkpoint", command, tmp_path) == 2
        assert f"{tmp_path} holds no checkpoint" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_merge_imports_neither_torchrec_nor_fbgemm(saved: tuple[Path, Run]) -> None:
    folder, _ = saved
    program = (
        "import sys\n"
        "from dlrm_scale.cli import main\n"
        "try:\n"
        f"    main(['checkpoint', 'merge', {str(folder)!r}, '--to', 'baseline', '--json'])\n"
        "except SystemExit as done:\n"
        "    print(done.code, sorted({'torchrec', 'fbgemm_gpu'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.strip() == "0 []"
    assert len(json.loads(done.stdout)["merged"]) == 1


def test_a_watching_merge_goes_by_other_files_than_the_one_that_it_has_found_damaged(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = saved
    root = folder / "checkpoints"
    assert run_command("checkpoint", "merge", folder, "--to", "baseline") == 0
    chain = find_chain(root)
    assert chain is not None
    (file,) = [f for f in chain.tip.files if f.role == "rank"]
    flipped = bytearray((root / file.name).read_bytes())
    flipped[file.entries[0].tensors["weight"].offset_bytes] ^= 1
    (root / file.name).write_bytes(flipped)
    go_on(run, range(5, 7))
    rounds: list[float] = []

    def pause(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("dlrm_scale.cli.checkpoint_merge.time.sleep", pause)
    capsys.readouterr()
    assert run_command("checkpoint", "merge", folder, "--to", "baseline", "--watch", "0", "--json") == 130
    told = capsys.readouterr()
    assert told.err.count(f"error: {file.name}, tensor") == 1
    (one,) = json.loads(told.out)["merged"]
    assert one["step"] == 6
    assert len(one["made_of"]) == 7
    assert load(root, make_layout("row_wise", 2), run.truth).equals(run.truth)


def test_what_show_compares_is_kept_from_removal_meanwhile(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    storage = LocalStorage(folder / "checkpoints")
    held: list[frozenset[str]] = []

    def compare(first: Chain, second: Chain, **options: object) -> Changes:
        held.extend(lease.holds for lease in read_leases(storage, now=time.time()))
        return find_changes(first, second)

    monkeypatch.setattr("dlrm_scale.checkpoint.chain.changes.find_changes", compare)
    found = run_json(capsys, "checkpoint", "show", folder, "1", "3")
    assert (found["first_step"], found["second_step"]) == (1, 3)
    assert sorted(map(len, held)) == [2, 4]
    assert storage.list_names("leases") == []


def test_best_names_the_checkpoint_that_ls_marks_wherever_a_step_is_taken(
    saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    name = "manifests/00000003-s1.json"
    (folder / "best.json").write_text(json.dumps({"manifest": name}))
    assert run_json(capsys, "checkpoint", "show", folder, "best")["name"] == name
    assert run_json(capsys, "checkpoint", "show", folder, "1", "best")["second_step"] == 2
    words = ("--to", "safetensors", "--out", tmp_path / "best.safetensors", "--step", "best")
    assert run_json(capsys, "checkpoint", "export", folder, *words)["step"] == 2
    assert run_json(capsys, "checkpoint", "verify", folder, "--level", "restore", "--step", "best")["ok"]
    assert run_json(capsys, "checkpoint", "pin", folder, "best") == {"pinned": name, "step": "best"}
    assert run_json(capsys, "checkpoint", "unpin", folder, "best") == {"unpinned": [name], "step": "best"}
    assert run_json(capsys, "checkpoint", "pin", folder, "2") == {"pinned": name, "step": 2}
    (one,) = run_json(capsys, "checkpoint", "merge", folder, "--to", "baseline", "--step", "best")["merged"]
    assert one["equal_to"] == name


def test_a_merge_beside_another_one_exits_with_1_and_a_watching_one_says_it_once(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    other = Lease(LocalStorage(folder / "checkpoints"), "merge", token="5")
    other.take()
    assert run_command("checkpoint", "merge", folder) == 1
    assert "is merging in" in capsys.readouterr().err
    rounds: list[float] = []

    def pause(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("dlrm_scale.cli.checkpoint_merge.time.sleep", pause)
    assert run_command("checkpoint", "merge", folder, "--watch", "0") == 130
    assert capsys.readouterr().err.count("is merging in") == 1
    other.release()


def test_data_without_any_manifest_is_damage_and_an_empty_folder_a_wrong_name(
    saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    assert run_command("checkpoint", "verify", tmp_path / "none") == 2
    for path in (folder / "checkpoints" / "manifests").iterdir():
        path.unlink()
    for command in ("verify", "merge", "gc", "show"):
        capsys.readouterr()
        assert run_command("checkpoint", command, folder) == 4, command
        assert "manifests/ is lost" in capsys.readouterr().err
