"""Tensors of an engine as pages: which are taken, and which are refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.errors import BadRequest
from tests.client.offload_rig import HostTensor


def kv(blocks: int = 5, *, dtype: str = "float32") -> npt.NDArray[Any]:
    """As vLLM has it on CPUs: [blocks, heads, tokens, K and V]."""
    return np.zeros((blocks, 2, 4, 16), dtype)


def fingerprint(**tensors: npt.NDArray[Any]) -> bytes:
    return EnginePages.of_tensors({name: HostTensor(array) for name, array in tensors.items()}).fingerprint


def test_pages_are_where_the_tensors_are() -> None:
    """Every layer has its address, its bytes of one block, and the bytes from block to block."""
    first, second = HostTensor(kv()), HostTensor(np.zeros((5, 3, 8), "float16")[:, :2])

    pages = EnginePages.of_tensors({"a": first, "b": second})

    assert pages.layers == ((first.data_ptr(), 512, 512), (second.data_ptr(), 32, 48))
    assert (pages.blocks, pages.block_bytes) == (5, 544)


def test_arrays_of_numpy_are_tensors() -> None:
    """An array of NumPy has the pages of a tensor over the same memory, and is kept alive."""
    memory = kv()
    array, tensor = (
        EnginePages.of_tensors({"a": memory[:, :1]}),
        EnginePages.of_tensors({"a": HostTensor(memory[:, :1])}),
    )

    assert array.layers == tensor.layers == ((memory.ctypes.data, 256, 512),)
    assert array.owners[0].base is memory  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.frombuffer(bytes(640), "float32").reshape(5, 32), "may only be read"),
        (np.zeros((5, 4), object), "objects of Python"),
        (np.zeros(50, "V6").view("V6")[:], "has the shape"),
        (np.ndarray((5, 4), "int32", bytearray(200), strides=(38, 4)), "strides"),
        (kv().transpose(1, 0, 2, 3), "not contiguous|more than two blocks"),
        (kv()[::-1], "not contiguous"),
    ],
    ids=["read-only", "objects", "one dimension", "odd strides", "transposed", "backwards"],
)
def test_array_of_numpy_that_cannot_be_copied_is_refused(array: npt.NDArray[Any], why: str) -> None:
    """What loads may not write, or where a block is not one run of bytes, is refused with the reason."""
    with pytest.raises(BadRequest, match=why):
        EnginePages.of_tensors({"a": array})


def test_what_is_no_tensor_is_told_what_is() -> None:
    """The error for other objects names the kinds of tensors that are taken."""
    with pytest.raises(BadRequest, match="a tensor of torch, an array of NumPy, or one with __cuda_array_interface__"):
        EnginePages.of_tensors({"a": [1, 2]})  # type: ignore[dict-item]


def test_block_of_several_rows_is_one_page() -> None:
    """Where a tensor has three rows for each block, its pages are three rows, beside a tensor with one row each."""
    rows, states = HostTensor(kv(15)), HostTensor(np.zeros((5, 7), "float32"))

    pages = EnginePages.of_tensors({"a": rows, "b": states}, 5)

    assert pages.layers == ((rows.data_ptr(), 3 * 512, 3 * 512), (states.data_ptr(), 28, 28))
    assert (pages.blocks, pages.block_bytes) == (5, 3 * 512 + 28)


def test_fingerprint_tells_how_many_rows_a_block_has() -> None:
    """Blocks of equal bytes in another number of rows are other blocks, and so are those of one row of their size."""
    in_rows = [EnginePages.of_tensors({"a": HostTensor(kv(12))}, blocks).fingerprint for blocks in (3, 4, 6, 12)]
    whole = EnginePages.of_tensors({"a": HostTensor(np.zeros((6, 2, 8, 16), "float32"))}, 6).fingerprint

    assert len({*in_rows, whole}) == 5
    assert in_rows[-1] == fingerprint(a=kv(12))


def test_states_lie_in_pages_of_several_rows() -> None:
    """A state in the memory of a block of attention is a part of its page, however many rows that has."""
    memory = np.zeros(12 * 128, "float32")
    rows = memory.reshape(12, 2, 4, 16)
    states = memory.reshape(4, 384)[:, :100]

    pages = EnginePages.of_tensors({"a": HostTensor(rows), "b": HostTensor(states)}, 4)

    assert pages.layers == ((rows.ctypes.data, 3 * 512, 3 * 512),)


def test_rows_apart_are_no_block() -> None:
    """Rows with something else between them are no run of bytes; and tensors of other multiples differ in blocks."""
    with pytest.raises(BadRequest, match="not contiguous"):
        EnginePages.of_tensors({"a": HostTensor(np.zeros((12, 3, 4), "float32")[:, :2])}, 4)
    with pytest.raises(BadRequest, match="4 and 7 blocks"):
        EnginePages.of_tensors({"a": HostTensor(kv(12)), "b": HostTensor(kv(7))}, 4)


def test_pages_keep_their_memory_alive() -> None:
    """Tensors that nobody else holds live as long as the pages do, and no longer."""
    tensor = HostTensor(kv())
    alive = weakref.ref(tensor)
    pages = EnginePages.of_tensors({"a": tensor})

    del tensor
    gc.collect()
    assert alive() is not None
    del pages
    gc.collect()
    assert alive() is None


def test_layers_on_one_tensor_are_copied_once() -> None:
    """A layer that uses another one's tensor adds no bytes, and is part of the fingerprint."""
    shared, other = HostTensor(kv()), HostTensor(kv())

    pages = EnginePages.of_tensors({"a": shared, "b": other, "c": shared})

    assert len(pages.layers) == 2
    assert pages.fingerprint != EnginePages.of_tensors({"a": shared, "b": other, "c": other}).fingerprint


def test_pages_in_any_order_of_dimensions_are_contiguous() -> None:
    """What counts is that a block is one run of bytes, not the order in which its dimensions are named."""
    swapped = np.zeros((5, 4, 2, 16), "float32").transpose(0, 2, 1, 3)

    pages = EnginePages.of_tensors({"a": HostTensor(swapped)})

    assert pages.layers[0][1:] == (512, 512)
    assert pages.fingerprint != fingerprint(a=kv())


def test_fingerprint_tells_layouts_apart() -> None:
    """Names, order, shapes and dtypes count; the number of blocks, and how far they are apart, do not."""
    same = fingerprint(a=kv(), b=kv())

    assert len(same) == 16
    assert same == fingerprint(a=kv(9), b=np.zeros((9, 4, 4, 16), "float32")[:, :2])
    others = [
        fingerprint(b=kv(), a=kv()),
        fingerprint(a=kv()),
        fingerprint(a=kv(), c=kv()),
        fingerprint(a=kv(), b=kv(dtype="int32")),
        fingerprint(a=kv(), b=np.zeros((5, 4, 2, 16), "float32")),
    ]
    assert len({same, *others}) == len(others) + 1


def test_stride_of_a_single_element_does_not_count() -> None:
    """Two views of the same bytes have one fingerprint, whatever they say of dimensions of one element."""
    one_head = np.zeros((5, 1, 4, 16), "float32")
    strides = (one_head.strides[0], 7 * 4, *one_head.strides[2:])
    odd = np.lib.stride_tricks.as_strided(one_head, one_head.shape, strides)

    assert fingerprint(a=odd) == fingerprint(a=one_head)


@pytest.mark.parametrize("device", ["xpu", "meta", "mps"])
def test_tensor_on_another_device_is_refused(device: str) -> None:
    """Memory of other accelerators cannot be copied from here, and the error says what can."""
    with pytest.raises(BadRequest, match=f"'{device}'.*run the engine on the CPU or on CUDA devices"):
        EnginePages.of_tensors({"model.layers.0": HostTensor(kv(), device)})


def test_tensors_on_cuda_are_pages_as_those_on_the_cpu() -> None:
    """Blocks of the same bytes have one fingerprint in both kinds of memory; the pages say where they are."""
    array = kv()
    on_cpu, on_cuda = (EnginePages.of_tensors({"a": HostTensor(array, device)}) for device in ("cpu", "cuda"))

    assert (on_cuda.layers, on_cuda.fingerprint) == (on_cpu.layers, on_cpu.fingerprint)
    assert (on_cpu.is_on_cuda, on_cuda.is_on_cuda) == (False, True)


def test_tensors_on_both_kinds_of_devices_are_refused() -> None:
    """A shard is on the CPU or on a device."""
    with pytest.raises(BadRequest, match="some are on the CPU"):
        EnginePages.of_tensors({"a": HostTensor(kv()), "b": HostTensor(kv(), "cuda")})


class CudaArray:
    """What CuPy and numba have: an address, and steps in bytes, if they are not those of a row after a row."""

    def __init__(self, array: npt.NDArray[Any], *, packed: bool = False) -> None:
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": None if packed else array.strides,
            "version": 3,
        }


def test_cuda_arrays_are_taken() -> None:
    """Arrays by the CUDA array interface are taken, with strides or without."""
    packed, apart = kv(), np.zeros((5, 3, 8), "float16")[:, :2]

    pages = EnginePages.of_tensors({"a": CudaArray(packed, packed=True), "b": CudaArray(apart)})

    assert pages.is_on_cuda
    assert pages.layers == ((packed.ctypes.data, 512, 512), (apart.ctypes.data, 32, 48))


def test_cuda_array_between_elements_is_refused() -> None:
    """Steps that are no whole number of elements make no blocks."""
    array: Any = CudaArray(kv())
    array.__cuda_array_interface__["strides"] = (513, 256, 64, 4)
    with pytest.raises(BadRequest, match="strides"):
        EnginePages.of_tensors({"a": array})


@pytest.mark.parametrize("layout", ["apart", "side by side"])
def test_keys_and_values_apart_are_two_pages(layout: str) -> None:
    """Of a tensor [2, blocks, tokens, heads, dim] K and V have a page of a block each, wherever strides put them."""
    pair, place = np.zeros((2, 5, 4, 3, 8), "float32"), 5 * 384
    if layout == "side by side":
        pair, place = np.zeros((5, 2, 4, 3, 8), "float32").swapaxes(0, 1), 384

    pages = EnginePages.of_tensors({"a": HostTensor(pair)})

    step = pair.strides[1]
    assert pages.layers == ((pair.ctypes.data, 384, step), (pair.ctypes.data + place, 384, step))
    assert (pages.blocks, pages.block_bytes) == (5, 768)
    assert pages.fingerprint == fingerprint(a=np.zeros((2, 9, 4, 3, 8), "float32"))
    assert pages.fingerprint != fingerprint(a=np.zeros((9, 4, 3, 8), "float32"))


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.lib.stride_tricks.as_strided(np.zeros(4096, "float32"), (2, 5, 4, 3, 8), (64, 768, 96, 32, 4)), "overlap"),
        (np.lib.stride_tricks.as_strided(np.zeros(4096, "float32"), (2, 5, 4, 3, 8), (600, 384, 96, 32, 4)), "overlap"),
        (np.zeros((2, 5, 4, 3, 16), "float32")[..., :8], "not contiguous"),
        (np.zeros((2, 2, 4, 3, 8), "float32"), "more than two blocks"),
    ],
    ids=["within-a-block", "across-blocks", "half-rows", "two-blocks"],
)
def test_keys_and_values_that_are_no_runs_are_refused(array: npt.NDArray[Any], match: str) -> None:
    """K and V must be apart, each one run of bytes in a block."""
    with pytest.raises(BadRequest, match=match):
        EnginePages.of_tensors({"a": HostTensor(array)})


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros((2, 5, 4, 16), "float32"), "K and V"),
        (np.zeros(5, "float32"), "shape"),
        (np.zeros((0, 4), "float32"), "shape"),
        (np.zeros((5, 2, 4, 32), "float32")[..., :16], "not contiguous"),
        (np.zeros((5, 2, 8, 16), "float32")[:, :, ::2], "not contiguous"),
        (np.zeros((4, 5, 16), "float32").transpose(1, 0, 2), "not contiguous"),
        (np.zeros((5, 16), "float32")[:, ::-1], "not contiguous"),
        (np.zeros((5, 16), "float32")[::-1], "not contiguous"),
        (np.broadcast_to(np.zeros(16, "float32"), (5, 16)), "not contiguous"),
    ],
    ids=["k-v-apart", "flat", "empty", "half-rows", "every-second", "tokens-first", "backwards", "down", "one-for-all"],
)
def test_blocks_that_are_no_single_run_are_refused(array: npt.NDArray[Any], match: str) -> None:
    """Blocks must be in the first dimension, each one run of bytes apart from the others."""
    with pytest.raises(BadRequest, match=match):
        EnginePages.of_tensors({"a": HostTensor(array)})


def test_tensors_of_different_pools_are_refused() -> None:
    """A block index must mean the same in all layers."""
    with pytest.raises(BadRequest, match="4 and 5 blocks"):
        EnginePages.of_tensors({"a": HostTensor(kv(5)), "b": HostTensor(kv(4))})


def test_what_is_no_tensor_is_refused() -> None:
    """No tensors at all, or a list where a tensor is expected (layers with a state), are the caller's error."""
    with pytest.raises(BadRequest, match="no tensor"):
        EnginePages.of_tensors({})
    listed: Any = [kv()]
    with pytest.raises(BadRequest, match="a is no tensor that can be used"):
        EnginePages.of_tensors({"a": listed})


def test_torch_tensors_are_taken() -> None:
    """Tensors of torch offer what is asked of tensors."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((5, 2, 4, 16), dtype=torch.bfloat16)

    pages = EnginePages.of_tensors({"a": tensor})

    assert pages.layers == ((tensor.data_ptr(), 256, 256),)


def rows(start: int, page: int, stride: int = 64) -> HostTensor:
    """Five pages in one memory, as bytes."""
    steps = np.lib.stride_tricks.as_strided(MEMORY[start:], (5, page), (stride, 1))
    return HostTensor(steps)


MEMORY = np.zeros(1024, np.uint8)


@pytest.mark.parametrize("second", [(64, 64), (32, 64), (40, 48), (0, 32, 128)], ids=str)
def test_pages_of_different_blocks_that_overlap_are_refused(second: tuple[int, ...]) -> None:
    """A load into one block would overwrite another one."""
    with pytest.raises(BadRequest, match="pages of different blocks overlap"):
        EnginePages.of_tensors({"a": rows(0, 64), "b": rows(*second)})


@pytest.mark.parametrize("second", [(32, 32), (0, 16), (16, 48), (5 * 64, 64)], ids=str)
def test_pages_of_one_block_may_share_memory(second: tuple[int, ...]) -> None:
    """Pages side by side, within each other, or in one block: each block is one place."""
    assert EnginePages.of_tensors({"a": rows(0, 32), "b": rows(*second)}).blocks == 5


@pytest.mark.parametrize(
    ("change", "match"),
    [({"data": (1 << 30, True)}, "only be read"), ({"data": (0, False)}, "no memory"), ({"mask": object()}, "masked")],
    ids=["read-only", "null", "mask"],
)
def test_cuda_array_that_cannot_be_loaded_into_is_refused(change: dict[str, Any], match: str) -> None:
    """A load writes every byte of a block."""
    array: Any = CudaArray(kv())
    array.__cuda_array_interface__.update(change)
    with pytest.raises(BadRequest, match=match):
        EnginePages.of_tensors({"a": array})


def test_torch_tensors_without_memory_are_refused() -> None:
    """A tensor whose storage was given back, and one that stores some of its elements only, are no pages."""
    torch = pytest.importorskip("torch")
    freed = torch.zeros((5, 4, 16))
    freed.untyped_storage().resize_(0)
    with pytest.raises(BadRequest, match="a has no memory"):
        EnginePages.of_tensors({"a": freed})
    with pytest.raises(BadRequest, match="a is no tensor that can be used"):
        EnginePages.of_tensors({"a": torch.zeros((5, 4, 16)).to_sparse()})


def test_tensors_have_names() -> None:
    """A list of them is refused, as nothing is."""
    tensors: Any = [np.zeros((4, 2, 16, 1, 8), np.float32)]
    with pytest.raises(BadRequest, match=r"there is no tensor with a name .*a dict of"):
        EnginePages.of_tensors(tensors)
