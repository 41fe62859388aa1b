"""Files that threads take and give back."""

from dlrm_scale.data.dataset.idle_files import IdleFiles


def test_a_taken_file_is_its_takers_alone() -> None:
    closed: list[str] = []
    idle: IdleFiles[str] = IdleFiles(closed.append, most=2)
    assert idle.take("a") is None
    idle.give("a", "a1")
    assert idle.take("a") == "a1"
    assert idle.take("a") is None  # a second thread opens one of its own
    idle.give("a", "a1")
    idle.give("a", "a2")
    assert {idle.take("a"), idle.take("a")} == {"a1", "a2"}
    assert closed == []


def test_the_files_that_were_used_last_stay_open() -> None:
    closed: list[str] = []
    idle: IdleFiles[str] = IdleFiles(closed.append, most=2)
    for key in "abc":
        idle.give(key, key)
    assert closed == ["a"]
    assert idle.take("b") == "b"
    idle.give("b", "b")
    idle.give("d", "d")
    assert closed == ["a", "c"]
    assert [idle.take(key) for key in "abcd"] == [None, "b", None, "d"]
