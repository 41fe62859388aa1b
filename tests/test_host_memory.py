"""Memory that a process may use, under the limits of containers."""

from pathlib import Path

import pytest

from dlrm_scale.host_memory import HostMemory, host_memory
from dlrm_scale.units import GIB, MIB


def _host(root: Path, cgroup: str, **files: object) -> HostMemory:
    """Make a host with 64 GiB, 50 free; `files` have `__` for `/` and hold what cgroups say."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (proc.parent / "meminfo").write_text(
        f"MemTotal:  {64 * MIB} kB\nMemFree:  1 kB\nMemAvailable:   {50 * MIB} kB\nHugePages_Total:  0\n"
    )
    (proc / "cgroup").write_text(cgroup)
    for name, content in files.items():
        file = root / "sys" / "fs" / "cgroup" / name.replace("__", "/").replace("memory_", "memory.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return host_memory(root)


def test_without_a_limit_all_memory_counts(tmp_path: Path) -> None:
    unlimited = HostMemory(total_bytes=64 * GIB, free_bytes=50 * GIB, limited=False)
    assert _host(tmp_path / "none", "") == unlimited
    assert _host(tmp_path / "v2", "0::/\n", memory_max="max", memory_current=5) == unlimited
    first = {"memory__memory_limit_in_bytes": 9223372036854771712, "memory__memory_usage_in_bytes": 5}
    assert _host(tmp_path / "v1", "4:memory:/\n", **first) == unlimited


def test_a_containers_limit_counts_less_what_is_used_but_not_idle_file_pages(tmp_path: Path) -> None:
    used = {"memory_current": 6 * GIB, "memory_stat": f"anon 1\ninactive_file {2 * GIB}"}
    found = _host(tmp_path / "v2", "0::/\n", memory_max=8 * GIB, **used)
    assert found == HostMemory(total_bytes=8 * GIB, free_bytes=4 * GIB, limited=True)
    first = {
        "memory__memory_limit_in_bytes": 8 * GIB,
        "memory__memory_usage_in_bytes": 6 * GIB,
        "memory__memory_stat": f"cache 9\ntotal_inactive_file {2 * GIB}",
    }
    # the group's path is the host's, which isn't mounted in the container
    assert _host(tmp_path / "v1", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n", **first) == found


def test_the_tightest_limit_from_the_group_to_the_root_counts(tmp_path: Path) -> None:
    found = _host(
        tmp_path,
        "0::/jobs/17\n",
        jobs__memory_max=16 * GIB,
        jobs__memory_current=15 * GIB,
        jobs__17__memory_max=20 * GIB,
        jobs__17__memory_current=1 * GIB,
    )
    assert found == HostMemory(total_bytes=16 * GIB, free_bytes=1 * GIB, limited=True)


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path: Path) -> None:
    assert _host(tmp_path, "0::/\n", memory_max=GIB, memory_current=2 * GIB).free_bytes == 0


def test_this_host_has_memory() -> None:
    found = host_memory()
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.total_bytes > 100 * MIB


@pytest.mark.parametrize("limit", [GIB, 3 * GIB])
def test_doctor_and_planner_see_the_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from dlrm_scale.cli import doctor
    from dlrm_scale.config import Config
    from dlrm_scale.sharding import plan
    from dlrm_scale.sharding.ranks import close_ranks, init_ranks

    limited = HostMemory(total_bytes=limit, free_bytes=limit // 2, limited=True)
    monkeypatch.setattr("dlrm_scale.cli.doctor.host_memory", lambda: limited)
    monkeypatch.setattr(plan, "host_memory", lambda: limited)
    assert doctor._memory().found.endswith(f"free under a limit of {limit // GIB}.0 GiB")
    ranks = init_ranks("cpu", 5)
    try:
        assert plan._device_memory_bytes(Config(), ranks) == limit // ranks.local_ranks
    finally:
        close_ranks()
