"""`dlrm-scale calibrate` as a user runs it."""

from pathlib import Path

import pytest

from dlrm_scale.planning.cluster.cluster_file import load_cluster
from tests.support.command_line import run_command, run_json


@pytest.mark.slow
def test_it_writes_a_cluster_file_and_sums_it_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    words = ("calibrate", "--quick", "--ranks", 2, "--allow-noise", "-o", path)
    summary = run_json(capsys, *words)
    cluster = load_cluster(path)
    assert cluster.name == "here"
    assert summary["fit_error"] == cluster.fit_error
    assert summary["type_ms"] == {kind: constant.value for kind, constant in cluster.type_ms.items()}
    assert (summary["ranks"], summary["device"], summary["cluster"]) == (2, "cpu", str(path))
    assert summary["noise"]["cores"] >= 1


def test_a_file_that_cant_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.toml"
    path.write_text("mine")
    assert run_command("calibrate", "-o", path) == 2
    assert "exists already" in capsys.readouterr().err
    assert run_command("calibrate", "-o", tmp_path / "here.json") == 2
    assert "a cluster file ends in .toml" in capsys.readouterr().err
    assert run_command("calibrate", "-o", tmp_path / "nowhere" / "here.toml") == 2
    assert "doesn't exist" in capsys.readouterr().err
    assert path.read_text() == "mine"
