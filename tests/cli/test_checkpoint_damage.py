"""What the commands say of damage: the file, the steps that are lost, and what to do; an outage is no damage."""

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.chain.damage import damage_met, lost_steps
from dlrm_scale.checkpoint.storage.local_storage import LocalReadableFile, LocalStorage
from dlrm_scale.errors import CheckpointError
from dlrm_scale.train.best_file import best_text
from tests.checkpoint.merging import files_of, go_on, merge, start
from tests.checkpoint.simulated_run import Run, make_layout
from tests.support.command_line import run_command, run_json


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Run]:
    """A baseline of step 0 and deltas of steps 1 to 4, in a run's folder."""
    run = start(tmp_path / "run" / "checkpoints", make_layout("row_wise", 1))
    go_on(run, range(5))
    return tmp_path / "run", run


def _flip(root: Path, chain: Chain, step: int) -> str:
    """Flip a bit of the weights of a step's file; returns the file's name."""
    manifest = next(manifest for manifest in chain.manifests if manifest.step == step)
    file = next(file for file in manifest.files if file.role == "rank")
    data = bytearray((root / file.name).read_bytes())
    data[next(e for e in file.entries if e.rows).tensors["weight"].offset_bytes] ^= 1
    (root / file.name).write_bytes(data)
    return file.name


def _chain(root: Path) -> Chain:
    chain = find_chain(root)
    assert chain is not None
    return chain


def _logged(step: int, manifest: str) -> str:
    return json.dumps({"event": "checkpoint", "committed": True, "step": step, "manifest": manifest}) + "\n"


def _export(folder: Path, out: Path, *more: object) -> int:
    return run_command("checkpoint", "export", folder, "--to", "safetensors", "--out", out, *more)


def test_an_export_goes_back_to_an_older_step_only_when_it_is_asked_for(
    saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    (folder / "checkpoints/data/00000004-s1a4-dense.safetensors").unlink()
    assert _export(folder, tmp_path / "out") == 4
    told = capsys.readouterr().err
    assert "is that of step 2, so steps up to 4 would be lost" in told
    assert "manifests/00000004-s1.json (step 3): data/00000004-s1a4-dense.safetensors is missing" in told
    assert "remedy: put the named files back from a copy, or take the older checkpoint with --step 2" in told
    assert not (tmp_path / "out").exists()
    assert _export(folder, tmp_path / "out", "--step", 2) == 0
    assert _export(folder, tmp_path / "other", "--step", 4) == 4
    told = capsys.readouterr().err
    assert "data/00000004-s1a4-dense.safetensors is missing" in told
    assert "remedy: put the named files back from a copy, or name another step" in told


def test_an_export_and_a_merge_miss_a_newest_manifest_that_the_runs_log_tells_of(
    saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    name = "manifests/00000005-s1.json"
    (folder / "log.jsonl").write_text(_logged(4, name))
    assert _export(folder, tmp_path / "whole") == 0
    (folder / "checkpoints" / name).unlink()
    before = files_of(folder / "checkpoints")
    commands = {"export": ("--to", "safetensors", "--out", tmp_path / "out"), "merge": ("--to", "baseline")}
    for command, more in commands.items():
        assert run_command("checkpoint", command, folder, *more) == 4
        said = capsys.readouterr().err
        assert "is that of step 3, so steps up to 4 would be lost" in said
        assert f"{name} (step 4): it is missing, and log.jsonl tells that it was committed" in said
    # By the folder of checkpoints too, beside which the log lies.
    assert _export(folder / "checkpoints", tmp_path / "out") == 4
    assert run_command("checkpoint", "ls", folder) == 4
    assert f"step 4 is lost: log.jsonl tells that it was committed, and {name} is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert files_of(folder / "checkpoints") == before
    assert _export(folder, tmp_path / "out", "--step", 3) == 0
    assert run_command("checkpoint", "merge", folder, "--to", "baseline", "--step", 3) == 0


def test_an_export_that_meets_a_flipped_bit_names_file_step_and_remedy(
    saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    root = folder / "checkpoints"
    name = _flip(root, _chain(root), 3)
    for more in ((), ("--step", 4)):
        assert _export(folder, tmp_path / "out", *more) == 4
        told = capsys.readouterr().err
        assert "manifests/00000005-s1.json (step 4)" in told
        assert f"{name}, tensor" in told
        assert "or take a whole checkpoint with --step 2" in told
        assert list(tmp_path.iterdir()) == [folder]
    assert list(root.glob("leases/*")) == []


def test_an_export_goes_by_other_files_that_have_the_same_rows(
    saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = saved
    root = folder / "checkpoints"
    merge(root, "baseline")
    name = _flip(root, _chain(root), 4)
    assert _export(folder, tmp_path / "out") == 0
    told = capsys.readouterr()
    assert f"note: read without a damaged file: {name}, tensor" in told.err
    assert "step 4, " in told.out
    assert torch.equal(load_file(tmp_path / "out")["C1.weight"], run.truth.weight["C1"])


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--to", "baseline"), ("--json",)])
def test_a_merge_of_a_damaged_chain_names_the_lost_steps(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    folder, _ = saved
    (folder / "checkpoints/data/00000002-s1a2-r0.safetensors").unlink()
    before = files_of(folder / "checkpoints")
    assert run_command("checkpoint", "merge", folder, *more) == 4
    told = capsys.readouterr()
    assert "nothing to merge" not in told.out
    assert "is that of step 0, so steps up to 4 would be lost" in told.err
    assert "data/00000002-s1a2-r0.safetensors is missing" in told.err
    assert "with --step 0" in told.err
    assert files_of(folder / "checkpoints") == before


def test_a_merge_that_meets_a_flipped_bit_names_file_step_and_remedy(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    root = folder / "checkpoints"
    name = _flip(root, _chain(root), 2)
    before = files_of(root)
    assert run_command("checkpoint", "merge", folder, "--to", "baseline") == 4
    told = capsys.readouterr().err
    assert "manifests/00000005-s1.json (step 4)" in told
    assert f"{name}, tensor" in told
    assert "or take a whole checkpoint with --step 1" in told
    assert files_of(root) == before
    assert run_command("checkpoint", "merge", folder, "--to", "baseline", "--step", 1) == 0


def test_a_watching_merge_says_once_which_checkpoints_it_does_without(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    (folder / "checkpoints/data/00000004-s1a4-r0.safetensors").unlink()
    rounds: list[float] = []

    def pause(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("dlrm_scale.cli.checkpoint_merge.time.sleep", pause)
    assert run_command("checkpoint", "merge", folder, "--to", "delta", "--watch", "0") == 130
    told = capsys.readouterr()
    assert told.err.count("(step 3): data/00000004-s1a4-r0.safetensors is missing") == 1
    assert "delta of step 2 made of 2 checkpoints" in told.out


def test_gc_says_what_is_damaged(saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = saved
    (folder / "checkpoints/data/00000005-s1a5-r0.safetensors").unlink()
    assert run_command("checkpoint", "gc", folder) == 0
    assert "damaged, and kept for now: manifests/00000005-s1.json (step 4): data/0" in capsys.readouterr().err


def test_damage_without_a_whole_checkpoint_has_another_remedy(saved: tuple[Path, Run]) -> None:
    root = saved[0] / "checkpoints"
    chain = _chain(root)
    names = [file.name for manifest in chain.manifests for file in manifest.files]
    error = damage_met(chain, dict.fromkeys(names, "it is gone"))
    assert error.remedy == "put the named files back from a copy; no other checkpoint is whole"
    skipped = Chain(storage=chain.storage, manifests=chain.manifests, tip_sha256="", skipped=())
    assert "would be lost" not in lost_steps(skipped).message


class _Down:
    """`LocalStorage` fails for names that contain something."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.what, self.error = "", OSError()
        size_bytes, opens = LocalStorage.size_bytes, LocalStorage.open

        def size(storage: LocalStorage, name: str) -> int:
            self._ask(name)
            return size_bytes(storage, name)

        @contextmanager
        def opened(storage: LocalStorage, name: str) -> Iterator[LocalReadableFile]:
            self._ask("open " + name)
            with opens(storage, name) as file:
                yield file

        patch.setattr(LocalStorage, "size_bytes", size)
        patch.setattr(LocalStorage, "open", opened)

    def _ask(self, name: str) -> None:
        if self.what and self.what in name:
            raise self.error


OUTAGES = [
    OSError(errno.ETIMEDOUT, "no answer within 60 s"),
    ConnectionError(errno.EIO, "the store is down"),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.EMFILE, "Too many open files"),
]


READERS = (
    ("verify", "--level", "restore"),
    ("export", "--to", "safetensors", "--out", "OUT"),
    ("export", "--to", "dcp", "--out", "OUT"),
    ("show", "0", "4"),
    ("merge", "--to", "baseline"),
)


@pytest.mark.parametrize(
    ("words", "what", "error"),
    [(words, "open data/00000003", OUTAGES[0]) for words in READERS]
    + [(READERS[1], what, OUTAGES[0]) for what in ("manifests/00000004", "data/00000002")]
    + [(READERS[0], "open data/00000003", error) for error in OUTAGES[1:]],
    ids=lambda value: errno.errorcode[value.errno] if isinstance(value, OSError) else "-".join(value).replace("/", "-"),
)
def test_an_outage_is_not_called_damage(
    saved: tuple[Path, Run],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    what: str,
    error: OSError,
) -> None:
    folder, _ = saved
    down = _Down(monkeypatch)
    down.what, down.error = what, error
    command = [str(tmp_path / "out") if word == "OUT" else word for word in words[1:]]
    assert run_command("checkpoint", words[0], folder, *command) == 1
    told = capsys.readouterr().err
    assert error.strerror in told
    assert "damaged" not in told
    assert "which is no damage: try again" in told
    down.what = ""
    root = folder / "checkpoints"
    assert list(root.glob("leases/*")) == []
    assert list(tmp_path.iterdir()) == [folder]
    # a disk that can't read a file any more is damage
    down.what, down.error = "open data/00000003", OSError(errno.EIO, "Input/output error")
    assert run_command("checkpoint", words[0], folder, *command) == 4


@pytest.mark.parametrize("words", [("ls",), ("show", "2"), ("pin", "2"), ("gc",)])
def test_a_store_that_is_down_ends_every_command_with_1(
    saved: tuple[Path, Run],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    def down(storage: LocalStorage, folder: str) -> list[str]:
        raise OSError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(LocalStorage, "list_names", down)
    assert run_command("checkpoint", words[0], saved[0], *words[1:]) == 1
    told = capsys.readouterr().err
    assert f"error: {saved[0]}: Connection refused\n  remedy: " in told


def test_a_folder_that_may_not_be_read_is_not_called_empty(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("dlrm_scale.checkpoint.storage.local_storage.os.lstat", forbidden)
    assert run_command("checkpoint", "ls", saved[0]) == 1
    assert "Permission denied" in capsys.readouterr().err


def test_an_export_without_room_is_no_damage(
    saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 100

    monkeypatch.setattr("dlrm_scale.checkpoint.export.new_output.shutil.disk_usage", lambda path: Usage)
    assert _export(saved[0], tmp_path / "out") == 1
    assert "has 100 B free" in capsys.readouterr().err


def test_a_merge_on_a_full_disk_says_how_to_make_room(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device", "data/x")

    monkeypatch.setattr("dlrm_scale.checkpoint.upkeep.merge_run.write_file", full)
    assert run_command("checkpoint", "merge", saved[0], "--to", "baseline") == 1
    told = capsys.readouterr().err
    assert f"remedy: make room on its disk: `dlrm-scale checkpoint gc {saved[0]}` removes old checkpoints" in told
    assert run_json(capsys, "checkpoint", "ls", saved[0])


def test_a_run_without_a_whole_checkpoint_is_told_in_json_too(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    for path in (folder / "checkpoints" / "data").glob("00000001-*"):
        path.unlink()
    words = ("checkpoint", "verify", folder, "--level", "restore")
    assert run_command(*words, "--json") == 4
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["ok"], told.err) == (False, "")
    assert found["restore"]["checkpoint"] is None
    assert "is valid" in found["restore"]["error"]
    assert {problem["reason"] for problem in found["problems"]} == {"is missing"}
    assert run_command(*words) == 4
    assert "damaged files:\n  data/00000001-" in capsys.readouterr().err
    assert run_command(*words, "--step", "9", "--json") == 2


def test_verify_names_a_committed_step_whose_manifest_is_gone(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    newest = max((folder / "checkpoints/manifests").iterdir())
    record = {"event": "checkpoint", "step": 4, "committed": True, "manifest": f"manifests/{newest.name}"}
    (folder / "log.jsonl").write_text(json.dumps(record) + "\n")
    assert run_command("checkpoint", "verify", folder) == 0
    newest.unlink()
    for level in ("manifest", "full"):
        assert run_command("checkpoint", "verify", folder, "--level", level) == 4
        told = capsys.readouterr().err
        assert f"manifests/{newest.name} is missing: log.jsonl tells that step 4 was committed" in told
        assert "the newest there is of step 3" in told


@pytest.mark.parametrize("content", ["garbage", '{"format": "dlrm_scale.chfckpoint", "major": 1, "minor": 0}'])
def test_a_damaged_format_file_is_named_and_costs_nothing(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str], content: str
) -> None:
    folder, _ = saved
    root = folder / "checkpoints"
    (root / "FORMAT").write_text(content)
    for level in ("manifest", "size", "full"):
        assert run_command("checkpoint", "verify", folder, "--level", level) == 4
        said = capsys.readouterr().err
        assert "FORMAT is damaged" in said
        assert "no checkpoint is broken, and the next start writes FORMAT anew" in said
    chain = _chain(root)
    assert chain.step == 4
    assert "FORMAT is damaged" in chain.detours[0]
    start(root, make_layout("row_wise", 1), resumed_from=chain)
    assert run_command("checkpoint", "verify", folder) == 0


def test_a_start_refuses_a_damaged_format_file_where_no_manifest_can_be_read(saved: tuple[Path, Run]) -> None:
    root = saved[0] / "checkpoints"
    for path in (root / "FORMAT", *(root / "manifests").iterdir()):
        path.write_text("garbage")
    with pytest.raises(CheckpointError, match=r"FORMAT in .* is damaged: .*, and no manifest can be read"):
        start(root, make_layout("row_wise", 1))
    assert (root / "FORMAT").read_text() == "garbage"


def test_a_flipped_best_json_is_named_and_blames_no_checkpoint(
    saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    best = {"metric": "logloss", "value": 0.5, "rows": 9, "step": 4, "manifest": "manifests/00000005-s1.json"}
    (folder / "best.json").write_text(best_text(best))
    assert run_command("checkpoint", "verify", folder) == 0
    (folder / "best.json").write_text(best_text(best).replace("00000005", "00000007"))
    assert run_command("checkpoint", "verify", folder) == 4
    said = capsys.readouterr().err
    assert "best.json can't be read: its sha256 doesn't match its content" in said
    assert "00000007" not in said
    assert _export(folder, tmp_path / "out") == 0
    # One of an early version, without a hash, that the log contradicts.
    (folder / "log.jsonl").write_text(_logged(4, best["manifest"]))
    (folder / "best.json").write_text(json.dumps({**best, "manifest": "manifests/00000007-s1.json"}))
    assert _export(folder, tmp_path / "again") == 0


def test_verify_notes_an_older_manifest_that_is_gone_while_its_data_is_there(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    merge(folder / "checkpoints", "baseline")
    name = "manifests/00000003-s1.json"
    (folder / "log.jsonl").write_text("".join(_logged(seq - 1, f"manifests/{seq:08d}-s1.json") for seq in range(1, 6)))
    assert run_command("checkpoint", "verify", folder) == 0
    assert "is gone" not in capsys.readouterr().out
    for seq in (3, 4, 5):
        (folder / f"checkpoints/manifests/{seq:08d}-s1.json").unlink()
    assert run_command("checkpoint", "verify", folder) == 0
    said = capsys.readouterr().out
    assert f"note: {name} is gone and its data is there, and log.jsonl tells that step 2 was committed" in said


@pytest.mark.parametrize(("out", "code"), [("/dev/full", 1), ("| head -c 1", 0)])
@pytest.mark.parametrize("command", ["checkpoint show {} 4 --json", "checkpoint ls {}", "stats mlperf_dcnv2"])
def test_output_that_can_not_be_written_is_told_as_such(
    saved: tuple[Path, Run], out: str, code: int, command: str
) -> None:
    folder, _ = saved
    command = f"{sys.executable} -m dlrm_scale {command.format(folder)}"
    shell = f"{command} {out if out.startswith('|') else f'> {out}'}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    expected = "error: the output can't be written: No space left on device\n  remedy: print to another place\n"
    assert done.stderr == (expected if code else "")


def test_verify_notes_a_start_whose_record_can_not_be_read(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    (folder / "checkpoints/starts/1.json").write_text("garbage")
    [note] = run_json(capsys, "checkpoint", "verify", folder)["notes"]
    assert note.startswith("starts/1.json can't be read: its number still counts")


def test_verify_notes_data_that_nobody_will_commit(saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = saved
    (folder / "checkpoints/data/00000002-s1a9-r0.safetensors").write_bytes(b"x")
    (folder / "checkpoints/data/00000099-s1a9-r0.safetensors").write_bytes(b"its trainer, this process, is alive")
    [note] = run_json(capsys, "checkpoint", "verify", folder)["notes"]
    assert note.startswith("no manifest names 1 of the files in data/ (data/00000002-s1a9-r0.safetensors)")


def test_a_damaged_header_breaks_no_checkpoint(
    saved: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    file = folder / "checkpoints/data/00000005-s1a5-r0.safetensors"
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[:header] = bytes(header)
    file.write_bytes(data)
    assert run_command("checkpoint", "verify", folder) == 4
    told = capsys.readouterr().err
    assert f"data/{file.name} has a damaged header: its rows and values are intact" in told
    assert "it breaks" not in told
    assert "no checkpoint is broken by them, and training resumes from the newest" in told
    assert _chain(folder / "checkpoints").step == 4
    assert _export(folder, tmp_path / "out") == 0
    data[-1] ^= 1
    file.write_bytes(data)
    assert run_command("checkpoint", "verify", folder) == 4
    assert "it breaks manifests/00000005-s1.json" in capsys.readouterr().err


def test_a_config_that_can_not_be_read_does_not_hide_the_checkpoints(
    saved: tuple[Path, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved
    (folder / "config.toml").write_text("garbage")
    assert run_command("checkpoint", "ls", folder) == 2
    assert f"its checkpoints can be named themselves: {folder / 'checkpoints'}" in capsys.readouterr().err
    assert run_command("checkpoint", "ls", folder / "checkpoints") == 0
