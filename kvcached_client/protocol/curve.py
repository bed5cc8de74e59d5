"""CurveZMQ, as either end of the daemon's TCP port speaks it: ZMTP in boxes that only the other end opens. No I/O.

The mechanism of ZeroMQ's connections (rfc.zeromq.org/spec/26), over libsodium (PyNaCl). Both ends have lasting keys and
make keys for each connection: what was recorded opens for nobody once the connection is over. A reader here has what
`zmtp.Reader` has; what comes out of the boxes is read by one, which applies its limits. Needs the extra `curve`.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from nacl.bindings import (
    crypto_box_afternm,
    crypto_box_beforenm,
    crypto_box_keypair,
    crypto_box_open_afternm,
    crypto_scalarmult_base,
)
from nacl.exceptions import CryptoError

from kvcached_client.protocol.engine import FRAME_SIZE_BYTES_MAX
from kvcached_client.protocol.greeting import ProtocolViolation, greeting, greeting_size
from kvcached_client.protocol.key_files import key_text
from kvcached_client.protocol.zmtp import (
    COMMAND,
    COMMAND_SIZE_BYTES_MAX,
    DEALER,
    FRAMES_PER_TURN_MAX,
    GREETING,
    HEAD_SIZE_BYTES,
    LONG,
    LONG_HEAD,
    MORE,
    ROUTER,
    Message,
    Reader,
    frame,
)

_CURVE: Final = b"CURVE"
_KEY_SIZE_BYTES: Final = 32

_TAG_SIZE_BYTES: Final = 16
_NONCE_SIZE_BYTES: Final = 8
_LONG_NONCE_SIZE_BYTES: Final = 16
_COOKIE_SIZE_BYTES: Final = 96
_COUNTER: Final = struct.Struct(">Q")

_HELLO: Final = b"\x05HELLO"
_WELCOME: Final = b"\x07WELCOME"
_INITIATE: Final = b"\x08INITIATE"
_READY: Final = b"\x05READY"
_ERROR: Final = b"\x05ERROR"
_MESSAGE: Final = b"\x07MESSAGE"

_VERSION: Final = b"\x01\x00"
_HELLO_FILLER: Final = bytes(72)
_HELLO_PROOF: Final = bytes(64)
_HELLO_SIZE_BYTES: Final = 200
#: ZeroMQ's status for a peer that is not let in.
_NOT_LET_IN: Final = b"400"
#: Flags within a box.
_BOX_MORE: Final = 1
_BOX_COMMAND: Final = 2
#: Of a MESSAGE: its name, the nonce, the box and the flags in it.
_OVERHEAD_BYTES: Final = len(_MESSAGE) + _NONCE_SIZE_BYTES + _TAG_SIZE_BYTES + 1


class KeyPair(NamedTuple):
    """Keys of one end."""

    secret: bytes
    public: bytes


def new_pair() -> KeyPair:
    """A pair that nobody has."""
    public, secret = crypto_box_keypair()
    return KeyPair(secret, public)


def pair_of(secret: bytes) -> KeyPair:
    """The pair of a secret key."""
    return KeyPair(secret, crypto_scalarmult_base(secret))


class NotLetIn(ProtocolViolation):
    """The other end of the handshake, whose key is proven, is none that is let in."""


def _box(plain: bytes, name: bytes, nonce: bytes, shared: bytes) -> bytes:
    return crypto_box_afternm(plain, name + nonce, shared)


def _opened(box: bytes, name: bytes, nonce: bytes, shared: bytes) -> bytes:
    try:
        return crypto_box_open_afternm(box, name + nonce, shared)
    except CryptoError:
        raise ProtocolViolation("a box that was made for other keys, or was changed") from None


def _shared(public: bytes, secret: bytes) -> bytes:
    try:
        return crypto_box_beforenm(public, secret)
    except CryptoError:
        raise ProtocolViolation("a public key that is none") from None


class CurveReader:
    """One connection's incoming side, and the boxes of its outgoing side.

    Args:
        keys: the lasting ones of this end.
        inner: reads what comes out of the boxes.

    Attributes:
        is_ready, commands, has_more, violation: as of `zmtp.Reader`; `commands` are in boxes, or of the handshake.
    """

    #: Names of the nonces of messages from here, and of those that come.
    _sends: bytes
    _hears: bytes

    def __init__(self, keys: KeyPair, inner: Reader) -> None:
        self._keys = keys
        self._inner = inner
        self.is_ready = False
        self.violation: ProtocolViolation | None = None
        self.commands: list[bytes] = []
        self.has_more = False
        self._is_greeted = False
        self._rest = bytearray()  #: received, not opened
        self._needed = 1  #: bytes of `_rest` without which there is nothing to open
        self._sent = 0  #: the last nonce from here
        self._heard = 0  #: the last nonce from the other end: nothing comes twice
        self._key = b""  #: both ends' keys of this connection
        self._step: Callable[[bytes], None] = self._begin

    @property
    def is_skipping(self) -> bool:
        """Whether what comes next belongs to a message that was refused."""
        return self._inner.is_skipping

    @property
    def held_bytes(self) -> int:
        """What is kept of messages that are not whole yet, or not taken yet."""
        return len(self._rest) + self._inner.held_bytes

    def read(self, data: memoryview | bytes, messages_max: int) -> list[Message]:
        """The next messages, of what was received before and `data`, at most so many."""
        self._rest += data
        plain = b"" if self._inner.has_more or self.violation else self._open()
        messages = self._inner.read(plain, messages_max)
        if self.is_ready:
            self.commands += [self._seal(_BOX_COMMAND, body[HEAD_SIZE_BYTES:]) for body in self._inner.commands]
            self._inner.commands.clear()
        self.violation = self.violation or self._inner.violation
        is_more = self._inner.has_more or len(self._rest) >= self._needed
        self.has_more = is_more and self.violation is None
        return messages

    def seal(self, parts: list[bytes]) -> bytes:
        """A message as it is on the wire."""
        last = len(parts) - 1
        return b"".join(self._seal(_BOX_MORE if index < last else 0, part) for index, part in enumerate(parts))

    def _seal(self, flags: int, body: bytes) -> bytes:
        nonce = self._next_nonce()
        return frame(0, _MESSAGE + nonce + _box(bytes((flags,)) + body, self._sends, nonce, self._key))

    def _open(self) -> bytes:
        """Take frames from the start of what has come; what was in their boxes, as it is on a wire without boxes."""
        plain: list[bytes] = []
        at = 0
        if len(self._rest) < self._needed:
            return b""
        try:
            if not self._is_greeted:
                at = greeting_size(self._rest, _CURVE)
                self._is_greeted, self._needed = at > 0, len(self._rest) + 1
            for _ in range(FRAMES_PER_TURN_MAX if self._is_greeted else 0):
                body = self._next_frame(at)
                if body is None:
                    break
                at += self._needed
                if self.is_ready:
                    plain.append(self._message(body))
                else:
                    self._step(body)
                self._needed = HEAD_SIZE_BYTES
        except ProtocolViolation as violation:
            self.violation = violation
        del self._rest[:at]
        return b"".join(plain)

    def _next_frame(self, at: int) -> bytes | None:
        """The body of the frame that begins at `at`, or None while it is not there whole; `_needed` is its size."""
        rest = self._rest
        left = len(rest) - at
        self._needed = HEAD_SIZE_BYTES
        if left < self._needed:
            return None
        flags, size, body = rest[at], rest[at + 1], at + HEAD_SIZE_BYTES
        if flags & LONG:
            self._needed = LONG_HEAD.size
            if left < self._needed:
                return None
            size, body = int.from_bytes(rest[at + 1 : at + LONG_HEAD.size], "big"), at + LONG_HEAD.size
        size_max = FRAME_SIZE_BYTES_MAX + _OVERHEAD_BYTES if self.is_ready else COMMAND_SIZE_BYTES_MAX
        if flags & ~(LONG | COMMAND) or size > size_max or not (self.is_ready or flags & COMMAND):
            raise ProtocolViolation(f"frame with flags {flags} and {size} bytes")
        self._needed = body + size - at
        return bytes(rest[body : body + size]) if left >= self._needed else None

    def _message(self, body: bytes) -> bytes:
        nonce = self._heard_nonce(body, _MESSAGE, at=len(_MESSAGE))
        plain = _opened(body[len(_MESSAGE) + _NONCE_SIZE_BYTES :], self._hears, nonce, self._key)
        flags = plain[0] if plain else ~0
        if flags & ~(_BOX_MORE | _BOX_COMMAND):
            raise ProtocolViolation("a box without flags, or with unknown ones")
        return frame(MORE * bool(flags & _BOX_MORE) | COMMAND * bool(flags & _BOX_COMMAND), plain[1:])

    def _next_nonce(self) -> bytes:
        self._sent += 1
        return _COUNTER.pack(self._sent)

    def _heard_nonce(self, body: bytes, name: bytes, at: int) -> bytes:
        """The nonce of a command with this name; each is higher than the one before."""
        nonce = body[at : at + _NONCE_SIZE_BYTES]
        if not body.startswith(name) or len(nonce) < _NONCE_SIZE_BYTES:
            raise ProtocolViolation(f"no {name[1:].decode()}")
        (number,) = _COUNTER.unpack(nonce)
        if number <= self._heard:
            raise ProtocolViolation("a box that has come before")
        self._heard = number
        return nonce

    def _begin(self, body: bytes) -> None:
        raise NotImplementedError

    def _introduce(self, metadata: bytes) -> None:
        """The other end has said which socket it is."""
        self._inner.read(GREETING + frame(COMMAND, _READY + metadata), 1)
        if self._inner.violation is not None:
            raise self._inner.violation
        self.is_ready = True


def _metadata(ready: bytes) -> bytes:
    """The properties in a READY as it is on a wire without boxes."""
    return ready[HEAD_SIZE_BYTES + len(_READY) :]


class CurveServer(CurveReader):
    """The daemon's end.

    Args:
        keys: the daemon's.
        is_known: whether a client with this public key is let in.

    Attributes:
        client: the client's public key, once its handshake is over.
    """

    greeting: Final = greeting(_CURVE, is_server=True)
    _sends = b"CurveZMQMESSAGES"
    _hears = b"CurveZMQMESSAGEC"

    def __init__(self, keys: KeyPair, is_known: Callable[[bytes], bool]) -> None:
        super().__init__(keys, Reader(ROUTER))
        self._is_known = is_known
        self.client = b""

    def _begin(self, body: bytes) -> None:
        """HELLO: the client shows that it knows the daemon's key, and gets this connection's."""
        if len(body) != _HELLO_SIZE_BYTES or not body.startswith(_HELLO + _VERSION):
            raise ProtocolViolation("no HELLO")
        key_at = len(_HELLO) + len(_VERSION) + len(_HELLO_FILLER)
        nonce_at = key_at + _KEY_SIZE_BYTES
        nonce = self._heard_nonce(body, _HELLO, at=nonce_at)
        peer = body[key_at:nonce_at]
        first = _shared(peer, self._keys.secret)
        if _opened(body[nonce_at + _NONCE_SIZE_BYTES :], b"CurveZMQHELLO---", nonce, first) != _HELLO_PROOF:
            raise ProtocolViolation("no HELLO")
        # A server without connections would seal its keys in the cookie; this one has them here.
        short, cookie = new_pair(), secrets.token_bytes(_COOKIE_SIZE_BYTES)
        self._key = _shared(peer, short.secret)
        nonce = secrets.token_bytes(_LONG_NONCE_SIZE_BYTES)
        box = _box(short.public + cookie, b"WELCOME-", nonce, first)
        self.commands.append(frame(COMMAND, _WELCOME + nonce + box))
        self._step = partial(self._on_initiate, peer, short, cookie)

    def _on_initiate(self, peer: bytes, short: KeyPair, cookie: bytes, body: bytes) -> None:
        """INITIATE: the client shows that its lasting key is its own, and vouches for this connection's."""
        nonce_at = len(_INITIATE) + _COOKIE_SIZE_BYTES
        nonce = self._heard_nonce(body, _INITIATE, at=nonce_at)
        if body[len(_INITIATE) : nonce_at] != cookie:
            raise ProtocolViolation("another connection's cookie")
        plain = _opened(body[nonce_at + _NONCE_SIZE_BYTES :], b"CurveZMQINITIATE", nonce, self._key)
        client, rest = plain[:_KEY_SIZE_BYTES], plain[_KEY_SIZE_BYTES:]
        vouch_size = _LONG_NONCE_SIZE_BYTES + 2 * _KEY_SIZE_BYTES + _TAG_SIZE_BYTES
        vouch, metadata = rest[:vouch_size], rest[vouch_size:]
        if len(vouch) < vouch_size:
            raise ProtocolViolation("no vouch")
        shared = _shared(client, short.secret)
        vouched = _opened(vouch[_LONG_NONCE_SIZE_BYTES:], b"VOUCH---", vouch[:_LONG_NONCE_SIZE_BYTES], shared)
        if vouched != peer + self._keys.public:
            raise ProtocolViolation("a vouch for other keys")
        if not self._is_known(client):
            self.commands.append(frame(COMMAND, _ERROR + bytes((len(_NOT_LET_IN),)) + _NOT_LET_IN))
            raise NotLetIn(f"its public key {key_text(client)} is none of those that are let in")
        self._introduce(metadata)
        self.client = client
        (ready,) = self._inner.commands
        self._inner.commands.clear()
        nonce = self._next_nonce()
        box = _box(_metadata(ready), b"CurveZMQREADY---", nonce, self._key)
        self.commands.append(frame(COMMAND, _READY + nonce + box))


class CurveClient(CurveReader):
    """A client's end.

    Args:
        keys: the client's.
        server: the public key that the daemon has to have.

    Attributes:
        hello: what it sends first.
    """

    _sends = b"CurveZMQMESSAGEC"
    _hears = b"CurveZMQMESSAGES"

    def __init__(self, keys: KeyPair, server: bytes) -> None:
        super().__init__(keys, Reader(DEALER))
        self._server = server
        self._short = short = new_pair()
        self._first = _shared(server, short.secret)
        nonce = self._next_nonce()
        proof = _box(_HELLO_PROOF, b"CurveZMQHELLO---", nonce, self._first)
        hello = _HELLO + _VERSION + _HELLO_FILLER + short.public + nonce + proof
        self.hello = greeting(_CURVE) + frame(COMMAND, hello)

    def _begin(self, body: bytes) -> None:
        """WELCOME: only who has the daemon's key has opened the HELLO, and can make this box."""
        short = self._short
        nonce, box = body[len(_WELCOME) :][:_LONG_NONCE_SIZE_BYTES], body[len(_WELCOME) + _LONG_NONCE_SIZE_BYTES :]
        if not body.startswith(_WELCOME) or len(nonce) < _LONG_NONCE_SIZE_BYTES:
            raise ProtocolViolation("no WELCOME")
        plain = _opened(box, b"WELCOME-", nonce, self._first)
        if len(plain) != _KEY_SIZE_BYTES + _COOKIE_SIZE_BYTES:
            raise ProtocolViolation("no WELCOME")
        peer, cookie = plain[:_KEY_SIZE_BYTES], plain[_KEY_SIZE_BYTES:]
        self._key = _shared(peer, short.secret)
        nonce = secrets.token_bytes(_LONG_NONCE_SIZE_BYTES)
        vouch = nonce + _box(short.public + self._server, b"VOUCH---", nonce, _shared(peer, self._keys.secret))
        nonce = self._next_nonce()
        plain = self._keys.public + vouch + _metadata(DEALER.ready)
        box = _box(plain, b"CurveZMQINITIATE", nonce, self._key)
        self.commands.append(frame(COMMAND, _INITIATE + cookie + nonce + box))
        self._step = self._on_ready

    def _on_ready(self, body: bytes) -> None:
        if body.startswith(_ERROR):
            raise NotLetIn("the daemon does not let this key in")
        nonce = self._heard_nonce(body, _READY, at=len(_READY))
        metadata = _opened(body[len(_READY) + _NONCE_SIZE_BYTES :], b"CurveZMQREADY---", nonce, self._key)
        self._introduce(metadata)
