"""Whether a dataset maps raw values to features as the model learnt them.

Tables of equal sizes don't mean equal ids: another vocabulary sends the same raw id to another row.
"""

from collections.abc import Mapping

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.errors import DatasetError

__all__ = ["check_feature_mapping", "feature_mapping"]


def feature_mapping(dataset: Dataset) -> dict[str, object]:
    """What must agree, JSON-ready: the rule of the dense features and the fingerprint of the vocabularies."""
    categories = dataset.manifest.transforms.get("categories")
    fingerprint = categories.get("mapping_fingerprint") if isinstance(categories, Mapping) else None
    return {"categories": fingerprint, "dense": dataset.manifest.transforms.get("dense")}


def check_feature_mapping(
    trained: object, dataset: Dataset, *, dense: bool = True, vocabularies: bool = True, warm_start: bool = False
) -> list[str]:
    """Compare a checkpoint's record with a dataset.

    Args:
        trained: `feature_mapping` of the dataset that the model was trained on.
        dataset: what it is to be used on.
        dense: the transform of the dense features must agree.
        vocabularies: the vocabularies must agree.
        warm_start: a new run takes the weights, and has options for what may differ.

    Returns:
        Warnings of vocabularies that needn't agree and don't.

    Raises:
        DatasetError: naming what differs.
    """
    assert isinstance(trained, Mapping)
    names = {"categories": "category vocabularies", "dense": "transform of the integer columns"}
    needed = [key for key, wanted in (("categories", vocabularies), ("dense", dense)) if wanted]
    now = feature_mapping(dataset)
    differs = [key for key in needed if now[key] != trained[key]]
    if differs:
        remedy = "preprocess these rows with --vocabulary-from THE_TRAINING_DATASET"
        options = {
            "dense": "--tables-only takes the tables without the dense part, which alone depends on that transform",
            "categories": "--allow-resized-tables takes rows over by their ids, where these still stand for the same "
            "raw values",
        }
        if warm_start:
            remedy = "; or ".join([remedy, *(options[key] for key in differs)])
        raise DatasetError(
            f"{dataset.path}: its {' and '.join(names[key] for key in differs)} differ from those that the model was "
            "trained with",
            remedy=remedy,
        )
    if now["categories"] != trained["categories"]:
        return [
            f"warning: {dataset.path}: its category vocabularies differ from those that the tables were trained with; "
            "rows that are taken over must still stand for the same raw values"
        ]
    return []
