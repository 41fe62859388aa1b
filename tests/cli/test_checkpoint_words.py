"""`checkpoint ls | show | gc` in words: one word for one thing, counts with their nouns, URLs that can't be meant."""

import json
import re
from pathlib import Path

import pytest

from dlrm_scale.checkpoint.chain.chain import open_step
from dlrm_scale.cli.checkpoint_words import counted, short_name
from tests.checkpoint.merging import go_on, merge, start, truth_of
from tests.checkpoint.simulated_run import make_layout
from tests.support.command_line import run_command, run_json


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A baseline of step 0 and deltas of steps 10 to 40, in a run's folder."""
    root = tmp_path / "run" / "checkpoints"
    run = start(root, make_layout("row_wise", 1))
    for step in range(0, 50, 10):
        go_on(run, range(step, step + 1))
    return root


def _best_is(root: Path, manifest: str) -> None:
    (root.parent / "best.json").write_text(json.dumps({"manifest": manifest}))


def _marked(capsys: pytest.CaptureFixture[str], root: Path) -> list[str]:
    return [row["name"] for row in run_json(capsys, "checkpoint", "ls", root.parent) if row["best"]]  # type: ignore[call-overload]


def test_the_best_checkpoint_is_marked_while_only_merges_stand_for_it(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = "manifests/00000003-s1.json"
    _best_is(root, best)
    names = [merge(root, to, step=20, number=number)[0].manifest.name for to, number in (("delta", 7), ("baseline", 8))]
    assert _marked(capsys, root) == [best]
    (root / best).unlink()
    assert _marked(capsys, root) == names
    assert run_command("checkpoint", "ls", root.parent) == 0
    assert capsys.readouterr().out.count(", best") == 2
    _best_is(root, "manifests/00000009-s1.json")
    assert _marked(capsys, root) == []


def test_show_names_checkpoints_by_step_by_name_and_from_the_end(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*words: object) -> str:
        return str(run_json(capsys, "checkpoint", "show", root.parent, *words)["name"])

    (merged,) = merge(root, "baseline", step=20, number=7)
    own = "manifests/00000003-s1.json"
    assert [shown(word) for word in (20, "00000003-s1", own)] == [own] * 3
    assert shown(short_name(merged.manifest.name)) == merged.manifest.name
    assert [shown(), shown("latest"), shown("previous")] == [f"manifests/0000000{n}-s1.json" for n in (5, 5, 4)]
    (root / own).unlink()
    assert [shown(word) for word in (20, "00000003-s1")] == [merged.manifest.name] * 2
    changes = run_json(capsys, "checkpoint", "show", root.parent, "previous", "latest")
    assert (changes["first_step"], changes["second_step"]) == (30, 40)
    changes = run_json(capsys, "checkpoint", "show", root.parent, 20, 40)
    assert (changes["first_step"], changes["second_step"]) == (20, 40)


def test_of_two_checkpoints_of_a_step_the_newest_is_shown_and_the_other_has_a_name(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = start(root, make_layout("row_wise", 1), truth_of(0), resumed_from=open_step(root, 20))
    go_on(resumed, range(30, 31))
    assert run_json(capsys, "checkpoint", "show", root.parent, 30)["name"] == "manifests/00000006-s2.json"
    assert run_json(capsys, "checkpoint", "show", root.parent, "00000004-s1")["step"] == 30


def test_what_show_can_not_find_is_told_with_the_steps_that_there_are(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "manifests/00000002-s1.json").write_bytes(b"{}")
    assert run_command("checkpoint", "show", root.parent, 10) == 4
    told = capsys.readouterr().err
    assert f"{root} has no checkpoint of step 10\n  manifests/00000002-s1.json" in told
    assert "remedy: name one of these steps: 0, 20, 30, 40; or a name" in told
    assert run_command("checkpoint", "show", root.parent, "00000002-s1") == 4
    assert "remedy: put it back from a copy" in capsys.readouterr().err
    assert run_command("checkpoint", "show", root.parent, "newest") == 4
    assert "has no checkpoint newest" in capsys.readouterr().err


def test_one_checkpoint_has_none_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path).save(7)
    assert run_json(capsys, "checkpoint", "show", tmp_path, "latest")["step"] == 7
    assert run_command("checkpoint", "show", tmp_path, "previous") == 2
    assert "has only one checkpoint" in capsys.readouterr().err


def test_gc_tells_chains_to_one_checkpoint_apart(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (merged,) = merge(root, "baseline")
    assert run_command("checkpoint", "gc", root.parent) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"keeps step 40 from {merged.manifest.name} on: 1 manifest, ")
    assert lines[1].startswith("keeps step 40 from manifests/00000001-s1.json on: 5 manifests, ")
    chains = run_json(capsys, "checkpoint", "gc", root.parent)["kept"]
    assert [(chain["step"], len(chain["manifests"])) for chain in chains] == [(40, 1), (40, 5)]


def test_counts_have_their_nouns() -> None:
    assert [counted(n, "file") for n in (0, 1, 2, 2000)] == ["0 files", "1 file", "2 files", "2,000 files"]


def test_a_file_url_is_the_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = run_json(capsys, "checkpoint", "ls", root.parent)
    for url in (f"file://{root.parent}", f"file://{root}", f"local://{root.parent}"):
        assert run_json(capsys, "checkpoint", "ls", url) == listed
    (root.parent / "config.toml").write_text(f"[checkpoint]\npath = {str(root)!r}\n")
    assert len(run_json(capsys, "checkpoint", "ls", f"file://{root.parent}")) == 5


@pytest.mark.parametrize(
    ("url", "code", "says", "remedy"),
    [
        ("http://host/run", 2, "checkpoints can't be kept under http://", "name a folder, or a bucket as s3://"),
        ("ftp://host/run", 2, "checkpoints can't be kept under ftp://", "name a folder, or a bucket as s3://"),
        ("nope://host/run", 2, "Protocol not known: nope", "name a folder, or a bucket as s3://"),
        ("memory://b/none", 2, "memory://b/none holds no checkpoint", "memory:// is seen only by the process that"),
    ],
)
def test_a_url_that_can_not_be_meant_is_refused_with_one_that_can(
    capsys: pytest.CaptureFixture[str], url: str, code: int, says: str, remedy: str
) -> None:
    for command in ("ls", "gc", "merge"):
        assert run_command("checkpoint", command, url) == code
        told = capsys.readouterr().err
        assert says in told
        assert f"remedy: {remedy}" in told


def test_help_speaks_of_options_that_the_command_has(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "show", "verify", "gc", "pin", "unpin", "export"):
        assert run_command("checkpoint", command, "--help") == 0
        assert "--watch" not in capsys.readouterr().out
    assert run_command("checkpoint", "--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "List, compare, verify, merge, pin, export and clean up the checkpoints" in told


def test_what_a_dry_run_of_gc_would_remove_is_counted_in_words(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = root / "data/00000001-s1a9-r0.safetensors"
    left.write_bytes(b"x" * 2048)
    assert run_command("checkpoint", "gc", root.parent, "--dry-run") == 0
    assert "would free 2.0 KiB in 1 file\n" in capsys.readouterr().out


def test_names_are_whole_in_a_listing_of_any_width(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(root, "baseline")
    for path in sorted((root / "data").iterdir())[:1]:
        path.unlink()
    names = {path.stem for path in (root / "manifests").iterdir()}
    monkeypatch.setenv("COLUMNS", "40")
    capsys.readouterr()
    assert run_command("checkpoint", "ls", root.parent) == 4
    piped = capsys.readouterr().out.splitlines()
    assert piped[1].split() == ["name", "kind", "step", "rows", "size", "time", "state"]
    assert {line.split()[0] for line in piped[3 : 3 + len(names)]} == names
    assert any(line.rstrip().endswith("is missing") for line in piped)  # with its whole state
    monkeypatch.setenv("FORCE_COLOR", "1")
    for columns, titles in (
        ("80", ["name", "kind", "step", "rows", "size", "state"]),
        ("40", ["name", "step", "state"]),
    ):
        monkeypatch.setenv("COLUMNS", columns)
        run_command("checkpoint", "ls", root.parent)
        told = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert set(told[1].split()) <= set(titles), columns
        assert {line.split()[0] for line in told[3:] if line.strip()} >= names, columns
