"""Says what is wrong with checkpoints that a crash has left, or that a program has read beside others."""

from collections.abc import Collection
from functools import cache, lru_cache

import torch

from dlrm_scale.checkpoint import Chain, find_chain, restore
from dlrm_scale.checkpoint.files.codec import decode
from dlrm_scale.checkpoint.files.format import TensorSource, file_fault
from dlrm_scale.checkpoint.files.manifest import FileRecord
from dlrm_scale.checkpoint.files.manifest_files import MANIFEST_LIMIT_BYTES, list_manifests, read_manifest
from dlrm_scale.checkpoint.files.quantize import encoded_source, lossy_rows
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.errors import CheckpointError
from dlrm_scale.schema import TableSpec
from tests.checkpoint.memory_storage import MemoryStorage
from tests.checkpoint.simulated_run import Truth, make_layout, shards_of
from tests.checkpoint.stepped_run import OPTIMIZER, truth_of

__all__ = ["faults_of", "judge", "rows_that_are", "tables_of"]


def judge(storage: Storage, *, encoded: bool = False, excused: Collection[str] = ()) -> tuple[int, list[str]]:
    """The step that a resume takes, 0 for none, and what is wrong with what it gets.

    Args:
        storage: what is left.
        encoded: deltas were written with int8 rows and bf16 state, some of them at least.
        excused: manifests that may name data which isn't there.
    """
    problems = [
        f"{name} is there and its {data.name} {fault}"
        for name in list_manifests(storage)
        if name not in excused
        for data in _data_of(name, storage.read(name, MANIFEST_LIMIT_BYTES))
        if (fault := file_fault(storage, data, read_all=True)) is not None
    ]
    try:
        chain = find_chain(storage, verify="full")
    except CheckpointError as error:
        return 0, [*problems, error.message]
    if chain is None:
        return 0, problems
    problems += [f"skipped {skip}" for skip in chain.skipped if not any(name in str(skip) for name in excused)]
    return chain.step, problems + faults_of(chain, encoded=encoded)


def faults_of(chain: Chain, *, encoded: bool = False) -> list[str]:
    """Restore a chain on as many ranks as it was written by; what isn't that of its step.

    A row must be that of the step to the last bit; with `encoded` it may also be what those bits are, encoded and
    decoded again.
    """
    ranks, tables = chain.tip.ranks, tables_of(chain)
    layout, truth = make_layout("table_wise", ranks, tables), _right(chain.step, tables)
    problems = []
    for rank in range(ranks):
        shards = shards_of(layout, truth, rank, blank=True)
        got = restore(chain, layout=layout, shards=shards, rank=rank, ranks=ranks, optimizer=OPTIMIZER)
        for shard, right in zip(shards, shards_of(layout, truth, rank), strict=True):
            right_rows = rows_that_are(right.weight, shard.weight, "int8_rows" if encoded else None)
            for name, values in right.state.items():
                right_rows &= rows_that_are(values, shard.state[name], "bf16" if encoded else None)
            if not right_rows.all():
                wrong = torch.nonzero(~right_rows).flatten().tolist()
                problems.append(f"table {shard.region.table} isn't that of step {chain.step} in rows {wrong[:5]}")
        if not torch.equal(got.dense["over.weight"], torch.full((3, 2), float(chain.step))):
            problems.append(f"the dense weights aren't those of step {chain.step}")
        if got.cursor != {"step": chain.step}:
            problems.append(f"the cursor isn't that of step {chain.step}")
        if got.rank_state is None or got.rank_state["rng"].tolist() != [rank, chain.step % 256]:
            problems.append(f"rank {rank}'s state isn't that of step {chain.step}")
    return problems


def tables_of(chain: Chain) -> tuple[TableSpec, ...]:
    """The tables that a chain holds."""
    return tuple(TableSpec(name=table.name, rows=table.rows, dim=table.dim) for table in chain.tip.tables)


def rows_that_are(right: torch.Tensor, found: torch.Tensor, codec: str | None) -> torch.Tensor:
    """`[n]` bool: the rows of `found` with the bits of `right`, or with what `codec` makes of them where it may."""
    same = _same_rows(right, found)
    if codec is not None and len(right):
        source = encoded_source(TensorSource.whole("", right), codec)
        rounded = decode(codec, torch.cat(list(source.blocks())))
        same |= _same_rows(rounded, found) & ~lossy_rows(codec, right)
    return same


def _same_rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    same = one == other
    return same if same.dim() == 1 else same.all(dim=1)


@lru_cache(maxsize=1024)
def _data_of(name: str, content: bytes) -> tuple[FileRecord, ...]:
    # One manifest is in thousands of states, and reading it took half of the time.
    found = read_manifest(MemoryStorage({name: content}), name)
    return found.manifest.files if found.manifest is not None else ()


@cache
def _right(step: int, tables: tuple[TableSpec, ...]) -> Truth:
    return truth_of(step, tables)
