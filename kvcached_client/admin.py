"""What people and tools have a daemon do: pause and resume copies, drain, clear a replica, set its weights."""

from __future__ import annotations

from typing import Final

from kvcached_client.protocol.engine import (
    ClearReplica,
    Drain,
    Drained,
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
    StorageControl,
    StorageReport,
    Unpin,
    Unpinned,
)
from kvcached_client.protocol.storage import StorageAction
from kvcached_client.transport.channel import Channel
from kvcached_client.types import WritePolicy

_NS_PER_MS: Final = 1_000_000


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
