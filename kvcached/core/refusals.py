"""Why a request is refused: typed values, with the numbers and names that they are about.

The words for people stand in `kvcached.service.refusals`.
"""

from __future__ import annotations

from enum import Enum

from kvcached_client.errors import ErrorCode


class Why(Enum):
    """Every reason that the core has to refuse a request, and the code that engines are told."""

    LEASE_RELEASED = "lease_released", ErrorCode.ALREADY_RELEASED
    COMMIT_OF_OTHER_LENGTH = "commit_of_other_length", ErrorCode.BAD_VALUE
    DECLARATION_OF_OTHER_LENGTH = "declaration_of_other_length", ErrorCode.BAD_VALUE
    LOAD_BEHIND_HIT = "load_behind_hit", ErrorCode.BAD_VALUE
    TOO_MANY_KEYS = "too_many_keys", ErrorCode.BAD_VALUE
    WRONG_SHARD = "wrong_shard", ErrorCode.BAD_VALUE
    OTHER_KIND = "other_kind", ErrorCode.BAD_VALUE
    CORRUPT_STORE = "corrupt_store", ErrorCode.BAD_VALUE
    SLOTS_PENDING = "slots_pending", ErrorCode.CAPACITY_PENDING
    POOL_ASLEEP = "pool_asleep", ErrorCode.ASLEEP
    POOL_NOT_ASLEEP = "pool_not_asleep", ErrorCode.REQUEST_CONFLICT
    CLEARING = "clearing", ErrorCode.CLEARING
    FOREIGN_LEASE = "foreign_lease", ErrorCode.FOREIGN_LEASE
    HIT_CLEARED = "hit_cleared", ErrorCode.HIT_GONE
    HIT_CORRUPT = "hit_corrupt", ErrorCode.HIT_GONE
    FENCES_FULL = "fences_full", ErrorCode.LIMIT
    LEASES_FULL = "leases_full", ErrorCode.LIMIT
    NAMESPACES_FULL = "namespaces_full", ErrorCode.LIMIT
    PINS_FULL = "pins_full", ErrorCode.LIMIT
    PIN_QUOTA = "pin_quota", ErrorCode.LIMIT
    TRANSFERS_FULL = "transfers_full", ErrorCode.LIMIT
    NO_SLOTS = "no_slots", ErrorCode.NO_CAPACITY
    NOT_RESUMABLE = "not_resumable", ErrorCode.NO_SESSION
    NO_SUCH_SESSION = "no_such_session", ErrorCode.NO_SESSION
    COMMIT_OUT_OF_ORDER = "commit_out_of_order", ErrorCode.OUT_OF_ORDER
    NOT_DECLARING = "not_declaring", ErrorCode.OUT_OF_ORDER
    SHARD_LEFT = "shard_left", ErrorCode.OUT_OF_ORDER
    STORE_OUT_OF_ORDER = "store_out_of_order", ErrorCode.OUT_OF_ORDER
    COPIES_PAUSED = "copies_paused", ErrorCode.PAUSED
    DECLARED_ALREADY = "declared_already", ErrorCode.REQUEST_CONFLICT
    REQUEST_IN_USE = "request_in_use", ErrorCode.REQUEST_CONFLICT
    SESSION_CLEARED = "session_cleared", ErrorCode.SESSION_EXPIRED
    SESSION_LOST_MEMBER = "session_lost_member", ErrorCode.SESSION_EXPIRED
    SESSION_SILENT = "session_silent", ErrorCode.SESSION_EXPIRED
    STALE_EPOCH = "stale_epoch", ErrorCode.STALE_EPOCH
    STILL_LOADING = "still_loading", ErrorCode.STILL_LOADING
    NO_SUCH_LEASE = "no_such_lease", ErrorCode.UNKNOWN_LEASE
    COMMIT_OF_FOREIGN_SLOTS = "commit_of_foreign_slots", ErrorCode.UNKNOWN_SLOT
    SLOTS_NOT_SET_ASIDE = "slots_not_set_aside", ErrorCode.UNKNOWN_SLOT
    BLOCK_TOO_LARGE = "block_too_large", ErrorCode.WRONG_LAYOUT
    OTHER_SHAPE = "other_shape", ErrorCode.WRONG_LAYOUT

    @property
    def code(self) -> ErrorCode:
        """What kind of error it is for an engine."""
        return self.value[1]


class Refusal(Exception):
    """A request is refused, and nothing has changed.

    Attributes:
        why: the reason.
        about: what the words for people name, by the names that they have there.
    """

    def __init__(self, why: Why, **about: int | str) -> None:
        super().__init__(f"{why.code}: {why.name}, {about}")
        self.why = why
        self.about = about

    @property
    def code(self) -> ErrorCode:
        """What kind of error it is for an engine."""
        return self.why.code
