"""Who owns which block of the device pool: ids, reference counts, hashes, and the order of eviction. Knows no tensors.

A block is in exactly one state:

    null        block 0, never handed out; padding writes land there
    referenced  ref_count > 0, not on a list; findable once committed
    free        ref_count = 0, on a list; still findable while it has a hash
    kept        ref_count = 0, on a list that nothing is taken from: a pin keeps it on the device

Who only reads a block, to copy it, *holds* it: the block leaves its list but a placeholder keeps its turn.

Unreferenced blocks lie on intrusive doubly linked lists, in the order in which they are taken:

    without a hash | priority 0 ... ordinary (35) ... 100, each least recently used first | kept: never

Releasing a chain puts its tail before its head, so that a prefix shrinks from its end and never loses its middle. Of the
blocks above the ordinary priority only so many stay ahead of the others (`retained_limit`): the one least recently used
among the lowest of them becomes an ordinary one, until it is used again.

Invariants: free + kept + referenced + null == total; a hash names at most one block, and the first writer keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tieredkv.errors import InvariantError
from tieredkv.free_list import Block, FreeList
from tieredkv.types import DEFAULT_PRIORITY

NULL_BLOCK = 0


@dataclass(slots=True)
class Hold:
    """A reader's ownership of one block; `place` keeps the turn it had if it was free, and `home` tells whether it still has
    the same rank.
    """

    block: Block
    place: Block | None
    home: FreeList | None


class BlockPool:
    """The blocks of one device. `on_evict(hash, block_id)`, if set, is called just before a committed block loses its hash
    to reuse; its bytes are still intact then.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[bytes, int], None] | None = None) -> None:
        if num_blocks < 2:
            raise InvariantError(f"a pool needs the null block and one more, got {num_blocks}")
        self._plain, self._ordinary, self._kept = FreeList(), FreeList(), FreeList()
        self._by_priority = {DEFAULT_PRIORITY: self._ordinary}
        # The lists of findable blocks that may be reused, lowest priority first.
        self._evictable = [self._ordinary]
        self._blocks = [Block(i, self._plain) for i in range(num_blocks)]
        self._by_hash: dict[bytes, Block] = {}
        # What is to become of blocks with these hashes, here or not: all others are ordinary.
        self._kept_hashes: set[bytes] = set()
        self._priorities: dict[bytes, int] = {}
        for block in self._blocks[1:]:
            self._plain.push_last(block)
        self.on_evict = on_evict
        self.retained_limit = num_blocks
        self.num_evicted = 0
        self.num_kept = 0
        """Blocks here that are kept, in use or not."""

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return len(self._blocks)

    @property
    def num_usable(self) -> int:
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out now; many of them are still findable."""
        return self._plain.count + self.num_findable_free

    @property
    def num_findable_free(self) -> int:
        """Those of `num_free` that are still findable."""
        return sum(each.count for each in self._evictable)

    @property
    def num_retained(self) -> int:
        """Those of `num_findable_free` that go after the ordinary ones."""
        return sum(each.count for each in self._retained_lists())

    @property
    def num_committed(self) -> int:
        return len(self._by_hash)

    def find(self, block_hash: bytes) -> int | None:
        """The id of the block committed under this hash. Changes nothing."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.id

    def is_free(self, block_id: int) -> bool:
        """Whether `take` could hand it out now."""
        block = self._blocks[block_id]
        return block.ref_count == 0 and block_id != NULL_BLOCK and block.home is not self._kept

    @property
    def num_kept_hashes(self) -> int:
        """Hashes that `keep` was called for, here or not."""
        return len(self._kept_hashes)

    def is_kept(self, block_hash: bytes) -> bool:
        """Whether a block with this hash is, or would be, kept."""
        return block_hash in self._kept_hashes

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def hash_of(self, block_id: int) -> bytes | None:
        return self._blocks[block_id].hash

    def acquire(self, block_id: int) -> None:
        """Add an owner to a block, which leaves the free list if it had none."""
        if block_id == NULL_BLOCK:
            raise InvariantError("the null block has no owner")
        block = self._blocks[block_id]
        if block.ref_count == 0:
            _list_of(block).remove(block)
        block.ref_count += 1

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with one owner each; what was findable in them is forgotten.

        Raises `InvariantError` if fewer are free: ask `num_free` first.
        """
        if count > self.num_free:
            raise InvariantError(f"{count} blocks asked for, {self.num_free} free")
        taken = []
        for _ in range(count):
            block = self._next_victim()
            if block.hash is not None:
                if self.on_evict is not None:
                    self.on_evict(block.hash, block.id)
                self.num_evicted += 1
                self._drop_hash(block)
            block.ref_count = 1
            taken.append(block.id)
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one owner from each block of a chain (head first in `block_ids`); ownerless blocks become free, tail first."""
        for block_id in reversed(block_ids):
            block = self._drop_owner(block_id)
            if block.ref_count == 0:
                self._put_on_list(block)

    def hold(self, block_ids: Sequence[int]) -> list[Hold]:
        """Own blocks in order to read them, without counting that as use: see `end_hold`."""
        holds = []
        for block_id in block_ids:
            block = self._blocks[block_id]
            free = block.ref_count == 0
            if block_id == NULL_BLOCK or (free and block.hash is None):
                raise InvariantError(f"{block} holds nothing to read")
            holds.append(Hold(block, _list_of(block).leave_place(block) if free else None, block.home))
            block.ref_count += 1
        return holds

    def end_hold(self, holds: Sequence[Hold]) -> None:
        """Give held blocks back. What nobody used meanwhile goes back to its old place in the order of eviction."""
        for hold in holds:
            block, place = self._drop_owner(hold.block.id), hold.place
            if place is not None and not block.ref_count and block.home is hold.home:
                _list_of(place).take_place(block, place)
                continue
            if place is not None:
                _list_of(place).remove(place)
            if not block.ref_count:
                self._put_on_list(block)

    def coldest(self) -> Iterator[int]:
        """Ids of free, findable blocks in the order in which they will be reused. Do not change the pool meanwhile."""
        return (block.id for each in self._evictable for block in each)

    def keep(self, block_hash: bytes) -> None:
        """Never reuse the block with this hash, now or once it is committed, until `unkeep`."""
        if block_hash not in self._kept_hashes:
            self._kept_hashes.add(block_hash)
            self.num_kept += block_hash in self._by_hash
            self._move_home(block_hash)

    def unkeep(self, block_hash: bytes) -> None:
        if block_hash in self._kept_hashes:
            self._kept_hashes.remove(block_hash)
            self.num_kept -= block_hash in self._by_hash
            self._move_home(block_hash)

    @property
    def priorities(self) -> Mapping[bytes, int]:
        """What `prioritize` was told, as far as it is not ordinary."""
        return self._priorities

    def prioritize(self, block_hash: bytes, priority: int) -> None:
        """Let the block with this hash, now or once it is committed, go before those of higher priorities (0 to 100). Of a
        chain whose priority rises the tail comes first, of one whose priority falls the head.
        """
        before = self._priorities.get(block_hash, DEFAULT_PRIORITY)
        if priority == DEFAULT_PRIORITY:
            self._priorities.pop(block_hash, None)
        else:
            self._priorities[block_hash] = priority
        self._move_home(block_hash, cold=priority < before)

    def _move_home(self, block_hash: bytes, *, cold: bool = False) -> None:
        block = self._by_hash.get(block_hash)
        if block is None:
            return
        home = self._home_of(block_hash)
        if home is not block.home:
            block.home = home
            if block.list is not None:
                block.list.remove(block)
                self._put_on_list(block, cold=cold)

    def _home_of(self, block_hash: bytes) -> FreeList:
        if block_hash in self._kept_hashes:
            return self._kept
        priority = self._priorities.get(block_hash, DEFAULT_PRIORITY)
        if priority not in self._by_priority:
            self._by_priority[priority] = FreeList()
            self._evictable = [self._by_priority[each] for each in sorted(self._by_priority)]
        return self._by_priority[priority]

    def _retained_lists(self) -> list[FreeList]:
        return self._evictable[self._evictable.index(self._ordinary) + 1 :]

    def _next_victim(self) -> Block:
        if self._plain.count:
            return self._plain.pop_first()
        return next(each for each in self._evictable if each.count).pop_first()

    def _drop_owner(self, block_id: int) -> Block:
        block = self._blocks[block_id]
        if block.ref_count < 1 or block_id == NULL_BLOCK:
            raise InvariantError(f"{block} is released without an owner")
        block.ref_count -= 1
        return block

    def _put_on_list(self, block: Block, *, cold: bool = False) -> None:
        """Findable blocks are used up in order of age; of the others the last one first: its memory is mapped and warm."""
        home = block.home
        if home is None:
            raise InvariantError(f"{block} belongs nowhere")
        if cold or home is self._plain:
            home.push_first(block)
            return
        home.push_last(block)
        if len(self._evictable) > 1 and home is not self._ordinary and home is not self._kept:
            self._limit_retained()

    def _limit_retained(self) -> None:
        retained = self._retained_lists()
        while sum(each.count for each in retained) > self.retained_limit:
            self._ordinary.push_last(next(each for each in retained if each.count).pop_first())

    def commit(self, block_id: int, block_hash: bytes) -> int:
        """Make an owned block findable; returns the id of the block that holds the hash from now on.

        The first writer wins: where the hash is taken, the given block stays anonymous and the other one's id returns.
        """
        block = self._blocks[block_id]
        if block.ref_count < 1:
            raise InvariantError(f"{block} is committed without an owner")
        if block.hash is not None and block.hash != block_hash:
            raise InvariantError(f"{block} is committed under another hash")
        holder = self._by_hash.setdefault(block_hash, block)
        if holder is block and block.hash is None:
            block.hash = block_hash
            block.home = self._home_of(block_hash)
            self.num_kept += block.home is self._kept
        return holder.id

    def clear(self) -> tuple[int, int]:
        """Forget every free block; returns how many were forgotten and how many stay because they are kept or in use."""
        num_forgotten = self.num_findable_free
        for each in self._evictable:
            while each.count:
                self._make_plain(each.pop_first())
        return num_forgotten, len(self._by_hash)

    def forget(self, block_id: int) -> None:
        """Make one free, findable block anonymous. Raises `InvariantError` if it is kept, in use, or has no hash."""
        block = self._blocks[block_id]
        if not self.is_free(block_id) or block.hash is None:
            raise InvariantError(f"{block} is in use, kept or not findable")
        _list_of(block).remove(block)
        self._make_plain(block)

    def _make_plain(self, block: Block) -> None:
        self._drop_hash(block)
        self._put_on_list(block)

    def _drop_hash(self, block: Block) -> None:
        if block.hash is None or self._by_hash.pop(block.hash, None) is not block:
            raise InvariantError(f"{block} is not the holder of its hash")
        block.hash = None
        block.home = self._plain

    def check_integrity(self, owned: Iterable[int] | None = None) -> None:
        """Recount everything; with `owned` (one entry per owner and block) also compare the reference counts.

        Raises `InvariantError`.
        """
        unused = [block for block in self._blocks[1:] if block.ref_count == 0]
        for each in (self._plain, self._kept, *self._evictable):
            listed = [block.id for block in each]
            if len(listed) != each.count or sorted(listed) != sorted(b.id for b in unused if b.list is each):
                raise InvariantError(f"a list of {listed} (count {each.count}) disagrees with the blocks")
        if sum(each.count for each in (self._plain, self._kept, *self._evictable)) != len(unused):
            raise InvariantError("an unreferenced block is on no list")
        for block in self._blocks[1:]:
            home = self._plain if block.hash is None else self._home_of(block.hash)
            strays = block.list not in (None, home) and not (
                block.list is self._ordinary and home in self._retained_lists()
            )
            if block.home is not home or strays or (block.ref_count and block.list is not None):
                raise InvariantError(f"{block} is not on the list that it belongs to")
        if self.num_kept != len(self._kept_hashes & self._by_hash.keys()):
            raise InvariantError("the count of kept blocks is wrong")
        if self.num_retained > self.retained_limit:
            raise InvariantError("more blocks are retained than may be")
        if self._blocks[NULL_BLOCK].ref_count or self._blocks[NULL_BLOCK].hash:
            raise InvariantError("the null block is in use")
        held = {b.hash: b for b in self._blocks if b.hash is not None}
        if held != self._by_hash or len(held) != sum(b.hash is not None for b in self._blocks):
            raise InvariantError("the hash map and the blocks disagree")
        if owned is not None:
            counts: dict[int, int] = {}
            for block_id in owned:
                counts[block_id] = counts.get(block_id, 0) + 1
            for block in self._blocks[1:]:
                if block.ref_count != counts.get(block.id, 0):
                    raise InvariantError(f"{block} has {counts.get(block.id, 0)} owners")


def _list_of(block: Block) -> FreeList:
    if block.list is None:
        raise InvariantError(f"{block} is on no list")
    return block.list
