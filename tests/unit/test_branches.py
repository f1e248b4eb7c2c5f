"""The prefix tree over all tiers, against a naive tree made from everything at once.

The properties: the pages together are exactly the branches of the union of the tiers, each named once, whatever lies
where; a list that is read page by page misses nothing that stays; one page reads a bounded part of a large store.
"""

from __future__ import annotations

import contextlib
import random

import pytest

from tieredkv import prefix_tree
from tieredkv.branches import NAME_LABEL, ROOT_LABEL, Branches, Root
from tieredkv.events import EventLog
from tieredkv.hashing import block_hash, pack_tokens
from tieredkv.prefix_tree import PrefixTree, View
from tieredkv.storage.disk import DiskStore
from tieredkv.storage.tier import BlockRecord
from tieredkv.tier_faces import BlockInfo
from tieredkv.types import Tier

NAMESPACE, OTHER = b"n" * 32, b"o" * 32
PAYLOAD = memoryview(bytes(64))


class Forest:
    """Random chains that share beginnings; every block lies in a random set of tiers, on disk with all before it."""

    def __init__(self, seed: int, num_chains: int = 12, longest: int = 12) -> None:
        dice = random.Random(seed)
        self.dice = dice
        self.blocks: dict[bytes, BlockInfo] = {}
        self.places: dict[bytes, set[Tier]] = {}
        for number in range(num_chains):
            root = bytes([number % 3]) * 32
            parent, depth = root, 0
            for _ in range(dice.randint(1, longest)):
                tokens = (*dice.choices([1, 2], [8, 1], k=2), number % 3)
                name = block_hash(parent, tokens)
                self.blocks.setdefault(name, BlockInfo(name, parent, depth, tokens, root))
                parent, depth = name, depth + 1
        for info in sorted(self.blocks.values(), key=lambda info: info.depth):
            above = self.places.get(info.parent, set(Tier)) if info.depth else set(Tier)
            self.places[info.hash] = {tier for tier in above if dice.random() < (0.9 if tier in above else 0)}
        self.places = {name: tiers for name, tiers in self.places.items() if tiers}

    def near(self) -> Branches:
        branches = Branches(EventLog())
        for name, tiers in self.places.items():
            for tier in tiers - {Tier.DISK}:
                info = self.blocks[name]
                branches.own(info.root, f"owner{info.root[0]}", info.root[:4])
                branches.stored(tier, info, "computed")
        return branches

    def store(self, path) -> DiskStore:
        store = DiskStore.open(path, 16 << 20)
        chosen = [self.blocks[name] for name, tiers in self.places.items() if Tier.DISK in tiers]
        store.put([record(info) for info in sorted(chosen, key=lambda info: info.depth)])
        roots = {info.root for info in chosen}
        store.label({(ROOT_LABEL, root): Root(f"owner{root[0]}", root[:4]).pack() for root in roots})
        # Another model's blocks are nobody's business here.
        store.put([record(BlockInfo(b"x" * 32, b"y" * 32, 0, (1, 2, 3)), OTHER)])
        return store

    def branches(self) -> dict[bytes, tuple[list[bytes], bytes | None]]:
        """By id: own blocks and the branch that it continues."""
        children: dict[bytes, list[bytes]] = {}
        for name in self.places:
            children.setdefault(self.blocks[name].parent, []).append(name)
        found = {}
        for name in self.places:
            if len(children.get(name, ())) == 1:
                continue
            own, at = [name], self.blocks[name]
            while at.depth and at.parent in self.places and len(children[at.parent]) == 1:
                own.append(at.parent)
                at = self.blocks[at.parent]
            found[name] = own[::-1], at.parent if at.depth and at.parent in self.places else None
        return found


def record(info: BlockInfo, namespace: bytes = NAMESPACE) -> BlockRecord:
    return BlockRecord(info.hash, info.parent, info.depth, namespace, PAYLOAD, pack_tokens(info.token_ids))


def view_of(branches: Branches, pins=None) -> View:
    return View(branches.snapshot(), pins or {}, {}, [], 64)


@contextlib.contextmanager
def tree_of(forest: Forest, store: DiskStore | None, **more):
    view = view_of(forest.near(), more.pop("pins", None))
    with contextlib.ExitStack() as stack:
        listing = stack.enter_context(store.listing(NAMESPACE)) if store is not None else None
        yield PrefixTree(view, listing, **more)


def read_pages(make_tree, limit: int, accept=lambda report: True):
    start, reports, totals = b"", [], []
    for _ in range(10_000):
        with make_tree() as tree:
            page = tree.page(start, limit, accept)
        assert len(page.prefixes) <= limit
        reports += page.prefixes
        totals.append(page.num_total)
        if page.next_start is None:
            return reports, totals
        assert page.next_start > start
        start = page.next_start
    raise AssertionError("the list does not end")


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_pages_are_the_branches_of_the_union(tmp_path, monkeypatch, seed, large):
    if large:
        monkeypatch.setattr(prefix_tree, "MAX_TO_COUNT", 0)
        monkeypatch.setattr(prefix_tree, "MAX_READS", 5)
    forest = Forest(seed)
    store = forest.store(tmp_path)
    expected = forest.branches()
    reports, totals = read_pages(lambda: tree_of(forest, store), limit=3)
    assert [report.id for report in reports] == sorted(name.hex() for name in expected)
    assert set(totals) == ({None} if large else {len(expected)})
    for report in reports:
        own, parent = expected[bytes.fromhex(report.id)]
        last = forest.blocks[own[-1]]
        assert report.num_blocks == len(own)
        assert report.parent == (None if parent is None else parent.hex())
        assert report.depth == forest.blocks[own[0]].depth
        assert report.num_tokens == 3 * (last.depth + 1)
        assert report.num_own_tokens == 3 * len(own)
        assert report.tenant == f"owner{last.root[0]}"
        for tier in Tier:
            assert report.blocks_by_tier[tier] == sum(tier in forest.places[name] for name in own)
    store.close()


@pytest.mark.parametrize("seed", range(6))
def test_without_a_disk_the_near_tiers_are_the_tree(seed):
    forest = Forest(seed)
    forest.places = {name: tiers - {Tier.DISK} for name, tiers in forest.places.items() if tiers - {Tier.DISK}}
    reports, _ = read_pages(lambda: tree_of(forest, None), limit=4)
    assert {bytes.fromhex(report.id) for report in reports} == set(forest.branches())


def test_filters_count_what_they_let_through(tmp_path):
    forest = Forest(3)
    store = forest.store(tmp_path)
    for tier in Tier:
        reports, totals = read_pages(
            lambda: tree_of(forest, store), 2, lambda report, t=tier: report.blocks_by_tier[t] > 0
        )
        expected = [own for own, _ in forest.branches().values() if any(tier in forest.places[name] for name in own)]
        assert len(reports) == len(expected) == totals[0]
    store.close()


@pytest.mark.parametrize("large", [False, True])
def test_a_list_read_while_the_tree_changes_misses_nothing_that_stays_and_repeats_nothing(tmp_path, monkeypatch, large):
    if large:
        monkeypatch.setattr(prefix_tree, "MAX_TO_COUNT", 0)
    forest = Forest(7, num_chains=30)
    store = forest.store(tmp_path)
    before = set(forest.branches())
    dice = random.Random(1)

    @contextlib.contextmanager
    def changing():
        leaves = [n for n in forest.places if not any(forest.blocks[c].parent == n for c in forest.places)]
        lost = dice.choice(leaves)
        if Tier.DISK not in forest.places[lost]:
            del forest.places[lost]
        with tree_of(forest, store) as tree:
            yield tree

    reports, _ = read_pages(changing, limit=2)
    listed = [bytes.fromhex(report.id) for report in reports]
    assert len(set(listed)) == len(listed)
    assert before & set(forest.branches()) <= set(listed)
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_block_can_be_asked_for(tmp_path, seed):
    forest = Forest(seed)
    store = forest.store(tmp_path)
    pins = {next(iter(forest.places)): ["p1", "p2"]}
    with tree_of(forest, store, pins=pins) as tree:
        for name, tiers in forest.places.items():
            report = tree.block(name)
            assert set(report.tiers) == tiers
            assert report.parent == forest.blocks[name].parent.hex()
            assert report.token_ids is None, "prompts are private"
            assert report.num_pins == len(pins.get(name, ()))
            branch = tree.branch(name)
            assert branch.hashes[-1] == name
        assert tree.block(b"?" * 32) is None
        assert tree.branch(b"?" * 32) is None
        assert tree.block(b"x" * 32) is None, "another namespace's"
    store.close()


def test_the_tokens_of_a_chain_come_back_from_wherever_they_lie(tmp_path):
    forest = Forest(2)
    store = forest.store(tmp_path)
    with tree_of(forest, store) as tree:
        for name in forest.places:
            tokens, at, whole = [], forest.blocks[name], True
            while True:
                tokens = [*at.token_ids, *tokens]
                if not at.depth:
                    break
                whole &= at.parent in forest.places
                at = forest.blocks[at.parent]
            assert tree.token_ids(name) == (tokens if whole else None)
            assert tree.about(forest.blocks[name].root).tenant == forest.blocks[name].root[:4]
    store.close()


def test_names_and_owners_survive_in_the_store(tmp_path):
    forest = Forest(1)
    for tiers in forest.places.values():
        tiers.add(Tier.DISK)
    store = forest.store(tmp_path)
    some_branch = next(iter(forest.branches()))
    store.label({(NAME_LABEL, some_branch): "the handbook"})
    store.close()
    reopened = DiskStore.open(tmp_path)
    with reopened.listing(NAMESPACE) as listing:
        tree = PrefixTree(view_of(Branches(EventLog())), listing)
        report = tree.report(tree.branch(some_branch))
        assert report.name == "the handbook"
        assert report.tenant == f"owner{forest.blocks[some_branch].root[0]}"
        assert tree.roots_of("owner1") == {b"\x01" * 32}
    reopened.close()


def test_words_are_shown_only_where_they_may_be(tmp_path):
    forest = Forest(1)
    store = forest.store(tmp_path)
    with tree_of(forest, store) as tree:
        assert all(report.first_words is None for report in tree.page(b"", 99, lambda report: True).prefixes)
    with tree_of(forest, store, decode=lambda tokens: "-".join(map(str, tokens))) as tree:
        for report in tree.page(b"", 99, lambda report: True).prefixes:
            own = forest.branches()[bytes.fromhex(report.id)][0]
            tokens = [str(token_id) for name in own for token_id in forest.blocks[name].token_ids]
            assert report.first_words == "-".join(tokens[:12])
            assert report.last_words == "-".join(tokens[-12:])
            assert tree.block(own[0]).token_ids == list(forest.blocks[own[0]].token_ids)
    store.close()


def test_a_page_of_a_store_of_long_chains_reads_a_bounded_part(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_tree, "MAX_TO_COUNT", 100)
    monkeypatch.setattr(prefix_tree, "MAX_READS", 300)
    store = DiskStore.open(tmp_path, 64 << 20)
    for chain in range(10):
        parent, records = bytes([chain]) * 32, []
        for depth in range(200):
            name = block_hash(parent, (chain, depth))
            records.append(record(BlockInfo(name, parent, depth, (chain, depth))))
            parent = name
        store.put(records)
    seen = 0
    start = b""
    while start is not None:
        with store.listing(NAMESPACE) as listing:
            tree = PrefixTree(view_of(Branches(EventLog())), listing)
            page = tree.page(start, 50, lambda report: True)
            # One branch is never cut in half: its 200 blocks are read a few times over.
            assert tree.num_reads <= 300 + 3 * 200 + 10
        seen += len(page.prefixes)
        start = page.next_start
    assert seen == 10
    store.close()


@pytest.mark.parametrize("most_to_count", [0, 10_000])
def test_a_page_describes_a_bounded_number_of_branches_also_if_none_of_them_is_wanted(monkeypatch, most_to_count):
    monkeypatch.setattr(prefix_tree, "MAX_TO_COUNT", most_to_count)
    monkeypatch.setattr(prefix_tree, "MAX_READS", 100)
    branches = Branches(EventLog())
    for i in range(500):
        branches.stored(Tier.DEVICE, BlockInfo(i.to_bytes(32, "big"), b"r" * 32, 0, (i,), b"r" * 32), "computed")
    start, seen = b"", []
    while start is not None:
        described = []
        page = PrefixTree(view_of(branches), None).page(start, 50, lambda report, to=described: to.append(report.id))
        assert page.prefixes == []
        assert page.num_total is None
        # Once in vain to count, once for the page.
        assert len(described) <= 2 * (100 // prefix_tree.READS_PER_REPORT + 1)
        seen += described
        start = page.next_start
    assert len(set(seen)) == 500


def test_hits_and_uses_are_counted_per_block():
    now = [100.0]
    branches = Branches(EventLog(), clock=lambda: now[0])
    infos = [BlockInfo(bytes([i]) * 32, bytes([i - 1]) * 32, i - 1, (i,), b"\0" * 32) for i in range(1, 4)]
    for info in infos:
        branches.stored(Tier.DEVICE, info, "computed")
    now[0] = 200.0
    branches.used([info.hash for info in infos[:2]])
    tree = PrefixTree(view_of(branches), None)
    assert [tree.block(info.hash).num_hits for info in infos] == [1, 1, 0]
    assert [tree.block(info.hash).last_use_s for info in infos] == [200.0, 200.0, 100.0]
    assert tree.report(tree.branch(infos[-1].hash)).num_hits == 1


def test_owners_and_names_are_bounded():
    branches = Branches(EventLog())
    for i in range(5000):
        branches.own(i.to_bytes(32, "big"), "somebody", b"")
        branches.call(i.to_bytes(32, "big"), f"name {i}")
    snapshot = branches.snapshot()
    assert len(snapshot.roots) <= 2048
    assert len(snapshot.names) <= 4096
    assert snapshot.names[(4999).to_bytes(32, "big")] == "name 4999"
