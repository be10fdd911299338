"""Tiny checkpoints without torch: the same numbers as torch draws, and the same parameters as transformers' classes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from tests.tiny import FAMILIES, write_checkpoint
from tests.tiny.noise import Noise
from tests.tiny.parameters import parameters

pytestmark = [pytest.mark.contract, pytest.mark.torch]

SHAPES = [(503, 48), (48,), (3,), (5,), (17,), (2,), (1, 48), (7,), (33, 5)]
OWN = ("JinaBert", "JinaBertCode", "NomicBertMoe", "NVEmbed")  # transformers has no class of them
KINDS = {
    "plain": {},
    "wrapped": {"wrapped": True},
    "sequences": {"head": "SequenceClassification"},
    "tokens": {"head": "TokenClassification"},
}


def test_noise_is_what_torch_draws() -> None:
    ours, theirs = Noise(7), torch.Generator().manual_seed(7)
    for shape in SHAPES:
        expected = torch.randn(shape, generator=theirs).numpy()
        np.testing.assert_allclose(ours.normal(*shape), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers_class(family: str, kind: str, tmp_path, monkeypatch) -> None:
    name = FAMILIES[family].native_class(**{"wrapped": False} | KINDS[kind])
    if not hasattr(transformers, name):
        if FAMILIES[family].native_prefix in OWN:
            assert parameters(name, FAMILIES[family].config | FAMILIES[family].native | {"vocab_size": 7})
            return
        with pytest.raises(AttributeError, match=name):
            parameters(name, FAMILIES[family].config)
        return
    asked: list[tuple[str, dict]] = []
    monkeypatch.setattr("tests.tiny.checkpoints.parameters", lambda *call: asked.append(call) or parameters(*call))
    monkeypatch.setattr("tests.tiny.checkpoints.find_spec", lambda name: None)  # as if transformers were missing
    folder = write_checkpoint(tmp_path / "light", family, seed=1, **KINDS[kind])  # seed: weights are kept
    monkeypatch.undo()
    expected = write_checkpoint(tmp_path / "full", family, **KINDS[kind])
    assert [architecture for architecture, _ in asked] == [name]
    assert _shapes(folder) == _shapes(expected)


def _shapes(folder) -> dict[str, list[int]]:
    content = (folder / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
