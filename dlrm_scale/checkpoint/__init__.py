"""Incremental checkpoints: baselines and deltas of touched rows that restore to any sharding layout."""

from dlrm_scale.checkpoint.chain import Chain, Skipped, find_chain, open_chain
from dlrm_scale.checkpoint.engine import CheckpointEngine, SaveOutcome
from dlrm_scale.checkpoint.format import DamagedFileError
from dlrm_scale.checkpoint.restore import Restored, restore
from dlrm_scale.checkpoint.storage import Location, Storage, open_storage
from dlrm_scale.checkpoint.store_calls import Retries
from dlrm_scale.checkpoint.verify import CheckpointRow, Problem, list_checkpoints, verify

__all__ = [
    "Chain",
    "CheckpointEngine",
    "CheckpointRow",
    "DamagedFileError",
    "Location",
    "Problem",
    "Restored",
    "Retries",
    "SaveOutcome",
    "Skipped",
    "Storage",
    "find_chain",
    "list_checkpoints",
    "open_chain",
    "open_storage",
    "restore",
    "verify",
]
