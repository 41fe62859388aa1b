"""Each of the doctor's lines is ok or says what to do."""

import json
from typing import Any

import pytest

from dlrm_scale.cli import main
from dlrm_scale.cli.doctor import Finding, examine
from dlrm_scale.install import Installed
from dlrm_scale.load_probe import Probe

CPU = Installed(versions={"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, torch_cuda=None)
TORCH: dict[str, object] = {
    "version": "2.13.0+cpu",
    "cuda": None,
    "threads": 2,
    "gpus": [],
    "gloo": True,
    "nccl": False,
}
GPU = {"name": "NVIDIA H100", "memory_bytes": 80 << 30}


def _loaded(**torch: object) -> Probe:
    return Probe(facts={"torch": {**TORCH, **torch}, "gloo": {}, "fbgemm": {}, "torchrec": {}})


def _line(name: str, found: Installed = CPU, loaded: Probe | None = None) -> Finding:
    (finding,) = [finding for finding in examine(found, loaded or _loaded()) if finding.name == name]
    return finding


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_doctor_exits_with_0_here_and_its_json_covers_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _run(capsys, "--json")
    findings: list[dict[str, Any]] = json.loads(out)
    assert code == 0, out
    assert [finding["name"] for finding in findings] == [
        "python", "versions", "torch", "gloo", "fbgemm", "torchrec", "nccl", "gpus", "cores", "memory", "disk",
    ]  # fmt: skip


def test_doctor_exits_with_1_and_prints_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Installed(versions={**CPU.versions, "fbgemm-gpu": "1.8.0"}, torch_cuda=None)
    monkeypatch.setattr("dlrm_scale.cli.doctor.installed", lambda: both)
    monkeypatch.setattr("dlrm_scale.cli.doctor.probe", _loaded)
    code, out = _run(capsys)
    assert code == 1
    assert 'to do: pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install --no-deps "fbgemm-gpu-cpu==1.8.*"' in out


def test_every_line_that_is_not_ok_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    broken = Probe(facts={"torch": {**TORCH, "gpus": [GPU]}}, failed="gloo", reason="no address")
    findings = examine(Installed(versions={"torch": "2.13.0"}, torch_cuda="13.0"), broken)
    not_ok = [finding for finding in findings if finding.state != "ok"]
    assert {finding.name for finding in not_ok} >= {"versions", "gloo", "nccl", "cores"}
    assert all(finding.remedy for finding in not_ok)


@pytest.mark.parametrize("stage", ["torch", "gloo", "fbgemm", "torchrec"])
def test_a_library_that_does_not_load_is_a_fault_with_the_reason(stage: str) -> None:
    facts = _loaded().facts
    before = dict(list(facts.items())[: list(facts).index(stage)])
    finding = _line(stage, loaded=Probe(facts=before, failed=stage, reason="the process died of SIGSEGV"))
    assert (finding.state, finding.found) == ("fault", "does not work: the process died of SIGSEGV")


def test_gpus_are_listed_with_their_memory() -> None:
    finding = _line("gpus", loaded=_loaded(gpus=[GPU, GPU], nccl=True, cuda="13.0"))
    assert finding.found == "2: NVIDIA H100 (80.0 GiB), NVIDIA H100 (80.0 GiB)"


def test_gpus_under_the_cpu_fbgemm_are_a_fault() -> None:
    wrong = Installed(versions={**CPU.versions, "torch": "2.13.0"}, torch_cuda="13.0")
    finding = _line("versions", found=wrong, loaded=_loaded(gpus=[GPU], nccl=True, cuda="13.0"))
    assert (finding.state, finding.remedy) == ("fault", "make install DEVICE=cuda")


def test_gpus_without_nccl_are_a_fault() -> None:
    assert _line("nccl", loaded=_loaded(gpus=[GPU])).state == "fault"


def test_more_threads_than_cores_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    finding = _line("cores")
    assert finding.state == "note"
    assert "OMP_NUM_THREADS is 4096" in finding.found


def test_a_containers_quota_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_scale.cli.doctor.usable_cores", lambda: 3)
    monkeypatch.setattr("dlrm_scale.cli.doctor.os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    finding = _line("cores")
    assert (finding.state, finding.found) == ("note", "3, but OMP_NUM_THREADS is 4")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert _line("cores").found.startswith("3 by a container's quota, 16 by affinity")


def test_little_memory_and_disk_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_scale.cli.doctor.LOW_MEMORY_BYTES", 1 << 62)
    monkeypatch.setattr("dlrm_scale.cli.doctor.LOW_DISK_BYTES", 1 << 62)
    assert (_line("memory").state, _line("disk").state) == ("note", "note")
