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


def _override(architecture: str, **more: Any) -> dict[str, Any]:
    return {"hf_overrides": {"architectures": [architecture], **more}}


_MEAN = Layout(modules=(Pooling(modes=("mean",)), Normalize()), style="old", max_seq_length=64)
_DENSE = Layout(modules=(Pooling(modes=("mean",)), Dense(out_features=24), Normalize()), max_seq_length=64)
_LAST = Layout(modules=(Pooling(modes=("lasttoken",)), Normalize()), max_seq_length=64)
_BERT_POOLER = ("bert.pooler.dense", 64, 64)
_ROBERTA_HEAD = linears(("classifier.dense", 64, 64), ("classifier.out_proj", 1, 64))
_MODERN_HEAD = {"head.dense.weight": (64, 64), "head.norm.weight": (64,)}
_PRM_HEAD = linears(("score.0", 64, 64), ("score.2", 2, 64))
_RM_HEAD = linears(("score.0", 64, 64), ("score.2", 1, 64))
_RAW = {"use_activation": False}
_IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
_RERANKER: dict[str, Any] = {"template": "$A", "tokenizer_limit": LONG}
_LONG_DECODER = {**_DECODER, "max_position_embeddings": LONG}

EMBED = (
    Row(name="bert-cls", task="embed", mistake={"layer_norm_eps": 0.1}, write=plain("bert", _ENCODER)),
    Row(name="bert-mean", task="embed", write=plain("bert", _ENCODER, sentence_transformers=_MEAN)),
    Row(name="bert-mean-dense", task="embed", write=plain("bert", _ENCODER, sentence_transformers=_DENSE)),
    Row(
        name="bert-matryoshka",
        task="embed",
        write=plain("bert", _ENCODER, config={"is_matryoshka": True}),
        params={"dimensions": 32},
        call={"dimensions": 32},
        mistaken_call={"dimensions": 32, "normalize": False},
    ),
    Row(name="roberta", task="embed", write=plain("roberta", _ENCODER)),
    Row(name="xlm-roberta", task="embed", write=plain("xlm-roberta", _ENCODER)),
    Row(name="modernbert", task="embed", mistake={"local_attention": 32}, write=plain("modernbert", _ENCODER)),
    Row(name="llama", task="embed", write=plain("llama", _DECODER)),
    Row(name="mistral", task="embed", write=plain("mistral", _DECODER)),
    Row(
        name="mistral-sliding",
        task="embed",
        mistake={"sliding_window": None},
        write=plain("mistral-sliding", _DECODER),
    ),
    Row(name="qwen2", task="embed", write=plain("qwen2", _DECODER)),
    Row(
        name="qwen2-bidirectional",
        task="embed",
        mistake={"is_causal": True},
        write=plain("qwen2-bidirectional", _DECODER),
    ),
    Row(
        name="qwen3-causal-lm",  # as Qwen3-Embedding: the class is a language model, modules.json makes it an embedder
        task="embed",
        write=plain("qwen3", _DECODER, wrapped=True, sentence_transformers=_LAST),
    ),
    Row(name="qwen3", task="embed", write=plain("qwen3", _DECODER)),
    Row(name="gemma2", task="embed", mistake={"attn_logit_softcapping": None}, write=plain("gemma2", _DECODER)),
    Row(
        name="gemma3-bidirectional",
        task="embed",
        mistake={"use_bidirectional_attention": False},
        write=plain("gemma3-bidirectional", _DECODER),
    ),
    Row(name="gpt2", task="embed", write=plain("gpt2", _GPT2)),
    Row(
        name="llama-bidirectional",
        task="embed",
        mistake={"pooling": "cls"},
        write=plain("llama-bidirectional", _DECODER),
        configuration="LlamaBidirectionalConfig",
    ),
    Row(
        name="nomic",
        task="embed",
        mistake={"rotary_emb_base": 10000},
        write=nomic,
        vllm={"pooler_config": {"pooling_type": "MEAN"}},
        configuration="NomicBertConfig",
        configured_as="GPT2Config",
    ),
    Row(
        name="gte-new",
        task="embed",
        mistake={"rope_scaling": None},
        write=plain("gte", _ENCODER),
        vllm=_override("GteNewModel"),
        configuration="NewConfig",
    ),
    Row(
        name="gte-new-en",
        task="embed",
        write=plain("gte-en", _ENCODER),
        vllm=_override("GteNewModel"),
        configuration="NewConfig",
    ),
    Row(name="gte-snowflake", task="embed", write=plain("gte-snowflake", _ENCODER), configuration="GteConfig"),
    Row(
        name="jina-v3-text-matching",
        task="embed",
        mistaken_call={"adapter": "separation"},
        write=plain("jina", _ENCODER),
        vllm={"pooler_config": {"pooling_type": "MEAN"}},
        call={"adapter": "text-matching"},
        configuration="XLMRobertaFlashConfig",
    ),
    Row(name="qwen3-tokens", task="token_embed", write=plain("qwen3", _DECODER)),
    Row(name="bert-tokens", task="token_embed", write=plain("bert", _ENCODER)),
)

CLASSIFY = (
    Row(
        name="bert-classifier",
        task="classify",
        write=headed(
            "bert",
            _ENCODER,
            "BertForSequenceClassification",
            linears(_BERT_POOLER, ("classifier", 3, 64)),
            prefix="bert.",
            config=_LABELS,
        ),
    ),
    Row(
        name="bert-multi-label",
        task="classify",
        mistake={"problem_type": "single_label_classification"},
        write=headed(
            "bert",
            _ENCODER,
            "BertForSequenceClassification",
            linears(_BERT_POOLER, ("classifier", 3, 64)),
            prefix="bert.",
            config={**_LABELS, "problem_type": "multi_label_classification"},
        ),
    ),
    Row(
        name="qwen2-classifier",
        task="classify",
        write=headed(
            "qwen2",
            _DECODER,
            "Qwen2ForSequenceClassification",
            {"score.weight": (3, 64)},
            prefix="model.",
            config=_LABELS,
        ),
    ),
    Row(
        name="gpt2-classifier",
        task="classify",
        write=headed(
            "gpt2",
            _GPT2,
            "GPT2ForSequenceClassification",
            {"score.weight": (3, 64)},
            prefix="transformer.",
            config=_LABELS,
        ),
    ),
    Row(
        name="bert-tokens-classifier",
        task="token_classify",
        write=headed(
            "bert",
            _ENCODER,
            "BertForTokenClassification",
            linears(("classifier", 3, 64)),
            prefix="bert.",
            config=_LABELS,
        ),
    ),
    Row(
        name="roberta-tokens-classifier",
        task="token_classify",
        write=headed(
            "roberta",
            _ENCODER,
            "RobertaForTokenClassification",
            linears(("classifier", 3, 64)),
            prefix="roberta.",
            config=_LABELS,
        ),
    ),
    Row(
        name="modernbert-tokens-classifier",
        task="token_classify",
        write=headed(
            "modernbert",
            _ENCODER,
            "ModernBertForTokenClassification",
            {**_MODERN_HEAD, **linears(("classifier", 3, 64))},
            prefix="model.",
            config=_LABELS,
        ),
    ),
)

SCORE = (
    Row(
        name="bert-reranker",
        task="score",
        inputs=PAIRS,
        mistake={"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
        write=headed(
            "bert",
            {**_ENCODER, "max_position_embeddings": LONG},
            "BertForSequenceClassification",
            linears(_BERT_POOLER, ("classifier", 1, 64)),
            prefix="bert.",
            config={**_ONE, **_IDENTITY},
            tokenizer_limit=LONG,
        ),
        vllm={"max_model_len": LONG},
    ),
    Row(
        name="xlm-roberta-reranker",
        task="score",
        inputs=PAIRS,
        write=headed(
            "xlm-roberta",
            {**_ENCODER, "max_position_embeddings": LONG + 2},
            "XLMRobertaForSequenceClassification",
            _ROBERTA_HEAD,
            prefix="roberta.",
            config=_ONE,
            tokenizer_limit=LONG,
        ),
        vllm={"max_model_len": LONG},
    ),
    Row(
        name="modernbert-reranker",
        task="score",
        inputs=PAIRS,
        write=headed(
            "modernbert",
            {**_ENCODER, "max_position_embeddings": LONG},
            "ModernBertForSequenceClassification",
            {**_MODERN_HEAD, **linears(("classifier", 1, 64))},
            prefix="model.",
            config=_ONE,
            tokenizer_limit=LONG,
        ),
        vllm={"max_model_len": LONG},
    ),
    Row(
        name="qwen3-reranker",
        task="score",
        inputs=PAIRS,
        mistake={"classifier_from_token": ["yes", "no"]},
        write=headed(
            "qwen3",
            _LONG_DECODER,
            "Qwen3ForCausalLM",
            {},
            prefix="model.",
            wrapped=True,
            tokens=("no", "yes"),
            **_RERANKER,
        ),
        vllm=_override(
            "Qwen3ForSequenceClassification",
            classifier_from_token=["no", "yes"],
            is_original_qwen3_reranker=True,
        ),
        template=_QWEN3,
    ),
    Row(
        name="qwen3-reranker-seq-cls",
        task="score",
        inputs=PAIRS,
        write=headed(
            "qwen3",
            _LONG_DECODER,
            "Qwen3ForSequenceClassification",
            {"score.weight": (1, 64)},
            prefix="model.",
            config=_ONE,
            **_RERANKER,
        ),
        template=_QWEN3,
    ),
    Row(
        name="mxbai-rerank-base-v2",
        task="score",
        inputs=PAIRS,
        write=headed(
            "qwen2",
            _LONG_DECODER,
            "Qwen2ForCausalLM",
            {},
            prefix="model.",
            wrapped=True,
            **_RERANKER,
        ),
        vllm=_override("Qwen2ForSequenceClassification", classifier_from_token=["0", "1"], method="from_2_way_softmax"),
        template=_MXBAI,
    ),
    Row(
        name="bge-reranker-v2-gemma",
        task="score",
        inputs=PAIRS,
        write=headed(
            "gemma",
            _LONG_DECODER,
            "GemmaForCausalLM",
            {},
            prefix="model.",
            wrapped=True,
            tokens=("Yes",),
            tokenizer_limit=LONG,
        ),
        vllm=_override("GemmaForSequenceClassification", classifier_from_token=["Yes"], method="no_post_processing"),
        params=_RAW,
        template=_GEMMA,
    ),
    Row(
        name="llama-nemotron-rerank-1b-v2",
        task="score",
        inputs=PAIRS,
        write=headed(
            "llama-bidirectional",
            _LONG_DECODER,
            "LlamaBidirectionalForSequenceClassification",
            {"score.weight": (1, 64)},
            prefix="model.",
            config=_ONE,
            tokenizer_limit=LONG,
        ),
        template=_NEMOTRON,
        configuration="LlamaBidirectionalConfig",
    ),
    Row(
        name="gte-new-reranker",
        task="score",
        inputs=PAIRS,
        write=headed(
            "gte",
            {**_ENCODER, "max_position_embeddings": LONG},
            "NewForSequenceClassification",
            linears(("new.pooler.dense", 64, 64), ("classifier", 1, 64)),
            prefix="new.",
            config=_ONE,
            tokenizer_limit=LONG,
        ),
        vllm={"max_model_len": LONG, **_override("GteNewForSequenceClassification")},
        configuration="NewConfig",
    ),
)

REWARD = (
    Row(
        name="internlm2-reward",
        task="token_classify",
        ours="reward",
        last=True,
        params=_RAW,
        mistake={"rope_theta": 100},
        write=headed(
            "internlm2",
            _DECODER,
            "InternLM2ForRewardModel",
            {"v_head.weight": (1, 64)},
            prefix="model.",
        ),
        configuration="InternLM2Config",
    ),
    Row(
        name="qwen2-reward",
        task="token_classify",
        ours="reward",
        last=True,
        write=headed("qwen2", _DECODER, "Qwen2ForRewardModel", _RM_HEAD, prefix="model.", template="$A"),
    ),
    Row(
        name="qwen2-process-reward",
        task="token_classify",
        ours="reward",
        inputs=_STEPS,
        params=_RAW,
        mistaken_call={"activation": "softmax"},
        write=headed(
            "qwen2",
            _DECODER,
            "Qwen2ForProcessRewardModel",
            _PRM_HEAD,
            prefix="model.",
            tokens=(_STEP,),
            template="$A",
        ),
        step=_STEP,
    ),
)

ROWS = (*EMBED, *CLASSIFY, *SCORE, *REWARD)
