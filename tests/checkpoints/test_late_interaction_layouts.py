"""Late-interaction checkpoints in each of their layouts, and what is refused."""

import json
import string

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.tiny import Dense, Layout, Other, Pooling, edit_json, write_checkpoint
from tests.tiny.heads import DIM, DOCUMENT_LENGTH, QUERY_LENGTH, write_pylate, write_stanford

from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.layouts.late_interaction import LateInteraction
from millpond.engine.loading import describe
from millpond.errors import ModelLoadError, WeightMismatchError
from millpond.values.config import EngineConfig

MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
POOLING = "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling"
ON_TOKENS = dict.fromkeys(("module_input_name", "module_output_name"), "token_embeddings")


def write_native(folder, *, mask=None, expansion=None, prompts=None, extra=(), listed=True, **lengths):
    """The layout of sentence-transformers 6, written by hand; ``listed=False`` leaves MultiVectorMask out."""
    modules = (
        Dense(out_features=DIM, bias=False, activation="Identity", stage="token_embeddings"),
        *([Other(dotted=MASK, config=mask or {})] if listed else []),
        Other(dotted=NORMALIZE, config=ON_TOKENS),
        *extra,
    )
    write_checkpoint(folder, "modernbert", sentence_transformers=Layout(modules=modules, prompts=prompts))
    edit_json(folder / "sentence_bert_config.json", query_expansion=expansion, **lengths)
    settings = {"model_type": "MultiVectorEncoder", "similarity_fn_name": "meanmaxsim"}
    edit_json(folder / "config_sentence_transformers.json", **settings)
    return folder


def late_of(folder, **overrides):
    return read_checkpoint(folder, hf_overrides=overrides).layout.late_interaction


def test_stanford(tmp_path):
    layout = read_checkpoint(write_stanford(tmp_path / "model")).layout
    assert layout.late_interaction == LateInteraction(
        query_marker="[unused0]",
        document_marker="[unused1]",
        query_length=QUERY_LENGTH,
        document_length=DOCUMENT_LENGTH,
        expand_to=QUERY_LENGTH,
        skiplist=tuple(string.punctuation),
    )
    projection = layout.token_heads[0]
    assert (projection.in_features, projection.out_features, projection.bias) == (48, DIM, False)
    assert projection.weight == "linear.weight" and layout.normalize and layout.pooling is None
    assert layout.max_seq_length == DOCUMENT_LENGTH


def test_stanford_without_metadata(tmp_path):
    folder = write_stanford(tmp_path / "model")
    (folder / "artifact.metadata").unlink()
    late = late_of(folder)
    assert (late.query_length, late.expand_to, late.document_length) == (32, 32, 220)
    assert (late.query_marker, late.document_marker) == ("[unused0]", "[unused1]")
    assert late.skiplist and not late.attend_to_expansion


def test_an_override_has_precedence_over_the_metadata(tmp_path):
    folder = write_stanford(tmp_path / "model")
    assert late_of(folder, attend_to_mask_tokens=True).attend_to_expansion
    assert late_of(folder, doc_maxlen=50).document_length == 50


@pytest.mark.parametrize(("value", "attends"), [(None, True), (False, False)])
def test_jina_attends_unless_its_file_says_otherwise(value, attends, tmp_path):
    folder = write_stanford(tmp_path / "model", "xlm-roberta", attend_to_mask_tokens=value)
    edit_json(folder / "config.json", position_embedding_type="rotary")
    late = late_of(folder)
    assert late.attend_to_expansion is attends
    assert (late.query_marker, late.document_marker) == ("[QueryMarker]", "[DocumentMarker]")


def test_the_projection_by_its_other_name(tmp_path):
    folder = write_stanford(tmp_path / "model")
    rename(folder, "linear.weight", "colbert_linear.weight")
    assert read_checkpoint(folder).layout.token_heads[0].weight == "colbert_linear.weight"


@pytest.mark.parametrize(
    ("write", "metadata", "match"),
    [
        (write_stanford, {"similarity": "l2"}, "similarity 'l2' is not run"),
        (write_stanford, {"interaction": "flipr"}, "interaction 'flipr' is not run"),
        (write_pylate, {"similarity_fn_name": "xtr"}, "similarity_fn_name 'xtr' is not run"),
        *((write_stanford, {"doc_maxlen": value}, "must be a positive int") for value in (0, "12", True, 3.5)),
    ],
)
def test_other_comparisons_and_invalid_lengths_are_refused(write, metadata, match, tmp_path):
    folder = write(tmp_path / "model", **metadata)
    with pytest.raises(ModelLoadError, match=match):
        late_of(folder)


def test_a_missing_projection(tmp_path):
    folder = write_stanford(tmp_path / "model")
    rename(folder, "linear.weight", "something.weight")
    with pytest.raises(WeightMismatchError, match=r"neither a modules.json nor linear\.weight"):
        late_of(folder)


@pytest.mark.parametrize(
    "change", [{"linear.bias": np.zeros(DIM, np.float32)}, {"linear.weight": np.zeros(DIM, np.float32)}]
)
def test_a_projection_of_another_kind(change, tmp_path):
    folder = write_stanford(tmp_path / "model")
    save_file(load_file(folder / "model.safetensors") | change, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMismatchError, match=r"\[dim, hidden\] and has no bias"):
        late_of(folder)


def test_an_override_reads_stanfords_layout_from_any_folder_with_its_files(tmp_path):
    folder = write_stanford(tmp_path / "model")
    edit_json(folder / "config.json", architectures=["BertModel"])
    assert late_of(folder) is None
    assert late_of(folder, architectures=["HF_ColBERT"]).expand_to == QUERY_LENGTH


def test_an_override_of_a_pooled_embedder_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout())
    with pytest.raises(ModelLoadError, match="leave the override of architectures out"):
        late_of(folder, architectures=["HF_ColBERT"])


def test_pylate(tmp_path):
    layout = read_checkpoint(write_pylate(tmp_path / "model", widths=(48, DIM), residual=True)).layout
    assert layout.late_interaction == LateInteraction(
        query_marker="[Q] ",
        document_marker="[D] ",
        query_length=QUERY_LENGTH,
        document_length=DOCUMENT_LENGTH,
        expand_to=QUERY_LENGTH,
        skiplist=(".", ",", "?", "!", ";", ":", "'"),
    )
    assert [head.out_features for head in layout.token_heads] == [48, DIM]
    assert all(head.residual and head.weight is None for head in layout.token_heads)
    assert layout.normalize and layout.pooling is None
    assert layout.max_seq_length == DOCUMENT_LENGTH  # the file has the length without the marker


def test_pylates_defaults(tmp_path):
    keys = "query_prefix document_prefix query_length document_length do_query_expansion attend_to_expansion_tokens"
    absent = dict.fromkeys((*keys.split(), "skiplist_words", "similarity_fn_name"))
    late = late_of(write_pylate(tmp_path / "model", **absent))
    assert late == LateInteraction(
        query_marker="[Q] ",
        document_marker="[D] ",
        query_length=32,
        document_length=180,
        expand_to=32,
        skiplist=tuple(string.punctuation),
    )


def test_pylate_without_expansion_or_markers(tmp_path):
    late = late_of(
        write_pylate(
            tmp_path / "model",
            do_query_expansion=False,
            attend_to_expansion_tokens=True,
            query_prefix="",
            document_prefix="",
            skiplist_words=[],
        )
    )
    assert late == LateInteraction(query_length=QUERY_LENGTH, document_length=DOCUMENT_LENGTH)


def test_prompts_are_kept_without_the_marker(tmp_path):
    prompts = {"query": "[Q] Find: ", "document": "[D] ", "other": "[Q] x"}
    layout = read_checkpoint(write_pylate(tmp_path / "model", prompts=prompts)).layout
    assert layout.prompts == {"query": "Find: ", "document": "", "other": "[Q] x"}


def test_native(tmp_path):
    folder = write_native(
        tmp_path / "model",
        mask={"skiplist_words": ["."], "skiplist_tasks": ["query", "document"], "keep_only_token_ids": None},
        expansion={"strategy": "fixed", "attend": True, "token": "[SEP]", "length": 16},
        document_length=40,
    )
    layout = read_checkpoint(folder).layout
    assert layout.late_interaction == LateInteraction(
        query_length=16,
        document_length=40,
        expand_to=16,
        expansion_token="[SEP]",
        attend_to_expansion=True,
        skiplist=(".",),
        skiplist_roles=("query", "document"),
        similarity="meanmaxsim",
    )
    assert layout.normalize and len(layout.token_heads) == 1 and layout.max_seq_length == 40


def test_native_with_a_floor_only(tmp_path):
    late = late_of(write_native(tmp_path / "a", expansion={"strategy": "min", "length": 16}))
    assert (late.expand_to, late.query_length, late.document_length) == (16, None, None)
    late = late_of(write_native(tmp_path / "b", expansion={"strategy": "min", "length": 16}, query_length=40))
    assert (late.expand_to, late.query_length) == (16, 40)


def test_native_markers_are_the_added_tokens_at_the_front_of_the_prompts(tmp_path):
    prompts = {"query": "[CLS] Find: ", "document": "Read: "}
    layout = read_checkpoint(write_native(tmp_path / "model", prompts=prompts)).layout
    assert layout.late_interaction.query_marker == "[CLS]" and layout.late_interaction.document_marker == ""
    assert layout.prompts == {"query": " Find: ", "document": "Read: "}


def test_an_expansion_that_is_neither_scored_nor_attended_to_is_off(tmp_path):
    expansion = {"strategy": "fixed", "attend": False, "length": 16}
    late = late_of(write_native(tmp_path / "a", expansion=expansion, listed=False))
    assert late.expand_to is None and late.query_length == 16 and late.skiplist == ()
    late = late_of(write_native(tmp_path / "b", expansion=expansion | {"attend": True}, listed=False))
    assert late.expand_to == 16


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"expansion": {"strategy": "other", "length": 16}}, "query_expansion"),
        ({"expansion": {"strategy": "fixed"}}, "query_expansion"),
        ({"expansion": {"strategy": "fixed", "length": 16, "more": 1}}, "query_expansion"),
        ({"expansion": "fixed"}, "query_expansion"),
        ({"mask": {"keep_only_token_ids": [3]}}, "keep_only_token_ids"),
        ({"mask": {"skiplist_words": "all"}}, "skiplist_words"),
        ({"mask": {"skiplist_tasks": ["image"]}}, "skiplist_words"),
        *(
            ({"extra": (other,)}, "in a place where a MultiVectorEncoder checkpoint has none")
            for other in (Other(dotted=POOLING), Dense(out_features=8), Pooling())
        ),
    ],
)
def test_what_is_not_understood_is_refused(options, match, tmp_path):
    folder = write_native(tmp_path / "model", **options)
    with pytest.raises(ModelLoadError, match=match):
        late_of(folder)


def test_modules_json_is_needed(tmp_path):
    folder = write_pylate(tmp_path / "model")
    (folder / "modules.json").unlink()
    with pytest.raises(ModelLoadError, match=r"modules\.json is missing"):
        late_of(folder)


def test_every_setting_is_in_the_digest(tmp_path):
    """Another marker changes the vectors, though the weights are the same."""
    folder = write_stanford(tmp_path / "model")
    before = read_checkpoint(folder).digest()
    metadata = json.loads((folder / "artifact.metadata").read_text())
    (folder / "artifact.metadata").write_text(json.dumps(metadata | {"query_token": "[R]"}))
    assert read_checkpoint(folder).digest() == before
    (folder / "artifact.metadata").write_text(json.dumps(metadata | {"query_maxlen": 13}))
    assert read_checkpoint(folder).digest() != before


def test_a_conversion_has_its_own_fingerprint(tmp_path):
    """It reads texts without markers, so its token vectors must not be compared with the original's."""
    folder = write_stanford(tmp_path / "model")
    specs = [describe(EngineConfig(model=str(folder), convert=convert)) for convert in ("auto", "embed")]
    assert specs[0].tasks == {"token_embed", "score"} and specs[1].tasks == {"embed", "token_embed"}
    assert specs[0].fingerprint != specs[1].fingerprint
    plain = [describe(EngineConfig(model=str(write_checkpoint(tmp_path / "plain")), convert="embed"))]
    plain.append(describe(EngineConfig(model=str(tmp_path / "plain"))))
    assert plain[0].fingerprint == plain[1].fingerprint


def rename(folder, old, new):
    tensors = load_file(folder / "model.safetensors")
    tensors[new] = tensors.pop(old)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
