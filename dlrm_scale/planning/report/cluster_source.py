"""Where a cluster's constants come from, in one line: measured and how noisily, or data sheets and assumptions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from dlrm_scale.planning.cluster.cluster import Cluster, Constant, Curve

__all__ = ["ClusterSource", "cluster_source", "describe_source"]

_MEASURED = re.compile(r"\s*calibrate\b")
_DATE = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSource:
    """How many of a cluster's constants and curves were measured.

    Attributes:
        measured: by `dlrm-scale calibrate`, as their sources say.
        given: from data sheets, assumed or written by hand.
        when: the measured ones were, as the notes say; "" where they don't.
        noise: what disturbed the measurements so that they are worth less; "" where nothing did, or none were made.
    """

    measured: int
    given: int
    when: str
    noise: str

    @property
    def kind(self) -> Literal["measured", "partly", "nothing"]:
        """Of the constants."""
        if not self.measured:
            return "nothing"
        return "partly" if self.given else "measured"


def cluster_source(cluster: Cluster) -> ClusterSource:
    """Look at the sources of all its constants and at its notes."""
    sources = list(_sources(cluster))
    measured = sum(bool(_MEASURED.match(source)) for source in sources)
    dated = _DATE.search(cluster.notes) if measured else None
    return ClusterSource(
        measured=measured,
        given=len(sources) - measured,
        when=dated[0] if dated else "",
        noise=cluster.noise if measured else "",
    )


def describe_source(cluster: Cluster) -> str:
    """Say it in one line."""
    source = cluster_source(cluster)
    if source.kind == "nothing":
        return f"{cluster.name}: data sheets and assumptions, nothing measured"
    share = "" if source.kind == "measured" else f" {source.measured} of {source.measured + source.given} constants"
    when = f" on {source.when}" if source.when else ", its file doesn't say when"
    return f"{cluster.name}: calibrated{share}{when}" + (f"; {source.noise}" if source.noise else "")


def _sources(record: object) -> Iterator[str]:
    if isinstance(record, Constant | Curve):
        yield record.source
    elif isinstance(record, BaseModel):
        for name in type(record).model_fields:
            yield from _sources(getattr(record, name))
    elif isinstance(record, dict):
        for value in record.values():
            yield from _sources(value)
    elif isinstance(record, tuple):
        for value in record:
            yield from _sources(value)
