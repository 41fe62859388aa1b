"""Plans are alive together as far as memory goes, and every group has the plan that all compare by."""

from dlrm_scale.planning.measuring.plan_groups import group_plans

SIZES = {"anchor": [10, 20], "a": [30, 30], "b": [50, 10], "c": [5, 5], "huge": [500, 0]}


def test_all_plans_are_one_group_where_they_fit() -> None:
    groups, refused = group_plans({n: s for n, s in SIZES.items() if n != "huge"}, 2, 160, "anchor")
    assert groups == [["anchor", "a", "b", "c"]], "30 + 60 + 60 + 10 bytes"
    assert refused == {}


def test_groups_share_the_anchor_and_stay_within_memory() -> None:
    groups, refused = group_plans(SIZES, 2, 100, "anchor")
    assert groups == [["anchor", "a"], ["anchor", "b", "c"]]
    assert list(refused) == ["huge"]
    assert "with anchor beside it" in refused["huge"]


def test_hosts_count_apart() -> None:
    groups, refused = group_plans(SIZES, 1, 100, "anchor")
    assert groups == [["anchor", "a", "b", "c"]]
    assert list(refused) == ["huge"]


def test_nothing_is_measured_where_the_anchor_alone_is_too_large() -> None:
    groups, refused = group_plans(SIZES, 2, 20, "anchor")
    assert groups == []
    assert set(refused) == set(SIZES)
