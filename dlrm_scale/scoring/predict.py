"""From raw rows or a dataset to a file of scores: prepares the rows, starts the ranks, names the file at the end."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.preprocess.options import PreprocessOptions
from dlrm_scale.data.preprocess.passes import OnProgress
from dlrm_scale.data.preprocess.staging import REJECTED_FILE
from dlrm_scale.errors import ConfigError
from dlrm_scale.scoring.predict_input import dataset_sources, is_dataset, prepare_rows, publish, working_folder
from dlrm_scale.scoring.predict_run import PredictRequest, PredictResult, predict_rank, scored_ranges
from dlrm_scale.scoring.score_file import RowPlaces, score_format
from dlrm_scale.train.launch import default_local_ranks, launch, under_torchrun

__all__ = ["PredictJob", "Prediction", "predict"]


@dataclass(frozen=True, kw_only=True)
class PredictJob:
    """What to score and where to write it.

    Attributes:
        config: the run's saved config.
        run: its folder.
        step: checkpoint of this step; None for the newest.
        manifest: name of the checkpoint's manifest, which goes before `step`; or "".
        inputs: one dataset, or raw files.
        split: of a dataset: `all`, `validation`, `test` or `train`.
        options: of raw rows; `vocabulary_from` is set.
        out: the file.
        force: it may be there already.
        local_ranks: ranks to start here; None for the default.
    """

    config: Config
    run: str
    step: int | None
    manifest: str
    inputs: Sequence[Path]
    split: str
    options: PreprocessOptions
    out: Path
    force: bool
    local_ranks: int | None

    def check(self) -> None:
        """Check what can be told without the rows.

        Raises:
            ConfigError: wishes that contradict one another or the input.
        """
        score_format(self.out)
        datasets = [path for path in self.inputs if is_dataset(path)]
        if datasets and len(self.inputs) > 1:
            raise ConfigError(f"{datasets[0]} is a dataset and stands beside other input", remedy="score it alone")
        if not datasets and self.split != "all":
            raise ConfigError(f"--split {self.split} is about a dataset, the input is raw rows", remedy="leave it out")
        if not datasets and under_torchrun():
            raise ConfigError(
                "raw rows can't be scored under another launcher: each of its processes would read them",
                remedy="make a dataset of them with `dlrm-scale preprocess --vocabulary-from`, or use --nproc",
            )
        if not datasets and not self.options.vocabulary_from:
            raise ConfigError("the run has no data.path", remedy="name its dataset with --vocabulary-from")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What was made.

    Attributes:
        result: of the scoring.
        rejected: the bad rows that were left out, or None.
        notes: for the user.
    """

    result: PredictResult
    rejected: Path | None
    notes: tuple[str, ...]


def predict(job: PredictJob, reading: AbstractContextManager[OnProgress | None]) -> Prediction:
    """Score rows into a file; until it is whole there is none of its name, or the one before.

    Args:
        job: what to do.
        reading: entered while raw rows are read; what it gives is told of the passes.

    Raises:
        DlrmScaleError: whatever a user can mend.
    """
    job.check()
    place: AbstractContextManager[Path] = nullcontext(job.out.with_name(f".{job.out.name}.predict"))
    first = os.environ.get("RANK", "0") == "0"
    if first:
        place = working_folder(job.out, force=job.force)
    with place as folder:
        notes: tuple[str, ...] = ()
        rejected: Path | None = None
        if is_dataset(job.inputs[0]):
            data = job.inputs[0]
            dataset = Dataset.open(data)
            sources, ranges = dataset_sources(dataset), scored_ranges(dataset, job.split)
        else:
            with reading as on_progress:
                data, sources, rejected, notes = prepare_rows(job.inputs, folder, job.options, on_progress=on_progress)
            ranges = ((0, sum(source.rows for source in sources)),)
        request = PredictRequest(
            config=job.config,
            run=job.run,
            step=job.step,
            manifest=job.manifest,
            data=str(data),
            places=RowPlaces(sources=sources, ranges=ranges),
            file=str(folder / "scores"),
            format=score_format(job.out),
        )
        ranks = job.local_ranks if job.local_ranks is not None else default_local_ranks(job.config.train.device)
        result = launch(predict_rank, request, ranks, job.config.run.shutdown_seconds)
        if first:
            if rejected is not None:
                beside = job.out.with_name(f"{job.out.name}.rejected.tsv")
                publish(rejected, beside)
                rejected = beside
                notes = tuple(note.replace(f" {REJECTED_FILE} ", f" {beside} ") for note in notes)
            publish(folder / "scores", job.out)
    return Prediction(result=result, rejected=rejected, notes=notes)
