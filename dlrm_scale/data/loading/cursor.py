"""The position of a training run in its data, as a checkpoint keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from dlrm_scale.errors import CheckpointError, ConfigError, DatasetError

__all__ = ["ORDER_VERSION", "Cursor"]

ORDER_VERSION = 1
"""Version of the order's definition: a run is never continued in another order by accident."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Position after a batch, and all that the order depends on.

    Attributes:
        order_version: how the order is defined.
        fingerprint: of the dataset.
        seed: `data.seed`.
        batch_size: `data.batch_size`, global.
        streams: number of streams, V.
        window_rows: `data.window_rows`.
        drop_last: `data.drop_last`.
        epoch: epoch of the next batch.
        step_in_epoch: its number in the epoch.
        stream_rows_consumed: rows of each stream before it in the epoch.
    """

    order_version: int = ORDER_VERSION
    fingerprint: str
    seed: int
    batch_size: int
    streams: int
    window_rows: int
    drop_last: bool
    epoch: int = 0
    step_in_epoch: int = 0
    stream_rows_consumed: int = 0

    def to_json(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        return dict(vars(self))

    def json_at(self, *, epoch: int, step_in_epoch: int, stream_rows_consumed: int) -> dict[str, object]:
        """Return what `to_json` of another position of this run returns."""
        position = {"epoch": epoch, "step_in_epoch": step_in_epoch, "stream_rows_consumed": stream_rows_consumed}
        return {**vars(self), **position}

    @staticmethod
    def from_json(raw: Mapping[str, object]) -> "Cursor":
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: a field is missing, unknown, of a wrong type or contradicts another.
        """
        damaged = "the data cursor is damaged"
        remedy = "resume from another checkpoint"
        if set(raw) != {field.name for field in fields(Cursor)}:
            raise CheckpointError(f"{damaged}: it has the fields {', '.join(sorted(raw))}", remedy=remedy)
        cursor = Cursor(**raw)  # type: ignore[arg-type]
        for name, value in raw.items():
            if type(value) is not Cursor.__annotations__[name] or (type(value) is int and value < 0):
                raise CheckpointError(f"{damaged}: {name} = {value!r}", remedy=remedy)
        if cursor.batch_size * cursor.step_in_epoch != cursor.stream_rows_consumed * cursor.streams:
            raise CheckpointError(
                f"{damaged}: step {cursor.step_in_epoch} can't follow {cursor.stream_rows_consumed} rows a stream",
                remedy=remedy,
            )
        return cursor

    def check_continues(self, start: "Cursor") -> None:
        """Check that this position belongs to the run that would start at `start`.

        Raises:
            DatasetError: the dataset isn't the same.
            ConfigError: a setting that the order depends on isn't the same.
        """
        if self.fingerprint != start.fingerprint:
            raise DatasetError(
                f"the dataset has fingerprint {start.fingerprint}, the checkpoint was trained on {self.fingerprint}",
                remedy="give the dataset of the first run; to train on new data start a run with --init-from",
            )
        for name in ("seed", "batch_size", "streams", "window_rows", "drop_last"):
            before, now = getattr(self, name), getattr(start, name)
            if before != now:
                raise ConfigError(
                    f"data.{name} = {now}, the checkpoint was trained with {before}: rows would come in another order",
                    remedy=f"leave data.{name} at {before}, or start a run with --init-from",
                )
        if self.order_version != start.order_version:
            raise CheckpointError(
                f"the checkpoint's order of rows has version {self.order_version}, here it is {start.order_version}",
                remedy="resume with the dlrm-scale that wrote it, or start a run with --init-from",
            )
