"""Models from torchrec.models as single-device modules; only `sharding` distributes them."""
