"""DeBERTa v2 and v3: millpond's packed forward compared with transformers' class, for each form of checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.dispatched import Dispatched
from tests.parity.oracles import oracle
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, _ids, difference, states
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine
from millpond.attention.padded_row import PaddedRow
from millpond.attention.segments import Segments
from millpond.errors import ModelLoadError
from millpond.models import deberta

FORMS: dict[str, dict[str, Any]] = {
    "v3": {},
    "own position projections": {"share_att_key": False},
    "content to position": {"pos_att_type": ["c2p"]},
    "position to content": {"pos_att_type": ["p2c"], "share_att_key": False},
    "a convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},  # v2-xlarge
    "distances without buckets": {"position_buckets": -1},
    "distances cut": {"position_buckets": -1, "max_relative_positions": 20},
    "positions in the input too": {"position_biased_input": True, "type_vocab_size": 2},
    "plain distances": {"norm_rel_ebd": "none"},
    "no distances": {"relative_attention": False, "position_biased_input": True},
    "narrow embeddings": {"embedding_size": 24},
    "tanh": {"hidden_act": "tanh"},
}


def expected_of(folder, texts):
    reference = oracle(folder)
    with torch.inference_mode():
        return [reference(ids).numpy() for ids in _ids(folder, texts)]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_transformers_in_blocks_and_as_on_cuda(form, tmp_path, monkeypatch):
    """Small blocks have other windows of distances; on CUDA texts of similar lengths are filled up to one batch."""
    batches = []
    right = deberta.PackedDeberta._batches

    def noted(self, *call):
        batches.append(right(self, *call))
        return batches[-1]

    monkeypatch.setattr(deberta.PackedDeberta, "_batches", noted)
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", config=FORMS[form])
    expected, block = expected_of(folder, TEXTS), deberta._SCORE_BLOCK
    with Engine(folder, dtype="float32", device="cpu") as engine:
        for pads, size in ((False, block), (False, 400), (True, block), (True, 400)):
            monkeypatch.setattr(deberta, "_row", PaddedRow.of if pads else lambda *_: None)
            monkeypatch.setattr(deberta, "_SCORE_BLOCK", size)
            worst = difference(states(engine, TEXTS), expected)
            assert worst <= TOLERANCE
    assert any(made.row and len(made.row.rows) > len(made.row.places) for made in batches)  # texts were filled up


def test_a_mixed_batch_takes_few_kernel_starts(monkeypatch):
    from transformers import DebertaV2Config, DebertaV2Model

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = DebertaV2Config(
        **size, relative_attention=True, pos_att_type="p2c|c2p", position_buckets=16, vocab_size=50, share_att_key=True
    )
    packed = deberta.PackedDeberta(DebertaV2Model(config).eval())
    lengths = list(range(5, 65))
    ids = torch.ones(1, sum(lengths), dtype=torch.long)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]

    def starts():
        forward = {"input_ids": ids, "position_ids": positions}
        with torch.inference_mode():
            packed(**forward, segments=Segments.of(lengths))
            with Dispatched() as dispatched:
                packed(**forward, segments=Segments.of(lengths))
        return dispatched

    by_run = starts().number
    monkeypatch.setattr(deberta, "_row", PaddedRow.of)
    padded = starts()
    assert by_run > 1000
    assert padded.number < 150


def test_the_table_of_distances_is_placed_once(monkeypatch):
    """A copy in each forward would wait for the device; it grows with the longest text."""
    distances = deberta.Distances(span=16, buckets=True, farthest=64)
    monkeypatch.setattr(deberta, "_REACH", 8)
    placed = []
    monkeypatch.setattr(deberta, "on_device", lambda table, device: placed.append(len(table)) or table)
    model = deberta.PackedDeberta.__new__(deberta.PackedDeberta)
    torch.nn.Module.__init__(model)
    model._table, model.distances = None, distances
    for longest in (3, 8, 1, 9, 16, 10, 5):
        batches = model._batches(Segments.of([longest, 2, 1]), torch.device("cpu"))
        assert {length: rows.tolist() for length, rows in batches.distances.items()} == {
            length: distances.rows(length).tolist() for length in {longest, 2, 1}
        }
    assert placed == [15, 31]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "v3"])
def test_the_forms_differ(form, tmp_path):
    """Each field above changes the states, or its test could not fail."""
    changed = write_checkpoint(tmp_path / "changed", "deberta-v2", config=FORMS[form])
    plain = write_checkpoint(tmp_path / "plain", "deberta-v2")
    assert difference(expected_of(changed, SHORT), expected_of(plain, SHORT)) > VISIBLE


def test_texts_longer_than_every_bucket(tmp_path):
    """With distances only, a text may be longer than max_position_embeddings, as in transformers."""
    texts = [" ".join(TEXTS), "a", " ".join(TEXTS[1:3])]
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", tokenizer_limit=None)
    with Engine(folder, dtype="float32", device="cpu", max_length=64) as engine:
        assert engine.spec.max_length == 64
    reference = oracle(folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        expected = [reference(torch.tensor(tokenizer(text)["input_ids"])).numpy() for text in texts]
    assert max(map(len, expected)) > 256
    with Engine(folder, dtype="float32", device="cpu", max_length=1024) as engine:
        worst = difference(states(engine, texts), expected)
    assert worst <= TOLERANCE


def test_a_table_of_positions_ends_the_texts(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", config={"position_biased_input": True})
    with pytest.raises(ModelLoadError, match="max_length=65 is more than .* choose 1 to 64"):
        Engine(folder, dtype="float32", device="cpu", max_length=65)


@pytest.mark.parametrize("buckets", [16, 256])
@pytest.mark.parametrize("longest", [1, 5, 700])
def test_distances_fall_into_transformers_buckets(buckets, longest):
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    rows = deberta.Distances(span=buckets, buckets=True, farthest=512).rows(longest)
    anything = torch.zeros(1, longest, 1)
    theirs = build_relative_position(anything, anything, bucket_size=buckets, max_position=512)[0]
    distance = torch.arange(longest)[:, None] - torch.arange(longest)[None, :]
    assert torch.equal(rows[distance + longest - 1], (theirs + buckets).clamp(0, 2 * buckets - 1))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), (4, 1), (3, 5)])
def test_skewed_is_a_gather(n, m):
    products = torch.randn(2, 3, n, n + m - 1, generator=torch.Generator().manual_seed(0))
    index = (n - 1 - torch.arange(n))[:, None] + torch.arange(m)
    assert torch.equal(deberta.skewed(products), products.gather(-1, index.expand(2, 3, n, m)))


@pytest.mark.parametrize("pads", [False, True], ids=["runs", "as on CUDA"])
def test_tokens_that_are_not_keys_have_no_effect(tmp_path, pads, monkeypatch):
    """A limit on the keys (for the expansion of a late-interaction query) applies as in the shared kernels."""
    monkeypatch.setattr(deberta, "_row", PaddedRow.of if pads else lambda *_: None)
    from transformers import DebertaV2Config, DebertaV2Model

    fields = {
        "relative_attention": True,
        "pos_att_type": "p2c|c2p",
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
    }
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = DebertaV2Config(**fields, **size, vocab_size=50, position_biased_input=False, share_att_key=True)
    torch.manual_seed(0)
    packed = deberta.PackedDeberta(DebertaV2Model(config).eval())
    ids = torch.arange(1, 15)[None]
    positions = torch.cat([torch.arange(8), torch.arange(6)])[None]
    changed = ids.clone()
    changed[0, 5:8] = 40

    def first(ids, keys):
        segments = Segments.of([8, 6], keys=keys)
        with torch.inference_mode():
            return packed(input_ids=ids, position_ids=positions, segments=segments).last_hidden_state[0, :5]

    assert torch.equal(first(ids, [5, 6]), first(changed, [5, 6]))
    assert (first(ids, None) - first(changed, None)).abs().max() > VISIBLE


# --- Mistakes. ------------------------------------------------------------------------------------------------------


def mirrored(right):
    return lambda self, length: right(self, length).flip(0)


def one_late(right):
    return lambda self, length: (right(self, length) + 1).clamp(max=2 * self.span - 1)


@pytest.mark.parametrize("change", [mirrored, one_late])
def test_notices_wrong_distances(change, tmp_path, monkeypatch):
    monkeypatch.setattr(deberta.Distances, "rows", change(deberta.Distances.rows))
    folder = write_checkpoint(tmp_path / "model", "deberta-v2")
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert difference(states(engine, SHORT), expected_of(folder, SHORT)) > VISIBLE


@pytest.mark.parametrize("name", ["position_key", "position_query"])
def test_notices_that_a_product_is_left_out(name, tmp_path, monkeypatch):
    right = deberta.PackedLayer.__init__

    def without(self, *args):
        right(self, *args)
        setattr(self, name, None)

    monkeypatch.setattr(deberta.PackedLayer, "__init__", without)
    folder = write_checkpoint(tmp_path / "model", "deberta-v2")
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert difference(states(engine, SHORT), expected_of(folder, SHORT)) > VISIBLE


def test_notices_the_usual_scale(tmp_path, monkeypatch):
    """1 / sqrt(d) instead of 1 / sqrt(3 d), the common factor of the three products."""
    right = deberta.PackedLayer.__init__

    def usual(self, *args):
        right(self, *args)
        self.scale *= 3**0.5
        self.position_query *= 3**0.5

    monkeypatch.setattr(deberta.PackedLayer, "__init__", usual)
    folder = write_checkpoint(tmp_path / "model", "deberta-v2")
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert difference(states(engine, SHORT), expected_of(folder, SHORT)) > VISIBLE


def test_notices_a_convolution_over_the_whole_row(tmp_path, monkeypatch):
    right = deberta.Convolution.forward

    def leaking(self, embedded, hidden, segments):
        return right(self, embedded, hidden, Segments.of([segments.total]))

    monkeypatch.setattr(deberta.Convolution, "forward", leaking)
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", config=FORMS["a convolution"])
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert difference(states(engine, SHORT), expected_of(folder, SHORT)) > VISIBLE
