"""What a process's resident memory consists of, read from the kernel's own account: `/proc/PID/smaps`, Linux only.

Every mapping belongs to exactly one kind, and its resident pages count once:

    blocks       pool and arena: anonymous, left out of core dumps, as `tieredkv.runtime.anonymous_memory` makes them and
                 nobody else in the process does
    store        files of the disk tier: the system's page cache, given back under pressure
    checkpoint   files of weights that are still mapped
    libraries    other files, code and data, shared or not
    memory       everything else: heaps, stacks, weights after packing

Weights are in `memory`, in `checkpoint`, or half in each; `Resident.overhead_nbytes` subtracts them once, so a second copy
anywhere counts as overhead, and so does a checkpoint that stays mapped beside what was made of it.

Knows no server. Invariant: the kinds add up to the resident size that the kernel reports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)$")
_NOT_DUMPED = "dd"


@dataclass(slots=True)
class Resident:
    """Resident bytes by kind."""

    blocks: int = 0
    store: int = 0
    checkpoint: int = 0
    libraries: int = 0
    memory: int = 0

    def overhead_nbytes(self, weights_nbytes: int) -> int:
        """What is resident beyond one copy of the weights, the blocks, and the system's cache of the store."""
        return self.checkpoint + self.libraries + self.memory - weights_nbytes

    def __str__(self) -> str:
        return ", ".join(f"{kind} {getattr(self, kind) / 1024**2:.0f}" for kind in self.__slots__) + " MiB"


def resident(smaps: str, store: Path) -> Resident:
    """The account in `smaps`, the text of that file, for a process whose disk tier lies in `store`."""
    found = Resident()
    path, nbytes = "", 0
    for line in smaps.splitlines():
        if header := _HEADER.match(line):
            path, nbytes = header[1].strip(), 0
        elif line.startswith("Rss:"):
            nbytes = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:"):
            # The last line of each mapping.
            kind = _kind(path, line.split()[1:], store)
            setattr(found, kind, getattr(found, kind) + nbytes)
    return found


def resident_of(pid: int, store: Path) -> Resident:
    """The same for a running process."""
    return resident(Path(f"/proc/{pid}/smaps").read_text(), store)


def _kind(path: str, flags: list[str], store: Path) -> str:
    if not path or path.startswith("["):
        return "blocks" if _NOT_DUMPED in flags and not path else "memory"
    if Path(path).is_relative_to(store):
        return "store"
    if path.endswith(".safetensors"):
        return "checkpoint"
    return "libraries"
