"""Wrong sets of packages are found by name, with the commands that mend them."""

from pathlib import Path

import pytest

from dlrm_scale.errors import InstallError
from dlrm_scale.install import Installed, check_install, faults, installed

CPU = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}
CUDA = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}


def test_this_environment_fits_together() -> None:
    assert faults(installed()) == []
    check_install()


@pytest.mark.parametrize(("versions", "cuda"), [(CPU, None), (CUDA, "13.0")])
def test_the_pinned_trios_have_no_fault(versions: dict[str, str], cuda: str | None) -> None:
    assert faults(Installed(versions=versions, torch_cuda=cuda)) == []


@pytest.mark.parametrize(
    ("torch", "fbgemm"), [("2.13.0+cpu", "1.9.0"), ("2.14.0+cpu", "1.8.0"), ("2.12.1+cpu", "1.8.0")]
)
def test_an_fbgemm_of_another_torch_is_a_fault_that_names_the_fitting_version(torch: str, fbgemm: str) -> None:
    listed = faults(Installed(versions={**CPU, "torch": torch, "fbgemm-gpu-cpu": fbgemm}, torch_cuda=None))
    fitting = int(torch.split(".")[1]) - 5
    assert f"fbgemm-gpu-cpu {fbgemm} does not go with torch {torch}" in listed[0].message
    assert listed[0].remedy == f'pip install --no-deps "fbgemm-gpu-cpu==1.{fitting}.*"'


def test_a_torchrec_of_another_torch_is_a_fault() -> None:
    (fault,) = faults(Installed(versions={**CPU, "torchrec": "1.7.0"}, torch_cuda=None))
    assert fault.remedy == 'pip install --no-deps "torchrec==1.8.*"'


@pytest.mark.parametrize(("cuda", "kept"), [(None, "fbgemm-gpu-cpu"), ("13.0", "fbgemm-gpu")])
def test_both_fbgemm_builds_are_a_fault_and_the_build_that_fits_torch_is_kept(cuda: str | None, kept: str) -> None:
    (fault,) = faults(Installed(versions={**CPU, "fbgemm-gpu": "1.8.0"}, torch_cuda=cuda))
    assert "both installed" in fault.message
    assert fault.remedy == (f'pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install --no-deps "{kept}==1.8.*"')


def test_the_cuda_fbgemm_under_a_cpu_torch_is_a_fault() -> None:
    (fault,) = faults(Installed(versions={**CUDA, "torch": "2.13.0+cpu"}, torch_cuda=None))
    assert "fbgemm-gpu 1.8.0 is the CUDA build" in fault.message


@pytest.mark.parametrize("absent", ["torch", "torchrec", "fbgemm-gpu-cpu"])
def test_an_absent_package_is_named(absent: str) -> None:
    versions = {name: version for name, version in CPU.items() if name != absent}
    (fault,) = faults(Installed(versions=versions, torch_cuda=None))
    assert fault.message == f"{absent.removesuffix('-gpu-cpu')} is not installed"


def test_cpu_builds_cannot_train_on_gpus() -> None:
    (fault,) = faults(Installed(versions=CPU, torch_cuda=None), device="cuda")
    assert fault.remedy == "make install DEVICE=cuda"
    assert faults(Installed(versions=CUDA, torch_cuda="13.0"), device="cuda") == []


def test_check_install_finds_a_second_fbgemm_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fbgemm_gpu", "fbgemm_gpu_cpu"):
        record = tmp_path / f"{name}-1.8.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.8.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InstallError, match="both installed") as caught:
        check_install()
    assert caught.value.remedy is not None
    assert caught.value.remedy.startswith("pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu")
