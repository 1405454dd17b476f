"""Published refit times that name their layouts, and how the time model's figures compare with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from refit_transport.simulation.case import Ask
from refit_transport.simulation.methods import Method, Prediction

Status = Literal["read", "retold", "summary"]


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published figure: what was measured, and which of our methods is the nearest thing to it.

    `status`: read in the named source, retold by others, or known from summaries only. `seconds` is the lowest and
    highest time given. `why` is the likely reason for our figure to differ.
    """

    id: str
    source: str
    status: Status
    ask: Ask
    seconds: tuple[float, float]
    nearest: Method
    what: str
    why: str
    note: str = ""
    baseline: str = ""
    baseline_seconds: float = 0.0
    baseline_nearest: Method = "broadcast_single"

    def deviation(self, prediction: Prediction) -> float:
        """The published time over the predicted one: above 1 when the published refit was slower.

        Of a range, the end that is nearer to the prediction counts; 1 inside the range.
        """
        low, high = self.seconds
        return min(max(prediction.seconds, low), high) / prediction.seconds


def published_rows() -> tuple[PublishedRow, ...]:
    """All rows of the package data."""
    text = files("refit_transport.simulation").joinpath("data", "published.json").read_text(encoding="utf-8")
    return tuple(
        PublishedRow(
            id=entry["id"],
            source=entry["source"],
            status=entry["status"],
            ask=Ask(
                entry["model"],
                entry["source_layout"],
                entry["target_layout"],
                entry["system"],
                entry["sources"],
                entry["targets"],
                entry.get("domain"),
                entry["dtype"],
                entry.get("tensors", "*"),
            ),
            seconds=(entry["seconds"][0], entry["seconds"][1]),
            nearest=entry["nearest"],
            what=entry["what"],
            why=entry["why"],
            note=entry.get("note", ""),
            baseline=entry.get("baseline", ""),
            baseline_seconds=entry.get("baseline_seconds", 0.0),
            baseline_nearest=entry.get("baseline_nearest", "broadcast_single"),
        )
        for entry in json.loads(text)
    )
