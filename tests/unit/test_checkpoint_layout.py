"""Dealing tensors to parts, and the safetensors file that a part becomes."""

from __future__ import annotations

import json
import resource
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from parti.checkpoint.layout import (
    LENGTH_BYTES,
    PartLayout,
    TensorSpec,
    assign,
    header_bytes,
    lay_out,
    read_header,
)
from parti.checkpoint.staged import Staged, is_dense
from parti.checkpoint.staging import Staging
from parti.checkpoint.tree import dtype_name
from parti.errors import CheckpointError

sizes = st.dictionaries(st.text(max_size=5), st.integers(0, 10**6), max_size=30)


@given(sizes, st.integers(1, 9))
def test_every_tensor_is_dealt_once(names: dict[str, int], num_parts: int) -> None:
    parts = assign(names.items(), num_parts)
    assert len(parts) == num_parts
    assert sorted(name for part in parts for name in part) == sorted(names)


@given(sizes, st.integers(1, 9))
def test_parts_differ_by_one_tensor_at_most(names: dict[str, int], num_parts: int) -> None:
    loads = [sum(names[name] for name in part) for part in assign(names.items(), num_parts)]
    assert max(loads) - min(loads) <= max(names.values(), default=0)


@given(sizes, st.integers(1, 9), st.randoms())
def test_the_deal_does_not_depend_on_the_order(
    names: dict[str, int], num_parts: int, random: object
) -> None:
    shuffled = list(names.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign(shuffled, num_parts) == assign(names.items(), num_parts)


def laid_out(tensors: dict[str, torch.Tensor]) -> PartLayout:
    return lay_out(
        TensorSpec(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            num_bytes=tensor.numel() * tensor.element_size(),
        )
        for name, tensor in tensors.items()
    )


def content(tensors: dict[str, torch.Tensor]) -> bytes:
    layout = laid_out(tensors)
    data = bytes_of(Staging().copy(layout, tensors))
    assert layout.file_bytes == len(layout.header) + len(data)
    return layout.header + data


def bytes_of(staged: Staged) -> bytes:
    return b"".join(staged.chunks())


WIDTHS = [torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
MIXED = {
    "flag": torch.tensor([True, False, True]),
    "nothing": torch.empty(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.randn(3, 5).bfloat16(),
    "columns": torch.randn(4, 6).t(),
    "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "rotated": torch.randn(3, dtype=torch.complex64).conj(),
    "strided": torch.arange(20)[::3],
    'name.with "quotes" and ü': torch.ones(1, dtype=torch.float8_e5m2),
}


def test_safetensors_reads_a_part(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(content(MIXED))
    found = load_file(tmp_path / "part")
    assert found.keys() == MIXED.keys()
    for name, tensor in MIXED.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tolist() == tensor.tolist()


def test_safetensors_reads_an_empty_part() -> None:
    assert load(content({})) == {}


def test_a_dtype_that_safetensors_lacks_is_stored_as_bytes() -> None:
    wide = torch.randn(2, 3, dtype=torch.complex128)
    found = load(content({"wide": wide, "byte": torch.ones(1, dtype=torch.uint8)}))
    assert found["wide"].shape == (2, 3, 16)
    assert torch.equal(found["wide"].view(torch.complex128).squeeze(-1), wide)


def test_every_tensor_begins_at_a_multiple_of_its_width() -> None:
    layout = laid_out(MIXED)
    assert len(layout.header) % 8 == 0
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        assert not spec.num_bytes or offset % MIXED[spec.name].element_size() == 0


def test_memory_is_used_again() -> None:
    staging, tensors = Staging(), {"a": torch.ones(1000)}
    layout = laid_out(tensors)
    first = staging.copy(layout, tensors)
    second = staging.copy(layout, {"a": torch.zeros(1000)})
    assert first.memory.obj is second.memory.obj
    assert not any(bytes_of(second))


def test_a_larger_state_gets_larger_memory() -> None:
    staging = Staging()
    for count in (10, 2**20, 100):
        tensors = {"a": torch.arange(count)}
        data = bytes_of(staging.copy(laid_out(tensors), tensors))
        assert data == tensors["a"].numpy().tobytes()


def test_memory_is_given_before_it_is_needed() -> None:
    staging, tensors = Staging(), {"a": torch.arange(10**6)}
    layout = laid_out(tensors)
    staging.touch(layout.data_bytes, {torch.device("cpu")}, threading.Event())
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    staged = staging.copy(layout, tensors)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100  # of 2,000 pages
    assert bytes_of(staged) == tensors["a"].numpy().tobytes()


def test_giving_memory_back_does_not_take_it_from_a_reader() -> None:
    staging, tensors = Staging(), {"a": torch.arange(10)}
    first = staging.copy(laid_out(tensors), tensors)
    staging.release()
    other = staging.copy(laid_out(tensors), {"a": torch.zeros(10, dtype=torch.int64)})
    assert bytes_of(first) == tensors["a"].numpy().tobytes()
    assert not any(bytes_of(other))


@given(st.permutations(range(4)), st.integers(0, 3), st.sampled_from(WIDTHS))
def test_a_tensor_that_lies_in_another_order(
    order: list[int], cut: int, dtype: torch.dtype
) -> None:
    """Also between others that do not, cut into chunks anywhere, and after it lay otherwise."""
    shape = [3, 1, 4, 5]
    permuted = torch.randn(shape, dtype=torch.float64).to(dtype).permute(order)
    beside = torch.arange(5).to(dtype)
    tensors = {"a": beside, "b": permuted, "c": permuted[..., cut : cut + 1], "d": beside}
    layout, staging = laid_out(tensors), Staging()
    for state in (tensors, {**tensors, "b": permuted.contiguous()}):
        expected = b"".join(
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for tensor in tensors.values()
        )
        assert bytes_of(staging.copy(layout, state)) == expected


def test_dense_is_without_gap_and_overlap() -> None:
    whole = torch.empty(2, 3, 4, 5)
    assert is_dense(whole.shape, whole.stride())
    for dense in (whole.permute(2, 0, 3, 1), whole[:1], whole.unsqueeze(1)):
        assert is_dense(dense.shape, dense.stride())
    for other in (whole[:, :2], whole[..., ::2], whole[:1].expand(2, 3, 4, 5)):
        assert not is_dense(other.shape, other.stride())


def test_headers_are_read_and_checked() -> None:
    whole = content(MIXED)
    length = header_bytes(whole[:LENGTH_BYTES], file_bytes=len(whole))
    text = whole[LENGTH_BYTES : LENGTH_BYTES + length]
    assert read_header(text, file_bytes=len(whole)).keys() == MIXED.keys()
    with pytest.raises(CheckpointError, match="of 5"):
        header_bytes(whole[:LENGTH_BYTES], file_bytes=5)
    with pytest.raises(CheckpointError, match="no safetensors header"):
        read_header(b"{}x", file_bytes=100)
    beyond = json.dumps({"a": {"data_offsets": [0, 99]}}).encode()
    with pytest.raises(CheckpointError, match="'a' at bytes 0 to 99"):
        read_header(beyond, file_bytes=len(beyond) + 20)
