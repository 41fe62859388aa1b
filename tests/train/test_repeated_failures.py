"""What fails at every save is told in full once, and then counted."""

from types import SimpleNamespace
from typing import Any, cast

from dlrm_scale.checkpoint import SaveOutcome
from dlrm_scale.train.run_saver import RunSaver

_FULL = "rank 0: [Errno 28] No space left on device: data/{:08d}-s1a{}-r0.safetensors"


def _saver(said: list[str]) -> RunSaver:
    report = SimpleNamespace(record=lambda *values: None, say=said.append)
    cadence = SimpleNamespace(ended=lambda outcome: {}, conflict=lambda: None)
    others = dict.fromkeys(("engine", "sharded", "touched", "clock"), None)
    config = SimpleNamespace(policy="consecutive", on_failure="warn")
    names = {"ranks": SimpleNamespace(rank=1), "cadence": cadence, "report": report, "config": config, "best": None}
    fields = RunSaver.__dataclass_fields__
    values = {name: names.get(name, others.get(name)) for name in fields if fields[name].init}
    return cast(Any, RunSaver)(**values | {"saved_step": 0, "saved_as": ""})  # type: ignore[no-any-return]


def _outcome(step: int, error: str | None, warning: str | None = None) -> SaveOutcome:
    return SaveOutcome(
        step=step,
        seq=step,
        manifest=f"manifests/{step:08d}-s1.json",
        kind="delta",
        committed=error is None,
        bytes=0,
        rows=0,
        stall_seconds=0.0,
        persist_seconds=0.0,
        error=error,
        warning=warning,
    )


def test_a_full_disk_is_told_in_full_once_and_then_counted() -> None:
    said: list[str] = []
    saver = _saver(said)
    for step in (10, 20, 30):
        saver._tell(_outcome(step, _FULL.format(step // 10, step)), {}, cast(Any, saver.report))
    first = f"warning: checkpoint of step 10 failed: {_FULL.format(1, 10)}; its rows stay marked for the next one"
    assert said == [
        first,
        "warning: checkpoint of step 20 failed: as before, 2 in a row",
        "warning: checkpoint of step 30 failed: as before, 3 in a row",
    ]
    saver._tell(_outcome(40, "rank 1: Connection refused"), {}, cast(Any, saver.report))
    assert "Connection refused" in said[-1]
    saver._tell(_outcome(50, None), {}, cast(Any, saver.report))
    saver._tell(_outcome(60, "rank 1: Connection refused"), {}, cast(Any, saver.report))
    assert "step 60 failed: rank 1: Connection refused; its rows" in said[-1]
    assert len(said) == 5


def test_a_warning_after_each_commit_is_counted_too() -> None:
    said: list[str] = []
    saver = _saver(said)
    for step in (10, 20):
        saver._tell(_outcome(step, None, f"old checkpoints can't be removed: data/{step}"), {}, cast(Any, saver.report))
    assert said == [
        "warning: checkpoint of step 10: old checkpoints can't be removed: data/10",
        "warning: checkpoint of step 20: as before, 2 in a row",
    ]
