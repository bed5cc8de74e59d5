"""What a client checks in the welcome of a daemon before it uses the session."""

from __future__ import annotations

from kvcached_client.errors import ErrorCode, bad_reply, request_error
from kvcached_client.keys import KeyChain
from kvcached_client.protocol.engine import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    TELLS_TOKENS,
    Welcome,
    WelcomeOffload,
)


def check_version(welcome: Welcome | WelcomeOffload) -> None:
    """Refuse a daemon that chose a version of the protocol which the client did not offer.

    Raises:
        BadRequest: `unsupported_version`.
    """
    if not PROTOCOL_VERSION_MIN <= welcome.version <= PROTOCOL_VERSION:
        offered = f"{PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}"
        message = f"the daemon chose version {welcome.version}, not one of {offered}"
        raise bad_reply(message, ErrorCode.UNSUPPORTED_VERSION)


def tells_tokens(welcome: Welcome | WelcomeOffload) -> bool:
    """Whether the daemon tells routers the tokens of the session's blocks, and so has to be told them."""
    return welcome.token_ids if isinstance(welcome, WelcomeOffload) else TELLS_TOKENS in welcome.capabilities


def check_welcome(welcome: Welcome, fingerprint: str) -> None:
    """Refuse a pool that the engine cannot use.

    Raises:
        BadRequest: as `check_version`, or a package for the key algorithm is missing.
        Refused: the pool has another layout than the one with the fingerprint; "" is any.
    """
    check_version(welcome)
    welcome.layout.check()
    if fingerprint and welcome.layout.fingerprint() != fingerprint:
        raise request_error(
            ErrorCode.WRONG_LAYOUT,
            f"the pool's layout is {welcome.layout.fingerprint()}, the engine's {fingerprint}",
            "configure the replica for this model, dtype, block size and sharding",
        )
    # If a package for the key algorithm is missing, fail now and not in the first request.
    KeyChain(welcome.namespace, welcome.layout.block_size, algorithm=welcome.key_algorithm)
