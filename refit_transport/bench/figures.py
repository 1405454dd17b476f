"""The figures that a case must reach, as data: what is compared, and the limit."""

from __future__ import annotations

from dataclasses import dataclass

# In place of a variant: the lower bound of the case.
BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median time of one variant (or the bound) over another's; where several are named, of the fastest of them.

    >>> str(Ratio(("ours",), ("feed all", "chain")))
    'ours / best of feed all, chain'
    """

    over: tuple[str, ...]
    under: tuple[str, ...]

    def __str__(self) -> str:
        return f"{_best(self.over)} / {_best(self.under)}"


@dataclass(frozen=True, slots=True)
class Overhead:
    """The share of a refit's time in which even its busiest rank neither packs, sends, receives nor unpacks."""

    variant: str

    def __str__(self) -> str:
        return f"{self.variant}: share of time outside pack, network, exchange, unpack"


@dataclass(frozen=True, slots=True)
class ExtraMemory:
    """Memory of the rank that needs most, beyond what it had with its weights, in MiB."""

    variant: str

    def __str__(self) -> str:
        return f"{self.variant}: MiB per rank beyond the weights"


@dataclass(frozen=True, slots=True)
class UplinkBytes:
    """Bytes over all NICs, both directions, headers and control messages included."""

    variant: str

    def __str__(self) -> str:
        return f"{self.variant}: bytes on all uplinks"


Figure = Ratio | Overhead | ExtraMemory | UplinkBytes


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure's limit; with neither `most` nor `least` it is only reported. `why` says where the limit is from."""

    figure: Figure
    most: float | None = None
    least: float | None = None
    why: str = ""

    def holds(self, value: float) -> bool:
        """Whether a measured value keeps it."""
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    @property
    def text(self) -> str:
        """The limit in signs: "<= 1.05".

        >>> Limit(Overhead("ours"), most=0.02).text
        '<= 0.02'
        """
        parts = [f"<= {self.most:.4g}"] if self.most is not None else []
        parts += [f">= {self.least:.4g}"] if self.least is not None else []
        return " and ".join(parts) or "reported"


def time_over_bound(most: float, *, why: str = "") -> Limit:
    """Our time over the lower bound."""
    return Limit(Ratio(("ours",), (BOUND,)), most=most, why=why)


def at_least(over: str, least: float, *, under: str = "ours", why: str = "") -> Limit:
    """How many times as long another variant takes."""
    return Limit(Ratio((over,), (under,)), least=least, why=why)


def as_fast_as(peer: str, share: float) -> Limit:
    """A peer reached this share of the bound on the same work; we may be 2 % slower at most."""
    return time_over_bound(1.02 / share, why=f"{peer} reached {share:.0%} of the bound")


def _best(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"best of {', '.join(names)}"
