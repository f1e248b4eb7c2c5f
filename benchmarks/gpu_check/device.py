"""What differs between CUDA and a CPU, behind one face: clocks, graphs, memory, facts. All else of the check is the same code.

`CudaDevice` holds the only lines that a run on a CPU does not walk.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.machine import describe
from tieredkv.cuda_graphs import Capture, CudaCapture
from tieredkv.runtime import free_memory_nbytes


class Device(Protocol):
    """Where the check runs."""

    torch: torch.device

    def card(self) -> str:
        """What people call it."""
        ...

    def free_nbytes(self) -> int:
        """Memory that can still be had."""
        ...

    def release(self) -> None:
        """Give memory that is no longer used back to the system."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was started. Raises what went wrong in it."""
        ...

    def clock(self) -> Callable[[], float]:
        """Start to take the time of what the device does from now on; the function returned ends it and gives seconds."""
        ...

    def capture(self) -> Capture:
        """What makes a function repeatable without the host's work."""
        ...


class CudaDevice:
    def __init__(self) -> None:
        self.torch = torch.device("cuda", torch.cuda.current_device())

    def card(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def free_nbytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch)[0]

    def release(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def clock(self) -> Callable[[], float]:
        event_class: Any = torch.cuda.Event
        began, ended = event_class(enable_timing=True), event_class(enable_timing=True)
        began.record()

        def stop() -> float:
            ended.record()
            ended.synchronize()
            seconds: float = began.elapsed_time(ended) / 1e3
            return seconds

        return stop

    def capture(self) -> Capture:
        return CudaCapture()


class CpuDevice:
    torch = torch.device("cpu")

    def card(self) -> str:
        return "cpu"

    def free_nbytes(self) -> int:
        return free_memory_nbytes()

    def release(self) -> None:
        """There is nothing that keeps any."""

    def synchronize(self) -> None:
        """Work is done when it returns."""

    def clock(self) -> Callable[[], float]:
        began_s = time.perf_counter()
        return lambda: time.perf_counter() - began_s

    def capture(self) -> Capture:
        def by_calling_again(function: Callable[[], None]) -> Callable[[], None]:
            function()
            return function

        return by_calling_again


DEVICES: dict[str, Callable[[], Device]] = {"cuda": CudaDevice, "cpu": CpuDevice}


def facts(device: Device) -> dict[str, str]:
    """Card, versions, machine."""
    found = {"card": device.card(), "cuda": str(torch.version.cuda)}
    for package in ("triton", "cupy-cuda13x", "lmdb"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, **describe()}


def times_s(
    device: Device, run: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Seconds that the device takes for `run`, each time after `before`; the first two runs do not count."""
    found = []
    for number in range(repeats + 2):
        before()
        stop = device.clock()
        run()
        seconds = stop()
        if number > 1:
            found.append(seconds)
    return found
