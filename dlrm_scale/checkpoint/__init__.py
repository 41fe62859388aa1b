"""Incremental checkpoints: baselines and deltas of touched rows that restore to any sharding layout."""

from dlrm_scale.checkpoint.chain.chain import Chain, Skipped, find_chain, open_chain
from dlrm_scale.checkpoint.files.format import DamagedFileError
from dlrm_scale.checkpoint.restoring.restore import Restored, restore
from dlrm_scale.checkpoint.saving.engine import CheckpointEngine, SaveOutcome
from dlrm_scale.checkpoint.storage.storage import Location, Storage, open_storage
from dlrm_scale.checkpoint.storage.store_calls import Retries
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
