"""Jamba's Mamba layers with packed rows: texts are batched by length, and no state passes from one to the next."""

from __future__ import annotations

import random

import pytest
import torch
from tests.parity.test_backbones import SHORT, VISIBLE, _ids, difference, states
from tests.tiny import TEXTS

from millpond import Engine
from millpond.attention.segments import Segments
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.models import jamba, load


def _plain(monkeypatch):
    """Mistake: the mixers run over the whole packed row."""
    monkeypatch.setattr(jamba.SegmentedMixer, "forward", lambda self, hidden_states, **rest: self.mixer(hidden_states))


def test_notices_mixers_that_run_over_the_whole_row(plain, monkeypatch):
    """Attention keeps to its segments, but without the wrapper the Mamba state passes between texts."""
    with Engine(plain("jamba"), dtype="float32", device="cpu") as engine:
        right = states(engine, TEXTS)
        _plain(monkeypatch)
        assert difference(states(engine, TEXTS), right) > VISIBLE
        assert difference([states(engine, [text])[0] for text in SHORT], [right[TEXTS.index(t)] for t in SHORT]) < 1e-5


def test_a_text_does_not_depend_on_the_one_before(plain):
    """Replacing the first text by another of the same length does not change the second one's states."""
    checkpoint = read_checkpoint(plain("jamba"))
    row = find(checkpoint.config, "jamba")
    backbone = load.load_backbone(checkpoint, row, device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(backbone, jamba.PackedJamba)
    text = _ids(plain("jamba"), SHORT[1:2])[0]
    actual = []
    for neighbour in (torch.full_like(text, 7), torch.full_like(text, 9)):
        lengths = [len(neighbour), len(text)]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        with torch.inference_mode():
            out = backbone(
                input_ids=torch.cat([neighbour, text])[None],
                position_ids=positions,
                segments=Segments.of(lengths),
                use_cache=False,
            ).last_hidden_state[0]
        actual.append(out.split(lengths))
    torch.testing.assert_close(actual[0][1], actual[1][1], rtol=0, atol=1e-6 * float(actual[0][1].abs().max()))
    assert not torch.allclose(actual[0][0], actual[1][0], atol=1e-2)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_hold_each_token_once_and_little_padding(seed):
    lengths = [random.Random(seed + i).choice([1, 2, 3, 7, 8, 9, 64, 200]) for i in range(20)]
    made = jamba.padded_batches(Segments.of(lengths), torch.device("cpu"))
    assert sorted(torch.cat([block.rows for block in made]).tolist()) == list(range(sum(lengths)))
    assert sum(block.texts for block in made) == len(lengths)
    for block in made:
        assert len(set(block.slots.tolist())) == len(block.rows) == len(block.slots)
        assert block.slots.max() < block.texts * block.longest < 2 * len(block.rows) + 1
        # A text's tokens are in order, from the start of a row of the batch.
        starts = (block.slots % block.longest == 0).nonzero()[:, 0].tolist()
        assert len(starts) == block.texts
        within = (block.slots.diff() == 1) & (block.slots[1:] % block.longest != 0)
        assert (block.rows.diff()[within] == 1).all()


def test_the_indices_of_all_batches_are_one_copy(monkeypatch):
    """To a GPU each copy from the host takes a start, and from pageable memory it waits for the device."""
    copies = []
    monkeypatch.setattr(jamba, "on_device", lambda indices, device: copies.append(len(indices)) or indices)
    lengths = [1, 2, 3, 9, 64, 200]
    assert len(jamba.padded_batches(Segments.of(lengths), torch.device("cpu"))) > 3
    assert copies == [2 * sum(lengths)]


def test_the_segments_are_forgotten_behind_a_forward(plain):
    """Segments live as long as the call; the next call and other engines have their own."""
    with Engine(plain("jamba"), dtype="float32", device="cpu") as engine:
        engine.embed(SHORT)
    with pytest.raises(LookupError):
        jamba._BATCHES.get()
