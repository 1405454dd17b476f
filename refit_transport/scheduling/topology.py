"""The machine graph: which ranks share fast links, and through what they reach the network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from refit_transport.errors import LayoutError

NicKind = Literal["domain", "rank"]

# Relative figures are enough to choose senders; absolute ones make predictions. These are an 8-GPU H100 node's.
DEFAULT_NIC_RATE = 50e9
DEFAULT_LOCAL_RATE = 450e9


@dataclass(frozen=True, slots=True)
class Nic:
    """What some ranks of one domain have toward the network: payload bytes per second, in each direction."""

    ranks: tuple[int, ...]
    rate: float

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise LayoutError("", self.ranks[0] if self.ranks else -1, "a NIC rate above 0", str(self.rate))


@dataclass(frozen=True)
class Topology:
    """Domains of ranks with uniform fast links inside (an NVLink island, a host); between domains lies the network.

    Every rank reaches the network through one NIC, which it may share with other ranks of its domain. `local_rate` is
    what a rank can send or receive inside its domain, in bytes per second.

    >>> topology = Topology.of(((0, 1), (2, 3)))
    >>> topology.domain(3), topology.is_local(2, 3), topology.is_local(1, 2), topology.nic(3)
    (1, True, False, 1)
    >>> Topology.of(((0, 1), (2, 3)), nics="rank").nic(3)
    3
    """

    domains: tuple[tuple[int, ...], ...]
    nics: tuple[Nic, ...]
    local_rate: float = DEFAULT_LOCAL_RATE

    def __post_init__(self) -> None:
        seen: set[int] = set()
        for domain in self.domains:
            for rank in domain:
                if rank in seen:
                    raise LayoutError("", rank, "each rank in one topology domain", "it in two")
                seen.add(rank)
        served = [rank for nic in self.nics for rank in nic.ranks]
        if sorted(served) != sorted(seen):
            wrong = next(iter({*served} ^ seen), -1)
            raise LayoutError("", wrong, "each rank of a domain on one NIC", "it on none, on two, or in no domain")
        for nic in self.nics:
            if len({self._domain_of[rank] for rank in nic.ranks}) > 1:
                raise LayoutError("", nic.ranks[0], "a NIC of one domain", f"one of ranks {list(nic.ranks)}")

    @classmethod
    def of(
        cls,
        domains: Iterable[Iterable[int]],
        *,
        nics: NicKind = "domain",
        nic_rate: float | Sequence[float] = DEFAULT_NIC_RATE,
        local_rate: float = DEFAULT_LOCAL_RATE,
    ) -> Self:
        """Sorted ranks in each domain, domains by their first rank; empty ones are dropped.

        Args:
            domains: the ranks of each domain.
            nics: one NIC for all ranks of a domain, or one for each rank.
            nic_rate: payload bytes per second of each NIC and direction; or one figure per domain, in the given order.
            local_rate: payload bytes per second of each rank and direction inside its domain.

        Raises:
            LayoutError: there are more or fewer rates than domains, or a rank is in two domains.

        >>> Topology.of(((2, 3), (0, 1)), nic_rate=(1e9, 2e9)).nics
        (Nic(ranks=(0, 1), rate=2000000000.0), Nic(ranks=(2, 3), rate=1000000000.0))
        """
        given = [tuple(sorted(domain)) for domain in domains]
        rates = list(nic_rate) if isinstance(nic_rate, Sequence) else [nic_rate] * len(given)
        if len(rates) != len(given):
            raise LayoutError("", -1, f"a NIC rate for each of {len(given)} domains", f"{len(rates)} rates")
        rated = sorted((ranks, rate) for ranks, rate in zip(given, rates, strict=True) if ranks)
        groups = [
            (group, rate) for ranks, rate in rated for group in ([ranks] if nics == "domain" else [(r,) for r in ranks])
        ]
        return cls(tuple(ranks for ranks, _ in rated), tuple(Nic(*group) for group in groups), local_rate)

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks of all domains."""
        return frozenset(self._domain_of)

    def renumbered(self, numbers: Mapping[int, int]) -> Self:
        """The part of it that the ranks in `numbers` see, each under its new number.

        >>> Topology.of(((0, 1), (2, 3), (4, 5)), nics="rank").renumbered({2: 0, 3: 1, 5: 2}).domains
        ((0, 1), (2,))
        """
        kept = ((nic, tuple(numbers[rank] for rank in nic.ranks if rank in numbers)) for nic in self.nics)
        domains = (tuple(sorted(numbers[r] for r in domain if r in numbers)) for domain in self.domains)
        return type(self)(
            tuple(sorted(domain for domain in domains if domain)),
            tuple(Nic(ranks, nic.rate) for nic, ranks in kept if ranks),
            self.local_rate,
        )

    @cached_property
    def _domain_of(self) -> dict[int, int]:
        return {rank: index for index, ranks in enumerate(self.domains) for rank in ranks}

    @cached_property
    def _nic_of(self) -> dict[int, int]:
        return {rank: index for index, nic in enumerate(self.nics) for rank in nic.ranks}

    @cached_property
    def nics_of_domains(self) -> tuple[tuple[int, ...], ...]:
        """The NICs of each domain, by index."""
        found: list[list[int]] = [[] for _ in self.domains]
        for index, nic in enumerate(self.nics):
            found[self._domain_of[nic.ranks[0]]].append(index)
        return tuple(tuple(nics) for nics in found)

    def domain(self, rank: int) -> int:
        """The index of the rank's domain.

        Raises:
            LayoutError: no domain lists the rank.
        """
        found = self._domain_of.get(rank)
        if found is None:
            raise LayoutError("", rank, "a topology domain that lists it", f"only {list(map(list, self.domains))}")
        return found

    def nic(self, rank: int) -> int:
        """The index of the NIC through which the rank reaches the network; LayoutError as `domain`."""
        self.domain(rank)
        return self._nic_of[rank]

    def is_local(self, a: int, b: int) -> bool:
        """Whether bytes between the two ranks stay off the network."""
        return self.domain(a) == self.domain(b)
