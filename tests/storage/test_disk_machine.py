"""The disk tier against a plain model of it, whatever the order of calls. After each step the store is audited."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.storage.chains import NAMESPACE, TOKENS, assert_sound, chain, load, name, pin, record
from tieredkv.storage.codec import RawCodec
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.record import max_record_nbytes
from tieredkv.storage.rows import record_cost
from tieredkv.storage.session import budget_nbytes_for
from tieredkv.storage.tier import NEVER, LoadOutcome, StoreOutcome
from tieredkv.types import DEFAULT_PRIORITY

CAPACITY = 512 * 1024
# One page a block: then LMDB never needs room beyond what is counted, and the model can be exact.
NBYTES = 3500
COST = record_cost(max_record_nbytes(NBYTES, RawCodec()), len(TOKENS), 4096)
NUM_FIT = 10
# The smallest store has room for more than that: a pinned chain takes up the rest.
BALLAST = chain("ballast", budget_nbytes_for(CAPACITY) // COST - NUM_FIT, nbytes=NBYTES, root=name("ballast root", 0))
ROOTS = [name("root", i) for i in range(2)]
# A forest of 2 roots, two blocks below every block, 4 deep: more than fits, with branches.
TREE: dict[bytes, tuple[bytes, int, bytes]] = {}


def _grow(parent: bytes, depth: int, root: bytes) -> None:
    for branch in range(2):
        block_hash = name(parent.hex(), branch)
        TREE[block_hash] = (parent, depth, root)
        if depth < 3:
            _grow(block_hash, depth + 1, root)


for _root in ROOTS:
    _grow(_root, 0, _root)
BLOCKS = list(TREE)
blocks = st.sampled_from(BLOCKS)


def path_to(block_hash: bytes) -> list[bytes]:
    path = []
    while block_hash in TREE:
        path.append(block_hash)
        block_hash = TREE[block_hash][0]
    return path[::-1]


@dataclass
class Entry:
    last_use: int
    priority: int
    expires_us: int


class Model:
    """What should be resident. Times as in the store: each use is later than all before."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.pins: dict[object, tuple[list[bytes], int]] = {}
        self.clock_us = 0

    def tick(self, now_us: int) -> int:
        self.clock_us = max(now_us, self.clock_us + 1)
        return self.clock_us

    def children(self, block_hash: bytes) -> list[bytes]:
        return [h for h in self.entries if TREE[h][0] == block_hash]

    def drop(self, block_hash: bytes) -> None:
        entry = self.entries.pop(block_hash)
        parent = self.entries.get(TREE[block_hash][0])
        if parent is not None:
            parent.last_use = max(parent.last_use, entry.last_use)

    def put(self, hashes: list[bytes], now_us: int, priority: int, expires_us: int) -> list[StoreOutcome]:
        outcomes: dict[int, StoreOutcome] = {}
        protected = {*hashes, *(TREE[h][0] for h in hashes)}
        for i in sorted(range(len(hashes)), key=lambda i: TREE[hashes[i]][1]):
            block_hash = hashes[i]
            parent, depth, _ = TREE[block_hash]
            if block_hash in self.entries:
                outcomes[i] = StoreOutcome.PRESENT
            elif depth and parent not in self.entries:
                outcomes[i] = StoreOutcome.NO_PARENT
            elif not self.make_room(protected, now_us):
                outcomes[i] = StoreOutcome.NO_ROOM
            else:
                self.entries[block_hash] = Entry(self.tick(now_us), priority, expires_us)
                outcomes[i] = StoreOutcome.STORED
        return [outcomes[i] for i in range(len(hashes))]

    def make_room(self, protected: set[bytes], now_us: int) -> bool:
        while len(self.entries) >= NUM_FIT:
            leaves = [h for h in self.entries if h not in protected and not self.is_pinned(h) and not self.children(h)]
            # Priorities expire when room is made, for good: the clock may be set back afterwards. Those of pinned blocks and of
            # blocks with children do so later.
            for h in self.entries:
                entry = self.entries[h]
                if entry.expires_us <= now_us and not self.children(h) and not self.is_pinned(h):
                    entry.priority, entry.expires_us = DEFAULT_PRIORITY, NEVER
            if not leaves:
                return False
            self.drop(min(leaves, key=lambda h: (self.entries[h].priority, self.entries[h].last_use, h)))
        return True

    def is_pinned(self, block_hash: bytes) -> bool:
        return any(block_hash in pinned for pinned, _ in self.pins.values())

    def expire_pins(self, now_us: int) -> None:
        self.pins = {key: (held, due) for key, (held, due) in self.pins.items() if due > now_us}

    def subtree(self, block_hash: bytes) -> list[bytes]:
        if block_hash not in self.entries:
            return []
        return [block_hash, *(h for c in self.children(block_hash) for h in self.subtree(c))]


class DiskMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.now_us = 1000
        self.model = Model()
        self.store = self.open()
        self.store.put(BALLAST)
        self.store.pin(pin("ballast", [BALLAST[-1].hash]))
        self.model.clock_us = self.now_us + len(BALLAST) - 1

    def open(self) -> DiskStore:
        return DiskStore.open(self.folder / "store", CAPACITY, clock_us=lambda: self.now_us)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def pick(self, data: st.DataObject) -> bytes:
        """A block, mostly a resident one."""
        known = sorted(self.model.entries)
        return data.draw(st.one_of(st.sampled_from(known), st.sampled_from(known), blocks) if known else blocks)

    @rule(
        hashes=st.one_of(
            st.lists(blocks.map(path_to), min_size=1, max_size=3).map(
                lambda paths: list(dict.fromkeys(h for path in paths for h in path))
            ),
            st.lists(blocks, min_size=1, max_size=6, unique=True),
        ),
        priority=st.sampled_from([0, 35, 35, 35, 100]),
        lifetime_us=st.sampled_from([None, None, 1, 50]),
    )
    def put(self, hashes, priority, lifetime_us):
        expires_us = NEVER if lifetime_us is None else self.now_us + lifetime_us
        records = [
            record(h, TREE[h][0], TREE[h][1], nbytes=NBYTES, priority=priority, expires_us=expires_us) for h in hashes
        ]
        assert self.store.put(records) == self.model.put(hashes, self.now_us, priority, expires_us)

    @rule(data=st.data(), count=st.integers(1, 3))
    def touch(self, data, count):
        hashes = [self.pick(data) for _ in range(count)]
        self.store.touch(hashes)
        for block_hash in hashes:
            if block_hash in self.model.entries:
                self.model.entries[block_hash].last_use = self.model.tick(self.now_us)

    @rule(step_us=st.sampled_from([1, 10, 100, -20]))
    def pass_time(self, step_us):
        self.now_us = max(self.now_us + step_us, 1)

    @rule(data=st.data(), key=st.integers(0, 2), lifetime_us=st.sampled_from([None, 5, 50]))
    def pin(self, data, key, lifetime_us):
        path = path_to(self.pick(data))
        expires_us = NEVER if lifetime_us is None else self.now_us + lifetime_us
        assert self.store.pin(pin(key, path, expires_us=expires_us)) == sum(h in self.model.entries for h in path)
        self.model.pins[key] = path, expires_us

    @rule(key=st.integers(0, 2))
    def unpin(self, key):
        assert self.store.unpin(pin(key, ()).id)
        self.model.pins.pop(key, None)

    @rule()
    def maintain(self):
        self.store.maintain(idle=False)
        self.model.expire_pins(self.now_us)

    @rule(data=st.data(), priority=st.sampled_from([0, 35, 60]), lifetime_us=st.sampled_from([1, 50]))
    def retain(self, data, priority, lifetime_us):
        block_hash = self.pick(data)
        self.store.retain([(block_hash, priority, self.now_us + lifetime_us)])
        entry = self.model.entries.get(block_hash)
        if entry is not None:
            entry.priority, entry.expires_us = priority, self.now_us + lifetime_us

    @rule(data=st.data())
    def remove(self, data):
        block_hash = self.pick(data)
        doomed = self.model.subtree(block_hash)
        assert self.store.remove([block_hash]) == len(doomed)
        for h in reversed(doomed):
            self.model.drop(h)

    @precondition(lambda self: len(self.model.entries) > NUM_FIT // 2)
    @rule(root=st.sampled_from([None, *ROOTS, *ROOTS]))
    def clear(self, root):
        chosen = [h for h in self.model.entries if root in (None, TREE[h][2])]
        removed = 0
        for h in sorted(chosen, key=lambda h: -TREE[h][1]):
            if not self.model.is_pinned(h) and not self.model.children(h):
                self.model.drop(h)
                removed += 1
        done = self.store.clear(root=root)
        kept = len(chosen) - removed + (len(BALLAST) if root is None else 0)
        assert (done.num_removed, done.num_kept) == (removed, kept)

    @rule(data=st.data())
    def load(self, data):
        block_hash = self.pick(data)
        expected = LoadOutcome.LOADED if block_hash in self.model.entries else LoadOutcome.MISSING
        assert load(self.store, block_hash, NBYTES) is expected

    @rule(data=st.data())
    @precondition(lambda self: len(self.model.entries) > NUM_FIT // 2)
    def load_under_another_namespace(self, data):
        block_hash = self.pick(data)
        target = memoryview(bytearray(NBYTES))
        known = block_hash in self.model.entries
        outcome = self.store.load(block_hash, name("other", 0), target)
        assert outcome is (LoadOutcome.CORRUPT if known else LoadOutcome.MISSING)
        assert block_hash not in self.store
        # A condemned record goes with all behind it, whatever pins it.
        self.store.maintain(idle=False)
        self.model.expire_pins(self.now_us)
        for h in reversed(self.model.subtree(block_hash)):
            self.model.drop(h)

    @rule(block_hash=blocks, asked=st.integers(0, 4))
    def look_up(self, block_hash, asked):
        path = path_to(block_hash)[:asked]
        assert self.store.longest_prefix(path) == sum(h in self.model.entries for h in path)

    @rule(sync=st.booleans())
    def reopen(self, sync):
        if sync:
            assert self.store.sync()
        self.store.close()
        self.store = self.open()
        self.model.expire_pins(self.now_us)

    @invariant()
    def agrees(self):
        assert {h for h in BLOCKS if h in self.store} == set(self.model.entries)
        usage = self.store.usage()
        num_blocks = len(self.model.entries) + len(BALLAST)
        assert usage.num_blocks == num_blocks
        assert usage.used_nbytes == COST * num_blocks
        assert usage.payload_nbytes == NBYTES * num_blocks
        assert_sound(self.store)
        seen = {record.id: list(record.hashes) for record in self.store.pins().records}
        assert seen.pop(pin("ballast", ()).id) == [BALLAST[-1].hash]
        assert seen == {pin(key, ()).id: path for key, (path, _) in self.model.pins.items()}
        assert self.store.fault is None
        assert {s.digest for s in self.store.inspect().namespaces} == {NAMESPACE}


DiskMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestDiskMachine = DiskMachine.TestCase
