"""The process that the engine runs in: cores, memory, allocator, OpenMP runtime.

Knows no torch, so that it can act before torch loads. Invariant: a process replaces itself at most once, and never when
there is nothing to gain.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

# Set in the replaced process, so that it does not replace itself again. Set by the user, it forbids the replacement.
REEXEC_VARIABLE = "TIEREDKV_REEXEC"

_CGROUP = Path("/sys/fs/cgroup")
_LIBRARY_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
_SYSTEM_ALLOCATORS = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
_ALLOCATOR_PACKAGE, _ALLOCATOR_LIBRARY = "cmeel-mimalloc", "libmimalloc.so"
_OPENMP_PACKAGE, _OPENMP_LIBRARY = "intel-openmp", "libiomp5.so"
# The call by which an allocator gives back what is free, and its arguments: mimalloc, tcmalloc, glibc.
_RELEASING: dict[str, tuple[int, ...]] = {
    "mi_collect": (1,),
    "MallocExtension_ReleaseFreeMemory": (),
    "malloc_trim": (0,),
}
_MADV_POPULATE_WRITE = 23
_TOUCHED_AHEAD_NBYTES = 96 * 1024**2
_SETTINGS = {
    # mimalloc: huge pages for the weights, and memory that a step gives back stays for the next one (ms).
    "MIMALLOC_ALLOW_LARGE_OS_PAGES": "1",
    "MIMALLOC_PURGE_DELAY": "10000",
    # How long (ms) an OpenMP worker spins for more work before it sleeps: longer than the gap between two operations,
    # shorter than what the HTTP threads would notice missing.
    "KMP_BLOCKTIME": "1",
}


def num_cores() -> int:
    """Physical cores that this process may use, at least 1."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text("ascii")
        except OSError:
            siblings = str(cpu)
        cores.add(siblings.strip())
    return max(len(cores), 1)


def free_memory_nbytes() -> int:
    """Bytes that can be allocated without swapping: what the kernel calls available, within the container's limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = (_CGROUP / "memory.max").read_text("ascii").strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text("ascii"))
            available = min(available, max(int(limit) - used, 0))
    except (OSError, ValueError, IndexError):
        return available
    return available


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """A zeroed mapping that takes memory only as it is touched, for keys and values: in huge pages where the kernel gives
    them, and left out of core dumps, because what it will hold encodes prompts. Its beginning is touched already, so that
    the first requests do not wait for the system to find memory. Raises `OSError`, `ValueError`.
    """
    if not sys.platform.startswith("linux"):
        return mmap.mmap(-1, nbytes)
    # Private: the kernel does not give shared mappings huge pages unless told so by its administrator.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    # Kernels before 5.14 do not know this advice: there the first requests find their pages themselves.
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_POPULATE_WRITE, 0, min(nbytes, _TOUCHED_AHEAD_NBYTES))
    return memory


def release_free_memory() -> None:
    """Let the allocator of this process give free memory back to the system, whichever it is."""
    process = ctypes.CDLL(None)
    for name, arguments in _RELEASING.items():
        function = getattr(process, name, None)
        if function is not None:
            function(*arguments)
            return


def better_environment(environ: Mapping[str, str]) -> dict[str, str] | None:
    """`environ` with a faster allocator and OpenMP runtime preloaded, or None where none is installed or all is set already.

    What the user preloads or sets comes first: a second allocator or a second OpenMP runtime is never added to one.
    """
    preload = [part for part in environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if part]
    names = " ".join(Path(part).name for part in preload)
    allocator = None if "malloc" in names else _find_allocator()
    openmp = None if "omp" in names else _find_openmp()
    found = [str(path) for path in (allocator, openmp) if path is not None]
    if not found:
        return None
    return {**_SETTINGS, **environ, "LD_PRELOAD": ":".join([*preload, *found])}


def maybe_reexec(argv: Sequence[str]) -> None:
    """Replace this process once by the same command in `better_environment`; return where there is nothing to gain.

    Only a process that was started as `argv` is replaced: one that merely calls the command line as a function is not.
    """
    if REEXEC_VARIABLE in os.environ or not sys.platform.startswith("linux"):
        return
    original = sys.orig_argv
    if len(argv) < 1 or list(argv[1:]) != original[len(original) - len(argv) + 1 :] or "torch" in sys.modules:
        return
    better = better_environment(os.environ)
    if better is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *original[1:]], better | {REEXEC_VARIABLE: "1"})


def _find_allocator() -> Path | None:
    """mimalloc from its Python package, or the system's tcmalloc: equally fast here, both faster than glibc's malloc."""
    if path := _find_in_package(_ALLOCATOR_PACKAGE, _ALLOCATOR_LIBRARY):
        return path
    for name in _SYSTEM_ALLOCATORS:
        for folder in _LIBRARY_FOLDERS:
            for path in sorted(Path("/").glob(f"{folder.lstrip('/')}/{name}")):
                return path
    return None


def _find_openmp() -> Path | None:
    return _find_in_package(_OPENMP_PACKAGE, _OPENMP_LIBRARY)


def _find_in_package(package: str, library: str) -> Path | None:
    """The file `library` of an installed Python package."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == library:
            path = Path(str(file.locate())).resolve()
            return path if path.exists() else None
    return None
