"""Encrypts one value with AES-256-GCM, each part by itself. Only this module imports `cryptography`, which is optional.

Nonces and tags are in the second half of the frame, which is reserved for that: 12 and 16 bytes for the first half of
the frame, then as much for each part. The value's name, the number of the part and the frame's nonce are authenticated
beside the bytes. So no part can be put in the place of another, under another name, or into another write of the value.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator, Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from kvcached.storage.backend import PREFIX_BYTES
from kvcached.storage.frame import FRAME_BYTES, SEALED_BYTES, SHARDS_MAX

_NONCE_BYTES: Final = 12
_PROOF_BYTES: Final = _NONCE_BYTES + 16
assert SEALED_BYTES + (1 + SHARDS_MAX) * _PROOF_BYTES <= FRAME_BYTES  # noqa: S101 - of constants


class BlockCipher:
    """Names, values and the record of generations under one key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._naming = _derived(key, b"kvcached storage names 1")
        self._bytes = AES(_derived(key, b"kvcached storage bytes 1"))
        self._record = AES(_derived(key, b"kvcached storage record 1"))

    def prefix(self, prefix: bytes) -> bytes:
        """The encrypted name of a prefix of keys: 16 bytes."""
        return _derived(self._naming, b"prefix" + prefix)[:PREFIX_BYTES]

    def name(self, key: bytes) -> bytes:
        """The encrypted name of a key: 32 bytes, which begin with the encrypted name of the key's prefix."""
        return self.prefix(key[:PREFIX_BYTES]) + _derived(self._naming, b"key" + key)[:PREFIX_BYTES]

    def encrypt(self, name: bytes, plain: Sequence[memoryview], into: Sequence[memoryview]) -> None:
        """Encrypt a value: its frame, then its parts. Both sequences have parts of the same sizes."""
        frame_nonce = secrets.token_bytes(_NONCE_BYTES)
        proofs = bytearray()
        for number, (source, target) in enumerate(_pieces(plain, into)):
            nonce = secrets.token_bytes(_NONCE_BYTES) if number else frame_nonce
            encryptor = Cipher(self._bytes, GCM(nonce)).encryptor()
            encryptor.authenticate_additional_data(_context(name, number, frame_nonce))
            target[:] = encryptor.update(source) + encryptor.finalize()
            proofs += nonce + encryptor.tag
        into[0][SEALED_BYTES:] = bytes(proofs).ljust(FRAME_BYTES - SEALED_BYTES, b"\0")

    def decrypt(self, name: bytes, encrypted: Sequence[memoryview], into: Sequence[memoryview]) -> bool:
        """Decrypt a value; False if it was not encrypted under that name. Then `into` may hold any bytes."""
        proofs = bytes(encrypted[0][SEALED_BYTES:])
        for number, (source, target) in enumerate(_pieces(encrypted, into)):
            proof = proofs[number * _PROOF_BYTES : (number + 1) * _PROOF_BYTES]
            decryptor = Cipher(self._bytes, GCM(proof[:_NONCE_BYTES], proof[_NONCE_BYTES:])).decryptor()
            decryptor.authenticate_additional_data(_context(name, number, proofs[:_NONCE_BYTES]))
            try:
                target[:] = decryptor.update(source) + decryptor.finalize()
            except InvalidTag:
                return False
        into[0][SEALED_BYTES:] = bytes(FRAME_BYTES - SEALED_BYTES)
        return True

    def encrypt_record(self, plain: bytes) -> bytes:
        """The record of generations, encrypted: nonce, bytes, proof."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        encryptor = Cipher(self._record, GCM(nonce)).encryptor()
        return nonce + encryptor.update(plain) + encryptor.finalize() + encryptor.tag

    def decrypt_record(self, encrypted: bytes) -> bytes | None:
        """The record; None if it was not encrypted under this key."""
        if len(encrypted) < _PROOF_BYTES:
            return None
        tag_at = len(encrypted) - (_PROOF_BYTES - _NONCE_BYTES)
        nonce, tag = encrypted[:_NONCE_BYTES], encrypted[tag_at:]
        decryptor = Cipher(self._record, GCM(nonce, tag)).decryptor()
        try:
            return decryptor.update(encrypted[_NONCE_BYTES:tag_at]) + decryptor.finalize()
        except InvalidTag:
            return None


def _pieces(source: Sequence[memoryview], target: Sequence[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """The pieces that are encrypted separately: the first half of the frame, and each part behind it."""
    yield source[0][:SEALED_BYTES], target[0][:SEALED_BYTES]
    yield from zip(source[1:], target[1:], strict=True)


def _context(name: bytes, number: int, frame_nonce: bytes) -> bytes:
    return name + number.to_bytes(2, "little") + frame_nonce


def _derived(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")
