"""Watches a weight loader run on tensors without data, and notes which elements it copies where.

Nothing here knows an engine: a loader is any function that takes `(name, tensor)` pairs and copies views of the tensors
into views of parameters. The parameters are on the meta device; so are the tensors, except those whose loader looks at
values. Copies into parameters are noted and not executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refit_transport.layout.box import Box
from refit_transport.layout.layout import row_major_strides
from refit_transport.targets.strided import LocatedView, StridedView, locate

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Region:
    """A strided part of a parameter, relative to its first element, and when in the load it was written."""

    parameter: str
    view: StridedView
    order: int


@dataclass(frozen=True, slots=True)
class Write:
    """Elements of one loaded tensor copied unchanged (but for the cast to the parameter's dtype) into a region.

    The region's view has the dims of `box`, the box of the loaded tensor.
    """

    source: str
    box: Box
    region: Region


@dataclass(frozen=True, slots=True)
class Computed:
    """A region written with something other than a view of one loaded tensor, and what that was made from."""

    region: Region
    sources: frozenset[str]
    parameters: frozenset[str]
    reason: str


@dataclass(frozen=True, slots=True)
class RawTrace:
    """What a loader did, in order; `zeroed` are the regions that it set to zero."""

    writes: tuple[Write, ...]
    computed: tuple[Computed, ...]
    zeroed: tuple[Region, ...]


class LoaderFailure(Exception):  # noqa: N818 - an outcome that the caller turns into its own error
    """The loader raised while it loaded `source`; `operation` is set when it needed the values of `sources`."""

    def __init__(self, source: str, sources: frozenset[str], operation: str) -> None:
        super().__init__(source, sources, operation)
        self.source = source
        self.sources = sources
        self.operation = operation


@dataclass(frozen=True, slots=True)
class _Plain:
    """A storage that holds elements of one loaded tensor: the tensor itself, a copy of a view of it, or a cast.

    `shape` is the storage's, as a contiguous tensor; its element `(i0, ...)` is the loaded tensor's element
    `base.offset + i0 * base.strides[0] + ...`.
    """

    source: str
    shape: tuple[int, ...]
    base: StridedView
    dtypes: tuple[torch.dtype, ...]

    def through(self, located: LocatedView) -> StridedView:
        """A box of this storage as a view of the loaded tensor."""
        starts = zip(located.box.offset, self.base.strides, strict=True)
        offset = self.base.offset + sum(start * stride for start, stride in starts)
        return StridedView(offset, located.box.shape, self.base.strides)


@dataclass(frozen=True, slots=True)
class _Derived:
    """A storage computed from loaded tensors or parameters."""

    sources: frozenset[str]
    parameters: frozenset[str]
    reason: str

    @classmethod
    def of(cls, origins: Iterable[_Origin], reason: str) -> _Derived:
        """What is made from all of `origins`; the first known reason stands."""
        sources: set[str] = set()
        parameters: set[str] = set()
        reasons: list[str] = []
        for origin in origins:
            if isinstance(origin, str):
                parameters.add(origin)
            elif isinstance(origin, _Plain):
                sources.add(origin.source)
            elif isinstance(origin, _Derived):
                sources |= origin.sources
                parameters |= origin.parameters
                reasons.append(origin.reason)
        return cls(frozenset(sources), frozenset(parameters), (*reasons, reason)[0])


@dataclass(frozen=True, slots=True)
class _Zeros:
    """A storage that the loader made of zeros, whatever it loads."""


_Origin = _Plain | _Derived | _Zeros | str
"""Where a storage's contents come from; a string is the name of the parameter that the storage is."""

_LOADER_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def trace(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    sources: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
) -> RawTrace:
    """Runs `load` over the contiguous `sources`, in their order, and notes what it does to the meta `parameters`.

    A source may be a real tensor of zeros instead of a meta tensor, for a loader that looks at its values.

    Raises:
        LoaderFailure: the loader raised.
    """
    tracer = _Tracer(sources, parameters)
    try:
        with torch.no_grad(), tracer:
            load(tracer.feed(sources))
    except _LOADER_ERRORS as error:
        raise LoaderFailure(tracer.current, tracer.unreadable, tracer.operation) from error
    return RawTrace(tuple(tracer.writes), tuple(tracer.computed), tuple(tracer.zeroed))


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows storages: loaded tensors, plain copies of them, values derived from them, and parameters."""

    def __init__(self, sources: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: list[Write] = []
        self.computed: list[Computed] = []
        self.zeroed: list[Region] = []
        self.current = ""
        self.unreadable: frozenset[str] = frozenset()
        self.operation = ""
        self._shapes = {name: tuple(tensor.shape) for name, tensor in sources.items()}
        self._parameters = dict(parameters)
        self._origins: dict[int, _Origin] = {}
        # A storage's address identifies it only while it is alive.
        self._alive: list[torch.UntypedStorage] = []
        for name, shape in self._shapes.items():
            base = StridedView(0, shape, row_major_strides(shape))
            self._note(sources[name], _Plain(name, shape, base, (sources[name].dtype,)))
        for name, tensor in parameters.items():
            self._note(tensor, name)

    def feed(self, sources: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sources.items():
            self.current = name
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        origins = [origin for origin in map(self._origin, inputs) if origin is not None]
        if not origins or func in _MAKES_ZEROS:
            result = func(*args, **kwargs)
            if func in _MAKES_ZEROS:
                self._note(result, _Zeros())
            return result
        if func is _ATEN.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        mutated = _mutated(func, args, kwargs)
        if mutated:
            for tensor in mutated:
                self._mutate(func, tensor, args, inputs)
            return mutated[0]
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            self.unreadable, self.operation = _Derived.of(origins, "").sources, str(func)
            raise
        for output in tree_leaves(result):
            if isinstance(output, torch.Tensor) and self._origin(output) is None:  # else it is a view of an input
                copied = self._plain_copy(args[0], output) if func in _COPIES else None
                self._note(output, copied or _Derived.of(origins, f"its loader applies {func}"))
        return result

    def _plain_copy(self, tensor: torch.Tensor, copied: torch.Tensor) -> _Plain | None:
        """The elements of a copy that keeps them in some dense order, so that views of it can be followed too."""
        origin = self._origin(tensor)
        if not isinstance(origin, _Plain) or copied.storage_offset():
            return None
        located = locate(_view(tensor), origin.shape, tuple(copied.stride()))
        if located is None:
            return None
        whole = origin.through(located)
        dims = sorted(range(len(whole.shape)), key=lambda dim: -located.strides[dim])
        shape = tuple(whole.shape[dim] for dim in dims)
        for dim, step in zip(dims, row_major_strides(shape), strict=True):
            if whole.shape[dim] > 1 and located.strides[dim] != step:
                return None
        base = StridedView(whole.offset, shape, tuple(whole.strides[dim] for dim in dims))
        return _Plain(origin.source, shape, base, (*origin.dtypes, copied.dtype))

    def _mutate(self, func: Any, tensor: torch.Tensor, args: tuple[Any, ...], inputs: list[torch.Tensor]) -> None:
        """Notes an in-place operation other than `copy_`."""
        origin = self._origin(tensor)
        derived = _Derived.of(filter(None, map(self._origin, inputs)), f"its loader applies {func}")
        zeroes = func is _ATEN.zero_.default or (func is _ATEN.fill_.Scalar and args[1] == 0)
        if not isinstance(origin, str):
            all_of_it = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            self._note(tensor, _Zeros() if zeroes and all_of_it else derived)
        elif zeroes:
            self.zeroed.append(self._region(origin, tensor))
        else:
            self._compute(origin, tensor, derived)

    def _copy(self, destination: torch.Tensor, value: torch.Tensor) -> None:
        target, origin = self._origin(destination), self._origin(value)
        if not isinstance(target, str):
            known = [each for each in (target, origin) if each is not None]
            self._note(destination, _Derived.of(known, "its loader builds the value in a temporary tensor"))
        elif torch.broadcast_shapes(value.shape, destination.shape) != destination.shape:  # type: ignore[no-untyped-call]
            raise RuntimeError(f"{list(value.shape)} doesn't fit into {list(destination.shape)}")
        elif destination.numel() == 0:
            pass
        elif isinstance(origin, _Plain):
            self._write(target, destination, origin, value)
        elif isinstance(origin, _Zeros):
            self.zeroed.append(self._region(target, destination))
        else:
            known = [] if origin is None else [origin]
            reason = "its loader writes a constant" if origin is None else "its loader computes the value"
            self._compute(target, destination, _Derived.of(known, reason))

    def _write(self, target: str, destination: torch.Tensor, origin: _Plain, value: torch.Tensor) -> None:
        between = [dtype for dtype in origin.dtypes[1:] if dtype not in (origin.dtypes[0], destination.dtype)]
        view = _as_broadcast(value, destination)
        inner = None if view is None else locate(view, origin.shape, tuple(destination.stride()))
        located = None if inner is None else locate(origin.through(inner), self._shapes[origin.source], inner.strides)
        problem = ""
        if between:
            problem = f"its loader casts it through {between[0]}"
        elif destination.dtype != self._parameters[target].dtype:
            problem = f"its loader writes bytes of {destination.dtype} into {self._parameters[target].dtype}"
        elif view is None or _repeats(destination):
            problem = "its loader broadcasts it"
        elif located is None:
            problem = "its loader copies elements that aren't one box of it"
        if problem or located is None:
            self._compute(target, destination, _Derived.of([origin], problem))
            return
        region = self._region(target, destination)
        boxed = StridedView(region.view.offset, located.box.shape, located.strides)
        self.writes.append(Write(origin.source, located.box, Region(target, boxed, region.order)))

    def _compute(self, parameter: str, destination: torch.Tensor, origin: _Derived) -> None:
        region = self._region(parameter, destination)
        self.computed.append(Computed(region, origin.sources, origin.parameters, origin.reason))

    def _region(self, parameter: str, tensor: torch.Tensor) -> Region:
        view = _view(tensor)
        offset = view.offset - int(self._parameters[parameter].storage_offset())
        order = len(self.writes) + len(self.computed) + len(self.zeroed)
        return Region(parameter, StridedView(offset, view.shape, view.strides), order)

    def _origin(self, tensor: torch.Tensor) -> _Origin | None:
        return self._origins.get(tensor.untyped_storage()._cdata)

    def _note(self, tensor: torch.Tensor, origin: _Origin) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._origins[storage._cdata] = origin


_COPIES = (_ATEN._to_copy.default, _ATEN.clone.default)
_MAKES_ZEROS = (_ATEN.zeros.default, _ATEN.zeros_like.default, _ATEN.new_zeros.default)


def _view(tensor: torch.Tensor) -> StridedView:
    return StridedView(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether one element stands for several along a dim."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _as_broadcast(value: torch.Tensor, destination: torch.Tensor) -> StridedView | None:
    """The value's view with the destination's shape, where that adds or drops dims of size 1 only."""
    shape, strides = [*value.shape], [*value.stride()]
    extra = destination.dim() - len(shape)
    padded_shape = [1] * extra + shape[max(0, -extra) :]
    padded_strides = [0] * extra + strides[max(0, -extra) :]
    if padded_shape != [*destination.shape]:
        return None
    return StridedView(int(value.storage_offset()), tuple(padded_shape), tuple(padded_strides))


def _mutated(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to, by its schema."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
