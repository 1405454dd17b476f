"""Runs the methods on a case and holds the answers, for tables and for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from refit_transport.simulation.case import Ask, Case
from refit_transport.simulation.methods import METHODS, Method, Prediction, lower_bound, predict
from refit_transport.simulation.published import PublishedRow, published_rows

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Study:
    """A case's facts and every method's prediction."""

    ask: Ask
    model: str
    stand_in: str
    sources: int
    targets: int
    domains: int
    nbytes: int
    ffn_share: float
    bound: float
    predictions: tuple[Prediction, ...]

    @property
    def title(self) -> str:
        """The model's name, marked where it is a stand-in."""
        return f"{self.model} (stand-in)" if self.stand_in else self.model

    def of(self, method: Method) -> Prediction:
        """The prediction of one method."""
        return next(prediction for prediction in self.predictions if prediction.method == method)

    def to_json(self) -> dict[str, Any]:
        """A plain value for programs; bytes and seconds."""
        methods = [
            {"method": each.method, "what": METHODS[each.method], **asdict(each), "over_bound": each.over_bound}
            for each in self.predictions
        ]
        return {**asdict(self), "predictions": methods}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published row and our figures for the same work."""

    row: PublishedRow
    study: Study

    @property
    def deviation(self) -> float:
        """See `PublishedRow.deviation`."""
        return self.row.deviation(self.study.of(self.row.nearest))

    def to_json(self) -> dict[str, Any]:
        """A plain value for programs."""
        return {"published": asdict(self.row), "deviation": self.deviation, "study": self.study.to_json()}


def simulate_refit(ask: Ask, *, announce: Announce, methods: Sequence[Method] = tuple(METHODS)) -> Study:
    """Predicts a refit by each method.

    Raises:
        ConfigError: as `Case.of`.
        PlanError: the two sides don't fit each other.
    """
    announce(f"describing both sides of {ask.model}")
    case = Case.of(ask)
    announce("the bound")
    least = lower_bound(case)
    predictions = []
    for method in methods:
        announce(METHODS[method])
        predictions.append(predict(method, case, least=least))
    ffn = sum(tensor.numel for tensor in case.model.model.main if tensor.name in case.ffn)
    total = sum(tensor.numel for tensor in case.model.model.main if tensor.name in frozenset(case.names))
    return Study(
        ask,
        case.model.name,
        case.model.stand_in,
        len(case.source.ranks),
        len(case.target.ranks),
        len(case.topology.domains),
        case.bytes,
        ffn / total,
        least,
        tuple(predictions),
    )


def compare_published(*, announce: Announce) -> Iterator[Comparison]:
    """Every published row, one after the other."""
    for row in published_rows():
        yield Comparison(row, simulate_refit(row.ask, announce=announce))
