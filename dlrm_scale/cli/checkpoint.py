"""`dlrm-scale checkpoint`: the commands for a run's checkpoints, one file each.

None needs a GPU or a process group, and none imports torchrec or fbgemm.
"""

import typer

from dlrm_scale.cli.checkpoint_export import export
from dlrm_scale.cli.checkpoint_gc import gc
from dlrm_scale.cli.checkpoint_guard import guarded
from dlrm_scale.cli.checkpoint_ls import ls
from dlrm_scale.cli.checkpoint_merge import merge
from dlrm_scale.cli.checkpoint_pin import pin, unpin
from dlrm_scale.cli.checkpoint_show import show
from dlrm_scale.cli.checkpoint_verify import verify

__all__ = ["app"]

app = typer.Typer(
    help="List, compare, verify, merge, pin, export and clean up the checkpoints of a run.", no_args_is_help=True
)
for _command in (ls, show, verify, merge, gc, pin, unpin, export):
    app.command()(guarded(_command))
