"""The connector for models whose groups of layers have caches of their own: windows or states beside full attention."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults, SupportsHMA

from kvcached_client.vllm.connector import KvcachedConnector
from kvcached_client.vllm.groups import check_states, has_states
from kvcached_client.vllm.scheduling.chains import Chains, unit_of
from kvcached_client.vllm.settings import VllmObject


class KvcachedHybridConnector(KvcachedConnector, SupportsHMA):  # type: ignore[misc]
    """As `KvcachedConnector`, beside vLLM's hybrid cache manager.

    vLLM then frees the blocks of layers with sliding windows once they have left the window, and keeps the states of
    other layers where a later request may continue. Models with one group of layers, of which vLLM keeps all blocks,
    are served as `KvcachedConnector` serves them.
    """

    _takes_groups = True

    def request_finished_all_groups(
        self, request: VllmObject, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`; with several groups, the scheduler's side looks the blocks up."""
        return self.request_finished(request, [] if self._is_grouped else block_ids[0])

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended, and those of them with bad blocks: vLLM computes these completely.

        With several groups, vLLM does not take the numbers of bad blocks.
        """
        if not self._is_grouped:
            return super().get_transfer_results(finished_req_ids)
        worker = self._of_worker()
        loaded, failed = worker.take_loaded(), worker.take_failed()
        worker.take_bad_blocks()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def _chains(self, pool: VllmObject) -> Chains:
        block_size: int = self._vllm_config.cache_config.block_size
        if not self._is_grouped:
            return Chains(block_size)
        specs = [group.kv_cache_spec for group in self._kv_cache_config.kv_cache_groups]
        check_states(specs, pool.hash_block_size)
        states = [number for number, spec in enumerate(specs) if has_states(spec)]
        unit = unit_of([spec.block_size for spec in specs], pool.hash_block_size, states)
        return Chains(block_size, unit=unit, live=lambda request: self._manager.get_blocks(request).blocks)
