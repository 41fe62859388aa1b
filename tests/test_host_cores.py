"""Cores that a process may keep busy, under the quotas of containers."""

from pathlib import Path

import pytest

from dlrm_scale import host_cores
from dlrm_scale.host_cores import usable_cores


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cores.os, "sched_getaffinity", lambda _: set(range(16)))


def _host(root: Path, cgroup: str, files: dict[str, object]) -> int:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, content in files.items():
        file = root / "sys" / "fs" / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return usable_cores(root)


def test_without_a_quota_affinity_counts(tmp_path: Path) -> None:
    assert _host(tmp_path / "none", "", {}) == 16
    assert _host(tmp_path / "v2", "0::/\n", {"cpu.max": "max 100000"}) == 16
    first = {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}
    assert _host(tmp_path / "v1", "4:cpu:/\n", first) == 16


@pytest.mark.parametrize(("quota", "cores"), [(400000, 4), (350000, 3), (50000, 1), (3200000, 16)])
def test_a_quota_pays_for_whole_cores_and_at_least_one(tmp_path: Path, quota: int, cores: int) -> None:
    assert _host(tmp_path / "v2", "0::/\n", {"cpu.max": f"{quota} 100000"}) == cores
    # the group's path is the host's, which isn't mounted in the container
    first = {"cpu,cpuacct/cpu.cfs_quota_us": quota, "cpu,cpuacct/cpu.cfs_period_us": 100000}
    assert _host(tmp_path / "v1", "9:name=systemd:/\n4:cpu,cpuacct:/docker/abc\n", first) == cores


def test_the_tightest_quota_from_the_group_to_the_root_counts(tmp_path: Path) -> None:
    files = {
        "jobs/cpu.max": "200000 100000",
        "jobs/17/cpu.max": "500000 50000",
        "cpu.max": "max 100000",
        "other/cpu.max": "100000 100000",
    }
    assert _host(tmp_path, "0::/jobs/17\n", files) == 2
