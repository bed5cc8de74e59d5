"""A worker that does what a sound one never does, or what one cannot be brought to do: ``odd_worker.py HOW FD``."""

from __future__ import annotations

import socket
import sys

from kvcached.process.seqpacket import send, wait_packet
from kvcached.worker.messages import (
    DESCRIPTORS_MAX,
    MESSAGE_SIZE_BYTES_MAX,
    Done,
    Ready,
    Request,
    Shutdown,
    decode_request,
    encode,
)


def main(how: str, connection: socket.socket) -> None:
    """Greet as a worker does; then answer in the way that `how` names."""
    wait_packet(connection, MESSAGE_SIZE_BYTES_MAX, DESCRIPTORS_MAX)
    send(connection, encode(Ready()))
    waiting: list[Request] = []
    while data := connection.recv(MESSAGE_SIZE_BYTES_MAX):
        command = decode_request(data)
        if isinstance(command.work, Shutdown):
            return
        if how == "forgets the first" and command.sequence == 1:
            continue
        waiting.append(command)
        if how == "in threes, backwards" and len(waiting) < 3:
            continue
        for each in reversed(waiting):
            answer = Done(sequence=each.sequence, corrupt=(each.sequence, 7))
            for _ in range(2 if how == "twice" else 1):
                send(connection, encode(answer))
        waiting.clear()


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
