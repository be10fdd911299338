"""Checkpoints, options and tasks that cannot be run correctly are refused; the message names problem and way out."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.parity.rerankers import FRAME
from tests.tiny.heads import write_language_model, write_reward
from tests.tiny.layouts import save_weights

from millpond import Engine
from millpond.errors import (
    InvalidRequestError,
    ModelLoadError,
    UnsupportedArchitectureError,
    UnsupportedTaskError,
    WeightMismatchError,
)
from tests import tiny

Write = Callable[[Path], Path]
Edit = Callable[[Path], object]
load = partial(Engine, dtype="float32", device="cpu")


def model(family: str = "bert", **options: Any) -> Write:
    return partial(tiny.write_checkpoint, family=family, **options)


def classifier(family: str = "bert", **options: Any) -> Write:
    return model(family, head="SequenceClassification", **options)


def modules(*listed: Any, **options: Any) -> Write:
    """A checkpoint of sentence-transformers; without ``listed``, the default modules."""
    return model(sentence_transformers=tiny.Layout(modules=listed, **options) if listed else tiny.Layout(**options))


def reward(architecture: str) -> Write:
    return partial(write_reward, architecture=architecture)


def language_model(name: str, *tokens: str) -> Write:
    return lambda folder: write_language_model(folder.parent / name, "qwen3", tokens, template="$A")


def without(tensor: str, module: str = ".") -> Edit:
    return lambda folder: tiny.drop_tensor(folder / module, tensor)


def fields(file: str = "config.json", **values: Any) -> Edit:
    return lambda folder: tiny.edit_json(folder / file, **values)


def text(content: str, file: str = "config.json") -> Edit:
    return lambda folder: (folder / file).write_text(content)


def unlinked(file: str) -> Edit:
    return lambda folder: (folder / file).unlink()


def truncated(file: str, keep: float = 0.5) -> Edit:
    return lambda folder: tiny.truncate_file(folder / file, keep=keep)


def cut(*tensors: str, rows: int | None = None, columns: int | None = None) -> Edit:
    def edit(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        for name in tensors:
            short = content[name][:rows]
            content[name] = (short if columns is None else short[:, :columns]).contiguous()
        save_weights(content, folder)

    return edit


def listed(first: int | None, end: int | None = None) -> Edit:
    """Some of the modules, renumbered."""

    def edit(folder: Path) -> None:
        path = folder / "modules.json"
        kept = json.loads(path.read_text())[first:end]
        path.write_text(json.dumps([{**entry, "idx": i} for i, entry in enumerate(kept)]))

    return edit


def unchanged(folder: Path) -> None:
    """The checkpoint is what is refused."""


def no_tensor(tensor: str) -> str:
    """The message of a head; its name has no prefix, which depends on the class."""
    return f"has no tensor {re.escape(re.sub(r'^(bert|albert|new)[.]', '', tensor))}, which its head needs"


POOLING = tiny.Pooling()
HEADS = (POOLING, tiny.Dense(out_features=8), tiny.LayerNorm())
AFTER = (POOLING, tiny.Dense(out_features=48), tiny.Normalize())
PROMPTS = "config_sentence_transformers.json"
WRONG_PROMPTS = ({"prompts": ["query: "]}, {"prompts": {"query": 3}}, {"prompts": {}, "default_prompt_name": "other"})
FILES: dict[str, str] = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
UNKNOWN, MISPLACED = (
    {name: tiny.Other(dotted=f"sentence_transformers.models.{name}") for name in names.split()}
    for names in (
        "StaticEmbedding Router Asym CLIPModel",
        "WordEmbeddings CNN LSTM BoW WordWeights WeightedLayerPooling",  # test_modules.py runs them in their places
    )
)
OWN = ("custom_st.Transformer", "jinaai/code--custom_st.Pooling", "modeling.MyHead")
ACTIVATIONS = "my.Swish torch.nn.functional.gelu torch.nn.modules.activation.MultiheadAttention os.system".split()
TOKEN_ROWS = dict.fromkeys(("module_input_name", "module_output_name"), "token_embeddings")
MEDIAN = "pooling 'median' of config.json is unknown"
EUROBERT = f"{MEDIAN}; bos, mean, late are"
MISFITS = {"classifier_pooling": "median", "hidden_size": "wide"}
LABELS = {"id2label": {"0": "low", "1": "high"}, "label2id": {"low": 0, "high": 1}}
SEQUENCES, TOKENS = "SequenceClassification", "TokenClassification"
PROCESS = "Qwen2ForProcessRewardModel"
BACKBONES = {
    "bert": "encoder.layer.1.output.dense.weight",
    "modernbert": "layers.2.attn.Wqkv.weight",
    "llama": "layers.0.self_attn.q_proj.weight",
    "gemma2": "norm.weight",
}
SEQUENCE_HEADS = {
    "bert": "bert.pooler.dense.weight classifier.weight classifier.bias",
    "roberta": "classifier.dense.weight classifier.out_proj.bias",
    "distilbert": "pre_classifier.weight",
    "modernbert": "head.dense.weight head.norm.weight classifier.bias",
    "albert": "albert.pooler.weight",
    "deberta-v2": "pooler.dense.bias",
    "eurobert": "dense.weight",
    "nomic": "bert.pooler.dense.weight",
    "gte": "new.pooler.dense.bias",
    "llama": "score.weight",
    "gpt2": "score.weight",
}
TOKEN_HEADS = {"bert": "classifier.weight", "modernbert": "head.dense.weight", "qwen3": "score.weight"}
REWARD_HEADS = {
    "InternLM2ForRewardModel": "v_head.weight",
    "Qwen2ForRewardModel": "score.2.weight",
    PROCESS: "score.0.bias",
}
TURNED_HEADS = {"bert": "classifier", "llama": "score", "modernbert": "head.dense"}

Rows = list[tuple[Write, Edit, str]]  # a checkpoint, a change of its files, and words of the message
MISMATCHES: Rows = [
    *((model(family), without(name), re.escape(name)) for family, name in BACKBONES.items()),
    (model(), cut("encoder.layer.0.attention.self.query.weight", rows=24), r"attention\.self\.query\.weight"),
    (model(config={"num_hidden_layers": 3}), fields(num_hidden_layers=2), r"encoder\.layer\.2\."),
    (model(), fields(num_hidden_layers=3), r"encoder\.layer\.2\."),
    # With rotary positions an XLM-RoBERTa is jina's model, whose tensors have other names.
    (model("xlm-roberta"), fields(position_embedding_type="rotary"), r"misses layers\.0\."),
    # Modules
    (modules(*HEADS), without("linear.bias", "2_Dense"), r"(?s)2_Dense.*linear.bias"),
    (modules(*HEADS), without("norm.weight", "3_LayerNorm"), r"(?s)3_LayerNorm.*norm.weight"),
    (modules(*HEADS), fields("2_Dense/config.json", bias=False), r"(?s)2_Dense.*linear\.bias"),
    # Heads
    *(
        (classifier(family), without(name), rf"{no_tensor(name)}.*convert=\"embed\"")
        for family, names in SEQUENCE_HEADS.items()
        for name in names.split()
    ),
    *((model(family, head=TOKENS), without(name), no_tensor(name)) for family, name in TOKEN_HEADS.items()),
    *((reward(kind), without(name), no_tensor(name)) for kind, name in REWARD_HEADS.items()),
    *(
        (model(family, head=head), fields(**LABELS), r"names 2 labels \(low, high.*the head has 3.*belong together")
        for family in TURNED_HEADS
        for head in (SEQUENCES, TOKENS)
    ),
    *(
        (classifier(family), cut(f"{name}.weight", columns=47), f"{name} takes 47 features, and gets 48")
        for family, name in TURNED_HEADS.items()
    ),
    (reward(PROCESS), cut("score.2.weight", "score.2.bias", rows=1), r"names 2 labels \(bad, good.*the head has 1"),
    # Its input embeddings have the same shape, but with untied weights they are not the head.
    (language_model("Qwen3-Reranker-4B", "no", "yes"), fields(tie_word_embeddings=False), "no language-model head"),
]
DAMAGES: Rows = [
    *(
        (model(weights=kind), truncated(FILES[kind], keep), "{folder}")
        for kind in FILES
        for keep in (0, 0.001, 0.5, 0.999)
    ),
    *(
        (model("modernbert"), unlinked(name), "{folder}")
        for name in ("config.json", FILES["safetensors"], "tokenizer.json")
    ),
    *((model(), text(content), r"config\.json") for content in ("", "{", "[]", '"bert"', "\x00\x01")),
    # Modules
    *((modules(*HEADS, weights=kind), truncated(f"2_Dense/{FILES[kind]}"), "2_Dense.*damaged") for kind in FILES),
    *((modules(*HEADS), unlinked(f"2_Dense/{name}"), "2_Dense") for name in ("model.safetensors", "config.json")),
    (modules(*HEADS), fields("2_Dense/config.json", in_features=47), "47 features, and gets 48"),
    *(
        (model(family), fields(num_hidden_layers=0), "(needs at least one layer|must be at least 1)")
        for family in ("bert", "llama", "gte")
    ),
    (model("distilbert"), fields(n_layers=0), "(needs at least one layer|must be at least 1)"),
    *(
        (modules(), text(content, "modules.json"), r"modules\.json")
        for content in ("", "{}", "[]", "[1]", '[{"idx": 0}]')
    ),
    (modules(), listed(0, 1), "no Pooling"),
    *((modules(), fields(PROMPTS, **wrong), "prompt") for wrong in WRONG_PROMPTS),
    # The modules of an embedder do not fit a config that names another kind of model.
    (modules(), fields(PROMPTS, model_type="CrossEncoder"), "lists Pooling behind a Transformer"),
    *((modules(), fields(PROMPTS, model_type=kind), kind) for kind in ("SparseEncoder", "MultiVectorEncoder")),
    *(
        (modules(*own, style="old"), edit, rf"{name}\b.*millpond does not run")
        for name, other in UNKNOWN.items()
        for own, edit in (((other, POOLING), listed(1)), ((other, POOLING), unchanged), ((POOLING, other), unchanged))
    ),
    *(
        (modules(POOLING, other, style="old"), unchanged, rf"{name} after Pooling, which millpond does not run")
        for name, other in MISPLACED.items()
    ),
    *((modules(POOLING, tiny.Other(dotted=dotted)), unchanged, dotted) for dotted in OWN),
    (modules(POOLING, POOLING), unchanged, "Pooling"),
    *(
        (modules(POOLING, tiny.Dense(out_features=8, activation=name)), unchanged, name.rsplit(".", 1)[-1])
        for name in ACTIVATIONS
    ),
    (modules(style="old"), fields("1_Pooling/config.json", pooling_mode_median_tokens=True), "median"),
    (modules(style="new"), fields("1_Pooling/config.json", pooling_mode="median"), "median"),
    (modules(), fields("1_Pooling/config.json", pooling_mode=[]), "switches every pooling mode off"),
    # After pooling, a module on token rows has no effect on the vector.
    (modules(*AFTER), fields("2_Dense/config.json", **TOKEN_ROWS), "Dense.*token_embeddings"),
    (modules(*AFTER), fields("3_Normalize/config.json", **TOKEN_ROWS), "Normalize.*token_embeddings"),
    # Heads
    (classifier(labels=2), fields(id2label={"0": "low", "2": "high"}), r"indices \[0, 2\].*without a gap"),
    (classifier(labels=2), fields(id2label={"zero": "low", "one": "high"}), "zero"),
    *((classifier("eurobert"), fields(**{key: "median"}), EUROBERT) for key in ("classifier_pooling", "clf_pooling")),
    (classifier("llama-bidirectional"), fields(pooling="median"), f"{MEDIAN}; avg, mean, cls, last are"),
    (classifier("llama-bidirectional"), fields(pooling=None), "pooling None of config.json is unknown"),
    # transformers raises while it loads the tokenizer or the backbone.
    *((classifier("modernbert"), fields(**{key: MISFITS[key]}), key) for key in MISFITS),
    (classifier("modernbert"), fields(classifier_activation="splash"), "activation 'splash' of its head is unknown"),
]
ARCHITECTURES: Rows = [
    (
        model(),
        fields(model_type="gemma3n", architectures=["Gemma3nModel"]),
        "reads images or sound, which millpond does not run; for text load google/embeddinggemma-2",
    ),
    (
        model(),
        fields(model_type="pondformer", architectures=["PondModel"]),
        r"PondModel.*pondformer.*it runs longformer.*for vectors load BAAI/bge-m3",
    ),
    *(
        # A class of a decoder's own most often drops the causal mask; the family's alone gives other vectors.
        (
            model("qwen2"),
            fields(architectures=[claimed], auto_map={"AutoModel": f"modeling_pond.{claimed}"}),
            rf"is a {claimed}, a class that millpond does not know beside Qwen2Model.*is .*Qwen3-Embedding-0.6B.*"
            r'\{"architectures": \["Qwen2Model"\], "auto_map": None, "is_causal": False\}, without is_causal',
        )
        for claimed in ("PondModel", "Qwen2BiModel", "Qwen2ForPond")
    ),
    (model("nomic"), fields(architectures=["NomicVisionModel"]), "a tower for images, .* nomic-ai/nomic-embed-text"),
    (model("electra"), fields(architectures=["ElectraForQuestionAnswering"]), "is an ElectraForQuestionAnswering, ano"),
    *(
        (model(family), fields(architectures=[claimed]), claimed)
        for family in ("bert", "modernbert", "jina", "llama", "qwen3", "gpt2")
        for claimed in (f"{tiny.FAMILIES[family].prefix}For{head}" for head in ("QuestionAnswering", "MultipleChoice"))
    ),
    (model(), fields(position_embedding_type="relative_query"), "relative_query"),
    (model("rembert"), fields(position_embedding_type="relative_key"), "relative_key"),
    (model(), fields(lora_adaptations=["a"]), "lora_adaptations"),
    (model(), fields(is_decoder=True), "is_decoder True, which millpond does not run for BertModel"),
    (model(), fields(add_cross_attention=True), "add_cross_attention True"),
    (model("roberta"), fields(position_embedding_type="rotary"), "rotary"),
    (model("llama"), fields(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
    (model("qwen2"), fields(rope_scaling={"rope_type": "longrope", "factor": 2.0}), "longrope"),
    (model("gemma3"), fields(rope_parameters={"full_attention": {"rope_type": "dynamic", "factor": 2.0}}), "dynamic"),
]
REFUSED = {WeightMismatchError: MISMATCHES, ModelLoadError: DAMAGES, UnsupportedArchitectureError: ARCHITECTURES}


@pytest.mark.parametrize(
    ("error", "write", "edit", "match"), [(error, *row) for error, rows in REFUSED.items() for row in rows]
)
def test_a_checkpoint_is_refused(error, write, edit, match, tmp_path):
    """The error has exactly this class."""
    folder = write(tmp_path / "model")
    edit(folder)
    with pytest.raises(error, match=match.replace("{folder}", str(folder))) as caught:
        load(folder)
    assert caught.type is error


# --- Code of the checkpoint's own must not run: it would leave a file. ------------------------------------------------


def test_a_pickle_that_is_more_than_tensors(tmp_path):
    ran = tmp_path / "ran"

    class Harm:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
            return Path.touch, (ran,)

    folder = tiny.write_checkpoint(tmp_path / "model", weights="bin")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"embeddings.word_embeddings.weight": Harm()}))
    with pytest.raises(ModelLoadError, match=str(folder)):
        load(folder)
    assert not ran.exists()


@pytest.mark.parametrize("native", [False, True])
def test_code_of_the_checkpoints_own(native, tmp_path):
    """The error names the code and, with an architecture of millpond's, the override that leaves it out."""
    folder, trace = tiny.write_checkpoint(tmp_path / "model"), tmp_path / "ran"
    (folder / "modeling_pond.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass PondModel: ...\n")
    own = {"auto_map": {"AutoModel": "modeling_pond.PondModel", "AutoConfig": "modeling_pond.PondConfig"}}
    if native:
        tiny.edit_json(folder / "config.json", **own)
        with pytest.raises(
            UnsupportedArchitectureError, match=r'modeling_pond.PondModel.*bge-base.*\{"auto_map": None\}$'
        ):
            load(folder)
        with load(folder, hf_overrides={"auto_map": None}) as engine:
            assert engine.embed(["a"]).embeddings.shape == (1, 48)
    else:
        tiny.edit_json(folder / "config.json", model_type="pondformer", architectures=["PondModel"], **own)
        with pytest.raises(UnsupportedArchitectureError, match="auto_map"):
            load(folder)
    assert not trace.exists()


# --- Options ---------------------------------------------------------------------------------------------------------


def slot(role: str) -> str:
    return f"{{{{ (messages | selectattr('role', 'eq', '{role}') | first).content }}}}"


NO_TEMPLATE = "is no Jinja|cannot be rendered"
NO_HEAD = r"is it a classifier\?.*convert=\"embed\".*classifier_from_token"


@pytest.mark.parametrize(
    ("error", "write", "options", "match"),
    [
        (ModelLoadError, classifier(), {"pooling": "cls+mean"}, r"pooling='cls\+mean'.*pools one way"),
        *(
            (ModelLoadError, classifier("modernbert"), {"hf_overrides": {key: value}}, key)
            for key, value in (("classifier_pooling", "median"), ("hidden_size", "wide"))
        ),
        *(
            (WeightMismatchError, model(family, wrapped=wrapped), {"convert": "classify"}, NO_HEAD)
            for family in ("bert", "qwen3")
            for wrapped in (False, True)
        ),
        *(
            (InvalidRequestError, classifier(labels=1), {"score_template": slot(other)}, f"has no slot for the {side}")
            for side, other in (("query", "document"), ("document", "query"))
        ),
        (
            InvalidRequestError,
            classifier(labels=1),
            {"score_template": "{{ messages "},
            "is no Jinja|cannot be rendered",
        ),
        (InvalidRequestError, model(), {"score_template": FRAME}, "score_template means nothing to .*; leave it out"),
    ],
)
def test_an_option_is_refused(error, write, options, match, tmp_path):
    with pytest.raises(error, match=match):
        load(write(tmp_path / "model"), **options)


def test_a_token_that_the_vocabulary_does_not_have(tmp_path):
    folder = language_model("Qwen3-Reranker-0.6B", "no")(tmp_path / "model")
    match = r"scores by the token 'yes', which its vocabulary does not have.*hf_overrides=\{\"classifier_from_token\""
    with pytest.raises(ModelLoadError, match=match) as caught:
        load(folder)
    assert caught.type is ModelLoadError
    with pytest.raises(ModelLoadError, match="scores by the token 'perhaps'"):
        load(folder, hf_overrides={"classifier_from_token": ["no", "perhaps"]})
    with load(folder, hf_overrides={"classifier_from_token": ["no"]}) as engine:
        assert "score" in engine.tasks


# --- Tasks -----------------------------------------------------------------------------------------------------------

EMBEDS = "serves embed, token_embed, not"
OTHERS = tuple(f"{task}; load another model" for task in ("token_classify", "reward", "sparse_embed"))
CLASSIFIES = "serves classify, token_classify, not"
BACK = r"or this one with convert=\"embed\""
SCORE = r"score; .*\(a score is one number, and this head has 3: level_0, level_1, .*\)"
# The end of the message: the task, and for some the way out.
WRONG: list[tuple[Write, str, tuple[str, ...]]] = [
    (model(), EMBEDS, (r"classify; load another model, or this one with convert=\"classify\"", *OTHERS)),
    (classifier(), CLASSIFIES, (f"embed; .*{BACK}", f"token_embed; .*{BACK}", SCORE, "reward; load another model")),
    (classifier(labels=1), "serves classify, reward, score, token_classify, not", (r"embed; .*convert=\"embed\"",)),
    (model(head=TOKENS), "serves token_classify, not", ("classify; load another model", "score")),
    (reward("Qwen2ForRewardModel"), "serves embed, reward, token_classify, token_embed, not", ("classify",)),
    (
        model("qwen3", wrapped=True),
        EMBEDS,
        ("reward; load another model, or pass returned_token_ids", "token_classify; load another model"),
    ),
]


@pytest.mark.parametrize(("write", "serves", "ends"), WRONG)
def test_tasks_of_another_model(write, serves, ends, tmp_path):
    """The message lists the checkpoint's tasks and the way out."""
    with load(write(tmp_path / "model")) as engine:
        for end in ends:
            task = end.partition(";")[0]
            with pytest.raises(UnsupportedTaskError, match=f"{serves} {end}"):
                engine.score("a", "b") if task == "score" else getattr(engine, task)(["a"])
            assert task not in engine.tasks


def test_the_suggested_option_works(tmp_path):
    """With ``convert="embed"`` a classifier's backbone embeds; without it, the checkpoint is a classifier again."""
    folder = classifier()(tmp_path / "model")
    with load(folder, convert="embed") as engine:
        assert engine.tasks == {"embed", "token_embed"}
        assert engine.embed(["a"]).embeddings.shape == (1, 48)
    tiny.edit_json(folder / "config.json", architectures=["BertModel"])
    with load(folder) as engine:
        assert engine.tasks == {"embed", "token_embed"}
    with load(folder, convert="classify") as engine:
        assert engine.tasks == {"classify", "token_classify"}


@pytest.mark.parametrize(
    ("write", "call", "match"),
    [
        (reward("Qwen2ForRewardModel"), {"step_tag_id": 5}, "which rewards whole texts"),
        (
            reward("Qwen2ForRewardModel"),
            {"returned_token_ids": [3]},
            "returned_token_ids holds 3; the columns of .* run from 0 to 0",
        ),
        (classifier(labels=1), {"step_tag_id": 5}, "which rewards whole texts"),
    ],
)
def test_steps_of_a_model_that_has_none(write, call, match, tmp_path):
    with load(write(tmp_path / "model")) as engine, pytest.raises(InvalidRequestError, match=match):
        engine.reward(["a"], **call)
