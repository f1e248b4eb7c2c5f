"""Copies between device blocks and host slots, beside the computation.

A copy moves whole blocks (`block_nbytes` each) and is owned by a `Copy` handle from launch to completion: whoever holds
the handle keeps blocks and slots from being reused, and nothing else does. Knows no hashes, no sequences, no policy.

On a CPU device, blocks and slots are both plain memory and one thread copies, with the GIL released. Copies complete in
any order; `poll` hands each handle out once, on the thread that polls.

Invariants: a copy reads and writes nothing after its handle was handed out; a copy that failed says so and is never
handed out as done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tieredkv.errors import InvariantError

Bytes = NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class Copy:
    """One batch of block copies in one direction: `views` are the host slots' bytes, parallel to `block_ids`. `tag` is the
    launcher's; `error` is set when it failed.
    """

    block_ids: Sequence[int]
    views: Sequence[memoryview]
    to_device: bool
    tag: Any = None
    error: str | None = None


class CopyEngine(Protocol):
    """Launches copies and tells which have completed."""

    def launch(self, copy: Copy) -> None:
        """Start a copy. The blocks' contents are those of everything that was computed before the launch."""
        ...

    def poll(self) -> list[Copy]:
        """Handles that completed since the last call, in order of completion."""
        ...

    def close(self) -> None:
        """Finish what was launched and stop."""
        ...


class ThreadCopyEngine:
    """Copies plain memory on one thread. `blocks` is the pool as uint8 `[num_blocks, block_nbytes]`. `wake` is called whenever
    a copy completes, from the copying thread.
    """

    def __init__(self, blocks: Bytes, wake: Callable[[], None] = lambda: None) -> None:
        if blocks.ndim != 2 or blocks.dtype != np.uint8:
            raise InvariantError(f"blocks must be uint8 [num_blocks, block_nbytes], got {blocks.dtype} {blocks.shape}")
        self._blocks = blocks
        self._wake = wake
        self._launched: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tieredkv-copy", daemon=True)
        self._thread.start()

    def launch(self, copy: Copy) -> None:
        if len(copy.block_ids) != len(copy.views):
            raise InvariantError(f"{len(copy.block_ids)} blocks for {len(copy.views)} slots")
        self._launched.put(copy)

    def poll(self) -> list[Copy]:
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (copy := self._launched.get()) is not None:
            try:
                for block_id, view in zip(copy.block_ids, copy.views, strict=True):
                    block, slot = self._blocks[block_id], np.frombuffer(view, dtype=np.uint8)
                    np.copyto(*((block, slot) if copy.to_device else (slot, block)))
            except Exception as error:
                copy.error = f"{type(error).__name__}: {error}"
            self._done.put(copy)
            self._wake()
