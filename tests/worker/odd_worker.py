"""A worker that does what a sound one never does, or what one cannot be brought to do: ``odd_worker.py HOW FD``."""

from __future__ import annotations

import os
import socket
import sys

from kvcached.seqpacket import listen, receive, send
from kvcached.worker.messages import (
    MESSAGE_SIZE_BYTES_MAX,
    Ack,
    Command,
    Shutdown,
    WorkerListening,
    WorkerReady,
    decode_command,
    decode_config,
    encode,
)
from kvcached_client.protocol import PROGRESS_SLOTS


def main(how: str, control: socket.socket) -> None:
    """Greet as a worker does; then answer in the way that `how` names."""
    config = receive(control, MESSAGE_SIZE_BYTES_MAX, 1)
    assert config is not None
    listener = listen(decode_config(config.data).socket_path, 1)
    listener.setblocking(True)
    send(control, encode(WorkerListening()))
    connection, _ = listener.accept()
    listener.close()
    events = 0 if how == "without eventfds" else PROGRESS_SLOTS
    memory = os.memfd_create("odd")
    send(connection, encode(WorkerReady()), (memory, memory, *[os.eventfd(0) for _ in range(events)]))
    waiting: list[Command] = []
    while data := connection.recv(MESSAGE_SIZE_BYTES_MAX):
        command = decode_command(data)
        if isinstance(command.work, Shutdown):
            return
        if how == "forgets the first" and command.sequence == 1:
            continue
        waiting.append(command)
        if how == "in threes, backwards" and len(waiting) < 3:
            continue
        for each in reversed(waiting):
            answer = Ack(sequence=each.sequence, corrupt=(each.sequence, 7))
            for _ in range(2 if how == "twice" else 1):
                send(connection, encode(answer))
        waiting.clear()


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
