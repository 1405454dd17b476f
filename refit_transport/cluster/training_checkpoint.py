"""Checkpoints of training ranks: by logical tensor, so that another parallel layout can go on from them.

A folder holds torch's distributed checkpoint of the fp32 weights and both of AdamW's moments, each under the logical
tensor's canonical name (elements as Megatron stores them), the random number generators of every rank, and
`training.json`. It is written beside its place and renamed last: a folder of that name is whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from refit_transport.errors import LayoutError, WorkerError

_HEADER = "training.json"
_FORMAT = 1
_RANDOM = "random/"

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a tensor: its key, the whole tensor's shape, the box's offset, and its live elements on this rank."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    elements: torch.Tensor


@dataclass(frozen=True, slots=True)
class Header:
    """What a checkpoint is of: a "policy" or a "critic" after so many updates, on so many ranks."""

    role: str
    updates: int
    world_size: int


def save(folder: Path, blocks: Sequence[Block], header: Header) -> None:
    """Writes a new folder of what all ranks hold; copies are written once. Collective; the folder is shared by all.

    Raises:
        WorkerError: the folder exists, or a rank can't write; on every rank. The folder doesn't exist then.
    """
    aside = on_first_rank(lambda: begin_folder(folder), phase="save")
    random = [Block(key, tuple(state.shape), (0,), state) for key, state in _random_states().items()]
    try:
        dcp.save({}, storage_writer=dcp.FileSystemWriter(aside), planner=_SavePlanner(aside, [*blocks, *random]))
    except dcp.CheckpointException as error:
        raise _failed("save", f"{aside} can't be written: {_causes(error)}") from error
    on_first_rank(lambda: _finish(aside, folder, header), phase="save")


def restore(folder: Path, blocks: Sequence[Block], *, role: str) -> Header:
    """Fills the blocks from a folder, whatever the layout that wrote it. Collective.

    The random number generators are restored where as many ranks as now wrote them, and left alone elsewhere.

    Raises:
        WorkerError: the folder is no whole checkpoint, or one of another role or model.
    """
    header = read_header(folder)
    if header.role != role:
        raise _failed("restore", f"{folder} is a checkpoint of a {header.role}; a {role} can't go on from it")
    states = _random_states() if header.world_size == dist.get_world_size() else {}
    random = [Block(key, tuple(state.shape), (0,), state) for key, state in states.items()]
    try:
        dcp.load({}, storage_reader=dcp.FileSystemReader(folder), planner=_LoadPlanner([*blocks, *random]))
    except dcp.CheckpointException as error:
        raise _failed("restore", f"{folder} can't be read: {_causes(error)}") from error
    for block in random:
        _set_random_state(block)
    return header


def read_header(folder: Path) -> Header:
    """What the checkpoint in a folder is of.

    Raises:
        WorkerError: there is no whole checkpoint, or one of another format.
    """
    try:
        fields = json.loads((folder / _HEADER).read_text())
    except (OSError, ValueError) as error:
        raise _failed("restore", f"{folder} is no whole checkpoint: {_HEADER}: {error}") from error
    if fields.pop("format", None) != _FORMAT:
        raise _failed("restore", f"{folder}/{_HEADER} isn't of format {_FORMAT}: another version wrote it")
    return Header(**fields)


def begin_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, in which its contents are gathered; what an earlier attempt left is removed.

    Raises:
        FileExistsError: `folder` exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; remove it, or save elsewhere")
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def publish_folder(aside: Path, folder: Path) -> None:
    """Gives a complete folder its name: afterwards it is on the disk under it, or under none."""
    _flush(aside)
    aside.rename(folder)
    _flush(folder.parent)


def on_first_rank(action: Callable[[], Result], *, phase: str) -> Result:
    """Rank 0's result of `action` on every rank. Collective.

    Raises:
        WorkerError: it failed; on every rank, with the phase.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except OSError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise _failed(phase, answer[1])
    result: Result = answer[0]
    return result


def _finish(aside: Path, folder: Path, header: Header) -> None:
    with (aside / _HEADER).open("w") as file:
        json.dump({"format": _FORMAT, **asdict(header)}, file)
        file.flush()
        os.fsync(file.fileno())
    publish_folder(aside, folder)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_states() -> dict[str, torch.Tensor]:
    """Copies of this rank's generators' states, by key."""
    rank = dist.get_rank()
    states = {f"{_RANDOM}cpu/{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{_RANDOM}cuda/{rank}"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(block: Block) -> None:
    if block.key.startswith(f"{_RANDOM}cuda/"):
        torch.cuda.set_rng_state(block.elements)
    else:
        torch.set_rng_state(block.elements)


class _SavePlanner(DefaultSavePlanner):
    """Plans blocks; torch's own planner drops copies, and refuses boxes that overlap or don't fill their tensor."""

    def __init__(self, folder: Path, blocks: Iterable[Block]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder
        self._blocks = {_index(block): block for block in blocks}

    def create_local_plan(self) -> SavePlan:
        if not self._folder.is_dir():
            raise FileNotFoundError("rank 0 made the folder, but this rank doesn't see it: all ranks must share it")
        self.plan = SavePlan([_write_item(index, block) for index, block in self._blocks.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._blocks[index].elements.detach().contiguous()


class _LoadPlanner(DefaultLoadPlanner):
    """Plans reads of every part of the blocks, from whichever boxes were saved."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = {_index(block): block for block in blocks}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for block in self._blocks.values():
            held = self.metadata.state_dict_metadata.get(block.key)
            if held is None and block.key.startswith(_RANDOM):
                continue
            expected = f"shape {list(block.shape)}"
            if not isinstance(held, TensorStorageMetadata):
                raise LayoutError(block.key, -1, expected, "nothing of that name: it is of another model")
            if tuple(held.size) != block.shape:
                raise LayoutError(block.key, -1, expected, f"shape {list(held.size)}: it is of another model")
            parts = create_read_items_for_chunk_list(block.key, held, [_chunk(block)])
            found = sum(math.prod(part.lengths) for part in parts)
            if found != block.elements.numel():
                wanted = f"{block.elements.numel()} elements at {list(block.offset)}"
                raise LayoutError(block.key, -1, wanted, f"{found} of them")
            items += parts
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._blocks[index].elements


def _index(block: Block) -> MetadataIndex:
    return MetadataIndex(block.key, torch.Size(block.offset))


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.elements.shape))


def _write_item(index: MetadataIndex, block: Block) -> WriteItem:
    properties = TensorProperties.create_from_tensor(block.elements)
    data = TensorWriteData(_chunk(block), properties, torch.Size(block.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _failed(phase: str, reason: str) -> WorkerError:
    return WorkerError("training", dist.get_rank(), phase, reason)


def _causes(error: dcp.CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
