"""Tensors of mapped files: the numbers equal torch's, and a damaged file is refused before anything is read."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.weights import stored_tensors, tensor_shapes
from millpond.errors import ModelLoadError

pytestmark = pytest.mark.torch

# Ties between two numbers of bfloat16, subnormal numbers, the greatest that is rounded down and the next, infinities.
SPECIAL = np.array(
    [
        *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x00000001, 0x00008000, 0x00018000, 0x80000001, 0x007FFFFF),
        *(0x7F7F7FFF, 0x7F7F8000, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x00000000, 0x80000000),
    ],
    dtype=np.uint32,
).view(np.float32)
NOT_A_NUMBER = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFF8000], dtype=np.uint32).view(np.float32)
# More numbers than are converted at a time.
NUMBERS = torch.cat((torch.from_numpy(SPECIAL), torch.randn(99_984, generator=torch.Generator().manual_seed(0)) * 1e3))


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.bfloat16).view(torch.uint16).numpy()


def stored(folder, tensor: torch.Tensor, *, pickled: bool = False) -> StoredTensor:
    if pickled:
        torch.save({"a": tensor}, folder / "pytorch_model.bin")
    else:
        save_file({"a": tensor}, folder / "model.safetensors")
    assert tensor_shapes(folder) == {"a": tuple(tensor.shape)}
    return stored_tensors(folder)["a"]


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
def test_the_numbers_are_torch_s(tmp_path, dtype, pickled):
    numbers = NUMBERS.abs().clamp(max=250) if dtype is torch.uint8 else NUMBERS
    tensor = numbers.reshape(-1, 40).nan_to_num(posinf=9, neginf=-9).to(dtype) if dtype is torch.int64 else numbers
    tensor = tensor.to(dtype)
    found = stored(tmp_path, tensor, pickled=pickled)
    assert found.dtype == str(dtype).removeprefix("torch.") and found.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(found.float32().view(np.uint32), tensor.float().numpy().view(np.uint32))
    np.testing.assert_array_equal(found.bfloat16(), bits(tensor))
    assert found.float32().dtype == np.float32 and found.bfloat16().dtype == np.uint16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_what_is_no_number_stays_none(tmp_path, dtype):
    found = stored(tmp_path, torch.from_numpy(NOT_A_NUMBER).repeat(3).to(dtype))
    assert np.isnan(found.float32()).all()
    assert (found.bfloat16() == 0x7FC0).all()


@pytest.mark.parametrize("pickled", [False, True])
def test_numbers_that_are_stored_as_asked_for_are_views_that_cannot_be_written(tmp_path, pickled):
    whole = stored(tmp_path, torch.ones(4, 2), pickled=pickled)
    assert np.shares_memory(whole.float32(), whole.float32()) and not whole.float32().flags.writeable
    assert np.shares_memory(whole[1:3].float32(), whole.float32())
    (tmp_path / "half").mkdir()
    half = stored(tmp_path / "half", torch.ones(4, 2, dtype=torch.bfloat16), pickled=pickled)
    assert np.shares_memory(half.bfloat16(), half.bfloat16()) and not half.bfloat16().flags.writeable
    assert not np.shares_memory(half.float32(), half.float32())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows(tmp_path, dtype):
    table = torch.randn(50, 6).to(dtype)
    found = stored(tmp_path, table)
    for rows in (slice(3, 9), slice(None, None, 7), slice(9, 3, -2), [4, 0, 4, 49], (7,), np.arange(6)[::-1], []):
        index = list(range(50))[rows] if isinstance(rows, slice) else list(rows)
        part = found[rows]
        assert part.shape == (len(index), 6)
        np.testing.assert_array_equal(part.float32(), table[index].float().numpy())
        np.testing.assert_array_equal(part.bfloat16(), bits(table[index]))
    part = found[[9, 8, 7, 6, 5]][1:4][[2, 0]]
    np.testing.assert_array_equal(part.float32(), table[[6, 8]].float().numpy())
    np.testing.assert_array_equal(found[10:20][[0, 9]].float32(), table[[10, 19]].float().numpy())
    with pytest.raises(IndexError, match="50"):
        found[[50]]


def test_a_scalar_and_a_tensor_without_numbers(tmp_path):
    save_file({"a": torch.tensor(2.5, dtype=torch.float16), "b": torch.ones(0, 3)}, tmp_path / "model.safetensors")
    found = stored_tensors(tmp_path)
    assert found["a"].float32() == 2.5 and found["a"].float32().shape == () and found["a"].bfloat16() == 0x4020
    assert found["b"].float32().shape == found["b"].bfloat16().shape == (0, 3)


def test_some_tensors_of_shards(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(1, 2)}, tmp_path / "model-00002-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}
    shards["b"] = shards["a"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert tensor_shapes(tmp_path) == {"a": (2,), "b": (3,), "c": (1, 2)}
    assert stored_tensors(tmp_path, only=("c", "missing")).keys() == {"c"}
    assert stored_tensors(tmp_path, only=("b", "c")).keys() == {"b", "c"}


def test_eight_bit_floats_are_refused_where_they_are_used(tmp_path):
    found = stored(tmp_path, torch.ones(3, dtype=torch.float8_e4m3fn))
    with pytest.raises(ModelLoadError, match="a is stored as float8_e4m3fn"):
        found.float32()


def test_numbers_at_an_odd_byte(tmp_path):
    save(tmp_path, {"a": ["U8", [1], 0, 1], "b": ["F32", [2], 1, 9]}, b"\7" + np.array([1, 2], np.float32).tobytes())
    found = stored_tensors(tmp_path)["b"].float32()
    assert found.flags.aligned and found.tolist() == [1, 2]


def save(folder, tensors, data: bytes) -> None:
    header = {name: {"dtype": e[0], "shape": e[1], "data_offsets": e[2:]} for name, e in tensors.items()}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"a": ["F32", [2], 0, 8]}, "end at .* and the file at"),  # 4 bytes more than the file has
        ({"a": ["F32", [1], 0, 4], "b": ["F32", [1], 0, 4]}, "b begins at 0, and the tensor before it ends at 4"),
        ({"a": ["F32", [1], 4, 8]}, "a begins at 4"),
        ({"a": ["F32", [3], 0, 4]}, r"no F32 of shape \[3\]"),
        ({"a": ["F32", [-1], 4, 0]}, "has shape"),
        ({"a": ["F32", [True], 0, 4]}, "has shape"),
        ({"a": ["F32", [1], 0, 4.0]}, "has shape"),
        ({"a": ["F32", [1 << 40, 1 << 40], 0, 4]}, "no F32"),
        ({"a": ["F32", None, 0, 4]}, ""),
        ({"a": [None, [1], 0, 4]}, "type None"),
        ({"a": [["F32"], [1], 0, 4]}, ""),
        ({"a": ["F32", [1], 0]}, ""),
    ],
)
def test_a_header_that_does_not_fit_its_file(tmp_path, tensors, problem):
    save(tmp_path, tensors, b"\0" * 4)
    for read in (stored_tensors, tensor_shapes):
        with pytest.raises(ModelLoadError, match=rf"model.safetensors: the weight file is damaged: .*{problem}.*fetch"):
            read(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"1234", b"\xff" * 16, b"\0" * 8, (10).to_bytes(8, "little") + b"{}"),
        *((2).to_bytes(8, "little") + b"[]", (2).to_bytes(8, "little") + b"\xff\xff"),
        *((14).to_bytes(8, "little") + b'{"a": {"b": 1}', (9).to_bytes(8, "little") + b'{"a": []}'),
        (8).to_bytes(8, "little") + b"{} more ",
    ],
)
def test_a_file_that_is_no_safetensors(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model.safetensors: the weight file is damaged: .*; fetch it again"):
        stored_tensors(tmp_path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    for length in range(len(content)):
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match="damaged"):
            tensor_shapes(tmp_path)


def described(folder):
    return read_checkpoint(folder, has_weights=True)


@pytest.mark.parametrize("read", [stored_tensors, tensor_shapes, described])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_without_torch_name_both_ways_out(tmp_path, read, name, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    if name.endswith(".json"):
        (tmp_path / name).write_text(json.dumps({"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}))
        (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00001.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModelLoadError) as refused:
        read(tmp_path)
    assert 'pip install "millpond[torch]"' in str(refused.value)
    assert f"millpond convert {tmp_path}" in str(refused.value)
