"""How pins get into the disk tier and out of it, and what it holds of them.

Each pin changes in one transaction with the counts of its blocks, so a block that is stored later finds out in its own
transaction that it must stay. Pins of all processes that share the store protect alike. Knows rows, not who wants what.

Invariants: nothing here raises; what all pins take stays within a quarter of the headroom that the capacity leaves to LMDB.
"""

from __future__ import annotations

import struct

from tieredkv.errors import StorageError
from tieredkv.storage.index import Index
from tieredkv.storage.pins import PinRecord, PinsSeen
from tieredkv.storage.session import CONTRADICTIONS, StoreSession, budget_nbytes_for, map_nbytes_for


class PinStore:
    """The pins of one store, for one writing thread at a time."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session

    def put(self, record: PinRecord) -> int | None:
        """Keep a pin, in the place of the one with its id if there is one; returns how many of its leading blocks are resident,
        None if it was not kept.
        """
        cost_nbytes = PinRecord.cost_of(record.pack())

        def apply(index: Index) -> int:
            capacity_nbytes = index.state.capacity_nbytes
            room_nbytes = (map_nbytes_for(capacity_nbytes) - budget_nbytes_for(capacity_nbytes)) // 4
            if cost_nbytes + index.pins_cost_nbytes(without=record.id) > room_nbytes:
                return -1
            index.put_pin(record)
            return num_resident(index, record)

        done = self._session.write(apply)
        return None if done is None or done < 0 else done

    def drop(self, pin_id: bytes) -> bool:
        """Take a pin away, if it is there; False if that could not be done."""
        return self._session.write(lambda index: index.drop_pin(pin_id) or True) is not None

    def see(self, num_resets: int) -> PinsSeen | None:
        """All pins, and what is there of them; None while the store is unavailable."""
        try:
            with self._session.env.reading() as txn:
                index = Index(txn, self._session.medium)
                records = tuple(index.pin_records())
                return PinsSeen(records, {record.id: num_resident(index, record) for record in records}, num_resets)
        except StorageError:
            return None
        except (struct.error, *CONTRADICTIONS) as error:
            self._session.distrust(error)
            return None

    def expire(self) -> None:
        """Take away the pins whose time is up."""
        now_us = self._session.clock_us()
        try:
            with self._session.env.reading() as txn:
                due = Index(txn, self._session.medium).due_pins(now_us)
        except StorageError:
            return
        except (struct.error, *CONTRADICTIONS) as error:
            self._session.distrust(error)
            return

        def apply(index: Index) -> int:
            # Another process may have renewed one.
            return sum(index.drop_pin(pin_id) for pin_id in index.due_pins(now_us))

        if due:
            self._session.write(apply)


def num_resident(index: Index, record: PinRecord) -> int:
    """How many of a pin's blocks are resident, from the first one on."""
    return next((i for i, block_hash in enumerate(record.hashes) if block_hash not in index), len(record.hashes))
