"""Which sharding plan scores with a run that was trained with one of its own."""

from collections.abc import Sequence
from pathlib import Path

from dlrm_scale.config import Config
from dlrm_scale.errors import PlanError
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.given_plan import differences
from dlrm_scale.sharding.hosts import ranks_per_host
from dlrm_scale.sharding.plan_file import PlanFile, load_plan
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.run_folder import RunFolder

__all__ = ["scoring_plan"]


def scoring_plan(
    config: Config, run: str, tables: Sequence[TableSpec], ranks: Ranks
) -> tuple[Config, PlanFile | None, list[str]]:
    """Take the run's plan where it is for as many ranks and hosts; else let TorchRec plan, and say so. A collective.

    Scores agree to rounding whatever the plan, so a run is scored on any number of ranks.

    Args:
        config: of the run.
        run: its folder.
        tables: of the model on the rows that are scored.
        ranks: that score.

    Returns:
        The config to build with, the plan to give to `build_on_ranks`, and lines for the user.
    """
    if config.sharding.plan == "torchrec":
        return config, None, []
    host_ranks = ranks_per_host(config.sharding.ranks_per_host, ranks)
    answer: object = None
    if ranks.rank == 0:
        try:
            plan = load_plan(RunFolder(path=Path(run)).plan)
        except PlanError as error:
            answer = error.message
        else:
            changed = differences(
                plan,
                tables,
                optimizer=config.sparse_optimizer.kind,
                ranks=ranks.ranks,
                ranks_per_host=host_ranks,
            )
            answer = "; ".join(changed[:2]) if changed else plan
    answer = ranks.broadcast_object(answer)
    if isinstance(answer, PlanFile):
        return config, answer, []
    sharding = config.sharding.model_copy(update={"plan": "torchrec"})
    note = f"scoring with a plan of TorchRec's in place of the run's: {answer}"
    return config.model_copy(update={"sharding": sharding}), None, [note]
