"""Learning-rate multiplier by step: linear warm-up, then polynomial decay (the shape of MLPerf's DLRM schedule)."""

from dlrm_scale.config import ScheduleConfig

__all__ = ["multiplier"]


def multiplier(config: ScheduleConfig, step: int) -> float:
    """Factor on both base learning rates.

    Args:
        config: warm-up, decay and final value.
        step: 0 for the first step of the run. A pure function of it, so that a resumed run continues exactly.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if not config.decay_steps or step < config.decay_start_step:
        return 1.0
    left = max(0.0, 1.0 - (step - config.decay_start_step) / config.decay_steps)
    final: float = config.final_multiplier
    return final + (1.0 - final) * float(left**config.decay_power)
