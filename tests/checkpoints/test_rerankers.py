"""Which checkpoints are rerankers, and by which template and tokens, by their names, files and overrides."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import Layout, Pooling, edit_json, write_checkpoint

from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.layouts.cross_encoder import is_cross_encoder, read_cross_encoder
from millpond.checkpoints.rerankers import Reranker, check_unknown, detect_reranker
from millpond.errors import ModelLoadError, UnsupportedArchitectureError

PAIRWISE = (
    "{{ bos_token }}{{ (messages | selectattr('role', 'eq', 'query') | first).content }} ? "
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }} !"
)
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"


def repository(folder: Path, model_type: str, architecture: str, **config: Any) -> Path:
    folder.mkdir(parents=True)
    content = {"model_type": model_type, "architectures": [architecture], "hidden_size": 8, **config}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def detect(folder: Path, **overrides: Any) -> Reranker | None:
    return detect_reranker(read_checkpoint(folder, hf_overrides=overrides or None))


@pytest.mark.parametrize(
    ("name", "model_type", "tokens", "difference", "activation", "begins"),
    [
        ("Qwen3-Reranker-0.6B", "qwen3", ("no", "yes"), True, "sigmoid", "<|im_start|>system\nJudge"),
        ("mxbai-rerank-base-v2", "qwen2", ("0", "1"), True, "sigmoid", "<|im_start|>system\nYou are Qwen"),
        ("bge-reranker-v2-gemma", "gemma", ("Yes",), False, "identity", "A: q\nB: d\nGiven"),
        ("zerank-1-small", "qwen3", ("Yes",), False, "sigmoid", "<|im_start|>system\nq<|im_end|>"),
        ("ctxl-rerank-v2-instruct-multilingual-6b", "mistral", (0,), False, "identity", "Check whether"),
    ],
)
def test_language_models_that_rerank_are_known_by_name(
    tmp_path, name, model_type, tokens, difference, activation, begins
):
    reranker = detect(repository(tmp_path / name, model_type, f"{model_type.capitalize()}ForCausalLM"))
    assert reranker.template.render("q", "d").startswith(begins)
    assert (reranker.tokens, reranker.activation) == (tokens, activation)
    assert reranker.method == ("from_2_way_softmax" if difference else "no_post_processing")
    # Under a name that means nothing the same files are a plain language model.
    assert detect(repository(tmp_path / "other", model_type, f"{model_type.capitalize()}ForCausalLM")) is None


@pytest.mark.parametrize(
    ("name", "model_type", "architecture", "template"),
    [
        ("Qwen3-Reranker-0.6B-seq-cls", "qwen3", "Qwen3ForSequenceClassification", "qwen3-reranker"),
        ("llama-nemotron-rerank-1b-v2", "llama_bidirec", "LlamaBidirectionalForSequenceClassification", "nemotron"),
        ("anything", "llama_bidirec", "LlamaBidirectionalForSequenceClassification", "nemotron"),
        ("llama-3.2-nv-rerankqa-1b-v2", "llama", "LlamaForSequenceClassification", "nemotron"),
    ],
)
def test_score_heads_keep_their_family_s_template(tmp_path, name, model_type, architecture, template):
    reranker = detect(repository(tmp_path / name, model_type, architecture))
    assert reranker.template.name.startswith(template)
    assert reranker.tokens == ()


@pytest.mark.parametrize(
    ("name", "model_type", "architecture"),
    [
        ("Qwen3-Embedding-0.6B", "qwen3", "Qwen3ForCausalLM"),
        ("Qwen3-0.6B", "qwen3", "Qwen3ForCausalLM"),
        ("my-Qwen3-Reranker-notes", "qwen3", "Qwen3ForCausalLM"),
        ("Qwen3-Reranker-0.6B", "llama", "LlamaForCausalLM"),
        ("Qwen3-Reranker-0.6B", "qwen3", "Qwen3Model"),
        ("bge-reranker-v2-m3", "xlm-roberta", "XLMRobertaForSequenceClassification"),
        ("llama-nemotron-embed-1b-v2", "llama_bidirec", "LlamaBidirectionalModel"),
        ("Skywork-Reward-V2-Llama-3.2-1B", "llama", "LlamaForSequenceClassification"),
    ],
)
def test_other_checkpoints_are_not_rerankers(tmp_path, name, model_type, architecture):
    assert detect(repository(tmp_path / name, model_type, architecture)) is None


@pytest.mark.parametrize(
    "card",
    [
        "---\nbase_model: Qwen/Qwen3-Reranker-0.6B\n---\n# Mine\n",
        "---\nlicense: mit\nbase_model:\n- org/unrelated\n- Qwen/Qwen3-Reranker-4B\n---\n",
        "---\nlicense: mit\n---\nSome words.\n\n# Qwen3-Reranker-0.6B\n",
        "---\npipeline_tag: text-ranking\n---\n# Hello\nmodel = load('Qwen/Qwen3-Reranker-8B')\n",
    ],
)
def test_a_model_card_names_the_family_if_the_folder_does_not(tmp_path, card):
    folder = repository(tmp_path / "model", "qwen3", "Qwen3ForCausalLM")
    (folder / "README.md").write_text(card, encoding="utf-8")
    reranker = detect(folder)
    assert reranker.tokens == ("no", "yes")


@pytest.mark.parametrize(
    "card",
    [
        "---\nbase_model: Qwen/Qwen3-0.6B-Base\npipeline_tag: feature-extraction\n---\n"
        "# Qwen3-Embedding-0.6B\nSee also Qwen3-Reranker-0.6B.\n",
        "---\npipeline_tag: text-ranking\n---\n# Mine\nBetter than my-Qwen3-Reranker.\n",
        "No front matter, and Qwen3-Reranker-0.6B in passing.\n",
    ],
)
def test_a_card_that_mentions_a_reranker_is_not_one(tmp_path, card):
    folder = repository(tmp_path / "model", "qwen3", "Qwen3ForCausalLM")
    (folder / "README.md").write_text(card, encoding="utf-8")
    assert detect(folder) is None


@pytest.mark.parametrize(
    ("matter", "task"),
    [
        ("pipeline_tag: text-ranking", "text-ranking"),
        ('pipeline_tag: "text-classification"', "text-classification"),
        ("tags:\n- finance\n- text-ranking", "text-ranking"),
        ("tags: [reranker, text-ranking]\npipeline_tag: text-generation", "text-ranking"),
        ("tags: [\n  finance,\n  text-ranking\n]\nlicense: mit", "text-ranking"),
        ("tags:\n# of its kind\n- finance\n\n- text-ranking  # yes\nlicense: mit", "text-ranking"),
        ("pipeline_tag : >-\n  text-ranking", "text-ranking"),
        ("tags:\n- qwen3\n- reranker", "reranking"),
        ("tags:\n- embeddings\n- reranker", None),
        ("tags:\n- finance\nlicense: mit\nlanguage:\n- text-ranking", None),
        ("tags:\n  - text-ranking\npipeline_tag: feature-extraction", None),
        ("tags:\n- sentence-similarity\n- text-classification", None),
        ("pipeline_tag: text-generation\ndescription: text-ranking", None),
    ],
)
def test_a_language_model_of_a_ranking_card_is_refused(tmp_path, matter, task):
    folder = repository(tmp_path / "model", "qwen3", "Qwen3ForCausalLM")
    card = f"---\n{matter}\n---\n# Mine\nBetter than Qwen/Qwen3-Reranker-8B.\n"
    (folder / "README.md").write_text(card, encoding="utf-8")
    assert detect(folder) is None
    if task is None:
        return check_unknown(read_checkpoint(folder))
    with pytest.raises(UnsupportedArchitectureError, match=f"a language model for {task}, as its README.md says"):
        check_unknown(read_checkpoint(folder))
    return None


@pytest.mark.parametrize("begins", ["\ufeff---\n", "\n---\n", "---  \n", "---\r\n"])
@pytest.mark.parametrize("ends", ["\n---", "\n--- \n# Mine\n", "\r\n---\r\n"])
def test_front_matter_as_the_hub_reads_it(tmp_path, begins, ends):
    folder = repository(tmp_path / "model", "qwen3", "Qwen3ForCausalLM")
    (folder / "README.md").write_bytes(f"{begins}pipeline_tag: text-ranking{ends}".encode())
    with pytest.raises(UnsupportedArchitectureError, match="a language model for text-ranking"):
        check_unknown(read_checkpoint(folder))


@pytest.mark.parametrize("name", ["PondRerank-1B", "models--someone--pond-reranker/snapshots/0a1b"])
def test_a_language_model_of_a_reranker_s_name_is_refused_too(tmp_path, name):
    folder = repository(tmp_path / name, "qwen3", "Qwen3ForCausalLM")
    with pytest.raises(UnsupportedArchitectureError, match="a language model for reranking, as its name says"):
        check_unknown(read_checkpoint(folder))


def test_its_own_name_has_precedence_over_its_card(tmp_path):
    folder = repository(tmp_path / "zerank-2", "qwen3", "Qwen3ForCausalLM")
    card = "---\npipeline_tag: text-ranking\nbase_model: Qwen/Qwen3-Reranker-4B\n---\n"
    (folder / "README.md").write_text(card, encoding="utf-8")
    assert detect(folder).divisor == 5.0


def test_the_config_and_the_hub_s_cache_folder_give_the_name_too(tmp_path):
    by_config = repository(tmp_path / "model", "qwen2", "Qwen2ForCausalLM", _name_or_path="x/mxbai-rerank-large-v2")
    cached = repository(
        tmp_path / "models--mixedbread-ai--mxbai-rerank-base-v2" / "snapshots" / "0a1b", "qwen2", "Qwen2ForCausalLM"
    )
    for folder in (by_config, cached):
        reranker = detect(folder)
        assert reranker.tokens == ("0", "1")


@pytest.mark.parametrize(
    ("architecture", "tokens"), [("Qwen3ForCausalLM", ("no", "yes")), ("Qwen3ForSequenceClassification", ())]
)
def test_a_checkpoint_with_a_chat_template_for_pairs_is_a_reranker(tmp_path, architecture, tokens):
    folder = repository(tmp_path / "model", "qwen3", architecture)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}', encoding="utf-8")
    for source in (CHATML, "{{ messages[0].content }}", "{{ broken"):
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        assert detect(folder) is None
    (folder / "chat_template.jinja").write_text(PAIRWISE, encoding="utf-8")
    reranker = detect(folder)
    assert reranker.template.render("q", "d") == "<s>q ? d !"
    assert not reranker.template.special_tokens
    assert reranker.tokens == tokens


def test_overrides_have_precedence(tmp_path):
    folder = repository(tmp_path / "model", "qwen3", "Qwen3ForCausalLM")
    original = detect(folder, is_original_qwen3_reranker=True)
    assert (original.template.name, original.tokens) == ("qwen3-reranker", ("no", "yes"))
    assert original.method == "from_2_way_softmax"
    one = detect(folder, classifier_from_token=["Yes"])
    assert one == Reranker(template=None, tokens=("Yes",), method="no_post_processing")
    three = detect(folder, classifier_from_token=["a", "b", "c"], method="no_post_processing")
    assert (three.tokens, three.method, three.activation) == (("a", "b", "c"), "no_post_processing", "softmax")
    named = repository(tmp_path / "Qwen3-Reranker-0.6B", "qwen3", "Qwen3ForCausalLM")
    overridden = detect(
        named, classifier_from_token=["false", "true"], architectures=["Qwen3ForSequenceClassification"]
    )
    assert (overridden.template.name, overridden.tokens) == ("qwen3-reranker", ("false", "true"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"classifier_from_token": [1, 2]}, "must be a list of tokens"),
        ({"classifier_from_token": []}, "must be a list of tokens"),
        ({"classifier_from_token": ["a"], "method": "from_2_way_softmax"}, "must be two tokens, the false one first"),
        ({"classifier_from_token": ["a", "b"], "method": "mean"}, "method='mean' is unknown; choose from_2_way"),
    ],
)
def test_invalid_overrides_are_refused(tmp_path, overrides, message):
    folder = repository(tmp_path / "model", "qwen3", "Qwen3ForCausalLM")
    with pytest.raises(ModelLoadError, match=message):
        detect(folder, **overrides)


def test_an_embedder_s_modules_have_precedence_over_its_name(tmp_path):
    folder = write_checkpoint(
        tmp_path / "Qwen3-Reranker-tuned", "qwen3", sentence_transformers=Layout(modules=(Pooling(),), style="new")
    )
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    assert detect(folder) is None
    (folder / "modules.json").unlink()
    assert detect(folder) is not None


# sentence-transformers' cross-encoders


def language_model(tmp_path: Path, template: str | None = PAIRWISE, **logit_score: Any) -> Path:
    """A Transformer with a LogitScore, saved by sentence-transformers."""
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder import CrossEncoder as Theirs
    from sentence_transformers.cross_encoder.modules import LogitScore

    source = write_checkpoint(tmp_path / "qwen3", "qwen3", wrapped=True, template="$A")
    if template is not None:
        (source / "chat_template.jinja").write_text(template, encoding="utf-8")
    options = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True, "restore_suffix": True}}}
    module = Transformer(str(source), transformer_task="text-generation", **options)
    theirs = Theirs(modules=[module, LogitScore(**logit_score)], prompts={"ask": "Find it"}, device="cpu")
    theirs.default_prompt_name = "ask"
    theirs.save_pretrained(str(tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.mark.torch
def test_a_language_model_with_logit_score(tmp_path):
    folder = language_model(tmp_path, true_token_id=7, false_token_id=5)
    assert is_cross_encoder(folder)
    cross_encoder = read_cross_encoder(folder)
    assert (cross_encoder.kind, cross_encoder.tokens, cross_encoder.activation) == (
        "text-generation",
        (5, 7),
        "sigmoid",
    )
    assert cross_encoder.template.instruction == "Find it"
    assert cross_encoder.prompt == ""
    assert cross_encoder.template.variables["add_generation_prompt"] is True
    assert "restore_suffix" not in cross_encoder.template.variables
    assert cross_encoder.template.bound({"bos_token": ""}).render("q", "d") == "q ? d !"
    assert not cross_encoder.template.special_tokens
    edit_json(next(folder.glob("1_*/config.json")), false_token_id=None)
    assert read_cross_encoder(folder).tokens == (7,)
    edit_json(next(folder.glob("1_*/config.json")), true_token_id="yes")
    with pytest.raises(ModelLoadError, match="must give true_token_id"):
        read_cross_encoder(folder)


@pytest.mark.torch
def test_its_template_must_render_both_texts(tmp_path):
    half = "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}"
    folder = language_model(tmp_path, template=half, true_token_id=7)
    with pytest.raises(ModelLoadError, match="has no slot for the document; pass a score_template"):
        read_cross_encoder(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelLoadError, match="has no chat template 'default'"):
        read_cross_encoder(folder)


@pytest.mark.torch
def test_without_a_chat_template_it_reads_the_tokenizer_s_pairs(tmp_path):
    cross_encoder = read_cross_encoder(language_model(tmp_path, template=None, true_token_id=7))
    assert (cross_encoder.template, cross_encoder.prompt, cross_encoder.tokens) == (None, "Find it", (7,))


def encoder_with_dense(tmp_path) -> Path:
    """An ettin reranker, saved by sentence-transformers."""
    import torch
    from sentence_transformers.base.modules import Dense as TheirDense
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder import CrossEncoder as Theirs
    from sentence_transformers.sentence_transformer.modules import LayerNorm as TheirLayerNorm
    from sentence_transformers.sentence_transformer.modules import Pooling as TheirPooling

    source = write_checkpoint(tmp_path / "modernbert", "modernbert")
    modules = [
        Transformer(str(source)),
        TheirPooling(48, pooling_mode="cls"),
        TheirDense(48, 48, bias=False, activation_function=torch.nn.SiLU()),
        TheirLayerNorm(48),
        TheirDense(48, 1, activation_function=torch.nn.Identity(), module_output_name="scores"),
    ]
    Theirs(modules=modules, device="cpu").save_pretrained(str(tmp_path / "saved"))
    return tmp_path / "saved"


@pytest.mark.torch
def test_modules_that_are_not_run_are_refused_by_name(tmp_path):
    folder = encoder_with_dense(tmp_path)
    listed = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    (folder / "modules.json").write_text(json.dumps(listed[:2]), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"lists Pooling behind a Transformer for feature-extraction"):
        read_cross_encoder(folder)
    strange = {"idx": 3, "name": "3b", "path": "", "type": "sentence_transformers.base.modules.router.Router"}
    (folder / "modules.json").write_text(json.dumps([*listed[:4], strange, listed[4]]), encoding="utf-8")
    with pytest.raises(ModelLoadError, match="lists Router after Pooling"):
        read_cross_encoder(folder)
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    edit_json(folder / "sentence_bert_config.json", transformer_task="fill-mask")
    with pytest.raises(ModelLoadError, match="is for 'fill-mask', from which millpond scores no pairs"):
        read_cross_encoder(folder)
