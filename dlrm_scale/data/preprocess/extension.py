"""Adding new days to a dataset: same vocabularies, new parts behind the old ones, and a new manifest at the end.

The parts that are there stay as they are, and until the manifest is replaced the dataset is the old one: a process that
dies leaves it whole. The newest day validates, the days before it train, those that validated before included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlrm_scale.data.dataset.dataset import Dataset, Part
from dlrm_scale.data.dataset.split import SplitRule
from dlrm_scale.data.preprocess.column_statistics import FileStatistics
from dlrm_scale.data.source.inputs import InputFile, day_number
from dlrm_scale.errors import ConfigError, DataError

__all__ = ["Extension", "extension_of", "input_identities"]


def input_identities(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """What tells whether inputs are the same ones, JSON-ready."""
    return [
        {"path": str(path.resolve()), "size_bytes": size_bytes, "modified_ns": modified_ns}
        for file in files
        for path, (size_bytes, modified_ns) in zip(file.members, file.identities, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """The dataset that is added to.

    Attributes:
        dataset: as it is.
        request: what made it.
        statistics: of each of its parts.
    """

    dataset: Dataset
    request: Mapping[str, Any]
    statistics: tuple[FileStatistics, ...]

    @property
    def parts(self) -> int:
        """Number of its parts."""
        return len(self.statistics)

    def holds(self, files: Sequence[InputFile]) -> bool:
        """Whether the dataset was made of these files already.

        Raises:
            DataError: some of them are in it, or files of the same names are.
        """
        known = self.request.get("inputs", [])
        given = input_identities(files)
        if all(entry in known for entry in given):
            return True
        sources = {part.source for part in self.dataset.manifest.parts}
        for file in files:
            # Parquet sets use the same names in the folder of each day.
            named = file.format != "parquet" and file.path.name in sources
            if named or any(entry in known for entry in input_identities([file])):
                raise DataError(
                    f"{file.path}: {self.dataset.path} already has rows of a file of that name",
                    remedy="name only the new days; to replace a day, preprocess all of them again with --force",
                )
        return False

    def check(self, rule: SplitRule) -> None:
        """Refuse splits that would cut through old parts.

        Raises:
            ConfigError: the rule is a fraction, or the dataset has no labels.
        """
        if rule.kind == "fraction":
            raise ConfigError(
                f"--validation {rule} can't be used when days are added to a dataset",
                remedy="give last-file (the newest day validates) or none",
            )
        labeled = self.dataset.manifest.statistics.get("labeled") is not False
        if labeled != (rule.kind != "unlabeled"):
            raise ConfigError(
                f"{self.dataset.path} holds rows {'with' if labeled else 'without'} labels, the input is "
                f"{'unlabeled' if labeled else 'labeled'}",
                remedy="name another --out",
            )

    def check_order(self, files: Sequence[InputFile]) -> None:
        """Refuse days that come before those that are there: the last one validates.

        Raises:
            DataError: names the day.
        """
        there = [day_number(part.source) for part in self.dataset.manifest.parts]
        newest = max((day for day in there if day is not None), default=None)
        for file in files:
            if file.day is not None and newest is not None and None not in there and file.day <= newest:
                raise DataError(
                    f"{file.path} is day {file.day}, {self.dataset.path} has days up to {newest}: days are added "
                    "behind those that are there, and the last one validates",
                    remedy="preprocess all days again, in one command",
                )

    def remove_strays(self) -> None:
        """Remove what a process that died while it was adding days left beside the dataset's own files."""
        folder, own = self.dataset.path, {part.file for part in self.dataset.manifest.parts}
        for path in folder.glob("part-*.arrow"):
            if path.name not in own:
                path.unlink()
        for path in folder.glob("rejected-*.tsv"):
            if int(path.stem.partition("-")[2]) >= self.parts:
                path.unlink()

    def training_parts(self) -> list[tuple[Part, FileStatistics]]:
        """Return its parts with their statistics when all of their rows train."""
        parts = self.dataset.manifest.parts
        return [(part, sums.all_training()) for part, sums in zip(parts, self.statistics, strict=True)]


def extension_of(dataset: Dataset, request: Mapping[str, Any] | None) -> Extension:
    """Prepare to add to a dataset.

    Raises:
        DataError: it isn't known what it was made of.
    """
    files = dataset.manifest.statistics.get("files")
    if request is None or not isinstance(files, list) or len(files) != len(dataset.manifest.parts):
        raise DataError(
            f"{dataset.path}: it isn't known what the dataset was made of, so nothing can be added to it",
            remedy="preprocess the new days into another folder with --vocabulary-from",
        )
    return Extension(
        dataset=dataset, request=request, statistics=tuple(FileStatistics.from_json(entry) for entry in files)
    )
