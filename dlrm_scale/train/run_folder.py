"""A run's folder: what is in it, who may create it, and which settings a resumed run may change.

runs/a/
  config.toml       the resolved config
  run.json          what the run was made from, and its id
  plan.json         the sharding plan of the last start (`sharding.plan_file`)
  log.jsonl         one JSON object a log step, appended
  tensorboard/      curves
  checkpoints/      see `checkpoint`; elsewhere with checkpoint.path
  profile/          traces of `train.profile_steps`
  best.json         the best checkpoint by train.best_metric
  result.json       the last summary
"""

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrm_scale import __version__
from dlrm_scale.checkpoint import open_storage
from dlrm_scale.checkpoint.chain.lossy import check_expected_restores
from dlrm_scale.checkpoint.chain.starts import RunIdentity
from dlrm_scale.checkpoint.saving.policy import check_policy
from dlrm_scale.config import Config
from dlrm_scale.data.loading.streams import check_streams
from dlrm_scale.errors import ConfigError
from dlrm_scale.models.tables import check_model
from dlrm_scale.recipes import checkpoint_location, find_checkpoints, load_config, read_overrides, write_config
from dlrm_scale.recipes.load import differing
from dlrm_scale.sharding.given_plan import plan_path
from dlrm_scale.sharding.rules import check_sharding
from dlrm_scale.train.memory.staging_plan import staging_memory_bytes
from dlrm_scale.train.micro_batch_rows import check_micro_batches
from dlrm_scale.train.tf32 import check_tf32
from dlrm_scale.train.warm_start import WarmStart, check_same_model

__all__ = ["RunFolder", "RunRequest", "check_config", "resolve_run"]

_UNSAFE_ON_RESUME = {
    "data.seed": "the order of rows",
    "data.batch_size": "the order of rows",
    "data.streams": "the order of rows",
    "data.window_rows": "the order of rows",
    "data.drop_last": "the rows of an epoch",
    "dense_optimizer.kind": "the meaning of the optimizer state",
    "sparse_optimizer.kind": "the meaning of the optimizer state",
}
_UNSAFE_SECTION_ON_RESUME = {"model": "the shape or the start of the model"}


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Paths inside a run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> str:
        """Folder or URL of the checkpoints of a run that exists; ConfigError if its config can't be read."""
        return find_checkpoints(str(self.path))

    @property
    def plan(self) -> Path:
        """The sharding plan."""
        return self.path / "plan.json"

    @property
    def log(self) -> Path:
        """JSON lines."""
        return self.path / "log.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """Traces of profiled steps."""
        return self.path / "profile"

    @property
    def result(self) -> Path:
        """The last summary."""
        return self.path / "result.json"

    @property
    def best(self) -> Path:
        """The best checkpoint."""
        return self.path / "best.json"

    def exists(self) -> bool:
        """Whether a run has been started here."""
        return self.config.is_file()

    def claim(self, config: Config, source: str, warm_start: WarmStart | None) -> None:
        """Create the folder of a new run; called by rank 0 alone.

        The exclusive link of config.toml is what makes a run: a crash before it leaves a folder that can be claimed.

        Args:
            config: resolved.
            source: recipe or file that it came from.
            warm_start: what it takes from another run.

        Raises:
            ConfigError: the folder can't be made or another run has taken it meanwhile.
        """
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        record: dict[str, object] = {"id": _new_id(), "source": source, "init_from": "", "version": __version__}
        record["created"] = made
        if warm_start is not None:
            record |= {"init_from": warm_start.run, "init_options": warm_start.options}
        temporary = self.path / f".config-{os.getpid()}.toml"
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"run.path {self.path} is a file", remedy="name a folder")
        try:
            made_in = [path.parent for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for path in made_in:
                _sync(path)
            with _locked(self.path):
                if self.exists():
                    raise FileExistsError
                write_config(config, temporary)
                _sync(temporary)
                _replace_text(self._record, json.dumps(record, indent=1))
                os.link(temporary, self.config)
                _sync(self.path)
        except FileExistsError:
            raise ConfigError(
                f"run.path {self.path}: another run is here already",
                remedy="continue it with --resume auto, or choose another run.path",
            ) from None
        except OSError as error:
            raise ConfigError(f"run.path {self.path}: {error.strerror}") from None
        finally:
            with suppress(OSError):
                temporary.unlink()

    def save_config(self, config: Config) -> None:
        """Write the config of a resumed run under its name in one step.

        Raises:
            ConfigError: the folder can't be written.
        """
        try:
            temporary = self.path / f".config-{os.getpid()}.toml"
            write_config(config, temporary)
            _sync(temporary)
            os.replace(temporary, self.config)
            _sync(self.path)
        except OSError as error:
            raise ConfigError(f"run.path {self.path}: {error.strerror}") from None

    def save_result(self, values: Mapping[str, object]) -> None:
        """Write result.json in one step; OSError if it can't be written."""
        _replace_text(self.result, json.dumps(values, indent=1))

    def started_from(self) -> tuple[str, WarmStart | None]:
        """Recipe or file that the run was made from, and what it took from another run.

        Raises:
            ConfigError: run.json is missing or damaged.
        """
        record = self._read_record()
        try:
            run = str(record["init_from"])
            return str(record["source"]), WarmStart(run=run, **record.get("init_options", {})) if run else None
        except (KeyError, TypeError) as error:
            raise self._unreadable(error) from None

    def identity(self) -> RunIdentity:
        """Which run it is; without an id if the run was begun before runs had one.

        Raises:
            ConfigError: run.json is missing or damaged.
        """
        return RunIdentity(id=str(self._read_record().get("id", "")), path=str(self.path.absolute()))

    def give_id(self) -> RunIdentity:
        """As `identity`; a run without an id gets one. Called by rank 0 alone.

        Raises:
            ConfigError: run.json is missing or damaged.
            OSError: it can't be written.
        """
        record = self._read_record()
        if not record.get("id"):
            _replace_text(self._record, json.dumps({"id": _new_id(), **record}, indent=1))
        return self.identity()

    def _read_record(self) -> dict[str, Any]:
        try:
            record = json.loads(self._record.read_text())
            if not isinstance(record, dict):
                raise TypeError("it is no JSON object")
        except (OSError, ValueError, TypeError) as error:
            raise self._unreadable(error) from None
        return record

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self._record} can't be read: {error}", remedy="put the file back, or start a run in another folder"
        )

    @property
    def _record(self) -> Path:
        return self.path / "run.json"


def _new_id() -> str:
    return uuid.uuid4().hex[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes that claim the folder waiting, where the file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(text)
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable.

    Checkpoints are: they may lie in this folder, and their place, wherever it is, knows the run by the id in run.json.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What a user asked for, resolved; the same on every rank.

    Attributes:
        config: complete and checked.
        source: recipe or file.
        resume: continue the run in the folder.
        resume_step: from the checkpoint of this step; None for the newest.
        warm_start: what is taken from another run. Of a resumed run too: it may have died before its first checkpoint.
        changes: settings that differ from the saved config, as (path, before, after).
    """

    config: Config
    source: str
    resume: bool = False
    resume_step: int | None = None
    warm_start: WarmStart | None = None
    changes: tuple[tuple[str, object, object], ...] = ()

    @property
    def folder(self) -> RunFolder:
        """Where the run lives."""
        return RunFolder(path=Path(self.config.run.path))

    @property
    def checkpoints(self) -> str:
        """Folder or URL of the checkpoints."""
        return checkpoint_location(self.config)


def resolve_run(
    source: str | None,
    overrides: Sequence[str],
    *,
    resume: bool = False,
    step: int | None = None,
    warm_start: WarmStart | None = None,
) -> RunRequest:
    """Find out which config applies. Reads only, so that every rank may do it.

    Args:
        source: recipe or TOML file; may be None when a run is resumed.
        overrides: `section.key=value` each.
        resume: continue a run that exists, with its saved config as the base.
        step: continue from the checkpoint of this step, which must exist.
        warm_start: what to take from another run.

    Raises:
        ConfigError: nothing to start from, an existing run without `resume`, or an unsafe change.
    """
    config = load_config(source, overrides) if source is not None else None
    path = config.run.path if config is not None else str(read_overrides(overrides).get("run.path", ""))
    if not path:
        raise ConfigError("run.path is not set", remedy="add --set run.path=FOLDER")
    folder = RunFolder(path=Path(path))
    if folder.exists():
        request = _continue(folder, source, overrides, resume, warm_start)
        check_config(request.config)
        return replace(request, resume_step=step)
    if config is None or step is not None:
        raise ConfigError(f"no run in {path}", remedy="name a recipe or TOML file to start one")
    if not config.data.path:
        raise ConfigError("data.path is not set", remedy="add --set data.path=DATASET")
    check_config(config)
    if warm_start is not None:
        check_same_model(config, warm_start)
    return RunRequest(config=_absolute(config), source=str(source), warm_start=warm_start)


def check_config(config: Config) -> None:
    """Find what is wrong with settings together, before any rank starts.

    Raises:
        ConfigError: naming key, value and rule; PlanError: sharding that is not allowed.
    """
    check_model(config.model)
    check_streams(config.data)
    check_micro_batches(config, ranks=1)
    check_sharding(config)
    check_expected_restores(config.checkpoint)
    check_policy(config.checkpoint)
    check_tf32(config, config.train.device)
    # Makes no request: a protocol without its package is found before a run has a folder.
    open_storage(checkpoint_location(config))
    staging_memory_bytes(config.checkpoint)


def _continue(
    folder: RunFolder, source: str | None, overrides: Sequence[str], resume: bool, warm_start: WarmStart | None
) -> RunRequest:
    if not resume:
        raise ConfigError(
            f"run.path {folder.path} holds a run already",
            remedy="continue it with --resume auto, or choose another run.path",
        )
    first_source, first_warm_start = folder.started_from()
    if warm_start is not None and warm_start != first_warm_start:
        raise ConfigError(
            f"run {folder.path} was not started with this --init-from {warm_start.run}, and exists already",
            remedy="leave --init-from and its options out, or start a new run in another run.path",
        )
    if source is not None and source != first_source:
        raise ConfigError(
            f"run {folder.path} was started from {first_source!r}, not {source!r}",
            remedy="leave the recipe out; the run's saved config is the base",
        )
    saved = load_config(folder.config)
    config = _absolute(load_config(folder.config, overrides))
    changes = dict(differing(saved, config))
    changes.pop("run.path", None)
    if "sharding.plan" not in changes:
        config = _with_own_plan(config, folder)
    unsafe = [_refusal(path, *values) for path, values in changes.items() if _why_unsafe(path)]
    if unsafe:
        raise ConfigError(
            "a resumed run can't change\n  " + "\n  ".join(unsafe),
            remedy="start a new run with --init-from and another run.path to change these",
        )
    return RunRequest(
        config=config,
        source=first_source,
        resume=True,
        warm_start=first_warm_start,
        changes=tuple((path, before, after) for path, (before, after) in changes.items()),
    )


def _with_own_plan(config: Config, folder: RunFolder) -> Config:
    """Resume with the plan that the run trained with, wherever its folder is now and whatever became of the file."""
    if plan_path(config.sharding) is None or not folder.plan.is_file():
        return config
    own = {"plan": str(folder.plan.absolute())}
    return config.model_copy(update={"sharding": config.sharding.model_copy(update=own)})


def _why_unsafe(path: str) -> str | None:
    return _UNSAFE_ON_RESUME.get(path) or _UNSAFE_SECTION_ON_RESUME.get(path.split(".")[0])


def _refusal(path: str, before: object, after: object) -> str:
    return f"{path} from {before} to {after}: it sets {_why_unsafe(path)}"


def _absolute(config: Config) -> Config:
    data: Mapping[str, object] = {"path": str(Path(config.data.path).absolute())}
    run: Mapping[str, object] = {"path": str(Path(config.run.path).absolute())}
    checkpoint: Mapping[str, object] = {}
    if config.checkpoint.path and "://" not in config.checkpoint.path:
        checkpoint = {"path": str(Path(config.checkpoint.path).absolute())}
    plan = plan_path(config.sharding)
    sharding: dict[str, object] = {} if plan is None else {"plan": str(plan.absolute())}
    if config.sharding.cluster.endswith(".toml"):
        sharding["cluster"] = str(Path(config.sharding.cluster).absolute())
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "run": config.run.model_copy(update=run),
            "checkpoint": config.checkpoint.model_copy(update=checkpoint),
            "sharding": config.sharding.model_copy(update=sharding),
        }
    )
