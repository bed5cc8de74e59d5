"""What a request asks of the cache, in its `kv_transfer_params` or in vLLM's KV hints: read, checked and reported.

A request's parameters are ``{"kvcached": {...}}`` with the keys of `KEYS`. KV hints are an envelope of actions, in
vLLM's own field or as ``kv_hint`` of the parameters, as Dynamo sends it. Each action stands for one key. Whatever is
not executed is refused by name, and never fails the request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, cast, get_args

from kvcached_client.vllm.settings import PrefetchMode

#: The keys of ``kv_transfer_params["kvcached"]``.
KEYS: Final = ("pin_ttl_s", "prefetch", "priority", "share", "tenant")
PRIORITY_MIN: Final = -8
PRIORITY_MAX: Final = 7
TENANT_CHARS_MAX: Final = 64
#: As long as the daemon keeps a pin.
PIN_TTL_S_MAX: Final = 604_800
#: Further actions of one request are refused.
ACTIONS_MAX: Final = 32

_OWN: Final = "kvcached"
_ENVELOPE: Final = "kv_hint"
_PROTOCOL: Final = "0.1"
_ACTION: Final = "1.0"
_REST: Final = "further actions"
#: Names in reports are cut, because a client chose them.
_NAME_LENGTH_MAX: Final = 64

#: Reasons that are logged.
_TOLD_MAX: Final = 64

log = logging.getLogger("vllm.kvcached")

#: Anything that a client sends.
_Value: TypeAlias = Any


class _Action(NamedTuple):
    """An action of the hints: the key that it stands for, and the field of the payload that has the value."""

    key: str
    field: str | None
    value: object = None  #: the value, if no field has it


_ACTIONS: Final[dict[str, _Action]] = {
    "kv.retain": _Action("pin_ttl_s", "ttl_s"),
    "kv.pin": _Action("pin_ttl_s", "ttl_s"),
    "kv.demote": _Action("priority", None, PRIORITY_MIN),
    "kv.prefetch": _Action("prefetch", "wait"),
    "kv.share": _Action("share", "share"),
}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is done for a request, and what is not.

    Attributes:
        priority: of the request's blocks; those of lower priority are evicted first.
        pin_ttl_ms: how long the prompt's blocks are kept after the request; 0 = as long as eviction leaves them.
        prefetch: how long the request waits for storage; None = as the engine's settings say.
        share: store the blocks that the request computes, for all engines of the namespace.
        tenant: whose quota of the host pool the request's blocks count against; "" for nobody's.
        accepted: names of what was accepted.
        refused: names of what was refused, with the reason.
    """

    priority: int = 0
    pin_ttl_ms: int = 0
    prefetch: PrefetchMode | None = None
    share: bool = True
    tenant: str = ""
    accepted: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    def report(self) -> dict[str, Any] | None:
        """What the response says; None if the request asked for nothing."""
        if not (self.accepted or self.refused):
            return None
        return {_OWN: {"accepted": list(self.accepted), "refused": dict(self.refused)}}


NO_WISHES: Final = Wishes()
_NO_STORES: Final = Wishes(share=False)


class WishLog:
    """Counts the wishes of all requests, and logs each reason of a refusal once.

    Attributes:
        accepted, refused: numbers since the last `take`.
    """

    def __init__(self) -> None:
        self.accepted = self.refused = 0
        self._told: set[str] = set()

    def note(self, wishes: Wishes) -> None:
        """Count what a request asked for."""
        self.accepted += len(wishes.accepted)
        self.refused += len(wishes.refused)
        for name, why in wishes.refused:
            if why not in self._told and len(self._told) < _TOLD_MAX:
                self._told.add(why)
                log.warning("kvcached: a request asked for %r, refused: %s; further ones are only counted", name, why)

    def take(self) -> tuple[int, int]:
        """Return both numbers, and begin again."""
        taken = self.accepted, self.refused
        self.accepted = self.refused = 0
        return taken


class _Wish(NamedTuple):
    """One wish, by the name that reports call it."""

    name: str
    key: str
    value: _Value


class _Refused(Exception):
    """A wish cannot be executed; says why."""


def read_wishes(params: _Value, hints: _Value, *, may_fetch: bool, may_store: bool = True) -> Wishes:
    """What a request asks for.

    Args:
        params: the request's ``kv_transfer_params``, or None.
        hints: the request's ``kv_hints``, or None.
        may_fetch: whether this engine reads from storage at all.
        may_store: whether this engine stores blocks at all.
    """
    if params is None and hints is None:
        return NO_WISHES if may_store else _NO_STORES
    found = _Found(may_fetch=may_fetch, may_store=may_store)
    for wish in (*_of_params(params), *_of_hints(hints)):
        found.add(wish)
    return found.wishes()


class _Found:
    """The wishes of a request, checked one by one."""

    def __init__(self, *, may_fetch: bool, may_store: bool) -> None:
        self._may_fetch = may_fetch
        self._may_store = may_store
        self._values: dict[str, Any] = {}
        self._accepted: dict[str, None] = {}
        self._refused: dict[str, str] = {}

    def add(self, wish: _Wish) -> None:
        """Accept or refuse a wish."""
        name = wish.name[:_NAME_LENGTH_MAX]
        try:
            self._accept(wish)
        except _Refused as why:
            self._refused.setdefault(name, str(why))
        else:
            self._accepted[name] = None

    def _accept(self, wish: _Wish) -> None:
        if isinstance(wish.value, _Refused):
            raise wish.value
        if wish.key not in _CHECKS:
            raise _Refused(f"kvcached knows {', '.join(KEYS)}")
        value = _CHECKS[wish.key](wish.value)
        if self._values.get(wish.key, value) != value:
            raise _Refused("the request asks for two different values")
        if wish.key == "prefetch" and value != "off" and not self._may_fetch:
            raise _Refused("this engine's setting prefetch is off")
        if wish.key == "share" and value and not self._may_store:
            raise _Refused("this engine's kv_role is kv_consumer")
        self._values[wish.key] = value

    def wishes(self) -> Wishes:
        """All of them."""
        values = self._values
        return Wishes(
            priority=values.get("priority", 0),
            pin_ttl_ms=values.get("pin_ttl_s", 0),
            prefetch=values.get("prefetch"),
            share=values.get("share", self._may_store),
            tenant=values.get("tenant", ""),
            accepted=tuple(self._accepted),
            refused=tuple(self._refused.items()),
        )


def _of_params(params: _Value) -> Iterator[_Wish]:
    if params is None:
        return
    if not isinstance(params, Mapping):
        yield _Wish("kv_transfer_params", "", _Refused("not a map"))
        return
    for name, value in params.items():
        if name == _OWN and isinstance(value, Mapping):
            yield from (_Wish(f"{key}", f"{key}", each) for key, each in _few(value.items()))
        elif name == _ENVELOPE:
            yield from _of_hints(value)
        else:
            yield _Wish(f"{name}", "", _Refused(f"kvcached reads a map {_OWN!r} and an envelope {_ENVELOPE!r} only"))


def _of_hints(hints: _Value) -> Iterator[_Wish]:
    """The wishes in an envelope: a map, or vLLM's structure with the same fields."""
    if hints is None:
        return
    version, actions = _field(hints, "protocol_version"), _field(hints, "actions")
    if version != _PROTOCOL:
        yield _Wish(_ENVELOPE, "", _Refused(f"protocol version {version!r:.32} is not {_PROTOCOL!r}"))
    elif not isinstance(actions, list):
        yield _Wish(_ENVELOPE, "", _Refused("actions is not a list"))
    else:
        yield from map(_of_action, actions[:ACTIONS_MAX])
        if len(actions) > ACTIONS_MAX:
            yield _Wish(_REST, "", _Refused(f"a request may have {ACTIONS_MAX}"))


def _of_action(action: _Value) -> _Wish:
    kind, version, payload = (_field(action, name) for name in ("action_type", "action_version", "payload"))
    name = f"{kind}"
    known = _ACTIONS.get(kind) if isinstance(kind, str) else None
    if known is None:
        return _Wish(name, "", _Refused(f"kvcached executes {', '.join(_ACTIONS)}"))
    if version != _ACTION:
        return _Wish(name, "", _Refused(f"version {version!r:.32} is not {_ACTION!r}"))
    fields = {known.field} - {None}
    if not isinstance(payload, Mapping) or set(payload) != fields:
        return _Wish(name, "", _Refused(f"the payload must have {', '.join(map(str, fields)) or 'no field'}, only"))
    return _Wish(name, known.key, known.value if known.field is None else payload[known.field])


def _few(items: Iterable[tuple[_Value, _Value]]) -> Iterator[tuple[_Value, _Value]]:
    """Keys and values, no more than there are actions in an envelope; a refusal in place of the others."""
    for number, item in enumerate(items):
        if number == ACTIONS_MAX:
            yield _REST, _Refused(f"a request may have {ACTIONS_MAX}")
            return
        yield item


def _field(value: _Value, name: str) -> _Value:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _priority(value: _Value) -> int:
    if not _is_number(value, int) or not PRIORITY_MIN <= value <= PRIORITY_MAX:
        raise _Refused(f"give an integer, {PRIORITY_MIN} to {PRIORITY_MAX}")
    return cast("int", value)


def _pin_ttl_ms(value: _Value) -> int:
    if not _is_number(value, int, float) or not 0 < value <= PIN_TTL_S_MAX:
        raise _Refused(f"give seconds, more than 0, at most {PIN_TTL_S_MAX}")
    milliseconds: int = round(value * 1000)
    return max(milliseconds, 1)


def _prefetch(value: _Value) -> PrefetchMode:
    if value not in get_args(PrefetchMode):
        raise _Refused(f"give one of {', '.join(get_args(PrefetchMode))}")
    return cast("PrefetchMode", value)


def _share(value: _Value) -> bool:
    if not isinstance(value, bool):
        raise _Refused("give true or false")
    return value


def _tenant(value: _Value) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= TENANT_CHARS_MAX:
        raise _Refused(f"give a name, 1 to {TENANT_CHARS_MAX} characters")
    try:
        value.encode()
    except UnicodeEncodeError:  # no message could have it, so that the whole request would get nothing of the cache
        raise _Refused("give a name that UTF-8 can encode, without halves of surrogate pairs") from None
    return value


def _is_number(value: _Value, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


#: Make a value that is executed of one that a client sent, or raise `_Refused`.
_CHECKS: Final[Mapping[str, Callable[[_Value], int | bool | str]]] = {
    "pin_ttl_s": _pin_ttl_ms,
    "prefetch": _prefetch,
    "priority": _priority,
    "share": _share,
    "tenant": _tenant,
}
