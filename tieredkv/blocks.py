"""Who owns which block of the device pool: ids, reference counts, hashes, and the order of eviction. Knows no tensors.

A block is in exactly one state:

    null        block 0, never handed out; padding writes land there
    referenced  ref_count > 0, not on a free list; findable once committed
    free        ref_count = 0, on a free list; still findable while it has a hash

Who only reads a block, to copy it, *holds* it: the block leaves its list but a placeholder keeps its turn.

Free blocks lie on two intrusive doubly linked lists: those without a hash, which go first, and the findable ones, least
recently used first. Releasing a chain puts its tail before its head, so that a prefix shrinks from its end and never
loses its middle.

Invariants: free + referenced + null == total; a hash names at most one block, and the first writer keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tieredkv.errors import InvariantError

NULL_BLOCK = 0
# Id of list entries that are no blocks.
_PLACEHOLDER = -1


class Block:
    """One entry of the pool. `prev` and `next` are set exactly while the block is on the free list."""

    __slots__ = ("hash", "id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        name = self.hash.hex()[:8] if self.hash else None
        return f"Block({self.id}, refs={self.ref_count}, hash={name})"


@dataclass(slots=True)
class Hold:
    """A reader's ownership of one block; `place` keeps the block's turn if it was free."""

    block: Block
    place: Block | None


class FreeList:
    """Doubly linked list through the blocks themselves: removal of any block in O(1), no allocation. Head goes first."""

    __slots__ = ("_head", "_tail", "count")

    def __init__(self) -> None:
        self._head, self._tail = Block(_PLACEHOLDER), Block(_PLACEHOLDER)
        self._head.next, self._tail.prev = self._tail, self._head
        self.count = 0

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not None and block is not self._tail:
            following = block.next
            if block.id > _PLACEHOLDER:
                yield block
            block = following

    def push_last(self, block: Block) -> None:
        self._insert(block, after=self._tail.prev)

    def push_first(self, block: Block) -> None:
        self._insert(block, after=self._head)

    def pop_first(self) -> Block:
        for block in self:
            self.remove(block)
            return block
        raise InvariantError("the free list is empty")

    def leave_place(self, block: Block) -> Block:
        """Take a block out and leave a placeholder where it was."""
        place = Block(_PLACEHOLDER)
        self._insert(place, after=block.prev)
        self.remove(block)
        return place

    def take_place(self, block: Block, place: Block) -> None:
        """Put a block where its placeholder is."""
        self._insert(block, after=place.prev)
        self.drop_place(place)

    def drop_place(self, place: Block) -> None:
        self.remove(place)

    def remove(self, block: Block) -> None:
        before, behind = block.prev, block.next
        if before is None or behind is None:
            raise InvariantError(f"{block} is not on the free list")
        before.next, behind.prev = behind, before
        block.prev = block.next = None
        self.count -= block.id > _PLACEHOLDER

    def _insert(self, block: Block, after: Block | None) -> None:
        if block.prev is not None or block.next is not None or after is None or after.next is None:
            raise InvariantError(f"{block} is on the free list already")
        behind = after.next
        block.prev, block.next = after, behind
        after.next = behind.prev = block
        self.count += block.id > _PLACEHOLDER


class BlockPool:
    """The blocks of one device. `on_evict(hash, block_id)`, if set, is called just before a committed block loses its hash
    to reuse; its bytes are still intact then.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[bytes, int], None] | None = None) -> None:
        if num_blocks < 2:
            raise InvariantError(f"a pool needs the null block and one more, got {num_blocks}")
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._by_hash: dict[bytes, Block] = {}
        self._plain = FreeList()
        self._findable = FreeList()
        for block in self._blocks[1:]:
            self._plain.push_last(block)
        self.on_evict = on_evict
        self.num_evicted = 0

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
        return self._plain.count + self._findable.count

    @property
    def num_findable_free(self) -> int:
        """Those of `num_free` that are still findable."""
        return self._findable.count

    @property
    def num_committed(self) -> int:
        return len(self._by_hash)

    def find(self, block_hash: bytes) -> int | None:
        """The id of the block committed under this hash. Changes nothing."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.id

    def is_free(self, block_id: int) -> bool:
        return self._blocks[block_id].ref_count == 0 and block_id != NULL_BLOCK

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
            self._list_of(block).remove(block)
        block.ref_count += 1

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with one owner each; what was findable in them is forgotten.

        Raises `InvariantError` if fewer are free: ask `num_free` first.
        """
        if count > self.num_free:
            raise InvariantError(f"{count} blocks asked for, {self.num_free} free")
        taken = []
        for _ in range(count):
            block = (self._plain if self._plain.count else self._findable).pop_first()
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
            holds.append(Hold(block, self._findable.leave_place(block) if free else None))
            block.ref_count += 1
        return holds

    def end_hold(self, holds: Sequence[Hold]) -> None:
        """Give held blocks back. What nobody used meanwhile goes back to its old place in the order of eviction."""
        for hold in holds:
            block = self._drop_owner(hold.block.id)
            if block.ref_count:
                if hold.place is not None:
                    self._findable.drop_place(hold.place)
            elif hold.place is not None and block.hash is not None:
                self._findable.take_place(block, hold.place)
            else:
                if hold.place is not None:
                    self._findable.drop_place(hold.place)
                self._put_on_list(block)

    def coldest(self) -> Iterator[int]:
        """Ids of free, findable blocks in the order in which they will be reused. Do not change the pool meanwhile."""
        return (block.id for block in self._findable)

    def _drop_owner(self, block_id: int) -> Block:
        block = self._blocks[block_id]
        if block.ref_count < 1 or block_id == NULL_BLOCK:
            raise InvariantError(f"{block} is released without an owner")
        block.ref_count -= 1
        return block

    def _put_on_list(self, block: Block) -> None:
        """Findable blocks are used up in order of age; of the others the last one first: its memory is mapped and warm."""
        if block.hash is None:
            self._plain.push_first(block)
        else:
            self._findable.push_last(block)

    def _list_of(self, block: Block) -> FreeList:
        return self._plain if block.hash is None else self._findable

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
        if holder is block:
            block.hash = block_hash
        return holder.id

    def clear(self) -> tuple[int, int]:
        """Forget every free block; returns how many were forgotten and how many stay because they are in use."""
        num_forgotten = self._findable.count
        while self._findable.count:
            block = self._findable.pop_first()
            self._drop_hash(block)
            self._put_on_list(block)
        return num_forgotten, len(self._by_hash)

    def forget(self, block_id: int) -> None:
        """Make one free, findable block anonymous. Raises `InvariantError` if it is in use or has no hash."""
        block = self._blocks[block_id]
        if block.ref_count:
            raise InvariantError(f"{block} is in use")
        self._findable.remove(block)
        self._drop_hash(block)
        self._put_on_list(block)

    def _drop_hash(self, block: Block) -> None:
        if block.hash is None or self._by_hash.pop(block.hash, None) is not block:
            raise InvariantError(f"{block} is not the holder of its hash")
        block.hash = None

    def check_integrity(self, owned: Iterable[int] | None = None) -> None:
        """Recount everything; with `owned` (one entry per owner and block) also compare the reference counts.

        Raises `InvariantError`.
        """
        for name, blocks in (("plain", self._plain), ("findable", self._findable)):
            on_list = {block.id for block in blocks}
            free = {b.id for b in self._blocks[1:] if b.ref_count == 0 and (b.hash is not None) == (name == "findable")}
            if len(on_list) != blocks.count or on_list != free:
                raise InvariantError(f"{name} list {sorted(on_list)} (count {blocks.count}) against {sorted(free)}")
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
