"""One step's arrays on their way to the device: packed, copied once, unpacked as views.

    token_ids | positions | slots | ... | block_tables        host buffer of the ring, page-locked on CUDA
        one asynchronous copy, in the stream of the forward
    token_ids | positions | slots | ... | block_tables        device bytes, seen as tensors of the arrays' types

The host may be filling the next step's buffer while the device still reads this one's, so the buffers form a ring, and
each is used again only after its event. Knows arrays and bytes; no pool, no model. Used by one thread.

Invariants: a buffer is never written before the copy that reads it has ended; no copy for each array; starts of arrays lie
on 16-byte borders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tieredkv.batch import Batch

# Steps that may be on their way at once: one that runs, one that is being prepared, and one to spare.
_NUM_BUFFERS = 3
_ALIGNMENT = 16
_LEAST_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The arrays of a `Batch` as tensors on the device, with its shapes and types."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logits_indices: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor


class Event(Protocol):
    """A mark in the stream of the forward, as `torch.cuda.Event`."""

    def record(self) -> Any: ...

    def synchronize(self) -> Any:
        """Sleep until everything before the last `record` is done; at once if there was none."""
        ...


class _NoEvent:
    """Where copies are done when they return, there is nothing to wait for."""

    def record(self) -> None:
        """Nothing to mark."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def events_of(device: torch.device) -> Callable[[], Event]:
    """What makes events for work on `device`."""
    return torch.cuda.Event if device.type == "cuda" else _NoEvent


class UploadRing:
    """Host buffers in turn, each with the event of the last copy that read it."""

    def __init__(
        self, device: torch.device, num_buffers: int = _NUM_BUFFERS, new_event: Callable[[], Event] | None = None
    ) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        make_event = new_event if new_event is not None else events_of(device)
        self._events = [make_event() for _ in range(num_buffers)]
        self._buffers = [self._allocate(_LEAST_NBYTES) for _ in range(num_buffers)]
        self._next = 0

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """Copies of `arrays` on the device, with one transfer, in the current stream. The arrays may be reused at once."""
        starts, nbytes = _layout(arrays)
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        self._events[index].synchronize()
        if self._buffers[index].numel() < nbytes:
            self._buffers[index] = self._allocate(1 << (nbytes - 1).bit_length())
        host = self._buffers[index][:nbytes]
        memory = host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        packed = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        packed.copy_(host, non_blocking=True)
        self._events[index].record()
        return [
            packed[start : start + array.nbytes].view(_torch_type(array)).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def stage(self, batch: Batch) -> StepTensors:
        """The arrays of one step on the device."""
        return StepTensors(*self.upload([getattr(batch, field.name) for field in fields(StepTensors)]))

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)


def _layout(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Where each array starts, and how many bytes all of them take."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, max(end, _ALIGNMENT)


def _torch_type(array: NDArray[Any]) -> torch.dtype:
    return {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}[array.dtype]
