"""The tokens of blocks, which the daemon tells routers where its configuration allows it."""

from __future__ import annotations

from array import array

from kvcached_client.vllm.scheduling.request_state import Request, RequestState


class ToldTokens:
    """Packs the tokens of requests.

    Args:
        block_size: tokens in a block.

    Attributes:
        is_on: whether the daemon wants to know them.
    """

    def __init__(self, block_size: int) -> None:
        self.is_on = False
        self._block_size = block_size

    def of(self, tracked: RequestState, start: int, stop: int) -> bytes | None:
        """The tokens of the blocks [start, stop) of a request, as little-endian int32; None if they are not told.

        They are not where they do not say alone what the prompt is, nor with several groups of layers, whose chains
        have other blocks.
        """
        if not self.is_on or tracked.group_keys is not None or not _is_plain(tracked.request):
            return None
        return array("i", tracked.request.all_token_ids[start * self._block_size : stop * self._block_size]).tobytes()


def _is_plain(request: Request) -> bool:
    """Whether a prompt is text alone, of no tenant with a salt, and for the model without an adapter."""
    is_text = not request.mm_features and request.prompt_embeds is None
    return is_text and request.lora_request is None and request.cache_salt is None
