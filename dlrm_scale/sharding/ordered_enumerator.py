"""TorchRec's enumerator with a fixed order of options."""

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

__all__ = ["OrderedEnumerator"]


class OrderedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator with a fixed order of options.

    TorchRec intersects sets of strings, whose order changes from process to process: two starts of one run would
    break ties differently, and a resumed run would sum in another order.
    """

    def _filter_sharding_types(self, name: str, allowed_sharding_types: list[str], sharder_key: str = "") -> list[str]:
        kept = set(super()._filter_sharding_types(name, allowed_sharding_types, sharder_key))
        return [t for t in allowed_sharding_types if t in kept]

    def _filter_compute_kernels(self, name: str, allowed_compute_kernels: list[str], sharding_type: str) -> list[str]:
        return sorted(super()._filter_compute_kernels(name, allowed_compute_kernels, sharding_type))
