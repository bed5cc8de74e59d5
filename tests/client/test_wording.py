"""Mistakes in arguments are told in the words of the caller: the method and the argument, not a field of a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest

from kvcached_client import AsyncClient, BadRequest, Client, RequestError, map_pool
from kvcached_client.errors import ErrorCode, Fault, request_error
from kvcached_client.offload import Offered, OffloadClient, OffloadLayout
from kvcached_client.protocol.admin import SetPolicy, SetWeights
from kvcached_client.protocol.engine import Acquire, ErrorReply, Hello, HelloOffload, decode_request, encode
from kvcached_client.protocol.fields import Header
from kvcached_client.protocol.sessions import Prefetch
from kvcached_client.transport.wording import about_argument
from kvcached_client.types import LeaseId
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_offload import Script

GOOD: dict[str, Any] = {"engine": "e", "instance": bytes(16), "keyspace": bytes(32), "label": "m"}
LAYOUT = {"block_size": 16, "shards": 1, "block_bytes": 1024, "fingerprint": bytes(16)}


def refused(request: Header) -> str:
    """The words for a request that the daemon cannot decode."""
    with pytest.raises(BadRequest) as error:
        decode_request(encode(request))
    return str(about_argument(request, error.value))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"request": "x" * 300},
            "request of acquire: expected str of length <= 256 (give text of 1 to 256 characters)",
        ),
        ({"request": ""}, "request of acquire: expected str of length >= 1 (give text of 1 to 256 characters)"),
        ({"tokens": -1}, "tokens of acquire: expected int >= 0 (give a whole number, 0 to 1048576)"),
        ({"tokens": 1.5}, "tokens of acquire: expected int, got float (give a whole number, 0 to 1048576)"),
        ({"priority": 8}, "priority of acquire: expected int <= 7 (give a whole number, -8 to 7)"),
        ({"reserve": -2}, "reserve_tokens of acquire: expected int >= 0 (give a whole number, 0 to 1048576)"),
        ({"full": 1}, "full of acquire: expected bool, got int (correct full)"),
    ],
)
def test_field_of_acquire_is_its_argument(changed: dict[str, Any], words: str) -> None:
    """What the daemon says of a field is said of the argument, also where the two have different names."""
    assert refused(Acquire(**{"id": 1, "epoch": 1, "request": "r", "tokens": 1, **changed})) == f"malformed: {words}"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"label": ""}, "label of connect: expected str of length >= 1 (give text of 1 to 128 characters)"),
        ({"keyspace": bytes(31)}, "keyspace of connect: expected bytes of length >= 32 (give 32 bytes)"),
        ({"shards": 0}, "layout.shards of connect: expected int >= 1 (give a whole number, 1 to 64)"),
    ],
)
def test_field_of_a_hello_is_an_argument_of_connect(changed: dict[str, Any], words: str) -> None:
    """Nobody calls hello: the method is connect, and what describes blocks is in its layout."""
    fields = {"id": 1, "version_min": 1, "version_max": 1, "member": bytes(32), **GOOD, **LAYOUT, **changed}
    assert refused(HelloOffload(**fields)) == f"malformed: {words}"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            Prefetch(id=1, tokens=1, stop=cast("Any", "foo")),
            "stop of prefetch: 'foo' is not allowed (give one of 'best_effort', 'timeout', 'wait_complete')",
        ),
        (
            Prefetch(id=1, tokens=1, prefill_tokens_per_s=-1.0),
            "prefill_tokens_per_s of prefetch: expected float >= 0.0 (give a number, at least 0)",
        ),
        (
            SetPolicy(id=1, target="default", policy=cast("Any", "foo")),
            (
                "policy of set_policy: 'foo' is not allowed (give one of 'write_through', 'write_through_selective', "
                "'write_back', 'never')"
            ),
        ),
        (
            SetWeights(id=1, target="default", version=""),
            "version of set_weights: expected str of length >= 1 (give text of 1 to 256 characters)",
        ),
    ],
)
def test_argument_is_told_with_what_is_allowed(request_: Header, words: str) -> None:
    """Choices are named, and so is the length of a text and the size of a number, as the message's field has them."""
    assert refused(request_) == f"malformed: {words}"


def test_other_errors_keep_their_words() -> None:
    """Only what is known to be about an argument is said anew."""
    request = Hello(id=1, version_min=1, version_max=1, member=bytes(32), replica="r", layout="", client="c")
    for code, message in (
        (ErrorCode.MALFORMED, "header is not MessagePack"),
        (ErrorCode.BAD_VALUE, "Expected `int` - at `$.tokens`"),
        (ErrorCode.POOL_BUSY, "session 3 holds the replica"),
    ):
        error = request_error(code, message, "fix")
        assert about_argument(request, error) is error


def test_calls_raise_in_these_words(daemon: FakeDaemon, connect: Callable[..., Client]) -> None:
    """The words are those of the exception that a call raises."""

    def script(request: Header, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if not isinstance(request, Acquire):
            return None
        told = "Expected `str` of length <= 256 - at `$.request`"
        reply = ErrorReply(id=request.id, code=ErrorCode.MALFORMED, fault=Fault.CALLER, message=told, fix="see")
        return reply, []

    daemon.script = script
    client = connect()
    with pytest.raises(BadRequest, match="request of acquire: expected str of length <= 256"):
        client.acquire("r", client.chain(range(8)))


def test_what_cannot_be_sent_names_its_method(connect: Callable[..., Client]) -> None:
    """An argument that no message can hold is told with the method, too."""
    client = connect()
    with pytest.raises(BadRequest, match=r"acquire: 'utf-8' codec .*\(correct this argument\)"):
        client.acquire("\ud800", client.chain(range(8)))


def test_keys_that_are_cut_are_told(daemon: FakeDaemon) -> None:
    """Keys of another length than a multiple of 16 are told as keys."""
    daemon.script = Script()
    layout = OffloadLayout(**LAYOUT)  # type: ignore[arg-type]
    client = OffloadClient.connect(daemon.run_dir, **GOOD, layout=layout)
    with client, pytest.raises(BadRequest, match="keys of 17 bytes"):
        client.acquire("r", bytes(17), 17)


def test_argument_of_another_type_names_itself(daemon: FakeDaemon, connect: Callable[..., Client]) -> None:
    """A tenant that is no text is told as such by both kinds of client."""
    client, anyone = connect(), cast("Any", 4)
    with pytest.raises(BadRequest, match=r"a tenant of the type int .*text of at most 64"):
        client.acquire("r", client.chain(range(8)), tenant=anyone)
    for prefetch in (client.prefetch, client.begin_prefetch):
        with pytest.raises(BadRequest, match=r"a tenant of the type int"):
            prefetch(client.chain(range(8)), tenant=anyone)
    daemon.script = Script()
    layout = OffloadLayout(**LAYOUT)  # type: ignore[arg-type]
    offload = OffloadClient.connect(daemon.run_dir, **GOOD, layout=layout)
    with offload, pytest.raises(BadRequest, match="tenant of acquire: expected str, got int"):
        offload.acquire("r", bytes(16), 17, tenant=anyone)


@pytest.fixture
def offload(daemon: FakeDaemon) -> Iterator[OffloadClient]:
    """A client in offload mode, whose daemon answers in a script's words."""
    daemon.script = Script()
    layout = OffloadLayout(**LAYOUT)  # type: ignore[arg-type]
    with OffloadClient.connect(daemon.run_dir, **GOOD, layout=layout) as connected:
        yield connected


#: Calls in offload mode that a number goes into, and the name of the argument.
OFFLOAD_CALLS: dict[str, Callable[[OffloadClient, Any], object]] = {
    "tokens of match": lambda client, number: client.match(bytes(16), number),
    "tokens of acquire": lambda client, number: client.acquire(str(number), bytes(80), number),
    "tokens of prefetch": lambda client, number: client.prefetch(bytes(16), number),
    "priority": lambda client, number: client.acquire(str(number), bytes(80), 81, priority=number),
    "load_from": lambda client, number: client.acquire(str(number), bytes(80), 81, load_from=number),
    "start of a load": lambda client, number: client.prepare_load(LeaseId(1), number, 2),
    "blocks": lambda client, number: client.prepare_load(LeaseId(1), 0, number),
    "start of a store": lambda client, number: client.prepare_store(LeaseId(1), number, bytes(32)),
    "start of stores": lambda client, number: client.begin_prepare_stores([Offered(LeaseId(1), number, bytes(32))]),
    "ttl_ms": lambda client, number: client.pin(bytes(16), ttl_ms=number),
    "deadline_ms": lambda client, number: client.prefetch(bytes(16), 17, deadline_ms=number),
    "prefill_tokens_per_s": lambda client, number: client.prefetch(bytes(16), 17, prefill_tokens_per_s=number),
}


@pytest.mark.parametrize("call", OFFLOAD_CALLS)
def test_numbers_of_numpy_are_numbers(offload: OffloadClient, call: str) -> None:
    """A client in offload mode takes them, and what is no number is told with the name of its argument."""
    OFFLOAD_CALLS[call](offload, np.int64(call != "load_from"))
    words = f"{call.partition(' ')[0]} 'many' .give a (whole )?number"
    with pytest.raises(BadRequest, match=words):
        OFFLOAD_CALLS[call](offload, "many")


@pytest.mark.parametrize("number", [10**400, 10**5000, Fraction(10**400, 3)], ids=["large", "unprintable", "fraction"])
def test_number_that_no_message_can_hold_is_refused(offload: OffloadClient, number: Any) -> None:
    """One of any size is told as a mistake of the caller, with the name of its argument."""
    with pytest.raises(BadRequest, match=r"prefill_tokens_per_s is too large .give a number up to 1e308"):
        offload.prefetch(bytes(16), 17, prefill_tokens_per_s=number)


def test_deadlines_and_shards_of_numpy_are_numbers(daemon: FakeDaemon) -> None:
    """Connecting and joining take them, and a shard that is no number is told as one."""
    two_seconds, nothing = cast("int", np.int32(2000)), cast("int", np.int64(0))
    with Client.connect(daemon.run_dir, deadline_ms=two_seconds, reserve_blocks=nothing) as client:
        assert client.match(client.chain(range(8))) == 2
        with pytest.raises(BadRequest, match=r"shard 'first' .give a whole number"):
            map_pool(client.session, cast("Any", "first"))
        with pytest.raises(RequestError, match="answered Joined with 0 descriptors"):  # it was asked
            map_pool(client.session, nothing, deadline_ms=two_seconds)
    for deadline_ms in ("soon", True, 2.0):
        with pytest.raises(ValueError, match=f"deadline_ms is {deadline_ms!r}, a whole number"):
            Client.connect(daemon.run_dir, deadline_ms=cast("Any", deadline_ms))


def test_id_of_a_request_is_text(offload: OffloadClient) -> None:
    """Another type is refused as such, also one that no table can hold."""
    for request in (["x"], 7, b"x"):
        with pytest.raises(BadRequest, match=f"a {type(request).__name__} in place of a request's id"):
            offload.acquire(cast("Any", request), bytes(16), 17)


def test_id_of_a_request_on_a_device_pool_is_text(connect: Callable[..., Client]) -> None:
    """So it is for the client of a device pool, also where failures are misses."""
    for failures in ("raise", "miss"):
        with connect(failures=failures) as client, pytest.raises(BadRequest, match="a list in place of a request's id"):
            client.acquire(cast("Any", ["x"]), client.chain(range(8)))


@pytest.mark.parametrize("open_client", [Client.connect, AsyncClient.open])
def test_reserve_below_nothing_is_told_before_anybody_is_asked(open_client: Callable[..., Any]) -> None:
    """A negative number of slots is refused as an argument of connect, not as one of the prompt that would hold it."""
    with pytest.raises(ValueError, match="reserve_blocks is -1"):
        open_client("/no/such/daemon", reserve_blocks=-1)
