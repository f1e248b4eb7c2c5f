"""An intrusive doubly linked list of blocks: the order in which the pool reuses them.

Knows blocks by their links only. Invariant: a block is on at most one list, which `Block.list` names, and its links are
set exactly then.
"""

from __future__ import annotations

from collections.abc import Iterator

from tieredkv.errors import InvariantError

# Id of list entries that are no blocks.
_PLACEHOLDER = -1


class Block:
    """One entry of the pool. `list`, `prev` and `next` are set exactly while the block is free; `home` is the list that it
    goes to when it becomes free.
    """

    __slots__ = ("hash", "home", "id", "list", "next", "prev", "ref_count")

    def __init__(self, block_id: int, home: FreeList | None = None) -> None:
        self.id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        self.home = home
        self.list: FreeList | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        name = self.hash.hex()[:8] if self.hash else None
        return f"Block({self.id}, refs={self.ref_count}, hash={name})"


class FreeList:
    """Removal of any block in O(1), no allocation. The head goes first."""

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
        self.remove(place)

    def remove(self, block: Block) -> None:
        before, behind = block.prev, block.next
        if before is None or behind is None or block.list is not self:
            raise InvariantError(f"{block} is not on the free list")
        before.next, behind.prev = behind, before
        block.prev = block.next = block.list = None
        self.count -= block.id > _PLACEHOLDER

    def _insert(self, block: Block, after: Block | None) -> None:
        if block.list is not None or after is None or after.next is None:
            raise InvariantError(f"{block} is on the free list already")
        behind = after.next
        block.prev, block.next, block.list = after, behind, self
        after.next = behind.prev = block
        self.count += block.id > _PLACEHOLDER
