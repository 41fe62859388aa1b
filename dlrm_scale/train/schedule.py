"""Learning-rate multiplier by step: linear warm-up, then polynomial decay (the shape of MLPerf's DLRM schedule)."""

from dlrm_scale.config import ScheduleConfig

__all__ = ["multiplier"]


def multiplier(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Factor on both base learning rates.

    Args:
        config: warm-up, decay and final value.
        step: 0 for the first step of the run. A pure function of it, so that a resumed run continues exactly.
        total_steps: steps of all epochs; matters for `decay_to_end` alone.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    start = max(config.decay_start_step, config.warmup_steps)
    decay_steps = total_steps - start if config.decay_to_end else config.decay_steps
    if decay_steps <= 0 or step < start:
        return 1.0
    left = max(0.0, 1.0 - (step - start) / decay_steps)
    final: float = config.final_multiplier
    return final + (1.0 - final) * float(left**config.decay_power)
