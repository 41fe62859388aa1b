"""Lives of trainers that go through everything that a root goes through, for their crash states."""

import errno

from tests.checkpoint.crash_life import Life, Meets
from tests.checkpoint.stepped_run import RESIZED, TABLES

__all__ = [
    "life_of_policy",
    "life_with_merges",
    "quantized_life",
    "resized_life",
    "whole_life",
]


def whole_life() -> Life:
    """Starts on 2, 1 and 3 ranks: saves, failed saves, an uncertain commit, kills in a commit and in retention."""
    life = Life()
    life.start()
    assert all([life.save() for _ in range(3)])
    assert not life.save(fail=Meets("write", "-r1."))
    assert life.save()
    assert not life.save(fail=Meets("sync_folder", "manifests"), error=errno.EIO)
    assert life.save()
    life.save(kill=Meets("remove", ".tmp"))  # linked, but the folder isn't synced and nobody was told
    assert life.dead
    assert life.start(1)
    # The second delta outgrows the baseline, so that the next save removes old chains.
    kills = Meets("remove", ".json", nth=3)
    while life.save(kill=kills):
        pass
    assert life.dead
    assert life.start(3, kind="data_parallel")
    assert all([life.save() for _ in range(2)])
    return life


def life_with_merges() -> Life:
    """Merges beside a trainer: whole ones, one whose commit can't be made durable, killed ones, and retention after."""
    life = Life(baseline_ratio=100)
    life.start()
    assert all([life.save() for _ in range(3)])
    assert life.merge("delta")
    assert life.save()
    assert not life.merge("baseline", fail=Meets("sync_folder", "manifests"), error=errno.EIO)
    assert life.save()
    assert not life.merge("baseline", kill=Meets("write", "-r1.", nth=2))
    assert life.merge("baseline")
    assert life.save()
    life.merge("delta", kill=Meets("remove", ".tmp"))
    assert life.start(3)
    assert life.save()
    assert life.merge("baseline")
    assert life.start(1, baseline_ratio=1e-9)
    assert all([life.save() for _ in range(3)])
    return life


def quantized_life() -> Life:
    """Deltas of int8 rows and bf16 state: merges of them, failures, kills, resumes, and one start that writes fp32."""
    life = Life(baseline_ratio=100, delta_rows="int8", delta_state="bf16")
    life.start()
    assert all([life.save() for _ in range(3)])
    assert not life.save(fail=Meets("sync", "-r1."))
    assert life.merge("delta")
    assert life.save()
    life.save(kill=Meets("remove", ".tmp"))
    assert life.start(1, staging_limit_bytes=0, lossy_restores=1)
    assert all([life.save() for _ in range(2)])
    assert life.merge("baseline")
    assert not life.save(fail=Meets("sync_folder", "manifests"), error=errno.EIO)
    assert life.save()
    life.save(kill=Meets("link", "manifests"))
    assert life.start(3, delta_rows="fp32", lossy_restores=2)
    assert life.save()
    assert life.collect()
    assert life.start(2, kind="data_parallel", lossy_restores=2)
    assert all([life.save() for _ in range(2)])
    assert life.merge("baseline")
    assert life.save()
    return life


def resized_life() -> Life:
    """A table grows, one shrinks, one is new: a start with them that is killed before its baseline, and one that isn't.

    Then the tables have as many rows again as they had.
    """
    life = Life(keep_baselines=2, baseline_ratio=0.4)
    life.start()
    assert all([life.save() for _ in range(3)])
    assert life.start(3, tables=RESIZED)
    assert not life.save(fail=Meets("write", "-r2."))
    life.save(kill=Meets("link", "manifests"))
    assert life.start(2, tables=RESIZED)
    assert all([life.save() for _ in range(2)])
    assert life.merge("baseline")
    assert not life.save(fail=Meets("sync_folder", "manifests"), error=errno.EIO)
    assert all([life.save() for _ in range(3)])
    assert life.start(1, kind="table_wise", tables=(*TABLES, RESIZED[-1]))
    assert all([life.save() for _ in range(2)])
    assert life.collect()
    life.save(kill=Meets("remove", ".tmp"))
    return life


def life_of_policy(policy: str) -> Life:
    """Saves under a policy until its rule or ratio asks for a baseline, with failures, kills and resumes between."""
    life = Life(policy=policy, keep_baselines=1, baseline_ratio=0.6)
    life.start()
    assert all([life.save() for _ in range(3)])
    assert not life.save(fail=Meets("write", "-dense."))
    assert life.save()
    # One that supersedes the deltas before, killed when it removes them.
    life.save(kill=Meets("remove", ".json"))
    assert life.start(1)
    assert life.save()
    assert not life.save(fail=Meets("sync_folder", "manifests"), error=errno.EIO)
    assert life.save()
    assert life.merge("baseline")
    assert all([life.save() for _ in range(2)])
    life.save(kill=Meets("remove", "data/"))
    assert life.start(3, kind="data_parallel")
    kinds = []
    for _ in range(9):
        assert life.run is not None
        kinds.append(life.run.engines[0].next_kind)
        assert life.save()
    assert set(kinds) == {"baseline", "delta"}
    return life
