"""What a user is told: every mistake that isn't ours is a `DlrmScaleError`."""

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "ConfigError",
    "DataError",
    "DatasetError",
    "DlrmScaleError",
    "InstallError",
    "MissingCheckpointError",
    "PlanError",
    "PlanFileError",
    "SaveError",
    "StorageError",
    "TrainingError",
]


class DlrmScaleError(Exception):
    """A mistake or fault outside this package, with what to do about it.

    The message names the file, line, column, table or rank and the rule that was broken.

    Attributes:
        message: what is wrong, one or more lines.
        remedy: what the user can do; printed on a line of its own.
        exit_code: what the command exits with. 2 is a wrong command or config, 3 a plan that doesn't
            fit or a table without a legal type, 4 a damaged checkpoint, 130 a stop by a signal, 1 everything else.
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message if remedy is None else f"{message}\n  remedy: {remedy}")
        self.message = message
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        """Keep message and remedy apart when an error crosses a process."""
        return _rebuild, (type(self), self.message, self.remedy)


def _rebuild(kind: type[DlrmScaleError], message: str, remedy: str | None) -> DlrmScaleError:
    return kind(message, remedy=remedy)


class ConfigError(DlrmScaleError):
    """A wrong key, value or combination in the config or on the command line."""

    exit_code = 2


class DataError(DlrmScaleError):
    """Raw input that breaks the format: file, line, column, expected and found."""


class DatasetError(DlrmScaleError):
    """A preprocessed dataset that is missing, damaged, changed or doesn't fit the model."""


class PlanError(DlrmScaleError):
    """A sharding plan that can't be made or isn't allowed."""

    exit_code = 3


class PlanFileError(PlanError):
    """A plan file that is missing, malformed, or made for something else: a wrong file, not a plan that doesn't fit."""

    exit_code = 2


class CheckpointError(DlrmScaleError):
    """A checkpoint that is missing, damaged or doesn't fit the model."""

    exit_code = 4


class MissingCheckpointError(CheckpointError):
    """A checkpoint that a command names and that isn't there, where nothing says that it was lost: no damage."""

    exit_code = 2


class StorageError(CheckpointError):
    """A storage of checkpoints, or of what is made of them, that is silent, refuses, is full or busy: no damage."""

    exit_code = 1


class SaveError(CheckpointError):
    """A checkpoint that isn't saved, or may not be; those that are there are as sound as before: no damage."""

    exit_code = 1


class CheckpointWarning(RuntimeWarning):
    """What a user should know of a checkpoint that is read or saved all the same."""


class TrainingError(DlrmScaleError):
    """Training that can't go on: a non-finite loss, a lost rank."""


class InstallError(DlrmScaleError):
    """Packages that don't fit together."""
