"""`Admin`: what people and tools ask a daemon, without a session: reports, and changes to what it does."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Self

from kvcached_client.errors import bad_value
from kvcached_client.protocol.admin import StorageAction
from kvcached_client.protocol.engine import (
    Check,
    CheckReport,
    ClearNamespace,
    Describe,
    Description,
    Drain,
    Drained,
    Explain,
    Explained,
    Explanation,
    ForgetPrefix,
    Health,
    HealthReport,
    Inspect,
    InspectReport,
    LogLevelSet,
    NamespaceCleared,
    Pause,
    Paused,
    Pin,
    Pinned,
    PolicySet,
    PrefixForgotten,
    Resume,
    Resumed,
    SetLogLevel,
    SetPolicy,
    SetWeights,
    Sleep,
    Slept,
    Stats,
    StatsReport,
    StorageControl,
    StorageReport,
    Tree,
    TreeNode,
    TreeReport,
    Unpin,
    Unpinned,
    Wake,
    Woken,
    unpack_tree_nodes,
)
from kvcached_client.transport.channel import Channel
from kvcached_client.transport.run_dir import default_run_dir, rpc_endpoint
from kvcached_client.types import LogLevel, WritePolicy

if TYPE_CHECKING:
    from kvcached_client.transport.tcp import RemoteDaemon

_TCP: Final = "tcp://"
_NS_PER_MS: Final = 1_000_000
#: After the last store: workers end, and the memory is given back.
_SLEEP_ENDS_MS: Final = 15_000


class ReportCalls:
    """Reports, which need no session.

    Each raises `RequestError` if the daemon refuses, `DaemonUnreachable` if there is none, and `DeadlineExceeded`.
    """

    _channel: Channel

    def stats(self) -> StatsReport:
        """Counters and gauges."""
        return self._channel.ask(Stats(id=self._channel.next_id()), StatsReport)[0]

    def health(self) -> HealthReport:
        """The result of a real request through every worker."""
        return self._channel.ask(Health(id=self._channel.next_id()), HealthReport)[0]

    def check(self) -> CheckReport:
        """The result of the invariant checker on the live core."""
        return self._channel.ask(Check(id=self._channel.next_id()), CheckReport)[0]

    def describe(self) -> Description:
        """Replicas, layouts, limits, versions."""
        return self._channel.ask(Describe(id=self._channel.next_id()), Description)[0]

    def tree(self, replica: str = "", *, levels: int = 8, children: int = 8) -> tuple[TreeReport, list[TreeNode]]:
        """The contents of the index: totals, and its runs in preorder.

        Args:
            replica: replica whose tree is shown; "" for all replicas.
            levels: depth, 1 to 64.
            children: children shown of each run, 1 to 256; further ones are only counted.
        """
        request = Tree(id=self._channel.next_id(), replica=replica, levels=levels, children=children)
        report, frames = self._channel.ask(request, TreeReport)
        return report, unpack_tree_nodes(frames[0])

    def inspect(self, key: bytes) -> InspectReport:
        """The places of the block with a 16-byte key, and the requests that hold it."""
        return self._channel.ask(Inspect(id=self._channel.next_id(), key=key), InspectReport)[0]

    def explain(
        self, keys: bytes, tokens: int, *, full: bool = False, replica: str = "", namespace: str = ""
    ) -> tuple[Explanation, ...]:
        """The hit of a prompt, and why it is not longer, for each replica and each namespace in offload mode.

        Args:
            keys: 16 bytes for each full block of the prompt.
            tokens: its length. At least its last token is left to compute, unless `full`.
            full: as in `Client.match`.
            replica: only this replica; "" for all.
            namespace: only namespaces whose hex digits begin with this; "" for all.
        """
        request = Explain(id=self._channel.next_id(), tokens=tokens, full=full, replica=replica, namespace=namespace)
        return self._channel.ask(request, Explained, (keys,))[0].explanations


class AdminCalls:
    """Requests that change what the daemon does, without a session. Each may be repeated.

    Each raises `RequestError` if the daemon refuses, `DaemonUnreachable` if there is none, and `DeadlineExceeded`.
    """

    _channel: Channel

    def pause(self, replica: str = "", *, deadline_ms: int = 5000) -> Paused:
        """Start no more copies between device and host memory, and wait until none is in flight.

        Args:
            replica: whose copies; "" for all, including those of engines in offload mode.
            deadline_ms: after it, the reply says how many copies are still in flight. The pause continues.
        """
        request = Pause(id=self._channel.next_id(), replica=replica, deadline_ms=deadline_ms)
        return self._channel.ask(request, Paused, deadline_ns=self._deadline_ns(deadline_ms))[0]

    def resume(self, replica: str = "") -> Resumed:
        """End a pause; "" ends all pauses and the draining."""
        return self._channel.ask(Resume(id=self._channel.next_id(), replica=replica), Resumed)[0]

    def drain(self, *, deadline_ms: int = 5000) -> Drained:
        """Admit no new sessions and leases, and wait until no lease, copy or waiting request is left.

        Args:
            deadline_ms: after it, the reply says what is left. The draining continues.
        """
        request = Drain(id=self._channel.next_id(), deadline_ms=deadline_ms)
        return self._channel.ask(request, Drained, deadline_ns=self._deadline_ns(deadline_ms))[0]

    def clear(self, target: str, *, deadline_ms: int = 60_000) -> NamespaceCleared:
        """Clear a namespace: nothing that it holds is matched again. Engines of its replicas must connect again.

        Args:
            target: a replica, with all that share its namespace, or a namespace: as in `set_policy`.
            deadline_ms: limit of the wait for copies in flight. After it, the clear is still made.

        Raises:
            RequestError: the target is not exactly one namespace (`unknown_replica`).
            DaemonFailure: the namespace is cleared, but this could not be recorded beside storage (`internal`).
        """
        request = ClearNamespace(id=self._channel.next_id(), target=target)
        return self._channel.ask(request, NamespaceCleared, deadline_ns=self._deadline_ns(deadline_ms))[0]

    def set_weights(self, target: str, version: str, *, deadline_ms: int = 60_000) -> NamespaceCleared:
        """Clear a namespace and give it other weights. Does nothing if it has these weights already.

        Args:
            target: a replica, or the first hex digits of its namespace; all that share it have the same weights.
                Engines in offload mode name their weights themselves, so their namespaces are refused (`bad_value`).
            version: replaces the configuration's `revision` in the root of all keys; at most 256 printable
                characters.
            deadline_ms: as of `clear`.
        """
        request = SetWeights(id=self._channel.next_id(), target=target, version=version)
        return self._channel.ask(request, NamespaceCleared, deadline_ns=self._deadline_ns(deadline_ms))[0]

    def set_policy(self, target: str, policy: WritePolicy) -> PolicySet:
        """Change the policy by which blocks of a namespace are copied to the host pool.

        Args:
            target: a replica by its name, or a namespace in offload mode by its label or by the first hex digits of its
                root, at least four.
            policy: see `docs/policies.md`.
        """
        return self._channel.ask(SetPolicy(id=self._channel.next_id(), target=target, policy=policy), PolicySet)[0]

    def sleep(self, target: str, *, deadline_ms: int = 30_000) -> Slept:
        """Give the memory of device pools back until `wake`: a trainer or another model uses the device meanwhile.

        Blocks that the host pool lacks are stored there first, and are hit again after `wake`. Engines get no session
        meanwhile and compute their prompts.

        Args:
            target: a replica, or the first hex digits of its namespace, for all replicas that share it.
            deadline_ms: limit of the time for stores. Blocks that are not stored by then are dropped.

        Raises:
            RequestError: an engine has a session on one of the pools (`pool_busy`), or no such target.
        """
        request = Sleep(id=self._channel.next_id(), target=target, deadline_ms=deadline_ms)
        return self._channel.ask(request, Slept, deadline_ns=self._deadline_ns(deadline_ms + _SLEEP_ENDS_MS))[0]

    def wake(self, target: str, *, deadline_ms: int = 120_000) -> Woken:
        """Make the memory of device pools again after `sleep`. Does nothing to pools that are awake.

        Args:
            target: as of `sleep`.
            deadline_ms: limit of the wait. After it, the wake goes on.

        Raises:
            RequestError: a pool is falling asleep (`request_conflict`), or no such target.
            DaemonFailure: a pool stays asleep because its memory cannot be made, or no worker starts (`asleep`).
        """
        request = Wake(id=self._channel.next_id(), target=target)
        return self._channel.ask(request, Woken, deadline_ns=self._deadline_ns(deadline_ms))[0]

    def storage(self, action: StorageAction = "status") -> StorageReport:
        """The state of storage; or start it, end it, or clear it.

        Args:
            action: status, attach, detach, or clear.

        Raises:
            BadRequest: no storage is configured, or it cannot do that now.
        """
        return self._channel.ask(StorageControl(id=self._channel.next_id(), action=action), StorageReport)[0]

    def pin(self, target: str, keys: bytes, *, ttl_ms: int) -> Pinned:
        """Keep the cached blocks of a prefix for a time, even if nobody uses them; for example of a system prompt.

        A repeated call with the same keys extends the time, and includes blocks that have been cached since.

        Args:
            target: a replica by its name, for its pool and the host pool; or a namespace as in `set_policy`, for the
                host pool.
            keys: keys of the prefix's full blocks, 16 bytes each: `KeyChain.keys`.
            ttl_ms: how long, at most a week.

        Raises:
            RequestError: over the quota (`limit`), or no such target.
        """
        request = Pin(id=self._channel.next_id(), target=target, ttl_ms=ttl_ms)
        return self._channel.ask(request, Pinned, (keys,))[0]

    def unpin(self, target: str, keys: bytes) -> bool:
        """End a pin; returns whether there was one. Target and keys are those of `pin`."""
        return self._channel.ask(Unpin(id=self._channel.next_id(), target=target), Unpinned, (keys,))[0].was_pinned

    def forget(self, target: str, keys: bytes, *, from_block: int = 0, deadline_ms: int = 60_000) -> PrefixForgotten:
        """Remove a prompt's cached blocks, and all blocks that continue them, from memory and storage.

        What leases, copies in flight, pins or prefetches use stays, and is counted: `unpin`, or wait for the requests,
        and repeat the call. No request notices it.

        Args:
            target: a replica by its name, for all that share its namespace; or a namespace as in `set_policy`.
            keys: keys of the prompt's full blocks, 16 bytes each: `KeyChain.keys`.
            from_block: how many leading blocks stay, with what else continues them: those of a system prompt that
                other prompts share.
            deadline_ms: limit of the wait for storage. After it, storage still deletes.

        Raises:
            RequestError: all blocks are to stay (`bad_value`), or no such target.
            DaemonFailure: the namespace is being cleared (`clearing`).
        """
        request = ForgetPrefix(
            id=self._channel.next_id(), target=target, from_block=from_block, deadline_ms=deadline_ms
        )
        return self._channel.ask(request, PrefixForgotten, (keys,), deadline_ns=self._deadline_ns(deadline_ms))[0]

    def set_log_level(self, level: LogLevel) -> LogLevelSet:
        """Have the daemon log messages of this level and above, until its end; the answer has the level of before."""
        return self._channel.ask(SetLogLevel(id=self._channel.next_id(), level=level), LogLevelSet)[0]

    def _deadline_ns(self, deadline_ms: int) -> int:
        """Deadline of a call for which the daemon may take `deadline_ms`."""
        return self._channel.deadline_ns() + deadline_ms * _NS_PER_MS


class Admin(ReportCalls, AdminCalls):
    """Reports and commands of people and tools. Needs no session. A context manager. Not thread-safe."""

    def __init__(self, channel: Channel) -> None:
        """Use `connect`."""
        self._channel = channel

    def __repr__(self) -> str:
        return f"Admin({self._channel.path!r}{', closed' if self._channel.is_closed else ''})"

    @classmethod
    def connect(
        cls,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        server_key: str = "",
        key_file: str | os.PathLike[str] | None = None,
        deadline_ms: int = 5000,
    ) -> Self:
        """Connect to the daemon in `run_dir` (default: `default_run_dir`). Calls take at most `deadline_ms`.

        Args:
            run_dir: the daemon's run directory; or ``"tcp://HOST:PORT"``, for a daemon on another machine.
            server_key: the public key of a daemon on another machine, as `kvcached keys show` prints it.
            key_file: this client's key, which that daemon knows; of `kvcached keys make`.
            deadline_ms: of each call.

        Raises:
            DaemonUnreachable: nothing listens there, or the daemon has another key.
            BadRequest: the path of the socket is too long, a key is missing or is none, or PyNaCl is not installed.
        """
        if isinstance(run_dir, str) and run_dir.startswith(_TCP):
            return cls(Channel(_remote_daemon(run_dir, server_key, key_file), deadline_ms=deadline_ms))
        if server_key or key_file is not None:
            raise bad_value(f"keys for {run_dir}", f"give {_TCP}HOST:PORT, or no keys")
        endpoint = rpc_endpoint(default_run_dir() if run_dir is None else run_dir)
        return cls(Channel(endpoint, deadline_ms=deadline_ms))

    def close(self) -> None:
        """Close the connection. Does nothing the second time."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remote_daemon(endpoint: str, server_key: str, key_file: str | os.PathLike[str] | None) -> RemoteDaemon:
    if find_spec("nacl") is None:
        raise bad_value(f"{endpoint} needs the package PyNaCl", "pip install PyNaCl")
    from kvcached_client.transport.tcp import RemoteDaemon  # noqa: PLC0415 - needs an extra

    return RemoteDaemon.of(endpoint, server_key, key_file)
