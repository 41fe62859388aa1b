"""Where TF32 may be asked for. Light to import: settings are checked before torch is needed."""

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError

__all__ = ["check_tf32"]


def check_tf32(config: Config, device_type: str) -> None:
    """Refuse TF32 where there is none.

    Args:
        config: `train.tf32` is read.
        device_type: `cpu` is refused; `auto` isn't known yet and passes.

    Raises:
        ConfigError: `train.tf32` on CPU.
    """
    if config.train.tf32 and device_type == "cpu":
        raise ConfigError(
            "train.tf32 = true: TF32 is a format of CUDA devices, and this run is on CPU",
            remedy='leave it out, or set train.precision = "bf16" for a faster dense part where the CPU has bf16',
        )
