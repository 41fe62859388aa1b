"""torch.compile for the dense part, never at the price of a crash."""

from collections.abc import Callable

import torch

from dlrm_scale.models.dense_part import DensePart

__all__ = ["compile_dense_part", "late_failure", "use_eager_layers"]

Layers = Callable[..., torch.Tensor]


def compile_dense_part(part: DensePart, rows: int) -> str | None:
    """Compile the layers of `part`, and try them forward and backward before training relies on them.

    Names, parameters and their devices stay. A shape that comes up later (another batch size in evaluation) is
    compiled when it does, and computed by the plain layers from then on if that fails; `late_failure` tells.

    Args:
        part: changed in place, or left alone where compilation fails.
        rows: of a batch on this rank, for the trial.

    Returns:
        None, or why it failed (no C++ compiler, say) in one line.
    """
    try:
        bottom, top = _CompiledOrPlain(part.bottom_function), _CompiledOrPlain(part.top_function)
        part.bottom_function, part.top_function = bottom, top
        part.try_layers(rows)
    except Exception as error:  # compilers fail in any way there is
        use_eager_layers(part)
        return _in_one_line(error)
    failure = bottom.failure or top.failure
    if failure is not None:
        use_eager_layers(part)
    return failure


def late_failure(part: DensePart) -> str | None:
    """Say in one line why layers that were compiled are plain again by now; None if none is."""
    functions = (part.bottom_function, part.top_function)
    return next((f.failure for f in functions if isinstance(f, _CompiledOrPlain) and f.failure), None)


def use_eager_layers(part: DensePart) -> None:
    """Go back to the plain layers."""
    for name in ("bottom_function", "top_function"):
        function = getattr(part, name)
        if isinstance(function, _CompiledOrPlain):
            setattr(part, name, function.plain)


class _CompiledOrPlain:
    """A compiled function that gives way to the plain one for good when it fails.

    Attributes:
        plain: what was compiled.
        failure: why it isn't used any more; None while it is.
    """

    def __init__(self, plain: Layers) -> None:
        self.plain = plain
        self.failure: str | None = None
        self._compiled: Layers = torch.compile(plain)

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
        if self.failure is None:
            try:
                return self._compiled(*arguments)
            except Exception as error:  # compilers fail in any way there is; a real error comes again below
                self.failure = _in_one_line(error)
        return self.plain(*arguments)


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
