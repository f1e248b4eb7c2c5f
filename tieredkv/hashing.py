"""The identity of a block: a chain of 32-byte digests.

    root  = H("root",  len(namespace) | namespace | len(tenant) | tenant)
    h[0]  = H("block", root   | tokens of block 0)
    h[i]  = H("block", h[i-1] | tokens of block i)

H is BLAKE2b with a 32-byte digest and the word as its `person` (domain separation). Tokens are unsigned 32-bit little
endian, lengths unsigned 64-bit little endian. Equal across processes, machines and `PYTHONHASHSEED`. A hash names
everything that a block's bytes depend on: the namespace (model, layout, scheme), the tenant, and every token up to the
block's end. Only full blocks have one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from tieredkv.types import SHARED_OWNER

HASH_NBYTES = 32
HASH_SCHEME = "blake2b-256/chain/u32le/1"

_ROOT = b"tkv.root.1"
_BLOCK = b"tkv.block.1"
_TENANT = b"tkv.tenant.1"
_OWNER = b"tkv.owner.1"
_NATIVE_U32 = array("I").itemsize == 4 and (1).to_bytes(4, "little") == array("I", [1]).tobytes()


def _digest(person: bytes, *parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=HASH_NBYTES, person=person)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as unsigned 32-bit little endian. Raises `OverflowError` for a value outside that range."""
    packed = array("I", token_ids)
    if not _NATIVE_U32:  # pragma: no cover - big-endian machines
        return b"".join(int(t).to_bytes(4, "little") for t in packed)
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The token ids that `pack_tokens` packed."""
    if not _NATIVE_U32:  # pragma: no cover - big-endian machines
        return [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]
    return array("I", packed).tolist()


def tenant_salt(*, api_key: str | None = None, cache_salt: str | None = None) -> bytes:
    """What keeps one tenant's blocks apart from another's; 32 bytes, or empty for the shared tenant.

    With an API key the salt always depends on it, whatever the caller sends as `cache_salt`: a caller can split its own
    cache further, never reach into another key's.
    """
    if api_key is None and not cache_salt:
        return b""
    key = b"" if api_key is None else b"k" + api_key.encode("utf-8", "surrogatepass")
    return _digest(_TENANT, key, (cache_salt or "").encode("utf-8", "surrogatepass"))


def owner_label(api_key: str | None) -> str:
    """A public name for whoever holds an API key: twelve hex digits that do not tell the key; "shared" without one."""
    if api_key is None:
        return SHARED_OWNER
    return _digest(_OWNER, api_key.encode("utf-8", "surrogatepass")).hex()[:12]


def root_hash(namespace: bytes, tenant: bytes = b"") -> bytes:
    """The parent of every first block: the namespace's digest and the tenant's salt, each with its length."""
    return _digest(_ROOT, namespace, tenant)


def block_hash(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """The hash of one full block below `parent` (32 bytes)."""
    state = hashlib.blake2b(parent, digest_size=HASH_NBYTES, person=_BLOCK)
    state.update(pack_tokens(token_ids))
    return state.digest()


def extend_chain(chain: list[bytes], parent: bytes, token_ids: Sequence[int], block_size: int, num_full: int) -> None:
    """Append to `chain`, whose last hash is `parent` (or the root when empty), until it has `num_full` hashes."""
    first = len(chain)
    packed = pack_tokens(token_ids[first * block_size : num_full * block_size])
    width = 4 * block_size
    for at in range(0, len(packed), width):
        state = hashlib.blake2b(parent, digest_size=HASH_NBYTES, person=_BLOCK)
        state.update(packed[at : at + width])
        parent = state.digest()
        chain.append(parent)


def full_block_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of all full blocks of a prompt, head first, below the chain's `root`."""
    chain: list[bytes] = []
    extend_chain(chain, root, token_ids, block_size, len(token_ids) // block_size)
    return chain
