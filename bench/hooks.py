"""Taking a module's hooks away and putting them back, to time steps with and without them on one model."""

from torch import nn

__all__ = ["Hooks", "hooks_of", "set_hooks"]

Hooks = dict[nn.Module, dict[str, dict]]

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def hooks_of(module: nn.Module) -> Hooks:
    """Copy down the forward hooks of a module and all inside it."""
    return {part: {name: dict(getattr(part, name)) for name in _KINDS} for part in module.modules()}


def set_hooks(hooks: Hooks) -> None:
    """Make them what `hooks_of` saw."""
    for part, kinds in hooks.items():
        for name, content in kinds.items():
            mapping = getattr(part, name)
            mapping.clear()
            mapping.update(content)
