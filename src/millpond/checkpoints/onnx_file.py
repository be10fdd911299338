"""Weights out of an ONNX file: the initializers of its graph, under the names that the exported model's tensors had.

An exporter stores the weight of a linear layer transposed and under a name of its own (``onnx::MatMul_314``). What
it is is told by the bias that is added to the product, or by the name of the product's node. onnxruntime's optimizer
joins queries, keys and values into one matrix of an ``Attention`` node; it is taken apart again. Only the fields of the
format that this needs are read (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto), and no node is run.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import ModelLoadError

Array = npt.NDArray[Any]
# TensorProto.data_type: torch's name, numpy's type of the numbers (of bfloat16 their bits), and the field that holds
# them if raw_data does not.
_TYPES = {
    1: ("float32", "<f4", 4),
    10: ("float16", "<f2", 5),
    16: ("bfloat16", "<u2", 5),
    11: ("float64", "<f8", 10),
    7: ("int64", "<i8", 7),
    6: ("int32", "<i4", 5),
    9: ("bool", "?", 5),
    3: ("int8", "i1", 5),
    2: ("uint8", "u1", 5),
}
# Nodes of quantized graphs.
_QUANTIZED = frozenset(
    "MatMulInteger QLinearMatMul DynamicQuantizeMatMul MatMulNBits MatMulBnb4 QAttention DequantizeLinear "
    "DynamicQuantizeLSTM QGemm".split()
)
# Nodes that add a bias to their first input, and which input it is; `Add` may have it on either side.
_BIASED = {"BiasGelu": 1, "FastGelu": 1, "SkipLayerNormalization": 4}
# Ends of the names of an attention's output projection, and those of its queries, keys and values.
_ATTENTION = {
    ".output.dense": (".self.query", ".self.key", ".self.value"),
    ".out_lin": (".q_lin", ".k_lin", ".v_lin"),
    ".attn.o": (".attn.q", ".attn.k", ".attn.v"),
}
# The name of a product's node, and the note of one, by which torch's two exporters say the layer.
_PRODUCT = re.compile(r"^/(.+)/MatMul(?:_\d+)?$")
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True, kw_only=True)
class _Node:
    """A node of the graph; inputs and outputs are names of tensors, empty where an optional one is left out."""

    kind: str
    layer: str  # the linear layer that it was exported from, as its name or its notes say; empty: unknown
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def read_onnx(path: Path) -> dict[str, tuple[str, Array]]:
    """Type and numbers of each tensor, as views of the file; a linear layer's weight is a transposed view.

    Raises:
        ModelLoadError: The graph is quantized.
        ValueError: The file is damaged.
    """
    held: dict[str, tuple[str, Array]] = {}
    nodes: list[_Node] = []
    for number, part in _fields(_mapped(path)):
        for kind, content in _fields(part) if number == 7 else ():  # the graph
            if kind == 1:
                nodes.append(_node(content))
            elif kind == 5:
                name, numbers = _tensor(content, path)
                held[name] = numbers
    codes = next((node.kind for node in nodes if node.kind in _QUANTIZED), None)
    if codes is not None:
        raise ModelLoadError(
            f"its graph is quantized for onnxruntime ({codes}), and millpond reads whole weights only; name the "
            "checkpoint that it was exported from, or an export that is not quantized"
        )
    return _named(held, nodes)


def _named(held: Mapping[str, tuple[str, Array]], nodes: list[_Node]) -> dict[str, tuple[str, Array]]:
    """The initializers under the names of the exported model."""
    named = {name: tensor for name, tensor in held.items() if _is_parameter(name)}
    readers: dict[str, list[_Node]] = {}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
        # A tensor that is equal to another is stored once, and named by a node that copies it.
        if node.kind == "Identity" and node.inputs[0] in held and _is_parameter(node.outputs[0]):
            named[node.outputs[0]] = held[node.inputs[0]]
    for node in nodes:
        weight = held.get(node.inputs[1]) if len(node.inputs) > 1 else None
        if weight is None or _is_parameter(node.inputs[1]) or weight[1].ndim != 2:
            continue
        if node.kind == "MatMul":
            layer = _layer(node, readers)
            if layer:
                named[f"{layer}.weight"] = (weight[0], weight[1].T)
        elif node.kind == "Attention" and len(node.inputs) > 2 and node.inputs[2] in held:
            named.update(_apart(node, weight, held[node.inputs[2]], readers))
    return named


def _is_parameter(name: str) -> bool:
    """Whether an initializer has the name of a tensor of the model, and not one that an exporter made."""
    return "." in name and "::" not in name and not name.startswith("/")


def _layer(product: _Node, readers: Mapping[str, list[_Node]]) -> str:
    """The linear layer that computes a product: that of the bias which is added to it, or what its node says."""
    for reader in readers.get(product.outputs[0], ()):
        at = _BIASED.get(reader.kind)
        added = reader.inputs if reader.kind == "Add" else reader.inputs[at : at + 1] if at is not None else ()
        bias = next((name for name in added if _is_parameter(name) and name.endswith(".bias")), None)
        # A tied vocabulary head adds a bias of the module around it.
        if bias is not None and (not product.layer or _last(bias.removesuffix(".bias")) == _last(product.layer)):
            return bias.removesuffix(".bias")
    return product.layer


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _apart(
    node: _Node, weight: tuple[str, Array], bias: tuple[str, Array], readers: Mapping[str, list[_Node]]
) -> dict[str, tuple[str, Array]]:
    """Queries, keys and values of a joint attention, named after the projection that reads its output."""
    out = next((layer for reader in readers.get(node.outputs[0], ()) if (layer := _layer(reader, readers))), "")
    for end, names in _ATTENTION.items():
        if out.endswith(end):
            weights, biases = np.split(weight[1], 3, axis=1), np.split(bias[1], 3)  # [hidden, 3 x hidden], [3 x hidden]
            parts = zip((out.removesuffix(end) + name for name in names), weights, biases, strict=True)
            return {
                name: tensor
                for layer, columns, added in parts
                for name, tensor in (
                    (f"{layer}.weight", (weight[0], columns.T)),
                    (f"{layer}.bias", (bias[0], added)),
                )
            }
    return {}


def _node(data: memoryview) -> _Node:
    texts: dict[int, list[str]] = {1: [], 2: [], 3: [], 4: []}  # inputs, outputs, name, kind
    notes: dict[str, str] = {}
    for number, value in _fields(data):
        if number in texts:
            texts[number].append(str(value, "utf-8"))
        elif number == 9:
            entry = dict(_fields(value))
            notes[str(entry[1], "utf-8")] = str(entry[2], "utf-8")
    path = _PRODUCT.match("".join(texts[3]))
    scopes = re.findall(r"'([^']*)'", notes.get(_SCOPES, ""))  # from the model to the product
    return _Node(
        kind="".join(texts[4]),
        layer=path[1].replace("/", ".") if path else "".join(scopes[-2:-1]),
        inputs=tuple(texts[1]),
        outputs=tuple(texts[2]),
    )


def _tensor(data: memoryview, path: Path) -> tuple[str, tuple[str, Array]]:
    """Name, type and numbers of an initializer."""
    shape: list[int] = []
    name, kind, raw = "", 0, None
    fields: dict[int, memoryview] = {}
    external: dict[str, str] = {}
    for number, value in _fields(data):
        if number == 1:  # one by one, or packed
            shape += [value] if isinstance(value, int) else list(_varints(value))
        elif number == 2:
            kind = int(value)
        elif number == 8:
            name = str(value, "utf-8")
        elif number == 9:
            raw = value
        elif number == 13:
            entry = dict(_fields(value))
            external[str(entry[1], "utf-8")] = str(entry[2], "utf-8")
        elif isinstance(value, memoryview):
            fields[number] = value
    if kind not in _TYPES:
        raise ModelLoadError(f"{name} is of ONNX's type {kind}, which millpond does not read")
    dtype, numpy_type, field = _TYPES[kind]
    if external:
        raw = _external(path, external)
    if raw is None and field in (4, 10):
        raw = fields.get(field)
    if raw is None:
        numbers = np.array(list(_varints(fields[field])) if field in fields else [], np.int64)
        if field == 5:  # of half precisions their bits
            numbers = numbers.astype(f"u{np.dtype(numpy_type).itemsize}").view(numpy_type)
    else:
        numbers = np.frombuffer(raw, numpy_type)
    if len(numbers) != prod(shape):
        raise ValueError(f"{name} has {len(numbers)} numbers, and its shape is {shape}")
    return name, (dtype, numbers.reshape(shape))


def _external(path: Path, entry: Mapping[str, str]) -> memoryview:
    """The bytes of a tensor in a file beside."""
    place = entry["location"]
    if Path(place).name != place:
        raise ValueError(f"it names {place}, which is not beside it")
    data = _mapped(path.with_name(place))
    begin = int(entry.get("offset", 0))
    return data[begin : begin + int(entry.get("length", len(data) - begin))]


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Number and content of each field of a message: an int, or the bytes of a string, message or packed list."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind} at byte {at}")
        if at + size > end:
            raise ValueError(f"a field ends at {at + size}, and its message at {end}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where the next begins."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"a number does not end at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value - (1 << 64) if value >> 63 else value
