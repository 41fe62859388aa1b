"""A library that can't be loaded is a finding, whatever way it fails."""

from pathlib import Path

import pytest

from dlrm_scale import load_probe
from dlrm_scale.load_probe import probe

MARK = "dlrm-scale-probe "


def test_every_stage_works_in_this_environment() -> None:
    found = probe()
    assert found.failed is None, found.reason
    assert list(found.facts) == ["torch", "gloo", "fbgemm", "torchrec"]
    assert found.facts["torch"]["gloo"] is True


def test_an_fbgemm_that_raises_is_reported_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fbgemm_gpu.py").write_text("raise OSError('undefined symbol: _ZN3c10')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe()
    assert found.failed == "fbgemm"
    assert found.reason == "OSError: undefined symbol: _ZN3c10"


def test_a_torch_that_kills_the_process_is_reported_with_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe()
    assert (found.failed, found.reason) == ("torch", "the process died of SIGSEGV")


def test_a_load_that_never_ends_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe(timeout_seconds=1).reason == "no answer within 1 s"


def test_words_of_a_library_between_the_stages_are_ignored() -> None:
    out = f'hello\n{MARK}["torch", {{"gloo": true}}]\nnoise'
    found = load_probe._read(out, "ImportError: no gloo\n", 1, 5)
    assert found.facts == {"torch": {"gloo": True}}
    assert (found.failed, found.reason) == ("gloo", "ImportError: no gloo")
