"""`dlrm-scale plan` and `dlrm-scale plan diff`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlrm_scale.cli.announce import announce
from dlrm_scale.cli.stats import Optimizer

if TYPE_CHECKING:
    from dlrm_scale.planning.plan.analysis import Analysis
    from dlrm_scale.planning.plan.request import PlanRequest
    from dlrm_scale.planning.plan.simulate import Simulation

__all__ = ["app", "diff", "plan"]

_FIRST, _LAST = 8, 4096
"""Devices of a simulation without --world-size."""
_LONGEST = 40
"""Characters of a wrong --world-size that are shown."""

app = typer.Typer(
    name="plan",
    invoke_without_command=True,
    help="Plan which rank holds which part of each table, on a cluster at hand or described.",
)


@app.callback()
def plan(
    context: typer.Context,
    tables: Annotated[
        str | None,
        typer.Option(
            help="A name of `dlrm-scale stats`, a tables file, a dataset, a run, or a config with --set; with a run or "
            "config its dense part counts too."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A ready-made cluster (a100x8, h100x8, h200x8) or a cluster file.")
    ] = None,
    world_size: Annotated[
        str | None,
        typer.Option(metavar="N", help="Ranks; with --simulate FIRST..LAST.", show_default="8..4096 with --simulate"),
    ] = None,
    batch_size_per_rank: Annotated[int | None, typer.Option(metavar="B", help="Rows of a batch a rank.", min=1)] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Ranks of a host.", min=1, show_default="the cluster's")
    ] = None,
    optimizer: Annotated[Optimizer | None, typer.Option(help="Of the tables.", show_default="the tables'")] = None,
    dim: Annotated[int | None, typer.Option(help="Columns of all tables.", show_default="the tables'")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting of a config; repeatable."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a rank, as in 80GiB.", show_default="the cluster's")
    ] = None,
    reserve: Annotated[
        float | None, typer.Option(help="Share of it kept for what isn't counted.", min=0, max=0.99)
    ] = None,
    allow_split_row_state: Annotated[
        bool,
        typer.Option(
            "--allow-split-row-state",
            help="Offer types that cut columns too: row-wise Adagrad then keeps a state for each column shard, another "
            "algorithm. The trainer takes such a plan with sharding.allow_split_row_state=true.",
        ),
    ] = False,
    constrain: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE=TYPE,…", help="Sharding types of a table, as C3=row_wise|table_wise; repeatable."),
    ] = None,
    force_plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rate this plan file, and write it with -o.")
    ] = None,
    force_kind: Annotated[str | None, typer.Option(metavar="TYPE", help="One sharding type for all tables.")] = None,
    effort: Annotated[
        float,
        typer.Option(help="Work of the solver, in multiples of its default; 0 takes its first plan.", min=0, max=1e6),
    ] = 1.0,
    torchrec: Annotated[
        bool,
        typer.Option(
            "--torchrec/--no-torchrec", help="Let TorchRec's planner plan too, and rate all plans in its costs."
        ),
    ] = True,
    what_if: Annotated[
        bool,
        typer.Option("--what-if/--no-what-if", help="Plan again with more memory and with types that cut columns."),
    ] = True,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Plan for numbers of devices from FIRST to LAST, each twice the last.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the plan, for sharding.plan of `dlrm-scale train`."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with figures.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files of -o and --html.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Plan which rank holds which part of each table.

    Compares our plan with TorchRec's, each in our costs and in TorchRec's, with the bound that no plan can beat, and
    says which rank and phase decide. Equal calls give equal output, but for the time that planning took. Exits with 3
    where nothing fits, with the changes that would make it fit, or a table has no legal type; with 2 where a plan file
    is missing, malformed or made for something else.
    """
    if context.invoked_subcommand is not None:
        return
    from dlrm_scale.planning.plan.no_fit import NothingFits
    from dlrm_scale.planning.text_file import check_outputs

    check_outputs({"-o": out, "--html": html}, force=force)
    first, last = _sizes(world_size, simulate)
    request = _request(
        tables=tables,
        cluster=cluster,
        ranks=first,
        batch_size_per_rank=batch_size_per_rank,
        ranks_per_host=ranks_per_host,
        optimizer=optimizer,
        dim=dim,
        overrides=overrides or [],
        memory=memory,
        reserve=reserve,
        wide=allow_split_row_state,
        constrain=constrain or [],
        force_kind=force_kind,
        sizes_follow=simulate,
    )
    if simulate:
        _check_simulation(out, force_plan)
        _simulate(request, last, effort, html, force, json_output)
        return
    try:
        analysis = _analyze(request, force_plan, effort, torchrec, what_if)
    except NothingFits as error:
        if json_output:
            _print_json(error.as_dict())
        raise
    _deliver(analysis, out, html, force, json_output)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan file.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Tell two plan files apart: tables that moved, bytes, predicted change. The plan.json of a run is one too."""
    from dlrm_scale.planning.plan.compare import compare_plans
    from dlrm_scale.planning.report.plan_text import describe_difference
    from dlrm_scale.sharding.plan_file import load_plan

    found = compare_plans(load_plan(before), load_plan(after))
    if json_output:
        _print_json(found.as_dict())
    else:
        typer.echo(describe_difference(found))


def _sizes(world_size: str | None, simulate: bool) -> tuple[int, int]:
    """Read `N` or `FIRST..LAST`."""
    from dlrm_scale.errors import ConfigError

    text = world_size
    if text is None:
        if not simulate:
            raise ConfigError("--world-size is missing", remedy="say how many ranks there are, as --world-size 64")
        return _FIRST, _LAST
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    first, dots, last = text.partition("..")
    try:
        sizes = int(first), int(last) if dots else int(first)
    except ValueError:  # no number, or one of more digits than Python reads
        sizes = 0, 0
    written = all(part.isdecimal() for part in (first, *([last] if dots else [])))
    if not written or not 0 < sizes[0] <= sizes[1]:
        raise ConfigError(
            f"--world-size {shown} is not allowed",
            remedy="write a number, or FIRST..LAST as in 8..4096",
        )
    if dots and not simulate:
        raise ConfigError(
            f"--world-size {shown}: several numbers need --simulate", remedy="name one, or add --simulate"
        )
    return sizes if dots or not simulate else (sizes[0], _LAST)


def _request(
    *,
    tables: str | None,
    cluster: str | None,
    ranks: int,
    batch_size_per_rank: int | None,
    ranks_per_host: int | None,
    optimizer: Optimizer | None,
    dim: int | None,
    overrides: list[str],
    memory: str | None,
    reserve: float | None,
    wide: bool,
    constrain: list[str],
    force_kind: str | None,
    sizes_follow: bool,
) -> "PlanRequest":
    from dlrm_scale.errors import ConfigError
    from dlrm_scale.planning.cluster.cluster_file import cluster_names, load_cluster
    from dlrm_scale.planning.plan.request import plan_request, read_constraints
    from dlrm_scale.planning.tables.load import config_of, load_tables
    from dlrm_scale.units import parse_bytes

    for value, name, remedy in (
        (tables, "--tables", "name a table set, as --tables mlperf_dcnv2, or a file of `dlrm-scale stats -o`"),
        (cluster, "--cluster", f"name one of {', '.join(cluster_names())}, or a file of `dlrm-scale calibrate -o`"),
        (batch_size_per_rank, "--batch-size-per-rank", "say how many rows a rank's batch has"),
    ):
        if value is None:
            raise ConfigError(f"{name} is missing", remedy=remedy)
    assert tables is not None
    assert cluster is not None
    assert batch_size_per_rank is not None
    found = load_tables(
        tables,
        overrides=overrides,
        dim=dim,
        optimizer=None if optimizer is None else optimizer.value,
        on_progress=_measuring(),
    )
    described = load_cluster(cluster)
    if memory is not None:
        described = described.model_copy(update={"memory_bytes": parse_bytes(memory), "memory_source": "--memory"})
    if reserve is not None:
        described = described.model_copy(update={"reserve": reserve})
    types = read_constraints(constrain) if constrain else {}
    if force_kind is not None and types:
        raise ConfigError("--force-kind and --constrain contradict each other", remedy="leave one of them out")
    if sizes_follow and ranks_per_host is None:
        ranks_per_host = min(ranks, described.ranks_per_host)
    return plan_request(
        found,
        described,
        ranks=ranks,
        batch_size_per_rank=batch_size_per_rank,
        ranks_per_host=ranks_per_host,
        wide=wide,
        types=types,
        forced_kind=force_kind,
        config=config_of(tables, overrides=overrides),
    )


def _analyze(
    request: "PlanRequest", force_plan: Path | None, effort: float, torchrec: bool, what_if: bool
) -> "Analysis":
    from dlrm_scale.planning.plan.analysis import Effort, analyze
    from dlrm_scale.planning.plan.proposal import given_shapes
    from dlrm_scale.planning.plan.torchrec_peer import plan_with_torchrec
    from dlrm_scale.sharding.plan_file import load_plan
    from dlrm_scale.sharding.third_party_logs import silence_known_warnings

    if torchrec:
        silence_known_warnings()
    given = None if force_plan is None else given_shapes(load_plan(force_plan), request)
    return analyze(
        request,
        {"torchrec": plan_with_torchrec} if torchrec else {},
        given=given,
        effort=Effort(of_default=effort),
        torchrec_costs=torchrec,
        what_if=what_if,
        say=announce,
    )


def _deliver(analysis: "Analysis", out: Path | None, html: Path | None, force: bool, json_output: bool) -> None:
    from dlrm_scale.planning.plan.proposal import plan_file_of
    from dlrm_scale.planning.report.plan_text import describe_analysis
    from dlrm_scale.planning.report.plan_values import analysis_values
    from dlrm_scale.planning.text_file import write_text
    from dlrm_scale.sharding.plan_file import format_plan
    from dlrm_scale.sharding.rules import COLUMN_SPLIT_TYPES

    written = []
    if out is not None:
        made = plan_file_of(analysis.comparison)
        write_text(out, format_plan(made), force=force)
        settings = f"--set sharding.plan={out}"
        if made.optimizer == "rowwise_adagrad" and any(table.type in COLUMN_SPLIT_TYPES for table in made.tables):
            settings += " --set sharding.allow_split_row_state=true"
        written.append(f"plan: {out}; train with {settings}")
    if html is not None:
        from dlrm_scale.planning.report.plan_page import plan_page

        write_text(html, plan_page(analysis), force=force)
        written.append(f"page: {html}")
    if json_output:
        _print_json(analysis_values(analysis))
        return
    typer.echo("\n".join([describe_analysis(analysis), *([""] if written else []), *written]))


def _check_simulation(out: Path | None, force_plan: Path | None) -> None:
    from dlrm_scale.errors import ConfigError

    if out is not None or force_plan is not None:
        name = "-o" if out is not None else "--force-plan"
        raise ConfigError(f"{name} needs one number of ranks, and --simulate has many", remedy="leave one of them out")


def _simulate(
    request: "PlanRequest", last: int, effort: float, html: Path | None, force: bool, json_output: bool
) -> None:
    from dlrm_scale.errors import PlanError
    from dlrm_scale.planning.plan.analysis import Effort
    from dlrm_scale.planning.plan.cost_models import OurCosts
    from dlrm_scale.planning.plan.simulate import simulate, sizes_between
    from dlrm_scale.planning.report.plan_text import describe_simulation
    from dlrm_scale.planning.report.plan_values import simulation_values
    from dlrm_scale.planning.text_file import write_text

    sizes = sizes_between(request.ranks, last)
    found: Simulation = simulate(request, sizes, OurCosts, Effort(of_default=effort).again, announce)
    if html is not None:
        from dlrm_scale.planning.report.plan_page import simulation_page

        write_text(html, simulation_page(found), force=force)
    if json_output:
        _print_json(simulation_values(found))
    else:
        typer.echo(describe_simulation(found) + (f"\n\npage: {html}" if html is not None else ""))
    if found.knee is None:
        raise PlanError(
            f"no sharding plan fits on any of {', '.join(map(str, sizes))} devices",
            remedy=f"`dlrm-scale plan --world-size {sizes[-1]}` says what is missing there",
        )


def _print_json(values: dict[str, object]) -> None:
    json.dump(values, sys.stdout)
    sys.stdout.write("\n")


def _measuring() -> Callable[[str, int, int], None]:
    told: set[str] = set()

    def tell(what: str, done: int, total: int) -> None:
        if what not in told:
            told.add(what)
            announce(what)

    return tell
