"""A pin as the store keeps it: one row that says what stays, whose wish that is, and until when.

    0   version, 1     1   tier        2   length of the owner    4   length of the name (65535: none)
    6   of the tenant  8   tokens      12  blocks                 16  created    24  expires    32  namespace (32 bytes)
    64  owner, name, tenant, the blocks' hashes (32 bytes each), the tokens (u32 each)

Numbers are little endian, times microseconds since the epoch. Knows no transaction and no rows of blocks. Invariant: a row
that can be read has exactly the length that it claims.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tieredkv.storage.tier import NEVER
from tieredkv.types import Tier

PIN_ID_NBYTES = 8
_VERSION = 1
_HEAD = struct.Struct("<BBHHHIIQQ32s")
_NO_NAME = 0xFFFF
_HASH_NBYTES, _TOKEN_NBYTES = 32, 4
_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
# What the count of one pinned block takes in its tree, whose pages are about two thirds full.
_COUNT_NBYTES = 80


@dataclass(frozen=True, slots=True)
class PinRecord:
    """`hashes` are the blocks that stay, head first; `token_ids` what was asked for, packed as unsigned 32-bit little endian.
    `tier` is the lowest tier in which the blocks must stay.
    """

    id: bytes
    namespace: bytes
    tenant: bytes
    owner: str
    name: str | None
    tier: Tier
    created_us: int
    expires_us: int
    hashes: tuple[bytes, ...]
    token_ids: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // _TOKEN_NBYTES

    @staticmethod
    def cost_of(value: memoryview | bytes) -> int:
        """About what a packed pin takes in a store, without reading all of it."""
        num_hashes: int = _HEAD.unpack_from(value)[6]
        return 2 * len(value) + _COUNT_NBYTES * num_hashes

    def is_due(self, now_us: int) -> bool:
        return self.expires_us != NEVER and self.expires_us <= now_us

    @staticmethod
    def expiry_of(value: memoryview | bytes) -> int:
        """`expires_us` of a packed pin, without reading the rest."""
        expires_us: int = _HEAD.unpack_from(value)[-2]
        return expires_us

    def pack(self) -> bytes:
        owner = self.owner.encode("utf-8", "surrogatepass")
        name = None if self.name is None else self.name.encode("utf-8", "surrogatepass")
        head = _HEAD.pack(
            _VERSION,
            _TIERS.index(self.tier),
            len(owner),
            _NO_NAME if name is None else len(name),
            len(self.tenant),
            self.num_tokens,
            len(self.hashes),
            self.created_us,
            self.expires_us,
            self.namespace,
        )
        return b"".join((head, owner, name or b"", self.tenant, *self.hashes, self.token_ids))

    @classmethod
    def unpack(cls, pin_id: bytes, value: memoryview | bytes) -> PinRecord:
        """Raises `struct.error` for bytes that are no pin."""
        version, tier, *lengths, num_tokens, num_hashes, created_us, expires_us, namespace = _HEAD.unpack_from(value)
        owner_nbytes, name_nbytes, tenant_nbytes = lengths
        named = name_nbytes != _NO_NAME
        sizes = (owner_nbytes, name_nbytes if named else 0, tenant_nbytes)
        length = _HEAD.size + sum(sizes) + num_hashes * _HASH_NBYTES + num_tokens * _TOKEN_NBYTES
        if version != _VERSION or tier >= len(_TIERS) or len(value) != length:
            raise struct.error("not a pin")
        rest, parts = bytes(value[_HEAD.size :]), []
        for size in (*sizes, num_hashes * _HASH_NBYTES):
            parts.append(rest[:size])
            rest = rest[size:]
        owner, name, tenant, hashes = parts
        return cls(
            id=pin_id,
            namespace=namespace,
            tenant=tenant,
            owner=owner.decode("utf-8", "replace"),
            name=name.decode("utf-8", "replace") if named else None,
            tier=_TIERS[tier],
            created_us=created_us,
            expires_us=expires_us,
            hashes=tuple(hashes[at : at + _HASH_NBYTES] for at in range(0, len(hashes), _HASH_NBYTES)),
            token_ids=rest,
        )


@dataclass(frozen=True, slots=True)
class PinsSeen:
    """All pins of a store at one moment; `num_resident` tells by id how many leading blocks of each were in it. `num_resets`
    changes when the store had to start empty.
    """

    records: tuple[PinRecord, ...]
    num_resident: dict[bytes, int]
    num_resets: int
