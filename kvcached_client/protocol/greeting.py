"""What an end of a ZMTP connection says first: its version, and the mechanism by which both ends know each other."""

from __future__ import annotations

from typing import Final

_SIZE_BYTES: Final = 64
_SIGNATURE_SIZE_BYTES: Final = 10
_SIGNATURE: Final = b"\xff" + bytes(7) + b"\x01\x7f"
_MECHANISM_AT: Final = slice(12, 32)
_MECHANISM_SIZE_BYTES: Final = 20
_VERSION_MIN: Final = 3


class ProtocolViolation(Exception):
    """The peer does not speak ZMTP, or goes beyond what can be skipped. Its connection is over."""


def greeting(mechanism: bytes, *, is_server: bool = False) -> bytes:
    """What an end of a connection sends first: signature, version 3.1, mechanism, the mechanism's server, filler."""
    named = mechanism.ljust(_MECHANISM_SIZE_BYTES, b"\0")
    return (_SIGNATURE + b"\x03\x01" + named + bytes((is_server,))).ljust(_SIZE_BYTES, b"\0")


def greeting_size(data: memoryview | bytes | bytearray, mechanism: bytes) -> int:
    """The size of the greeting at the start of `data`; 0 while it is not there whole.

    Raises:
        ProtocolViolation: it is no greeting of version 3 with this mechanism.
    """
    if data and data[0] != _SIGNATURE[0]:
        raise ProtocolViolation("no ZeroMQ greeting")
    if len(data) >= _SIGNATURE_SIZE_BYTES and not data[_SIGNATURE_SIZE_BYTES - 1] & 1:
        raise ProtocolViolation("no ZeroMQ greeting")
    if len(data) < _SIZE_BYTES:
        return 0
    version, offered = data[_SIGNATURE_SIZE_BYTES], bytes(data[_MECHANISM_AT]).rstrip(b"\0")
    if version < _VERSION_MIN or offered != mechanism:
        raise ProtocolViolation(
            f"greeting of version {version} with mechanism {offered!r}, not {_VERSION_MIN} with {mechanism.decode()}"
        )
    return _SIZE_BYTES
