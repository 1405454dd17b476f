"""The error hierarchy: fields first, the message derived from them.

Every error survives pickling (Ray sends exceptions between processes) because it is rebuilt from its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


class RefitTransportError(Exception):
    """Base class of everything that this package raises on purpose."""


@dataclass(eq=False)
class _FieldError(RefitTransportError):
    """An error whose message is derived from dataclass fields and which pickles by them."""

    def __post_init__(self) -> None:
        Exception.__init__(self, self.message())

    def message(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.message()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


@dataclass(eq=False)
class LayoutError(_FieldError):
    """A layout, piece or manifest contradicts itself or another side.

    `tensor` is the canonical name ("" when no single tensor is at fault), `rank` the refit rank (-1: none in
    particular).
    """

    tensor: str
    rank: int
    expected: str
    got: str

    def message(self) -> str:
        where = "".join(
            (f"tensor {self.tensor}: " if self.tensor else "", f"rank {self.rank}: " if self.rank >= 0 else "")
        )
        return f"{where}expected {self.expected}, got {self.got}"


@dataclass(eq=False)
class PlanError(_FieldError):
    """A transfer plan or schedule doesn't deliver every needed element exactly once."""

    tensor: str
    box: str
    rank: int
    reason: str

    def message(self) -> str:
        return f"plan: tensor {self.tensor}, box {self.box}, target rank {self.rank}: {self.reason}"


@dataclass(eq=False)
class UnknownTransportError(_FieldError):
    """`refit_transport` names nothing that is registered or importable."""

    name: str
    known: tuple[str, ...]
    reason: str

    def message(self) -> str:
        return (
            f"refit_transport: unknown transport {self.name!r} ({self.reason}); known: {', '.join(self.known)}, "
            "or 'package.module:Class'"
        )


@dataclass(eq=False)
class DuplicateTransportError(_FieldError):
    """Two installed packages, or one and this package, claim the same transport name."""

    name: str
    claims: tuple[str, ...]

    def message(self) -> str:
        return f"transport {self.name!r} is claimed by {' and by '.join(self.claims)}: uninstall one of them"


@dataclass(eq=False)
class MissingDependencyError(_FieldError):
    """An optional package is needed for what was asked."""

    package: str
    needed_for: str
    extra: str

    def message(self) -> str:
        return f"{self.needed_for} needs the package {self.package!r}: pip install 'refit-transport[{self.extra}]'"


@dataclass(eq=False)
class UnsupportedVersionError(_FieldError):
    """An installed package has a version that this one doesn't work with (see `compatibility`)."""

    package: str
    found: str
    supported: str
    remedy: str

    def message(self) -> str:
        return f"{self.package} {self.found} isn't supported: it must be {self.supported}; {self.remedy}"


@dataclass(eq=False)
class SeamError(_FieldError):
    """A place where we extend another package isn't as we know it, so extending it would be a guess."""

    package: str
    version: str
    seam: str
    expected: str

    def message(self) -> str:
        return f"{self.package} {self.version} isn't supported: {self.seam}: expected {self.expected}"


@dataclass(frozen=True, slots=True)
class Violation:
    """One problem of a configuration: where, what it is, why it is wrong and what to do."""

    path: str
    value: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.path}: {self.reason} (got {self.value}){remedy}"


@dataclass(eq=False)
class ConfigError(_FieldError):
    """Everything that is wrong with a configuration, all at once."""

    source: str
    violations: tuple[Violation, ...]

    def message(self) -> str:
        count = len(self.violations)
        lines = "\n".join(f"  {violation}" for violation in self.violations)
        return f"{self.source}: {count} problem{'s' if count != 1 else ''}\n{lines}"


@dataclass(eq=False)
class AgreementError(_FieldError):
    """The ranks of a refit don't hold the same value of something they must agree on."""

    what: str
    values: tuple[tuple[str, tuple[int, ...]], ...]

    def message(self) -> str:
        parts = "; ".join(f"{value} on rank{'s' if len(r) > 1 else ''} {list(r)}" for value, r in self.values)
        return f"the ranks disagree about {self.what}: {parts}"


@dataclass(eq=False)
class TransferError(_FieldError):
    """A refit failed on one rank. `peer` is -1 and `tensor` "" where they are not known."""

    rank: int
    peer: int
    phase: str
    tensor: str
    reason: str

    def message(self) -> str:
        peer = f" with rank {self.peer}" if self.peer >= 0 else ""
        tensor = f", tensor {self.tensor}" if self.tensor else ""
        return f"refit: rank {self.rank}{peer}, phase {self.phase}{tensor}: {self.reason}"


@dataclass(eq=False)
class PeerLateError(TransferError):
    """A peer didn't do its part within the deadline; `peer` is -1 where it isn't known which."""


@dataclass(eq=False)
class DeadlineError(_FieldError):
    """Something that must answer didn't within its deadline (seconds)."""

    waiting: str
    waited_for: str
    phase: str
    seconds: float

    def message(self) -> str:
        return (
            f"{self.waiting}: no answer from {self.waited_for} in phase {self.phase} within {self.seconds:g} s; raise "
            "timeout_s if that rank is only slow"
        )


@dataclass(eq=False)
class VersionError(_FieldError):
    """A refit's version isn't strictly larger than the last one."""

    version: int
    last: int

    def message(self) -> str:
        return f"weight version {self.version} refused: it must be larger than the last one, {self.last}"


@dataclass(eq=False)
class VerificationError(_FieldError):
    """What a target serves differs from what the source holds, or (`source_rank` -1) from what its own weights give."""

    tensor: str
    box: str
    source_rank: int
    target_rank: int
    version: int

    def message(self) -> str:
        held = f"source rank {self.source_rank}" if self.source_rank >= 0 else "what this rank's weights give"
        return (
            f"verification of version {self.version}: tensor {self.tensor}, box {self.box} on target rank "
            f"{self.target_rank} differs from {held}"
        )


@dataclass(eq=False)
class WorkerError(_FieldError):
    """A remote worker failed or vanished. `actor` is its name, `rank` its rank in its group (-1: the whole group)."""

    actor: str
    rank: int
    phase: str
    reason: str

    def message(self) -> str:
        rank = f" (rank {self.rank})" if self.rank >= 0 else ""
        return f"worker {self.actor}{rank} failed in phase {self.phase}: {self.reason}"


@dataclass(eq=False)
class ParityError(_FieldError):
    """After a refit, the samplers don't compute what the trainer computes, or compute what they did before."""

    version: int
    difference: float
    tolerance: float
    what: str
    setting: str = "logprob_tolerance"

    def message(self) -> str:
        return (
            f"weight version {self.version}: the samplers' log-probabilities {self.what} {self.difference:.3g} "
            f"(refit_run.{self.setting} is {self.tolerance:g})"
        )
