"""A checkpoint in formats that other programs read: whole tables without shards, deltas or row ranges.

contents       what is exported, and under which names
new_output     a file or folder that appears whole or not at all
safetensors_file, parquet_tables, dcp_folder      one format each
"""

from dlrm_scale.checkpoint.export.contents import Contents
from dlrm_scale.checkpoint.export.dcp_folder import export_dcp
from dlrm_scale.checkpoint.export.parquet_tables import export_parquet
from dlrm_scale.checkpoint.export.safetensors_file import export_safetensors

__all__ = ["Contents", "export_dcp", "export_parquet", "export_safetensors"]
