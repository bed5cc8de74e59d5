"""Which ranks store pages that several ranks hold alike.

With latent attention, SGLang 0.5.23 has the first of all tensor-parallel ranks store for the others. A daemon has the
pages of one node, and of each rank of context parallelism its own ones. So the others would find nothing there, and as
SGLang uses what all ranks find, no rank would.
"""

from __future__ import annotations

from typing import Any, Final

#: Of SGLang's configuration of a storage: whether it hands pages of keys and values to it.
_IS_WRITER: Final = "is_storage_writer"


def have_pages_stored(config: Any, parallel: Any) -> None:  # noqa: ANN401 - SGLang's
    """Have SGLang hand pages to this rank's storage, unless another rank of the node stores them.

    Args:
        config: of the storage. SGLang asks this object before it hands over a page; its answer follows from its class,
            which is why it gets one with another answer.
        parallel: SGLang's ranks and sizes.

    Raises:
        ValueError: this SGLang decides otherwise who stores.
    """
    if not config.is_mla_model:
        return
    try:
        if not config.is_storage_writer and _is_first_of_node(parallel):
            kind = type(config)
            config.__class__ = type(kind.__name__, (kind,), {_IS_WRITER: True})
    except (AttributeError, TypeError) as error:
        raise ValueError(f"this version of SGLang is not served with latent attention: {error}") from error


def _is_first_of_node(parallel: Any) -> bool:  # noqa: ANN401 - SGLang's
    """Whether no lower rank of the node holds the same pages of the same requests.

    SGLang numbers ranks by node, then by context-parallel rank, then by tensor-parallel rank of the attention; each
    node has equally many of those of a pipeline stage.
    """
    nodes_of_stage = max(parallel.nnodes // parallel.pp_size, 1)
    ranks_of_node = max(parallel.tp_size // nodes_of_stage, 1)
    is_first_of_node = parallel.tp_rank % ranks_of_node == 0
    return bool(is_first_of_node or parallel.attn_tp_rank == 0)
