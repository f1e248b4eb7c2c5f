"""Runs parts one after another and says in JSON lines what it found; see `conductor` for who listens.

A part that raises is reported as failed. When its error has made the device unusable, the worker says so and ends, and
another process takes the parts that are left.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_check.report import Row, as_json
from benchmarks.gpu_check.sizes import FULL, SMALL, Sizes

if TYPE_CHECKING:
    from benchmarks.gpu_check.device import Device

# part -> where it is made, and the most seconds it may take from then on begin something new.
MADE_BY = {
    "kernels": ("oracle", "kernels", 130.0),
    "equivalence": ("tiers", "equivalence", 90.0),
    "decode": ("attention_speed", "decode", 60.0),
    "prefill": ("attention_speed", "prefill", 40.0),
    "copies": ("copying", "copies", 60.0),
    "ttft": ("tiers", "ttft", 90.0),
    "graphs": ("graphs", "graphs", 90.0),
}


@dataclass(slots=True)
class Context:
    """What a part is given. `late()` says that it should begin nothing new."""

    device: Device
    sizes: Sizes
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    # What parts share: the model, which takes a while to make.
    shared: dict[str, Any] = field(default_factory=dict)

    def late(self) -> bool:
        return self.clock() > self.deadline_s


Part = Callable[[Context], Iterator[Row]]


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def run_part(name: str, part: Part, context: Context) -> bool:
    """Run one part and say its rows; False when the device cannot be used any more."""
    say(begin=name)
    num_rows = 0
    try:
        for row in part(context):
            num_rows += 1
            _say_row(row)
        context.device.synchronize()
        # An engine's parts refer to each other; its memory is wanted back now.
        gc.collect()
        context.device.release()
        if num_rows == 0:
            _say_row(Row(name, "the whole part", "nothing was measured", skipped=True))
    except Exception as error:
        traceback.print_exc()
        _say_row(Row(name, "the whole part" if num_rows == 0 else "the rest", _short(error), ok=False))
        return _usable(context.device)
    finally:
        say(end=name)
    return True


def _say_row(row: Row) -> None:
    (values,) = as_json([row])
    del values["verdict"]
    say(row=values)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _usable(device: Device) -> bool:
    try:
        device.release()
        device.synchronize()
    except Exception as error:
        say(fatal=f"the device cannot be used any more: {_short(error)}")
        return False
    return True


def load(name: str) -> Part:
    """The function that runs the part `name`; imported only when its turn comes."""
    module, function, _ = MADE_BY[name]
    part: Part = getattr(importlib.import_module(f"benchmarks.gpu_check.{module}"), function)
    return part


def _load_and_run(name: str, context: Context) -> Iterator[Row]:
    return load(name)(context)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.worker", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit-s", type=float, default=450.0)
    parser.add_argument("parts", nargs="+", choices=list(MADE_BY))
    chosen = parser.parse_args(arguments)
    end_s = time.monotonic() + chosen.limit_s
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    import torch

    from benchmarks.gpu_check.device import DEVICES, facts

    torch.set_float32_matmul_precision("highest")
    try:
        device = DEVICES[chosen.device]()
        say(machine=facts(device))
    except Exception as error:
        say(fatal=f"there is no such device: {_short(error)}")
        return 1
    context = Context(device, SMALL if chosen.small else FULL, end_s)
    for name in chosen.parts:
        now_s = time.monotonic()
        if now_s > end_s:
            say(late=name)
            break
        limited = replace(context, deadline_s=min(now_s + MADE_BY[name][2], end_s))
        if not run_part(name, partial(_load_and_run, name), limited):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
