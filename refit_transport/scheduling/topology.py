"""The machine graph: which ranks share fast links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from refit_transport.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Topology:
    """Domains of ranks with uniform fast links inside (an NVLink island, a host); between domains lies the network.

    >>> topology = Topology.of(((0, 1), (2, 3)))
    >>> topology.domain(3), topology.is_local(2, 3), topology.is_local(1, 2)
    (1, True, False)
    """

    domains: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        seen: set[int] = set()
        for domain in self.domains:
            for rank in domain:
                if rank in seen:
                    raise LayoutError("", rank, "each rank in one topology domain", "it in two")
                seen.add(rank)

    @classmethod
    def of(cls, domains: Iterable[Iterable[int]]) -> Self:
        """Sorted ranks in each domain, domains by their first rank; empty ones are dropped."""
        return cls(tuple(sorted(tuple(sorted(domain)) for domain in domains if domain)))

    @classmethod
    def from_hosts(cls, hosts: Mapping[int, str]) -> Self:
        """One domain per host, from each rank's host name."""
        domains: dict[str, list[int]] = {}
        for rank, host in hosts.items():
            domains.setdefault(host, []).append(rank)
        return cls.of(domains.values())

    def domain(self, rank: int) -> int:
        """The index of the rank's domain.

        Raises:
            LayoutError: no domain lists the rank.
        """
        for index, ranks in enumerate(self.domains):
            if rank in ranks:
                return index
        raise LayoutError("", rank, "a topology domain that lists it", f"only {list(map(list, self.domains))}")

    def is_local(self, a: int, b: int) -> bool:
        """Whether bytes between the two ranks stay off the network."""
        return self.domain(a) == self.domain(b)
