"""A cap on the instruction set, applied to every engine of a run alike: what a smaller processor would run.

millpond, torch (ATen), oneDNN (in torch, vLLM and OpenVINO) and MKL read environment variables when they are loaded.
vLLM chooses its own library by asking torch for the processor's flags; `peers.process` answers for it. onnxruntime has
no such setting: it runs uncapped, and the table says so.
"""

from __future__ import annotations

from collections.abc import Mapping

CAPS: Mapping[str, Mapping[str, str]] = {
    "avx2": {
        "MILLPOND_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {
        "MILLPOND_ISA": "avx512",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1",
    },
    "avx512bf16": {
        "MILLPOND_ISA": "avx512bf16",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3",
    },
}
# Below AVX512-BF16, products of bfloat16 run in oneDNN's reference code, far slower than float32.
WITHOUT_BFLOAT16 = ("avx2", "avx512")
NOT_CAPPED = ("st-onnx", "st-onnx-int8", "fastembed")
