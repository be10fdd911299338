"""The native encoder under each instruction set that this processor has: ``MILLPOND_ISA`` caps it."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tests.tiny import TEXTS, write_checkpoint

from millpond.native.library import ISAS, isa

pytestmark = pytest.mark.skipif(isa() is None, reason="no compiled kernels: no C++ compiler, or no AVX2")

pytestmark = pytest.mark.slow  # a process for each cap
_CAPS = ISAS[: ISAS.index(isa() or "avx2") + 1]

_EMBED = """
import gc, json, sys
sys.path[:0] = json.loads(sys.argv[1])
import numpy as np
from millpond import Engine
from millpond.models.native.encoder import NativeEncoder
from millpond.native.library import isa
from tests.tiny import TEXTS
told = {"isa": isa()}
for dtype in ("float32", "bfloat16", "auto"):
    with Engine(sys.argv[2], dtype=dtype, device="cpu") as engine:
        texts = list(TEXTS) * 8
        vectors = np.asarray(engine.embed(texts))
        told[dtype] = vectors[: len(TEXTS)].tolist()
        told[f"{dtype} alone"] = np.asarray(engine.embed(texts[:1]))[0].tolist() == vectors[0].tolist()
        told[f"{dtype} native"] = any(isinstance(o, NativeEncoder) for o in gc.get_objects())
    del engine
    gc.collect()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a process under each cap embeds; ``None``: torch's operators."""
    config = {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 160}
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "bert", config=config)
    processes = {}
    for cap in (None, *_CAPS):
        variables = {"MILLPOND_NATIVE": "0"} if cap is None else {"MILLPOND_NATIVE": "1", "MILLPOND_ISA": cap}
        command = [sys.executable, "-c", _EMBED, json.dumps(sys.path), str(checkpoint)]
        processes[cap] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
    texts = {cap: process.communicate(timeout=300)[0] for cap, process in processes.items()}
    assert all(process.returncode == 0 for process in processes.values())
    return {cap: json.loads(text) for cap, text in texts.items()}


@pytest.mark.parametrize("cap", _CAPS)
def test_the_encoder_equals_torch_under_every_cap(told, cap):
    under, reference = told[cap], np.array(told[None]["float32"])
    assert under["isa"] == cap
    assert not told[None]["float32 native"]
    assert under["float32 native"]
    assert under["float32 alone"]
    assert under["bfloat16 alone"] or not under["bfloat16 native"]
    np.testing.assert_allclose(under["float32"], reference, atol=2e-5)
    np.testing.assert_allclose(under["bfloat16"], reference, atol=0.05)
    assert under["bfloat16 native"] == (cap in ("avx512bf16", "amx"))


@pytest.mark.parametrize("cap", [cap for cap in _CAPS if cap in ("avx2", "avx512")])
def test_below_bfloat16_the_encoder_is_in_float32(told, cap):
    assert told[cap]["auto"] == told[cap]["float32"]
    assert told[cap]["auto native"]
    assert len(TEXTS) == len(told[cap]["auto"])
