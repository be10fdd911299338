"""The compared engines: one row for each engine and setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.caps import WITHOUT_BFLOAT16
from peers.environments import HERE

# vLLM's own thread binding would leave one core unused. Its engine core runs in the same process, which is faster.
_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
}


@dataclass(frozen=True, kw_only=True)
class Competitor:
    """An engine in one setting.

    Attributes:
        name: Its name in flags and results.
        title: Its name in tables and plots.
        family: A key of ``peers.process.FAMILIES``.
        environment: The environment whose interpreter runs it.
        options: Passed when its model is loaded.
        precision: A key of ``peers.equality.LIMITS``.
        tasks: The tasks that it is measured on.
        searches: Whether the fastest batch size is searched for.
        backend: The runtime that the model is exported to, if any.
        environ: Environment variables of its process.
        smoke: Whether smoke runs include it.
    """

    name: str
    title: str
    family: str
    environment: str = HERE
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "half"
    tasks: frozenset[str] = frozenset({"embed", "rerank", "tokens"})
    searches: bool = False
    backend: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    smoke: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is millpond."""
        return self.family == "millpond"


_ST = "sentence-transformers"
_TWO = frozenset({"embed", "rerank"})
_ONE = frozenset({"embed"})

REFERENCE = "st-fp32"
COMPETITORS = {
    row.name: row
    for row in (
        Competitor(name="millpond", title="millpond", family="millpond", smoke=True),
        Competitor(name="millpond-compile", title="millpond compiled", family="millpond", options={"compile": True}),
        Competitor(
            name="millpond-fp32",
            title="millpond fp32",
            family="millpond",
            options={"dtype": "float32"},
            precision="float32",
        ),
        Competitor(
            name="millpond-int8",
            title="millpond int8",
            family="millpond",
            options={"quantization": "int8"},
            precision="int8",
            tasks=_TWO,
        ),
        Competitor(
            name="millpond-int8-all",
            title="millpond int8-all",
            family="millpond",
            options={"quantization": "int8-all"},
            precision="int8",
            tasks=_ONE,
        ),
        Competitor(name="st-fp32", title=f"{_ST} fp32", family=_ST, precision="float32", searches=True, smoke=True),
        Competitor(name="st-bf16", title=f"{_ST} bf16", family=_ST, options={"dtype": "bfloat16"}, searches=True),
        Competitor(
            name="st-onnx",
            title=f"{_ST} ONNX",
            family=_ST,
            environment="openvino",
            options={"backend": "onnx"},
            precision="float32",
            tasks=_TWO,
            searches=True,
            backend="onnx",
        ),
        Competitor(
            name="st-openvino",
            title=f"{_ST} OpenVINO",
            family=_ST,
            environment="openvino",
            options={"backend": "openvino"},
            tasks=_TWO,
            searches=True,
            backend="openvino",
        ),
        Competitor(
            name="st-onnx-int8",
            title=f"{_ST} ONNX int8",
            family=_ST,
            environment="openvino",
            options={"backend": "onnx", "int8": True},
            precision="int8",
            tasks=_ONE,
            searches=True,
            backend="onnx-int8",
        ),
        Competitor(
            name="st-openvino-int8",
            title=f"{_ST} OpenVINO int8",
            family=_ST,
            environment="openvino",
            options={"backend": "openvino", "int8": True},
            precision="int8",
            tasks=_ONE,
            searches=True,
            backend="openvino-int8",
        ),
        Competitor(
            name="fastembed",
            title="fastembed",
            family="fastembed",
            environment="openvino",
            precision="float32",
            tasks=_ONE,
            searches=True,
            backend="onnx",
        ),
        Competitor(
            name="vllm",
            title="vLLM bf16",
            family="vllm",
            environment="vllm",
            # With prefix caching, a later round would read results of an earlier one.
            options={"dtype": "bfloat16", "enable_prefix_caching": False},
            tasks=_TWO,
            environ=_VLLM,
        ),
        Competitor(
            name="vllm-fp32",
            title="vLLM fp32",
            family="vllm",
            environment="vllm",
            options={"dtype": "float32", "enable_prefix_caching": False},
            precision="float32",
            tasks=_TWO,
            environ=_VLLM,
        ),
        Competitor(
            name="transformers",
            title="transformers bf16",
            family="transformers",
            options={"dtype": "bfloat16", "max_length": 512},
            tasks=_TWO,
            searches=True,
        ),
    )
}


def default_engines(instruction_sets: Sequence[str], cap: str | None) -> list[str]:
    """The engines of a run that names none.

    With bfloat16 in the processor vLLM runs in bfloat16. Without, a peer in bfloat16 would run in reference code, so
    its float32 row is the one to compare with.

    Args:
        instruction_sets: Flags of the processor.
        cap: A key of ``peers.caps.CAPS``.
    """
    flags = {"avx512_bf16", "amx_bf16", "bf16"}
    fast = cap not in WITHOUT_BFLOAT16 and not flags.isdisjoint(instruction_sets)
    without = (
        {"vllm-fp32"} if fast else {row.name for row in COMPETITORS.values() if row.options.get("dtype") == "bfloat16"}
    )
    return [name for name in COMPETITORS if name not in without]
