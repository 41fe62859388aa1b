"""A dataset that maps raw values otherwise than a model learnt them is refused, with the ways out that there are."""

from pathlib import Path

import pytest

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.errors import DatasetError
from dlrm_scale.train.feature_mapping import check_feature_mapping, feature_mapping
from tests.support.datasets import make_dataset


@pytest.mark.parametrize(
    ("differs", "warm_start", "offers"),
    [
        (["categories"], False, []),
        (["categories"], True, ["--allow-resized-tables"]),
        (["dense"], True, ["--tables-only"]),
        (["categories", "dense"], True, ["--allow-resized-tables", "--tables-only"]),
    ],
)
def test_the_remedy_names_the_options_that_allow_what_differs(
    tmp_path: Path, differs: list[str], warm_start: bool, offers: list[str]
) -> None:
    make_dataset(tmp_path / "dataset", 20)
    dataset = Dataset.open(tmp_path / "dataset")
    trained = feature_mapping(dataset) | dict.fromkeys(differs, "another")
    with pytest.raises(DatasetError) as caught:
        check_feature_mapping(trained, dataset, warm_start=warm_start)
    remedy = str(caught.value.remedy)
    assert "--vocabulary-from THE_TRAINING_DATASET" in remedy
    assert [flag for flag in ("--allow-resized-tables", "--tables-only") if flag in remedy] == offers
    if offers:
        told = check_feature_mapping(
            trained,
            dataset,
            dense="--tables-only" not in offers,
            vocabularies="--allow-resized-tables" not in offers,
        )
        assert len(told) == ("categories" in differs)
