"""Cluster files: ready-made, written by hand, read back, and what is wrong with one."""

from importlib.resources import files
from pathlib import Path

import pytest

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.cluster.cluster import Cluster, Constant
from dlrm_scale.planning.cluster.cluster_file import cluster_names, format_cluster, load_cluster, save_cluster


def _constants(value: object) -> list[Constant]:
    if isinstance(value, Constant):
        return [value]
    if isinstance(value, dict):
        return [found for inner in value.values() for found in _constants(inner)]
    if hasattr(value, "__dict__"):
        return [found for inner in vars(value).values() for found in _constants(inner)]
    return []


@pytest.mark.parametrize("name", cluster_names())
def test_a_ready_made_cluster_is_read_and_written_back_as_it_stands(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    path = tmp_path / "copy.toml"
    save_cluster(cluster, path)
    assert load_cluster(path) == cluster
    assert path.read_text() == format_cluster(cluster)
    assert files("dlrm_scale.planning.cluster").joinpath(f"{name}.toml").read_text() == format_cluster(cluster)


def test_a_file_says_the_units_of_every_section_beside_its_numbers() -> None:
    for name in ("a100x8", "cpu2"):
        lines = format_cluster(load_cluster(name)).splitlines()
        sections = [number for number, line in enumerate(lines) if line.startswith("[") and "collectives" not in line]
        assert len(sections) >= 7
        for number in sections:
            assert lines[number + 1].startswith("# "), lines[number]
    text = format_cluster(load_cluster("cpu2"))
    assert "all others: per million\n# of ids (lookup)" in text
    assert "points = [  # bytes, milliseconds\n" in text


def test_what_speaks_against_measured_constants_is_kept_in_the_file(tmp_path: Path) -> None:
    noisy = load_cluster("a100x8").model_copy(update={"noise": "fit of step: 50% off"})
    save_cluster(noisy, tmp_path / "noisy.toml")
    assert load_cluster(tmp_path / "noisy.toml").noise == "fit of step: 50% off"
    assert load_cluster("a100x8").noise == ""
    assert "isn't borne out by the steps" in load_cluster("cpu2").noise


@pytest.mark.parametrize("name", ["a100x8", "h100x8", "h200x8"])
def test_constants_of_unmeasured_gpus_name_their_source_or_say_that_they_are_assumed(name: str) -> None:
    constants = _constants(load_cluster(name))
    assert len(constants) >= 38
    for constant in constants:
        known = ("assumed", "data sheet", "nccl-tests", "NCCL")
        assert any(word in constant.source for word in known), constant


def test_the_ready_made_cpu_cluster_was_measured() -> None:
    cluster = load_cluster("cpu2")
    assert (cluster.device, cluster.hosts, cluster.ranks_per_host) == ("cpu", 1, 2)
    assert cluster.clock == "elapsed"
    assert "Elapsed times" in cluster.notes
    for constant in _constants(cluster):
        assert "calibrate" in constant.source or constant.source.startswith("assumed: as table_row_wise")
    assert {costs.ranks for costs in cluster.collectives} == {2}
    assert max(cluster.fit_error.values()) < 0.15


def test_bandwidths_of_ready_made_gpus_are_those_of_their_data_sheets() -> None:
    links = {name: load_cluster(name).links for name in ("a100x8", "h100x8", "h200x8")}
    assert {name: link.host.gigabytes_per_second.value for name, link in links.items()} == {
        "a100x8": 300, "h100x8": 450, "h200x8": 450,
    }  # fmt: skip
    assert {name: link.network.gigabytes_per_second.value for name, link in links.items()} == {
        "a100x8": 25, "h100x8": 50, "h200x8": 50,
    }  # fmt: skip
    # A million values of 4 bytes at three quarters of HBM's bandwidth.
    reads = {name: load_cluster(name).forward.unique_element_ms.value for name in links}
    for name, gigabytes in (("a100x8", 2039), ("h100x8", 3350), ("h200x8", 4800)):
        assert reads[name] == pytest.approx(4e6 / (0.75e6 * gigabytes), rel=5e-3)


def _changed(tmp_path: Path, old: str, new: str) -> Path:
    text = format_cluster(load_cluster("a100x8"))
    assert text.count(old) == 1, old
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    return path


CASES = {
    "a misspelt key": (
        "memory_source =",
        "memory_sorce =",
        r"memory_source is absent\n.*unknown key 'memory_sorce'; did you mean memory_source\?",
    ),
    "a constant without its source": (
        '{value = 300.0, source = "NVLink, half of 600 GB/s of both directions (NVIDIA A100 80GB data sheet)"}',
        "{value = 300.0}",
        "links.host.gigabytes_per_second: source is absent",
    ),
    "a negative time": ("value = 0.0066", "value = -1.0", "links.start_ms: value = -1.0: .*greater than or equal to 0"),
    "an efficiency above one": (
        "{value = 0.78,",
        "{value = 1.2,",
        "links.host: efficiency must be at least 0.001 and at most 1, but is 1.2",
    ),
    "a sharding type that there isn't": (
        "table_wise = {value = 0.1,",
        "table_wize = {value = 0.1,",
        "type_ms: unknown sharding type 'table_wize'; did you mean table_wise",
    ),
    "an endless time": ("value = 0.0066", "value = 1e300", r"start_ms: value = 1e\+300: .*less than or equal to 1"),
    "a link without bandwidth": ("value = 300.0", "value = 1e-300", "gigabytes_per_second must be at least 0.001"),
    "memory of 300 digits": (
        "memory_bytes = 85899345920",
        "memory_bytes = 1" + "0" * 300,
        r"memory_bytes = 1000.*… \(301 characters\)",
    ),
    "a number that Python doesn't read": ("hosts = 1\n", "hosts = 1" + "0" * 5000 + "\n", "4300 digits"),
    "a name of two lines": ('name = "a100x8"', 'name = "a\\nb"', "character 2 is the control character"),
    "an unknown device": ('device = "cuda"', 'device = "tpu"', "device = 'tpu' is not allowed"),
    "a reserve of everything": ("reserve = 0.15", "reserve = 1.0", "reserve = 1.0: .*less than 1"),
    "a file of a later version": ("format_version = 1", "format_version = 2", "format_version = 2; this .* reads 1"),
    "a file that isn't TOML": ("hosts = 1\n", "hosts = \n", "not valid TOML"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_names_file_key_and_rule(case: str, tmp_path: Path) -> None:
    old, new, told = CASES[case]
    path = _changed(tmp_path, old, new)
    with pytest.raises(ConfigError, match=told) as caught:
        load_cluster(path)
    assert str(path) in caught.value.message
    assert caught.value.remedy


def _with_curves(tmp_path: Path, curves: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(format_cluster(load_cluster("a100x8")) + curves)
    return path


def test_a_curve_that_falls_is_refused_with_its_place(tmp_path: Path) -> None:
    curve = """
[[collectives]]
collective = "all_reduce"
ranks = 2
[collectives.curve]
source = "by hand"
points = [[1, 2.0], [10, 1.0]]
"""
    with pytest.raises(ConfigError, match=r"collectives number 1: more bytes can't take less time: 1.0 ms follows 2.0"):
        load_cluster(_with_curves(tmp_path, curve))
    swapped = curve.replace("[[1, 2.0], [10, 1.0]]", "[[10, 1.0], [1, 2.0]]")
    with pytest.raises(ConfigError, match="bytes must rise from point to point, but 1 follows 10"):
        load_cluster(_with_curves(tmp_path, swapped))
    sound = curve.replace("[10, 1.0]", "[10, 3.0]")
    assert load_cluster(_with_curves(tmp_path, sound)).collectives[0].curve.milliseconds(19) == 4.0
    with pytest.raises(ConfigError, match="all_reduce over 2 ranks on 1 hosts is there twice"):
        load_cluster(_with_curves(tmp_path, sound + sound))


def test_a_cluster_that_isnt_there_is_told_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no cluster or file 'a10x8'; did you mean 'a100x8'") as caught:
        load_cluster("a10x8")
    assert "h200x8" in str(caught.value.remedy)


def test_a_file_that_is_there_isnt_replaced_without_being_asked(tmp_path: Path) -> None:
    cluster = load_cluster("h100x8")
    path = tmp_path / "mine.toml"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists already"):
        save_cluster(cluster, path)
    assert path.read_text() == "precious"
    save_cluster(cluster, path, force=True)
    assert load_cluster(path) == cluster
    with pytest.raises(ConfigError, match=r"a cluster file ends in .toml"):
        save_cluster(cluster, tmp_path / "mine.json")


def test_neither_links_nor_curves_is_refused() -> None:
    content = load_cluster("a100x8").model_dump() | {"links": None}
    with pytest.raises(ValueError, match=r"needs \[links\], measured \[\[collectives\]\], or both"):
        Cluster.model_validate(content)
