"""`Admin`: what people and tools ask a daemon, without a session: reports, and changes to what it does."""

from __future__ import annotations

import os
from typing import Final, Self

from kvcached_client.protocol.engine import (
    Check,
    CheckReport,
    ClearReplica,
    Describe,
    Description,
    Drain,
    Drained,
    Explain,
    Explained,
    Explanation,
    Health,
    HealthReport,
    Inspect,
    InspectReport,
    Pause,
    Paused,
    Pin,
    Pinned,
    PolicySet,
    ReplicaCleared,
    Resume,
    Resumed,
    SetPolicy,
    SetWeights,
    Stats,
    StatsReport,
    StorageControl,
    StorageReport,
    Tree,
    TreeNode,
    TreeReport,
    Unpin,
    Unpinned,
    unpack_tree_nodes,
)
from kvcached_client.protocol.storage import StorageAction
from kvcached_client.transport.channel import Channel
from kvcached_client.transport.run_dir import default_run_dir, rpc_endpoint
from kvcached_client.types import WritePolicy

_NS_PER_MS: Final = 1_000_000


class ReportCalls:
    """The questions that need no session.

    Each raises `RequestError` where the daemon refuses, `DaemonUnreachable` where none answers, and `DeadlineExceeded`.
    """

    _channel: Channel

    def stats(self) -> StatsReport:
        """Counters and gauges."""
        return self._channel.ask(Stats(id=self._channel.next_id()), StatsReport)[0]

    def health(self) -> HealthReport:
        """What the daemon found when it tried a real request through every worker."""
        return self._channel.ask(Health(id=self._channel.next_id()), HealthReport)[0]

    def check(self) -> CheckReport:
        """What the invariant checker says about the live core."""
        return self._channel.ask(Check(id=self._channel.next_id()), CheckReport)[0]

    def describe(self) -> Description:
        """Replicas, layouts, limits, versions."""
        return self._channel.ask(Describe(id=self._channel.next_id()), Description)[0]

    def tree(self, replica: str = "", *, levels: int = 8, children: int = 8) -> tuple[TreeReport, list[TreeNode]]:
        """What the index holds, and its runs in preorder.

        Args:
            replica: whose tree; "" for those of all replicas.
            levels: how deep, 1 to 64.
            children: how many of each run's children, 1 to 256; the others are counted.
        """
        request = Tree(id=self._channel.next_id(), replica=replica, levels=levels, children=children)
        report, frames = self._channel.ask(request, TreeReport)
        return report, unpack_tree_nodes(frames[0])

    def inspect(self, key: bytes) -> InspectReport:
        """Where the block with a 16-byte key is, and who holds it."""
        return self._channel.ask(Inspect(id=self._channel.next_id(), key=key), InspectReport)[0]

    def explain(
        self, keys: bytes, tokens: int, *, full: bool = False, replica: str = "", namespace: str = ""
    ) -> tuple[Explanation, ...]:
        """What of a prompt would be hit, and why no more, for each replica and attached namespace.

        Args:
            keys: 16 bytes for each full block of the prompt.
            tokens: its length. One of them at least is left to compute, unless `full`.
            full: as in `Client.match`.
            replica: for this one only; "" for all.
            namespace: only where its hex digits begin so; "" for all.
        """
        request = Explain(id=self._channel.next_id(), tokens=tokens, full=full, replica=replica, namespace=namespace)
        return self._channel.ask(request, Explained, (keys,))[0].explanations


class AdminCalls:
    """Requests that change what the daemon does, without a session. Each may be repeated.

    Each raises `RequestError` where the daemon refuses, `DaemonUnreachable` where none answers, and `DeadlineExceeded`.
    """

    _channel: Channel

    def pause(self, replica: str = "", *, deadline_ms: int = 5000) -> Paused:
        """Have no copies started between device and host memory, and wait until none is under way.

        Args:
            replica: whose copies; "" for all, those of engines in attached mode included.
            deadline_ms: past it the answer says how many are still under way. The pause holds all the same.
        """
        request = Pause(id=self._channel.next_id(), replica=replica, deadline_ms=deadline_ms)
        return self._channel.ask(request, Paused, deadline_ns=self._deadline_ns(deadline_ms))[0]

    def resume(self, replica: str = "") -> Resumed:
        """End a pause; for all, "", the draining, too."""
        return self._channel.ask(Resume(id=self._channel.next_id(), replica=replica), Resumed)[0]

    def drain(self, *, deadline_ms: int = 5000) -> Drained:
        """Have no new sessions and leases admitted, and wait until no lease, copy or waiting request is left.

        Args:
            deadline_ms: past it the answer says what is left. The draining goes on all the same.
        """
        request = Drain(id=self._channel.next_id(), deadline_ms=deadline_ms)
        return self._channel.ask(request, Drained, deadline_ns=self._deadline_ns(deadline_ms))[0]

    def clear(self, target: str, *, deadline_ms: int = 60_000) -> ReplicaCleared:
        """Have nothing matched any more of what a namespace holds. Engines of replicas have to connect anew.

        Args:
            target: a replica, with all that share its namespace, or a namespace: as in `set_policy`.
            deadline_ms: copies of replicas under way are awaited. Past it, the clear will be made all the same.

        Raises:
            RequestError: not exactly one namespace is meant (`unknown_replica`).
            DaemonFailure: it is cleared, and that could not be written down beside storage (`internal`).
        """
        request = ClearReplica(id=self._channel.next_id(), target=target)
        return self._channel.ask(request, ReplicaCleared, deadline_ns=self._deadline_ns(deadline_ms))[0]

    def set_weights(self, target: str, version: str, *, deadline_ms: int = 60_000) -> ReplicaCleared:
        """As `clear`, and other weights from then on; nothing happens where the replica has these already.

        Args:
            target: a replica, or the first hex digits of its namespace; all that share it have the same weights.
                Engines in attached mode name their weights themselves: their namespaces are refused (`bad_value`).
            version: stands in place of the configuration's `revision` in the root of all keys, 256 characters at most.
            deadline_ms: as of `clear`.
        """
        request = SetWeights(id=self._channel.next_id(), target=target, version=version)
        return self._channel.ask(request, ReplicaCleared, deadline_ns=self._deadline_ns(deadline_ms))[0]

    def set_policy(self, target: str, policy: WritePolicy) -> PolicySet:
        """Have blocks of a namespace copied to the host pool by another policy from now on.

        Args:
            target: a replica by its name, or the namespace of engines in attached mode: by the first hex digits of its
                root, four or more, or by what they call it.
            policy: see `docs/policies.md`.
        """
        return self._channel.ask(SetPolicy(id=self._channel.next_id(), target=target, policy=policy), PolicySet)[0]

    def storage(self, action: StorageAction = "status") -> StorageReport:
        """What storage does; start it, end it, or have it forget all that it holds.

        Args:
            action: status, attach, detach, or clear.

        Raises:
            BadRequest: none is configured, or it cannot do that now.
        """
        return self._channel.ask(StorageControl(id=self._channel.next_id(), action=action), StorageReport)[0]

    def pin(self, target: str, keys: bytes, *, ttl_ms: int) -> Pinned:
        """Have what is cached of a prefix kept for a time, though nobody uses it: a system prompt, say.

        Again with the same keys it is kept for longer, with what has been cached since.

        Args:
            target: a replica by its name, for its pool and the host pool; or a namespace as in `set_policy`, for the
                host pool.
            keys: of the prefix's full blocks, 16 bytes each: `KeyChain.keys`.
            ttl_ms: for so long, a week at most.

        Raises:
            RequestError: over the quota (`limit`), or no such target.
        """
        request = Pin(id=self._channel.next_id(), target=target, ttl_ms=ttl_ms)
        return self._channel.ask(request, Pinned, (keys,))[0]

    def unpin(self, target: str, keys: bytes) -> bool:
        """Keep a prefix no longer; whether it was kept. Target and keys are those of `pin`."""
        return self._channel.ask(Unpin(id=self._channel.next_id(), target=target), Unpinned, (keys,))[0].was_pinned

    def _deadline_ns(self, deadline_ms: int) -> int:
        """When a call is over that the daemon may take so long for."""
        return self._channel.deadline_ns() + deadline_ms * _NS_PER_MS


class Admin(ReportCalls, AdminCalls):
    """Questions and orders to a daemon, without a session. A context manager. Not thread-safe."""

    def __init__(self, channel: Channel) -> None:
        """Use `connect`."""
        self._channel = channel

    @classmethod
    def connect(cls, run_dir: str | os.PathLike[str] | None = None, *, deadline_ms: int = 5000) -> Self:
        """Speak to the daemon in `run_dir` (default: `run_dir.default_run_dir`). Calls take at most `deadline_ms`.

        Raises:
            DaemonUnreachable: nothing listens in `run_dir`.
            BadRequest: the path of the socket is too long.
        """
        endpoint = rpc_endpoint(default_run_dir() if run_dir is None else run_dir)
        return cls(Channel(endpoint, deadline_ms=deadline_ms))

    def close(self) -> None:
        """Close the connection. Does nothing the second time."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
