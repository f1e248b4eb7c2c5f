"""The copy engine on CUDA keeps its promises under every order of execution that CUDA allows: copies see what was computed
before them and disturb nothing that still reads, and nothing is reported done before it is.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_cuda import CudaError, FakeCuda
from tieredkv.cuda_runtime import CupyRuntime, cupy_problem, find_batch_copy
from tieredkv.cuda_transfer import CudaCopyEngine
from tieredkv.errors import ConfigError, InvariantError
from tieredkv.transfer import Copy

NBYTES = 64
NUM_BLOCKS = 6


class Machine:
    """Blocks on a fake device, slots on the host, and an engine between them."""

    def __init__(self, num_slots: int = 8) -> None:
        self.cuda = FakeCuda()
        self.blocks = np.zeros((NUM_BLOCKS, NBYTES), dtype=np.uint8)
        self.slots = np.zeros((num_slots, NBYTES), dtype=np.uint8)
        self.woken = threading.Semaphore(0)
        self.engine = CudaCopyEngine(
            self.blocks.ctypes.data, NUM_BLOCKS, NBYTES, self.cuda, lambda: 0, self.woken.release
        )

    def launch(self, block_ids, slots, to_device: bool) -> Copy:
        copy = Copy(list(block_ids), [memoryview(self.slots[s]) for s in slots], to_device)
        self.engine.launch(copy)
        return copy

    def close(self) -> list[Copy]:
        self.engine.close()
        return self.engine.poll()


@pytest.fixture
def machine():
    made = Machine()
    yield made
    made.cuda.lost = None
    made.cuda.crank_all()
    made.close()


def write(machine: Machine, block: int, value: int) -> None:
    machine.cuda.compute(lambda: machine.blocks[block].fill(value))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_order_of_execution_is_right(data):
    """Forwards write and read blocks, copies go both ways, and the device runs whatever it may whenever it likes. Blocks and
    slots of a copy that was not handed out are left alone, as their owners do; everything else is fair game.
    """
    machine = Machine()
    cuda = machine.cuda
    content = dict.fromkeys(range(NUM_BLOCKS), 0)  # what each block holds once everything launched so far has run
    slots = dict.fromkeys(range(8), 0)
    open_copies: dict[int, tuple[Copy, list[int], list[int]]] = {}
    mistakes: list[str] = []
    next_value = 1

    def read(block: int, expected: int) -> None:
        def check() -> None:
            if not (machine.blocks[block] == expected).all():
                mistakes.append(f"a forward read {machine.blocks[block][0]}, not {expected}, from block {block}")

        cuda.compute(check)

    def take_done() -> None:
        for copy in machine.engine.poll():
            _, block_ids, slot_ids = open_copies.pop(id(copy))
            assert copy.error is None
            for block, slot in zip(block_ids, slot_ids, strict=True):
                if copy.to_device:
                    assert (machine.blocks[block] == slots[slot]).all(), "reported before the bytes were there"
                    content[block] = slots[slot]
                else:
                    assert (machine.slots[slot] == content[block]).all(), "reported before the bytes were there"
                    slots[slot] = content[block]

    for _ in range(data.draw(st.integers(5, 40))):
        busy_blocks = {b for _, blocks, _ in open_copies.values() for b in blocks}
        busy_slots = {s for _, _, used in open_copies.values() for s in used}
        idle_blocks = [b for b in range(NUM_BLOCKS) if b not in busy_blocks]
        idle_slots = [s for s in range(8) if s not in busy_slots]
        action = data.draw(st.sampled_from(["write", "read", "down", "up", "crank", "crank", "crank", "poll"]))
        if action == "write" and idle_blocks:
            block = data.draw(st.sampled_from(idle_blocks))
            content[block] = next_value
            machine.cuda.compute(lambda block=block, value=next_value: machine.blocks[block].fill(value))
            next_value = next_value % 250 + 1
        elif action == "read":
            # Forwards may also read a block that is just being copied down: it stays findable.
            held = [b for c, blocks, _ in open_copies.values() if not c.to_device for b in blocks]
            block = data.draw(st.sampled_from([*idle_blocks, *held] or [0]))
            if block in idle_blocks or block in held:
                read(block, content[block])
        elif action in ("down", "up") and idle_blocks and idle_slots:
            number = data.draw(st.integers(1, min(3, len(idle_blocks), len(idle_slots))))
            blocks = data.draw(st.permutations(idle_blocks))[:number]
            used = data.draw(st.permutations(idle_slots))[:number]
            copy = machine.launch(blocks, used, to_device=action == "up")
            open_copies[id(copy)] = (copy, blocks, used)
        elif action == "crank" and (streams := cuda.runnable()):
            cuda.crank(data.draw(st.sampled_from(streams)))
        elif action == "poll":
            take_done()
    cuda.crank_all()
    take_done()
    assert not open_copies
    assert not mistakes
    machine.close()
    assert not cuda.events, "events were lost"
    assert list(cuda.streams) == [0]


def test_a_copy_down_waits_for_the_forward_before_it_and_for_none_after(machine):
    write(machine, 1, 7)
    copy = machine.launch([1], [0], to_device=False)
    down = next(s for s, ops in machine.cuda.streams.items() if s and ops)
    assert machine.cuda.runnable() == [0]
    assert machine.engine.poll() == []
    machine.cuda.crank(0)  # the forward
    assert machine.cuda.runnable() == [0], "the forward's end has not been reached yet"
    machine.cuda.crank(0)  # the position
    while down in machine.cuda.runnable():
        machine.cuda.crank(down)
    assert machine.engine.poll() == [copy]
    assert (machine.slots[0] == 7).all()


def test_the_two_directions_do_not_wait_for_each_other(machine):
    down, up = machine.launch([1], [0], to_device=False), machine.launch([2], [1], to_device=True)
    streams = [s for s in machine.cuda.streams if s]
    while 0 in machine.cuda.runnable():
        machine.cuda.crank(0)
    while streams[1] in machine.cuda.runnable():
        machine.cuda.crank(streams[1])
    assert machine.engine.poll() == [up]
    machine.cuda.crank_all()
    assert machine.engine.poll() == [down]


def test_the_forward_after_a_restore_is_ordered_after_it(machine):
    machine.launch([1], [0], to_device=True)
    machine.cuda.crank_all()
    assert not machine.cuda.streams[0]
    machine.engine.poll()
    assert [op[0] for op in machine.cuda.streams[0]] == ["wait"]


def test_whoever_polls_is_woken_by_every_completion(machine):
    for i in range(3):
        machine.launch([i], [i], to_device=i % 2 == 0)
    assert not machine.woken.acquire(blocking=False)
    machine.cuda.crank_all()
    for _ in range(3):
        assert machine.woken.acquire(timeout=30)
    assert len(machine.engine.poll()) == 3


@pytest.mark.parametrize("call", ["record", "wait", "copy", "create_event"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_refused_call_fails_its_copy_and_no_other(call, after, machine):
    machine.cuda.fail[call] = after
    copies = [machine.launch([2 * i, 2 * i + 1], [2 * i, 2 * i + 1], to_device=bool(i % 2)) for i in range(3)]
    machine.cuda.crank_all()
    seen = machine.engine.poll()
    assert sorted(map(id, seen)) == sorted(map(id, copies))
    failed = [copy for copy in copies if copy.error]
    assert len(failed) <= 1, "one refusal, one failure"
    assert failed or call in machine.cuda.fail or call == "wait"
    assert all(call in copy.error for copy in failed)


def test_a_copy_that_failed_half_way_is_not_handed_out_while_its_first_half_runs(machine):
    machine.cuda.fail["copy"] = 1
    copy = machine.launch([1, 2], [1, 2], to_device=False)
    assert copy.error
    assert machine.engine.poll() == []
    machine.cuda.crank_all()
    assert machine.engine.poll() == [copy]


def test_a_lost_context_fails_everything_and_hangs_nothing(machine):
    before = machine.launch([1], [1], to_device=False)
    machine.cuda.lose_context()
    after = machine.launch([2], [2], to_device=True)
    assert {id(copy) for copy in machine.engine.poll()} == {id(before), id(after)}
    assert "illegal memory access" in before.error
    assert "illegal memory access" in after.error
    for _ in range(2):
        assert machine.woken.acquire(timeout=30)


def test_closing_waits_for_what_was_launched():
    machine = Machine()
    write(machine, 1, 9)
    copies = [machine.launch([1], [i], to_device=False) for i in range(3)]
    assert machine.close() == copies
    assert (machine.slots[:3] == 9).all()
    assert machine.engine.poll() == []
    assert not machine.cuda.events


def test_what_does_not_fit_is_a_bug_of_the_caller(machine):
    with pytest.raises(InvariantError, match="2 blocks for 1 slots"):
        machine.launch([1, 2], [1], to_device=True)
    with pytest.raises(InvariantError, match=f"pool of {NUM_BLOCKS}"):
        machine.launch([NUM_BLOCKS], [1], to_device=True)
    with pytest.raises(InvariantError, match="a slot of 32 bytes"):
        machine.engine.launch(Copy([1], [memoryview(machine.slots[0])[:32]], True))


# CuPy


class FakeCupy:
    """`cupy.cuda.runtime`, as far as it is called."""

    streamNonBlocking, eventDisableTiming, eventBlockingSync = 1, 2, 1  # noqa: N815
    memcpyHostToDevice, memcpyDeviceToHost = 1, 2  # noqa: N815

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.status = 0

    def __getattr__(self, name: str):
        def call(*args):
            self.calls.append((name, *args))
            return {"eventQuery": self.status, "streamCreateWithFlags": 11, "eventCreateWithFlags": 12}.get(name)

        return call


def test_cupy_is_called_as_it_wants_to_be():
    cupy = FakeCupy()
    runtime = CupyRuntime(cupy)
    stream, event = runtime.create_stream(), runtime.create_event()
    runtime.record(event, stream)
    runtime.wait(stream, event)
    runtime.synchronize_event(event)
    runtime.synchronize_stream(stream)
    runtime.copy([100, 200], [1000, 2000], 64, True, stream)
    runtime.copy([1000], [100], 64, False, stream)
    runtime.destroy_event(event)
    runtime.destroy_stream(stream)
    assert cupy.calls == [
        ("streamCreateWithFlags", 1),
        ("eventCreateWithFlags", 3),
        ("eventRecord", 12, 11),
        ("streamWaitEvent", 11, 12, 0),
        ("eventSynchronize", 12),
        ("streamSynchronize", 11),
        ("memcpyAsync", 100, 1000, 64, 1, 11),
        ("memcpyAsync", 200, 2000, 64, 1, 11),
        ("memcpyAsync", 1000, 100, 64, 2, 11),
        ("eventDestroy", 12),
        ("streamDestroy", 11),
    ]


@pytest.mark.parametrize(("status", "happened"), [(0, True), (600, False)])
def test_an_event_that_is_not_ready_is_no_error(status, happened):
    cupy = FakeCupy()
    cupy.status = status
    assert CupyRuntime(cupy).has_happened(12) is happened


def test_an_event_that_reports_an_error_has_not_happened():
    cupy = FakeCupy()
    cupy.status = 700
    with pytest.raises(OSError, match="700"):
        CupyRuntime(cupy).has_happened(12)


def test_a_driver_with_batches_is_called_once_and_one_that_refuses_never_again():
    cupy, batches = FakeCupy(), []
    answers = [0, 1]

    def batch(targets, sources, nbytes, stream):
        batches.append((targets, sources, nbytes, stream))
        return answers.pop(0)

    runtime = CupyRuntime(cupy, batch)
    for _ in range(3):
        runtime.copy([1, 2], [3, 4], 64, True, 11)
    assert batches == [([1, 2], [3, 4], 64, 11)] * 2
    assert [call[0] for call in cupy.calls] == ["memcpyAsync"] * 4


def test_the_drivers_batch_function_gets_what_its_header_says():
    seen = []

    def function(targets, sources, sizes, count, attributes, first, num_attributes, stream):
        struct = attributes._obj
        seen.append((list(targets), list(sources), list(sizes), count.value, struct.source_access_order))
        assert ctypes.sizeof(struct) == 24
        assert (first._obj.value, num_attributes.value, stream.value) == (0, 1, 11)
        return 0

    copy = find_batch_copy(SimpleNamespace(cuMemcpyBatchAsync_v2=function))
    assert copy([1, 2**40], [3, 4], 64, 11) == 0
    assert seen == [([1, 2**40], [3, 4], [64, 64], 2, 1)]
    assert find_batch_copy(SimpleNamespace()) is None


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *r: None if name == "cupy" else find_spec(name, *r))
    assert "pip install" in cupy_problem()
    with pytest.raises(ConfigError, match="cupy-cuda13x"):
        CupyRuntime()


def test_a_broken_cupy_is_named(monkeypatch):
    import importlib.util
    import sys

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *r: SimpleNamespace(name=name))
    runtime = SimpleNamespace(getDeviceCount=lambda: (_ for _ in ()).throw(CudaError("no driver")))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    assert "no driver" in cupy_problem()
