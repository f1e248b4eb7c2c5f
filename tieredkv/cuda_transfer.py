"""Copies between device blocks and page-locked host slots on CUDA, beside the computation: the CUDA form of
`transfer.CopyEngine`.

    compute  --- forward ---+------------------------------+--- forward reads the block --->
                            | event: position at launch    ^ event: copy done
    copies   ---------------+--> slab | slab | slab -------+---------------------------->      one stream each way

Both directions wait for the compute stream's position at the launch: a copy down must see what was computed, a copy up
must not overwrite what an earlier forward still reads. A copy is done when its own event has happened; before `poll`
hands out a copy to the device, the compute stream is told to wait for that event. The copying needs no thread; one
thread per direction sleeps on the events, only to wake whoever polls.

Within one direction copies complete in the order of their launches. Knows no hashes, no sequences, no policy.

Invariants: no copy starts before the compute stream's position at its launch; a handle is handed out only after its event
has happened, or after the device can touch its memory no more, with `error` set; an event is reused only when nobody
waits for it any longer.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tieredkv.cuda_runtime import CudaRuntime
from tieredkv.errors import InvariantError
from tieredkv.transfer import Copy


@dataclass(slots=True, eq=False)
class _Flight:
    """A launched copy. `event` is None when it could not be recorded; `watched` once no thread sleeps on it any more."""

    copy: Copy
    event: int | None
    watched: bool = False


class CudaCopyEngine:
    """Copies by DMA. The pool's blocks lie `block_nbytes` apart from the device address `pool_address` on; host slots lie in
    page-locked memory.

    `compute_stream()` is the stream that forwards run on. `wake` is called, from a thread of this engine, whenever a copy
    completes. Used by one thread.
    """

    def __init__(
        self,
        pool_address: int,
        num_blocks: int,
        block_nbytes: int,
        runtime: CudaRuntime,
        compute_stream: Callable[[], int],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool_address = pool_address
        self._num_blocks = num_blocks
        self._block_nbytes = block_nbytes
        self._runtime = runtime
        self._compute_stream = compute_stream
        self._wake = wake
        self._streams = {to_device: runtime.create_stream() for to_device in (False, True)}
        self._flights: dict[bool, deque[_Flight]] = {False: deque(), True: deque()}
        self._free_events: list[int] = []
        # Handed out, but a thread may still sleep on their events.
        self._retired: list[_Flight] = []
        self._watching: dict[bool, queue.SimpleQueue[_Flight | None]] = {
            False: queue.SimpleQueue(),
            True: queue.SimpleQueue(),
        }
        self._threads = [
            threading.Thread(target=self._watch, args=(flights,), name="tieredkv-copy-wake", daemon=True)
            for flights in self._watching.values()
        ]
        for thread in self._threads:
            thread.start()

    def launch(self, copy: Copy) -> None:
        """Enqueue the copy behind the compute stream's present position. Failures of CUDA show in `copy.error` at `poll`."""
        addresses = [self._slot_address(view) for view in copy.views]
        if len(copy.block_ids) != len(addresses):
            raise InvariantError(f"{len(copy.block_ids)} blocks for {len(addresses)} slots")
        if any(not 0 <= block_id < self._num_blocks for block_id in copy.block_ids):
            raise InvariantError(f"blocks {list(copy.block_ids)} of a pool of {self._num_blocks}")
        blocks = [self._pool_address + block_id * self._block_nbytes for block_id in copy.block_ids]
        runtime, stream = self._runtime, self._streams[copy.to_device]
        flight = _Flight(copy, None)
        try:
            position = self._event()
            runtime.record(position, self._compute_stream())
            runtime.wait(stream, position)
            # The wait refers to the position just recorded, whatever the event is used for later.
            self._free_events.append(position)
            targets, sources = (blocks, addresses) if copy.to_device else (addresses, blocks)
            runtime.copy(targets, sources, self._block_nbytes, copy.to_device, stream)
        except Exception as error:
            copy.error = f"{type(error).__name__}: {error}"
        try:
            event = self._event()
            runtime.record(event, stream)
            flight.event = event
        except Exception as error:
            copy.error = copy.error or f"{type(error).__name__}: {error}"
            self._settle(stream)
        self._flights[copy.to_device].append(flight)
        if flight.event is None:
            self._wake()
        else:
            self._watching[copy.to_device].put(flight)

    def poll(self) -> list[Copy]:
        done: list[Copy] = []
        for to_device, flights in self._flights.items():
            while flights and self._is_done(flights[0]):
                flight = flights.popleft()
                if to_device and flight.event is not None and flight.copy.error is None:
                    self._order_reads(flight.copy, flight.event)
                self._retired.append(flight)
                done.append(flight.copy)
        self._recycle()
        return done

    def close(self) -> None:
        """Wait for what was launched, which `poll` still hands out, and give streams and events back."""
        for stream in self._streams.values():
            self._settle(stream)
        for watching in self._watching.values():
            watching.put(None)
        for thread in self._threads:
            thread.join()
        flights = [flight for queued in self._flights.values() for flight in queued]
        for flight in flights:
            self._is_done(flight)
        events = {f.event for f in [*flights, *self._retired] if f.event is not None}
        for flight in flights:
            flight.event = None
        with contextlib.suppress(Exception):
            for event in [*events, *self._free_events]:
                self._runtime.destroy_event(event)
            for stream in self._streams.values():
                self._runtime.destroy_stream(stream)
        self._free_events.clear()
        self._retired.clear()

    def _slot_address(self, view: memoryview) -> int:
        if view.nbytes != self._block_nbytes:
            raise InvariantError(f"a slot of {view.nbytes} bytes for blocks of {self._block_nbytes} bytes")
        return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)

    def _event(self) -> int:
        return self._free_events.pop() if self._free_events else self._runtime.create_event()

    def _is_done(self, flight: _Flight) -> bool:
        """Whether the device has done with the copy, well or not."""
        if flight.event is None:
            return True
        try:
            return self._runtime.has_happened(flight.event)
        except Exception as error:
            # Such errors stick: the context is lost, and nothing in it runs any more.
            flight.copy.error = flight.copy.error or f"{type(error).__name__}: {error}"
            return True

    def _order_reads(self, copy: Copy, event: int) -> None:
        """Forwards launched from now on wait for the copy that has arrived."""
        try:
            self._runtime.wait(self._compute_stream(), event)
        except Exception as error:
            copy.error = f"{type(error).__name__}: {error}"

    def _settle(self, stream: int) -> None:
        """Wait until nothing of the stream runs. Where even that fails the context is lost, and nothing runs in it."""
        with contextlib.suppress(Exception):
            self._runtime.synchronize_stream(stream)

    def _recycle(self) -> None:
        if self._retired:
            self._free_events += [f.event for f in self._retired if f.watched and f.event is not None]
            self._retired = [f for f in self._retired if not f.watched and f.event is not None]

    def _watch(self, flights: queue.SimpleQueue[_Flight | None]) -> None:
        while (flight := flights.get()) is not None:
            if flight.event is not None:
                # What went wrong is found by `poll`.
                with contextlib.suppress(Exception):
                    self._runtime.synchronize_event(flight.event)
            flight.watched = True
            self._wake()
