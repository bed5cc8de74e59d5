"""States that a step completes, and that wait for their store: what groups of states have at a boundary.

vLLM's cache of states in mode "align" has a block for the state at the end of a step. It keeps some of these blocks,
where a later request may continue: behind the last unit of a prompt, and where prompts have parted. When the step that
completes them is decided, vLLM names these blocks (`boundary_state_offloads`). From the end of that step they stay as
they are, as long as somebody holds them: the next step copies the state into another block before it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvcached_client.vllm.scheduling.chains import Chains
from kvcached_client.vllm.scheduling.request_state import RequestState, Step


def completed_states(step: Step, chains: Chains) -> Iterator[tuple[str, int, list[int]]]:
    """The states that a step completes: the request, behind how many units of its chain they are, and their blocks."""
    told = step.kv_connector_block_state if chains.states else None
    for request_id, handed_off in () if told is None else told.boundary_state_offloads.items():
        at: dict[int, dict[int, int]] = {}
        for group, block, tokens in handed_off:
            at.setdefault(tokens, {})[group] = block
        for tokens, blocks in sorted(at.items()):
            units, rest = divmod(tokens, chains.unit_tokens)
            if not rest and (in_order := chains.in_branch(blocks)):
                yield request_id, units, in_order


class WaitingStates:
    """States that are held until the blocks before them are stored, because the daemon keeps none without its prefix.

    Args:
        chains: how blocks form chains.
    """

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._computed_by: dict[RequestState, RequestState] = {}

    def __bool__(self) -> bool:
        return bool(self._computed_by)

    def add(self, tracked: RequestState, units: int, block_ids: list[int]) -> None:
        """States that a request has computed, behind so many units of its chain. Their blocks are held already."""
        keys = self._chains.branch(tracked.chain, units)
        state = RequestState(tracked.request, tracked.preemptions, tracked.wishes, group_keys=keys, is_finished=True)
        state.full = state.due = len(keys)
        state.parting_start, state.parting = units * self._chains.unit_blocks, block_ids
        self._computed_by[state] = tracked

    def take_ready(self, is_storing: Callable[[RequestState], bool]) -> list[RequestState]:
        """Remove and return those before which all blocks are stored, or will never be.

        Args:
            is_storing: whether blocks of a request are being stored or wait for that.
        """
        ready = [
            state
            for state, tracked in self._computed_by.items()
            if _is_offered(state, tracked) and not is_storing(tracked)
        ]
        for state in ready:
            del self._computed_by[state]
        return ready

    def frees_soon(self, is_storing: Callable[[RequestState], bool]) -> bool:
        """Whether some of them are ready, or may be when a store ends: without a further step of their request."""
        return any(_is_offered(state, tracked) or is_storing(tracked) for state, tracked in self._computed_by.items())

    def has_any_of(self, tracked: RequestState) -> bool:
        """Whether states of a request wait."""
        return tracked in self._computed_by.values()

    def take_of(self, tracked: RequestState) -> list[RequestState]:
        """Remove and return those of a request."""
        found = [state for state, computed_by in self._computed_by.items() if computed_by is tracked]
        for state in found:
            del self._computed_by[state]
        return found


def _is_offered(state: RequestState, tracked: RequestState) -> bool:
    """Whether the blocks before states have been offered, or never will be."""
    return tracked.is_finished or tracked.offered >= state.parting_start
