"""THE table: one row per family that millpond runs as packed rows.

A family is added here and nowhere else: a row, and a module of the backends named in it where the family
computes something that no other does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from millpond.checkpoints.architecture import (
    BERT_MLM,
    CAUSAL_LM,
    DISTILBERT_MLM,
    GTE_MLM,
    MODERNBERT_MLM,
    RELATIVE,
    REMBERT_MLM,
    ROFORMER_MLM,
    Architecture,
    DecoderTraits,
    EncoderFields,
    EncoderNames,
    roberta_mlm,
)
from millpond.checkpoints.classifier_steps import (
    BART_HEAD,
    CLASSIFIER,
    DEBERTA_HEAD,
    ELECTRA_HEAD,
    EUROBERT_HEAD,
    HIDDEN_ACT_HEAD,
    LLAMA_POOLING,
    MODERNBERT_HEAD,
    POOLER_HEAD,
    ROBERTA_HEAD,
    SCORE,
    ULTRABERT_HEAD,
    ConfigField,
    FamilyHead,
    Linear,
)
from millpond.checkpoints.refusals import backbone_alone, unknown_class, unknown_family, with_article
from millpond.errors import UnsupportedArchitectureError

# Suffixes of the classes that config.json may name for a backbone. The backbone is loaded; heads are built here.
_SUFFIXES = (
    "Model ForMaskedLM ForCausalLM LMHeadModel ForPreTraining PreTrainedModel ForSequenceClassification "
    "ForTokenClassification ForRewardModel ForProcessRewardModel SpladeSparseEmbeddingModel "
    # The other suffixes in vLLM's table.
    "EmbeddingModel ForTextEncoding ClassificationModel RewardModel ForRewardModeling"
).split()

# Packed forwards.
_ROTARY_ENCODER = "millpond.backends.torch.forwards.rotary_encoder:PackedRotaryEncoder"
_DECODER = "millpond.backends.torch.forwards.decoder:PackedDecoder"
PLAN = "millpond.backends.torch.forwards.plan:PackedPlan"
_RECURRENT = "millpond.backends.torch.forwards.recurrent"

# What two or more rows have.
_QWEN3 = DecoderTraits(window="layer", biases=("attention",), head_norms=True)

# BERT-like families with other names than BERT.
_DISTILBERT_NAMES = EncoderNames(
    prefix="distilbert",
    layers="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    norm="output_layer_norm",
    fields=EncoderFields(
        layers="n_layers",
        heads="n_heads",
        hidden="dim",
        inner="hidden_dim",
        types="",
        epsilon="",
        activation="activation",
    ),
)
_MPNET_NAMES = EncoderNames(
    prefix="mpnet",
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    attention_out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    relative_bias="encoder.relative_attention_bias",
    fields=EncoderFields(types="", buckets="relative_attention_num_buckets"),
)

# What most rows of a kind share.
_bert_like = partial(
    Architecture, forward="millpond.backends.torch.forwards.encoder:PackedEncoder", pooling="cls", positions="absolute"
)
_decoder = partial(
    Architecture,
    forward=_DECODER,
    traits=DecoderTraits(biases=("attention", "mlp")),
    pooling="lasttoken",
    positions="rotary",
    decoder=True,
)

_t5 = partial(
    Architecture,
    family="t5",
    forward=PLAN,
    pooling="mean",
    positions="relative",
    half="bfloat16",
    refused={
        "ForSequenceClassification": "which classifies by its decoder's states, and millpond runs T5's encoder alone: "
        "embedders and token classifiers"
    },
)

ARCHITECTURES = (
    _bert_like(
        prefix="Bert",
        model_type="bert",
        names=("Contriever",),
        token_types=True,
        pooler=True,
        encoder=EncoderNames(prefix="bert"),
        head=POOLER_HEAD,
        mlm=BERT_MLM,
        example="BAAI/bge-base-en-v1.5",
    ),
    _bert_like(
        prefix="Roberta",
        model_type="roberta",
        offset_positions=True,
        pooler=True,
        encoder=EncoderNames(prefix="roberta"),
        head=ROBERTA_HEAD,
        mlm=roberta_mlm("roberta"),
        example="sentence-transformers/all-roberta-large-v1",
    ),
    _bert_like(
        prefix="XLMRoberta",
        model_type="xlm-roberta",
        offset_positions=True,
        pooler=True,
        # `bilingual` is XLM-RoBERTa's code under another name.
        aliases=("camembert", "bilingual"),
        names=(
            *("BgeM3EmbeddingModel", "BilingualModel", "BilingualForMaskedLM"),
            *("BilingualForSequenceClassification", "BilingualForTokenClassification"),
            *("CamembertModel", "CamembertForMaskedLM"),
            *("CamembertForSequenceClassification", "CamembertForTokenClassification"),
        ),
        family="xlm_roberta",
        encoder=EncoderNames(prefix="roberta"),
        head=ROBERTA_HEAD,
        mlm=roberta_mlm("roberta"),
        example="intfloat/multilingual-e5-base",
    ),
    _bert_like(
        prefix="Ernie",
        forward=PLAN,
        model_type="ernie",
        token_types=True,
        pooler=True,
        encoder=EncoderNames(prefix="ernie", fields=EncoderFields(tasks="task_type_vocab_size")),
        head=POOLER_HEAD,
        mlm=replace(BERT_MLM, backbone="ernie"),
        example="shibing624/text2vec-base-chinese-paraphrase",
    ),
    _bert_like(
        prefix="Data2VecText",
        model_type="data2vec-text",
        offset_positions=True,
        pooler=True,
        encoder=EncoderNames(prefix="data2vec_text"),
        head=ROBERTA_HEAD,
        mlm=roberta_mlm("data2vec_text"),
        example="facebook/data2vec-text-base",
    ),
    _bert_like(
        prefix="MegatronBert",
        forward=PLAN,
        model_type="megatron-bert",
        token_types=True,
        pooler=True,
        encoder=EncoderNames(prefix="bert", attention_norm="attention.ln", norm="ln", last_norm="encoder.ln"),
        head=POOLER_HEAD,
        mlm=BERT_MLM,
        example="KBLab/megatron-bert-large-swedish-cased-165k",
    ),
    _bert_like(
        prefix="XLMRobertaXL",
        forward=PLAN,
        model_type="xlm-roberta-xl",
        half="bfloat16",
        offset_positions=True,
        pooler=True,
        encoder=EncoderNames(
            prefix="roberta",
            attention_norm="attention.self_attn_layer_norm",
            norm="LayerNorm",
            last_norm="encoder.LayerNorm",
        ),
        head=ROBERTA_HEAD,
        mlm=roberta_mlm("roberta"),
        example="facebook/xlm-roberta-xl",
    ),
    _bert_like(
        prefix="RoFormer",
        forward=PLAN,
        model_type="roformer",
        positions="rotary",
        token_types=True,
        family="roformer",
        encoder=EncoderNames(
            prefix="roformer",
            rotary="encoder.embed_positions",
            fields=EncoderFields(embedding="embedding_size"),
        ),
        head=HIDDEN_ACT_HEAD,
        mlm=ROFORMER_MLM,
        example="junnyu/roformer_chinese_sim_char_base",
    ),
    _bert_like(
        prefix="RemBert",
        forward=PLAN,
        model_type="rembert",
        token_types=True,
        pooler=True,
        encoder=EncoderNames(
            prefix="rembert",
            widen="encoder.embedding_hidden_mapping_in",
            fields=EncoderFields(embedding="input_embedding_size"),
        ),
        head=POOLER_HEAD,
        mlm=REMBERT_MLM,
        example="google/rembert",
    ),
    _bert_like(
        prefix="Longformer",
        forward=PLAN,
        model_type="longformer",
        offset_positions=True,
        pooler=True,
        family="longformer",
        encoder=EncoderNames(prefix="longformer", fields=EncoderFields(window="attention_window")),
        head=ROBERTA_HEAD,
        refused={
            "ForSequenceClassification": "whose first token attends to all others by weights of its own (global "
            "attention), which millpond does not run; of Longformer it runs embedders, token classifiers and SPLADE"
        },
        mlm=roberta_mlm("longformer"),
        example="allenai/longformer-base-4096",
    ),
    _bert_like(
        prefix="BigBird",
        forward=PLAN,
        model_type="big_bird",
        token_types=True,
        pooler=True,
        family="big_bird",
        encoder=EncoderNames(prefix="bert"),
        head=HIDDEN_ACT_HEAD,
        mlm=BERT_MLM,
        example="google/bigbird-roberta-base",
    ),
    _bert_like(
        prefix="MobileBert",
        forward=PLAN,
        model_type="mobilebert",
        half="bfloat16",
        token_types=True,
        pooler=True,
        family="mobilebert",
        head=replace(POOLER_HEAD, pooler_field="classifier_activation"),
        example="typeform/mobilebert-uncased-mnli",
    ),
    _bert_like(
        prefix="DistilBert",
        model_type="distilbert",
        pooling="mean",
        encoder=_DISTILBERT_NAMES,
        head=FamilyHead(sequence=(Linear(name="pre_classifier"), "relu", *CLASSIFIER)),
        mlm=DISTILBERT_MLM,
        example="sentence-transformers/msmarco-distilbert-base-v4",
    ),
    _bert_like(
        prefix="MPNet",
        model_type="mpnet",
        pooling="mean",
        offset_positions=True,
        pooler=True,
        encoder=_MPNET_NAMES,
        head=ROBERTA_HEAD,
        mlm=roberta_mlm("mpnet"),
        example="sentence-transformers/all-mpnet-base-v2",
    ),
    Architecture(
        prefix="ModernBert",
        model_type="modernbert",
        pooling="cls",
        positions="rotary",
        forward="millpond.backends.torch.forwards.modernbert:PackedModernBert",
        head=MODERNBERT_HEAD,
        mlm=MODERNBERT_MLM,
        example="Alibaba-NLP/gte-modernbert-base",
    ),
    Architecture(
        prefix="NomicBert",
        model_type="nomic_bert",
        pooling="mean",
        positions="rotary",
        token_types=True,
        family="nomic",
        forward=_ROTARY_ENCODER,
        head=POOLER_HEAD,
        example="nomic-ai/nomic-embed-text-v1.5",
    ),
    Architecture(
        prefix="NomicBertMoe",
        model_type="nomic_bert_moe",
        names=tuple(f"NomicBert{suffix}" for suffix in _SUFFIXES),
        pooling="mean",
        positions="rotary",
        token_types=True,
        recognized_by={"model_type": "nomic_bert", "num_experts": 2},
        family="nomic",
        forward=PLAN,
        head=POOLER_HEAD,
        example="nomic-ai/nomic-embed-text-v2-moe",
    ),
    Architecture(
        prefix="Gte",
        model_type="gte",
        aliases=("new",),
        names=(
            *(f"New{kind}" for kind in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")),
            *("GteNewModel", "GteNewForSequenceClassification"),
        ),
        pooling="cls",
        positions="rotary",
        token_types=True,
        family="gte",
        module="millpond.backends.torch.forwards.gte",
        forward=_ROTARY_ENCODER,
        head=POOLER_HEAD,
        mlm=GTE_MLM,
        weighted_tokens="NewForTokenClassification",  # gte-multilingual-base's
        example="Alibaba-NLP/gte-multilingual-base",
    ),
    Architecture(
        prefix="JinaEmbeddingsV3",
        model_type="jina_embeddings_v3",
        names=(
            *("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
            *("XLMRobertaForTokenClassification", "XLMRobertaLoRA", "JinaRobertaModel", "ColBERTJinaRobertaModel"),
        ),
        adapters=True,
        pooling="mean",
        positions="rotary",
        pooler=True,
        recognized_by={"model_type": "xlm-roberta", "position_embedding_type": "rotary"},
        family="jina",
        module="millpond.backends.torch.forwards.jina",
        head=ROBERTA_HEAD,
        example="jinaai/jina-embeddings-v3",
    ),
    Architecture(
        prefix="JinaBert",
        model_type="jina_bert",
        pooling="mean",
        positions="relative",
        token_types=True,
        recognized_by={"model_type": "bert", "position_embedding_type": "alibi"},
        family="jina_bert",
        forward=PLAN,
        head=POOLER_HEAD,
        mlm=BERT_MLM,
        example="jinaai/jina-embeddings-v2-base-en",
    ),
    _bert_like(
        prefix="Electra",
        model_type="electra",
        token_types=True,
        encoder=EncoderNames(prefix="electra", fields=EncoderFields(embedding="embedding_size")),
        head=ELECTRA_HEAD,
        example="cross-encoder/ms-marco-electra-base",
    ),
    Architecture(
        prefix="Albert",
        model_type="albert",
        pooling="mean",
        positions="absolute",
        token_types=True,
        pooler=True,
        forward="millpond.backends.torch.forwards.albert:PackedAlbert",
        head=FamilyHead(sequence=(Linear(name="pooler"), "tanh", *CLASSIFIER)),
        example="sentence-transformers/paraphrase-albert-small-v2",
    ),
    Architecture(
        prefix="DebertaV2",
        model_type="deberta-v2",
        pooling="cls",
        positions="relative",
        token_types=True,
        half="bfloat16",
        family="deberta",
        module="millpond.backends.torch.forwards.deberta",
        head=DEBERTA_HEAD,
        example="cross-encoder/nli-deberta-v3-base",
    ),
    Architecture(
        prefix="Deberta",
        model_type="deberta",
        pooling="cls",
        positions="relative",
        token_types=True,
        half="bfloat16",
        family="deberta_v1",
        forward=PLAN,
        head=DEBERTA_HEAD,
        example="cross-encoder/nli-deberta-base",
    ),
    Architecture(
        prefix="Bart",
        model_type="bart",
        names=("BartForConditionalGeneration",),
        pooling="mean",
        positions="absolute",
        offset_positions=True,
        family="bart",
        forward=PLAN,
        half="bfloat16",
        head=BART_HEAD,
        example="facebook/bart-large-mnli",
    ),
    Architecture(
        prefix="T5Gemma2",
        model_type="t5gemma2",
        names=("T5Gemma2ForConditionalGeneration",),
        pooling="lasttoken",
        positions="rotary",
        token_types=True,
        decoder=True,
        encodes_apart=True,
        family="t5gemma2",
        forward=PLAN,
        half="bfloat16",
        example="KaLM-Embedding/KaLM-Reranker-V1-Nano",
    ),
    _t5(
        prefix="T5",
        model_type="t5",
        aliases=("mt5",),
        names=(
            *("T5EncoderModel", "T5ForConditionalGeneration", "T5WithLMHeadModel"),
            *(f"MT5{kind}" for kind in ("Model", "EncoderModel", "ForConditionalGeneration", "ForTokenClassification")),
        ),
        example="sentence-transformers/sentence-t5-base",
    ),
    _t5(
        prefix="UMT5",
        model_type="umt5",
        names=("UMT5EncoderModel", "UMT5ForConditionalGeneration"),
        example="google/umt5-base",
    ),
    Architecture(
        prefix="NeoMME",
        model_type="neomme",
        names=("NeoMMEForRetrieval",),
        pooling="mean",
        positions="rotary",
        half="bfloat16",
        example="neomme/NeoMME-260M",
    ),
    Architecture(
        prefix="Ultrabert",
        model_type="ultrabert",
        # As the code that its checkpoints had before transformers knew them spells it
        names=tuple(
            f"UltraBert{kind}"
            for kind in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
        ),
        pooling="mean",
        positions="rotary",
        family="ultrabert",
        forward=PLAN,
        traits=DecoderTraits(window="radius", rotary_by_kind=True, biases=("attention", "mlp")),
        head=ULTRABERT_HEAD,
        example="dmis-lab/UltraBERT-150M",
    ),
    Architecture(
        prefix="EuroBert",
        model_type="eurobert",
        pooling="mean",
        positions="rotary",
        forward=_DECODER,
        traits=DecoderTraits(biases=("attention", "mlp")),
        head=EUROBERT_HEAD,
        example="EuroBERT/EuroBERT-210m",
    ),
    _decoder(
        prefix="Llama",
        model_type="llama",
        names=("ReasonIRModel", "LlamaEncoderModel"),
        pooling_field=LLAMA_POOLING,  # NVIDIA's older checkpoints call themselves llama
        example="samaya-ai/RepLLaMA-reproduced",
    ),
    Architecture(
        prefix="LlamaBidirectional",
        model_type="llama_bidirec",
        native="LlamaModel",
        pooling="mean",
        positions="rotary",
        decoder=True,
        half="bfloat16",
        unmasked="llama",
        forward=_DECODER,
        traits=DecoderTraits(biases=("attention", "mlp")),
        head=FamilyHead(sequence=SCORE, tokens=SCORE, pooling=LLAMA_POOLING, divisor="temperature"),
        pooling_field=LLAMA_POOLING,
        example="nvidia/llama-nemotron-rerank-1b-v2",
    ),
    _decoder(
        prefix="InternLM2",
        model_type="internlm2",
        native="LlamaModel",
        half="bfloat16",
        family="internlm2",
        reward_head=(Linear(name="v_head", biased=False),),
        reward_token=ConfigField(name="reward_token_id", default=92527),
        example="internlm/internlm2-1_8b-reward",
    ),
    _decoder(
        prefix="Mistral",
        model_type="mistral",
        traits=DecoderTraits(window="config"),
        example="intfloat/e5-mistral-7b-instruct",
    ),
    _decoder(
        prefix="NVEmbed",
        model_type="nvembed",
        native="MistralModel",
        unmasked="mistral",
        pooling="mean",
        half="bfloat16",
        family="nvembed",
        traits=DecoderTraits(),
        refused=dict.fromkeys(
            ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "ForCausalLM"),
            "a class that NV-Embed's code does not have",
        ),
        example="nvidia/NV-Embed-v2",
    ),
    _decoder(
        prefix="Qwen2",
        model_type="qwen2",
        names=("QZhouModel",),
        traits=DecoderTraits(window="layer", biases=("qkv",)),
        example="Alibaba-NLP/gte-Qwen2-1.5B-instruct",
    ),
    _decoder(
        prefix="Qwen3",
        model_type="qwen3",
        names=("JinaForRanking", "Splade", "VoyageQwen3BidirectionalEmbedModel"),
        mlm=CAUSAL_LM,
        traits=_QWEN3,
        example="Qwen/Qwen3-Embedding-0.6B",
    ),
    _decoder(
        prefix="PPLXQwen3",
        model_type="bidirectional_pplx_qwen3",
        native="Qwen3Model",
        unmasked="qwen3",
        pooling="mean",
        mlm=CAUSAL_LM,
        traits=_QWEN3,
        example="perplexity-ai/pplx-embed-v1-0.6b",
    ),
    _decoder(
        prefix="BidirLM",
        model_type="bidirlm",
        native="Qwen3Model",
        unmasked="qwen3",
        pooling="mean",
        half="bfloat16",
        mlm=CAUSAL_LM,
        traits=_QWEN3,
        example="BidirLM/BidirLM-0.6B-Embedding",
    ),
    _decoder(
        prefix="Gemma",
        model_type="gemma",
        half="bfloat16",
        traits=DecoderTraits(centred=True, biases=("attention",)),
        example="google/gemma-2b",
    ),
    _decoder(
        prefix="Gemma2",
        model_type="gemma2",
        aliases=("cost_wise_gemma",),
        names=("CostWiseGemmaModel", "CostWiseGemmaForCausalLM"),
        family="layerwise",
        half="bfloat16",
        traits=DecoderTraits(
            centred=True,
            activation="hidden_activation",
            window="layer",
            softcap=True,
            biases=("attention",),
            sandwich=True,
        ),
        example="BAAI/bge-multilingual-gemma2",
    ),
    _decoder(
        prefix="Gemma3Text",
        model_type="gemma3_text",
        names=("Gemma3ForCausalLM",),
        half="bfloat16",
        traits=DecoderTraits(
            centred=True,
            activation="hidden_activation",
            window="layer",
            rotary_by_kind=True,
            biases=("attention",),
            head_norms=True,
            sandwich=True,
        ),
        example="google/embeddinggemma-300m",
    ),
    Architecture(
        prefix="EmbeddingGemma2",
        model_type="embedding_gemma2",
        aliases=("embedding_gemma2_text",),
        names=("EmbeddingGemma2TextModel",),
        pooling="mean",
        positions="rotary",
        half="bfloat16",
        family="embedding_gemma2",
        forward=PLAN,
        refused=dict.fromkeys(
            ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "ForMaskedLM"),
            "a class that transformers does not have",
        ),
        example="google/embeddinggemma-2",
    ),
    _decoder(
        prefix="Phi3",
        model_type="phi3",
        half="bfloat16",
        family="phi3",
        forward=PLAN,
        traits=DecoderTraits(window="config", partial=True),
        example="microsoft/Phi-4-mini-instruct",
    ),
    _decoder(
        prefix="Olmo2",
        model_type="olmo2",
        half="bfloat16",
        forward=PLAN,
        traits=DecoderTraits(biases=("attention",), head_norms=True, whole_norms=True, post_norms=True),
        example="allenai/OLMo-2-0425-1B",
    ),
    _decoder(
        prefix="Granite",
        model_type="granite",
        aliases=("minicpm",),
        names=("MiniCPM", "LayerWiseMiniCPMModel", "LayerWiseMiniCPMForCausalLM"),
        family="layerwise",
        half="bfloat16",
        forward=PLAN,
        traits=DecoderTraits(biases=("attention", "mlp"), multipliers=True),
        example="ibm-granite/granite-3.3-2b-base",
    ),
    _decoder(
        prefix="SmolLM3",
        model_type="smollm3",
        half="bfloat16",
        forward=PLAN,
        traits=DecoderTraits(window="layer", biases=("attention", "mlp"), unrotated="no_rope_layers"),
        example="HuggingFaceTB/SmolLM3-3B-Base",
    ),
    _decoder(
        prefix="Ministral3",
        model_type="ministral3",
        half="bfloat16",
        family="ministral3",
        forward=PLAN,
        traits=DecoderTraits(window="config"),
        example="mistralai/Ministral-3-3B-Base-2512",
    ),
    _decoder(
        prefix="Qwen3Moe",
        model_type="qwen3_moe",
        half="bfloat16",
        forward=None,  # transformers' class multiplies all experts at once on a GPU
        traits=DecoderTraits(window="config", biases=("attention",), head_norms=True, experts=True),
        example="Qwen/Qwen3-30B-A3B-Base",
    ),
    _decoder(
        prefix="Lfm2",
        model_type="lfm2",
        aliases=("lfm2_bidirectional",),
        names=tuple(
            f"Lfm2Bidirectional{kind}" for kind in ("Model", "ForSequenceClassification", "ForTokenClassification")
        ),
        half="bfloat16",
        family="lfm2",
        forward=PLAN,
        traits=None,
        recurrent=True,
        example="LiquidAI/LFM2.5-Embedding-350M",
    ),
    _decoder(
        prefix="Qwen3_5Text",
        model_type="qwen3_5_text",
        aliases=("qwen3_5",),
        names=tuple(
            f"Qwen3_5{kind}"
            for kind in (
                *("Model", "ForCausalLM", "ForConditionalGeneration"),
                *("ForSequenceClassification", "ForTokenClassification"),
            )
        ),
        half="bfloat16",
        family="qwen3_5",
        module=_RECURRENT,
        forward=None,
        traits=None,
        recurrent=True,
        example="infgrad/Prism-Qwen3.5-Reranker-0.8B",
    ),
    _decoder(
        prefix="GPTNeoX",
        model_type="gpt_neox",
        forward=PLAN,
        traits=None,
        head=FamilyHead(sequence=SCORE, pooling="lasttoken"),
        example="EleutherAI/pythia-160m",
    ),
    Architecture(
        prefix="GPT2",
        model_type="gpt2",
        names=("GPT2DoubleHeadsModel",),
        pooling="lasttoken",
        positions="absolute",
        decoder=True,
        family="gpt2",
        module="millpond.backends.torch.forwards.gpt2",
        head=FamilyHead(sequence=SCORE, pooling="lasttoken"),
        example="openai-community/gpt2",
    ),
    Architecture(
        prefix="Jamba",
        model_type="jamba",
        pooling="lasttoken",
        positions="none",
        decoder=True,
        half="bfloat16",
        module=_RECURRENT,
        recurrent=True,
        example="ai21labs/Jamba-tiny-reward-dev",
    ),
)


# A table of token vectors in the place of a backbone: no model_type of transformers has it.
STATIC = Architecture(
    prefix="Static",
    model_type="static",
    pooling="mean",
    positions="none",
    example="minishlab/potion-base-8M",
)


def row_of(model_type: str) -> Architecture | None:
    """The row of a ``model_type``, or of an alias."""
    return next((row for row in ARCHITECTURES if model_type in (row.model_type, *row.aliases)), None)


def find(config: Mapping[str, Any], name: str) -> Architecture:
    """The row for a checkpoint's config.json."""
    model_type, claimed = config.get("model_type"), (config.get("architectures") or [None])[0]
    # A checkpoint whose model_type is another family's, else by it.
    recognized = (row for row in ARCHITECTURES if row.is_recognized(config))
    row = next(recognized, None) or row_of(str(model_type))
    if row is None:
        raise UnsupportedArchitectureError(unknown_family(config, name, ARCHITECTURES, class_names))
    why_not = row.refused.get(str(claimed).removeprefix(row.prefix))
    if why_not is not None:
        raise UnsupportedArchitectureError(f"{name} is {with_article(claimed)}, {why_not}; {backbone_alone(row)}")
    if claimed is not None and claimed not in class_names(row):
        why_not = unknown_class(config, str(claimed), row)
        raise UnsupportedArchitectureError(f"{name} is {with_article(claimed)}, {why_not}")
    if row.takes_distances and config.get("position_embedding_type") in RELATIVE:  # of transformers 4 only
        return replace(row, forward=PLAN)
    return row


def class_names(row: Architecture) -> frozenset[str]:
    """The class names that config.json may claim for a family."""
    # Stanford's ColBERT class can have any backbone; vLLM's ColBERT classes have the backbone in their names.
    of_colbert = ("HF_ColBERT", f"ColBERT{row.prefix}Model")
    return frozenset((*(row.prefix + suffix for suffix in _SUFFIXES), *of_colbert, *row.names))
