"""The rows of the comparison with vLLM: checkpoints, tasks and options of both engines."""

from __future__ import annotations

from typing import Any

from tests.parity.vllm_row import LONG, Row, nomic, plain
from tests.tiny import SENTENCES, Dense, Layout, Normalize, Pooling
from tests.tiny.heads import headed, linears

PAIRS = (
    ("How deep is it?", "The wheel."),
    (SENTENCES[10], SENTENCES[1]),
    (SENTENCES[10], SENTENCES[8]),
    ("a", "b"),
    ("Who wrote the level in a book?", SENTENCES[8] + " " + SENTENCES[9]),
)
_ENCODER = {"hidden_size": 64, "num_attention_heads": 2}
_DECODER = {**_ENCODER, "num_key_value_heads": 1, "head_dim": 32}
_GPT2 = {"n_embd": 64, "n_head": 2}
_DECODERS = ("llama", "mistral", "qwen", "gemma", "internlm2")
_PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "gpt2": "transformer.", "gte": "new."}
_LABELS = {"id2label": {"0": "low", "1": "high", "2": "flood"}, "label2id": {"low": 0, "high": 1, "flood": 2}}
_ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_STEP = "<extra_0>"
_STEPS = (
    f"Open the gate.{_STEP} The wheel turns.{_STEP}",
    f"Two sacks.{_STEP} Three sacks and a half.{_STEP} {SENTENCES[4]}{_STEP}",
    f"a{_STEP}",
)

# Prompts of the model cards. The final newlines are printed by expressions, because Jinja drops a template's last one.
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {{ messages[0].content }}\n<Document>: {{ messages[1].content }}<|im_end|>\n"
    '<|im_start|>assistant\n<think>\n\n</think>{{ "\\n\\n" }}'
)
_MXBAI = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nquery: {{ messages[0].content }}\ndocument: {{ messages[1].content }}\n"
    "You are a search relevance expert who evaluates how well documents match search queries. For each "
    "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
    "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant{{ '\\n' }}"
)
_GEMMA = (
    "A: {{ messages[0].content }}\nB: {{ messages[1].content }}\nGiven a query A and a passage B, determine whether "
    "the passage contains an answer to the query by providing a prediction of either 'Yes' or 'No'."
)
_NEMOTRON = "question:{{ messages[0].content }} \n \n passage:{{ messages[1].content }}"


_MEAN = Layout(modules=(Pooling(modes=("mean",)), Normalize()), style="old", max_seq_length=64)
_DENSE = Layout(modules=(Pooling(modes=("mean",)), Dense(out_features=24), Normalize()), max_seq_length=64)
_LAST = Layout(modules=(Pooling(modes=("lasttoken",)), Normalize()), max_seq_length=64)
_BERT_HEAD, _ONE_BERT_HEAD = (linears(("bert.pooler.dense", 64, 64), ("classifier", rows, 64)) for rows in (3, 1))
_ROBERTA_HEAD = linears(("classifier.dense", 64, 64), ("classifier.out_proj", 1, 64))
_MODERN_HEAD = {"head.dense.weight": (64, 64), "head.norm.weight": (64,)}
_SCORES = {"score.weight": (3, 64)}
_NAMED = {"config": _LABELS}
_TOKENS = linears(("classifier", 3, 64))
_PRM_HEAD, _RM_HEAD = (linears(("score.0", 64, 64), ("score.2", rows, 64)) for rows in (2, 1))
_RAW = {"use_activation": False}
_IDENTITY, _SIGMOID = (
    {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{name}"}}
    for name in ("linear.Identity", "activation.Sigmoid")
)
_MEAN_OF_VLLM = {"pooler_config": {"pooling_type": "MEAN"}}
_NEW: dict[str, Any] = {"configuration": "NewConfig"}
_AS_IS = {"template": "$A"}  # the tokenizer adds nothing around a template


def _override(architecture: str, **more: Any) -> dict[str, Any]:
    return {"hf_overrides": {"architectures": [architecture], **more}}


def _size(family: str) -> dict[str, Any]:
    return _GPT2 if family == "gpt2" else _DECODER if family.startswith(_DECODERS) else _ENCODER


def embed(name: str, family: str = "", written: Any = None, task: str = "embed", **row: Any) -> Row:
    """A plain checkpoint, ``written`` with these options."""
    family = family or name
    return Row(name=name, task=task, write=plain(family, _size(family), **(written or {})), **row)


def head(name: str, task: str, family: str, architecture: str, tensors: Any, written: Any = None, **row: Any) -> Row:
    """A checkpoint of this class, with the tensors of a head."""
    options = {"prefix": _PREFIXES.get(family, "model."), **(written or {})}
    size = _size(family) | ({} if task != "score" else {"max_position_embeddings": LONG + 2 * (family[:3] == "xlm")})
    return Row(name=name, task=task, write=headed(family, size, architecture, tensors, **options), **row)


def score(name: str, family: str, architecture: str, tensors: Any, written: Any = None, **row: Any) -> Row:
    """A reranker; texts and templates may be longer than elsewhere."""
    options = {"tokenizer_limit": LONG, **(written or {})}
    options["config"] = (_ONE if tensors else {}) | options.get("config", {})
    row["vllm"] = {"max_model_len": LONG, **row.get("vllm", {})}
    return head(name, "score", family, architecture, tensors, options, inputs=PAIRS, **row)


EMBED = (
    embed("bert-cls", "bert", mistake={"layer_norm_eps": 0.1}),
    embed("bert-mean", "bert", {"sentence_transformers": _MEAN}),
    embed("bert-mean-dense", "bert", {"sentence_transformers": _DENSE}),
    embed(
        "bert-matryoshka",
        "bert",
        {"config": {"is_matryoshka": True}},
        params={"dimensions": 32},
        call={"dimensions": 32},
        mistaken_call={"dimensions": 32, "normalize": False},
    ),
    *(embed(name) for name in ("roberta", "xlm-roberta", "llama", "mistral", "qwen2", "qwen3", "gpt2")),
    embed("modernbert", mistake={"local_attention": 32}),
    embed("mistral-sliding", mistake={"sliding_window": None}),
    embed("qwen2-bidirectional", mistake={"is_causal": True}),
    # As Qwen3-Embedding: the class is a language model, modules.json makes it an embedder.
    embed("qwen3-causal-lm", "qwen3", {"wrapped": True, "sentence_transformers": _LAST}),
    embed("gemma2", mistake={"attn_logit_softcapping": None}),
    embed("gemma3-bidirectional", mistake={"use_bidirectional_attention": False}),
    embed("llama-bidirectional", mistake={"pooling": "cls"}, configuration="LlamaBidirectionalConfig"),
    Row(
        name="nomic",
        task="embed",
        mistake={"rotary_emb_base": 10000},
        write=nomic,
        vllm=_MEAN_OF_VLLM,
        configuration="NomicBertConfig",
        configured_as="GPT2Config",
    ),
    embed("gte-new", "gte", mistake={"rope_scaling": None}, vllm=_override("GteNewModel"), **_NEW),
    embed("gte-new-en", "gte-en", vllm=_override("GteNewModel"), **_NEW),
    embed("gte-snowflake", configuration="GteConfig"),
    embed(
        "jina-v3-text-matching",
        "jina",
        mistaken_call={"adapter": "separation"},
        vllm=_MEAN_OF_VLLM,
        call={"adapter": "text-matching"},
        configuration="XLMRobertaFlashConfig",
    ),
    embed("qwen3-tokens", "qwen3", task="token_embed"),
    embed("bert-tokens", "bert", task="token_embed"),
)

CLASSIFY = (
    head("bert-classifier", "classify", "bert", "BertForSequenceClassification", _BERT_HEAD, _NAMED),
    head(
        "bert-multi-label",
        "classify",
        "bert",
        "BertForSequenceClassification",
        _BERT_HEAD,
        {"config": {**_LABELS, "problem_type": "multi_label_classification"}},
        mistake={"problem_type": "single_label_classification"},
    ),
    *(
        head(f"{family}-classifier", "classify", family, f"{name}ForSequenceClassification", _SCORES, _NAMED)
        for family, name in (("qwen2", "Qwen2"), ("gpt2", "GPT2"))
    ),
    *(
        head(f"{family}-tokens-classifier", "token_classify", family, f"{name}ForTokenClassification", tensors, _NAMED)
        for family, name, tensors in (
            ("bert", "Bert", _TOKENS),
            ("roberta", "Roberta", _TOKENS),
            ("modernbert", "ModernBert", {**_MODERN_HEAD, **_TOKENS}),
        )
    ),
)

SCORE = (
    score(
        "bert-reranker",
        "bert",
        "BertForSequenceClassification",
        _ONE_BERT_HEAD,
        {"config": _IDENTITY},
        mistake=_SIGMOID,
    ),
    score("xlm-roberta-reranker", "xlm-roberta", "XLMRobertaForSequenceClassification", _ROBERTA_HEAD),
    score(
        "modernbert-reranker",
        "modernbert",
        "ModernBertForSequenceClassification",
        {**_MODERN_HEAD, **linears(("classifier", 1, 64))},
    ),
    score(
        "qwen3-reranker",
        "qwen3",
        "Qwen3ForCausalLM",
        {},
        {"wrapped": True, "tokens": ("no", "yes"), **_AS_IS},
        mistake={"classifier_from_token": ["yes", "no"]},
        vllm=_override(
            "Qwen3ForSequenceClassification",
            classifier_from_token=["no", "yes"],
            is_original_qwen3_reranker=True,
        ),
        template=_QWEN3,
    ),
    score(
        "qwen3-reranker-seq-cls",
        "qwen3",
        "Qwen3ForSequenceClassification",
        {"score.weight": (1, 64)},
        _AS_IS,
        template=_QWEN3,
    ),
    score(
        "mxbai-rerank-base-v2",
        "qwen2",
        "Qwen2ForCausalLM",
        {},
        {"wrapped": True, **_AS_IS},
        vllm=_override("Qwen2ForSequenceClassification", classifier_from_token=["0", "1"], method="from_2_way_softmax"),
        template=_MXBAI,
    ),
    score(
        "bge-reranker-v2-gemma",
        "gemma",
        "GemmaForCausalLM",
        {},
        {"wrapped": True, "tokens": ("Yes",)},
        vllm=_override("GemmaForSequenceClassification", classifier_from_token=["Yes"], method="no_post_processing"),
        params=_RAW,
        template=_GEMMA,
    ),
    score(
        "llama-nemotron-rerank-1b-v2",
        "llama-bidirectional",
        "LlamaBidirectionalForSequenceClassification",
        {"score.weight": (1, 64)},
        template=_NEMOTRON,
        configuration="LlamaBidirectionalConfig",
    ),
    score(
        "gte-new-reranker",
        "gte",
        "NewForSequenceClassification",
        linears(("new.pooler.dense", 64, 64), ("classifier", 1, 64)),
        vllm=_override("GteNewForSequenceClassification"),
        **_NEW,
    ),
)


def reward(name: str, family: str, architecture: str, tensors: Any, written: Any = None, **row: Any) -> Row:
    return head(name, "token_classify", family, architecture, tensors, written, ours="reward", **row)


REWARD = (
    reward(
        "internlm2-reward",
        "internlm2",
        "InternLM2ForRewardModel",
        {"v_head.weight": (1, 64)},
        last=True,
        params=_RAW,
        mistake={"rope_theta": 100},
        configuration="InternLM2Config",
    ),
    reward("qwen2-reward", "qwen2", "Qwen2ForRewardModel", _RM_HEAD, _AS_IS, last=True),
    reward(
        "qwen2-process-reward",
        "qwen2",
        "Qwen2ForProcessRewardModel",
        _PRM_HEAD,
        {"tokens": (_STEP,), **_AS_IS},
        inputs=_STEPS,
        params=_RAW,
        mistaken_call={"activation": "softmax"},
        step=_STEP,
    ),
)

ROWS = (*EMBED, *CLASSIFY, *SCORE, *REWARD)
