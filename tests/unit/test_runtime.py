"""A process replaces itself at most once, and only with what is installed and not chosen by the user already."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import memory_map
from tieredkv import runtime

ALLOCATOR, OPENMP = Path("/lib/libtcmalloc_minimal.so.4"), Path("/lib/libiomp5.so")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(runtime, "_find_allocator", lambda: ALLOCATOR)
    monkeypatch.setattr(runtime, "_find_openmp", lambda: OPENMP)


def test_both_are_preloaded(installed):
    better = runtime.better_environment({"HOME": "/root"})
    assert better is not None
    assert better["LD_PRELOAD"] == f"{ALLOCATOR}:{OPENMP}"
    assert better["HOME"] == "/root"
    assert better["KMP_BLOCKTIME"] == "1"


def test_the_users_choice_stays(installed):
    better = runtime.better_environment({"LD_PRELOAD": "/x/libjemalloc.so.2", "KMP_BLOCKTIME": "50"})
    assert better is not None
    assert better["LD_PRELOAD"] == f"/x/libjemalloc.so.2:{OPENMP}"
    assert better["KMP_BLOCKTIME"] == "50"
    assert runtime.better_environment({"LD_PRELOAD": "/x/libmimalloc.so /x/libgomp.so.1"}) is None


def test_nothing_installed_means_no_change(monkeypatch):
    monkeypatch.setattr(runtime, "_find_allocator", lambda: None)
    monkeypatch.setattr(runtime, "_find_openmp", lambda: None)
    assert runtime.better_environment({}) is None


@pytest.mark.parametrize("guard", [{}, {"TIEREDKV_REEXEC": "1"}])
def test_a_process_is_replaced_at_most_once(guard):
    code = (
        "import os, pathlib, sys; from tieredkv import runtime;"
        "runtime._find_allocator = lambda: pathlib.Path('/nowhere/libtcmalloc.so');"
        "print(os.environ.get('TIEREDKV_REEXEC'), flush=True); runtime.maybe_reexec(sys.argv)"
    )
    environ = {key: value for key, value in os.environ.items() if key not in ("TIEREDKV_REEXEC", "LD_PRELOAD")}
    done = subprocess.run(
        [sys.executable, "-c", code, "a", "b"],
        env=environ | guard,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == (["None", "1"] if not guard else ["1"])


def test_a_caller_that_is_another_program_is_not_replaced(installed, monkeypatch):
    monkeypatch.delenv("TIEREDKV_REEXEC", raising=False)
    monkeypatch.setattr(os, "execve", lambda *args: pytest.fail("replaced"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    runtime.maybe_reexec(["tieredkv", "serve", "some-model"])


def test_there_is_at_least_one_core():
    assert 1 <= runtime.num_cores() <= (os.cpu_count() or 1)


def test_memory_for_blocks_is_counted_apart_from_everything_else():
    nbytes = 8 * 1024**2
    account = Path("/proc/self/smaps").read_text
    before = memory_map.resident(account(), Path("/nowhere"))
    memory = runtime.anonymous_memory(nbytes)
    memory[:] = b"x" * nbytes
    after = memory_map.resident(account(), Path("/nowhere"))
    assert after.blocks - before.blocks == nbytes
    memory.close()
    assert memory_map.resident(account(), Path("/nowhere")).blocks == before.blocks


def test_every_mapping_is_of_one_kind():
    def mapping(path, nbytes, flags="rd wr mr"):
        return f"7f0-7f8 rw-p 00000000 00:00 0 {path}\nRss: {nbytes // 1024} kB\nAnonymous: 4 kB\nVmFlags: {flags} \n"

    found = memory_map.resident(
        mapping("", 1 << 20)
        + mapping("[heap]", 2 << 20)
        + mapping("", 4 << 20, "rd wr dd hg")
        + mapping("/store/of mine/data.mdb", 8 << 20)
        + mapping("/model/model.safetensors", 16 << 20)
        + mapping("/lib/libtorch.so", 32 << 20),
        Path("/store/of mine"),
    )
    assert found == memory_map.Resident(
        memory=3 << 20, blocks=4 << 20, store=8 << 20, checkpoint=16 << 20, libraries=32 << 20
    )
    assert found.overhead_nbytes(weights_nbytes=1 << 20) == 50 << 20


def test_free_memory_can_be_released_whatever_the_allocator():
    runtime.release_free_memory()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the page faults of a Linux thread")
def test_the_beginning_of_anonymous_memory_is_there_before_it_is_used():
    try:
        mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise(runtime._MADV_POPULATE_WRITE)
    except OSError:
        pytest.skip("a kernel without this advice")
    nbytes = 8 * 1024**2
    memory = runtime.anonymous_memory(nbytes)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for at in range(0, nbytes, mmap.PAGESIZE):
        memory[at] = 1
    # Fewer than one for a hundred pages: the interpreter has its own.
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < nbytes // mmap.PAGESIZE // 100
