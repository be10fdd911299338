"""Families that millpond does not run, in words: what they are, and the nearest that is served."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Unserved:
    """A kind of model that is refused."""

    pattern: str  # of `model_type`, of a class, of a module or of a hub id
    kind: str  # what it is
    nearest: str  # what to use instead


_TEXT_OF_PAGES = "for text, or the text of pages, load lightonai/GTE-ModernColBERT-v1 or Qwen/Qwen3-Embedding-0.6B"
_RERANKERS = "for scores of pairs load Qwen/Qwen3-Reranker-0.6B or zeroentropy/zerank-1-small"
UNSERVED = (
    Unserved(
        pattern=r"qwen3_5_moe(_text)?|qwen3_next",
        kind="a language model with layers of linear attention and experts",
        nearest=f"{_RERANKERS}, for vectors Qwen/Qwen3-Embedding-0.6B",
    ),
    Unserved(
        pattern=r".*(vl|vision|pali|qwen\d_\d|idefics|smolvlm|llava|modernvbert|internvl|omni)(_.*)?"
        r"|mllama|jina_embeddings_v4|phi3_v|minicpmv",
        kind="a language model that reads images",
        nearest=f"{_TEXT_OF_PAGES}; {_RERANKERS}",
    ),
    Unserved(
        pattern=r".*(clip|siglip2?|align|blip(_2)?|altclip)(_text_model)?",
        kind="a pair of towers for images and texts",
        nearest="for texts in the space of clip-ViT-B-32 load sentence-transformers/clip-ViT-B-32-multilingual-v1",
    ),
    Unserved(
        pattern=r"whisper|wav2vec2.*|hubert|wavlm|clap|seamless.*|speecht5|encodec|qwen\d_audio",
        kind="a model of sound",
        nearest="embed what was said, as text",
    ),
    Unserved(
        pattern=r"mbart|pegasus|led|marian",
        kind="an encoder with a decoder that writes",
        nearest="for zero-shot classes load facebook/bart-large-mnli or MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli",
    ),
    Unserved(
        pattern=r"m2m_100|nllb.*",
        kind="a translator",
        nearest="for one vector in many languages load sentence-transformers/LaBSE",
    ),
    Unserved(
        pattern=r"t5gemma|longt5",
        kind="an encoder with a decoder that writes",
        nearest="for vectors load intfloat/e5-large-v2, for scores of pairs KaLM-Embedding/KaLM-Reranker-V1-Nano or "
        "cross-encoder/ms-marco-MiniLM-L12-v2",
    ),
    Unserved(
        pattern=r"bloom|gpt_neo|gptj|opt|mpt|falcon",
        kind="an older decoder",
        nearest="load Qwen/Qwen3-Embedding-0.6B",
    ),
    Unserved(
        pattern=r"mixtral|deepseek.*|gpt_oss|dbrx",
        kind="a decoder with experts",
        nearest="load GritLM/GritLM-7B or Qwen/Qwen3-Embedding-8B",
    ),
    Unserved(
        pattern=r"gemma3n|gemma4",
        kind="a language model that reads images or sound",
        nearest="for text load google/embeddinggemma-2 or google/embeddinggemma-300m",
    ),
    Unserved(
        pattern=r"mamba2?|rwkv.*|recurrent_gemma|falcon_mamba|lfm2_(moe|vl)",
        kind="a decoder whose layers carry a state or convolve",
        nearest="load Qwen/Qwen3-Embedding-0.6B, or lightonai/GTE-ModernColBERT-v1 for late interaction",
    ),
    Unserved(
        pattern=r"squeezebert|funnel|xlnet|convbert|fnet|nystromformer|mra|yoso|canine|flaubert|xlm|ibert",
        kind="an encoder of its own design",
        nearest="load sentence-transformers/all-MiniLM-L6-v2",
    ),
    Unserved(
        pattern=r"gigarembed",
        kind="a decoder whose rows go through an attention of its own before they are pooled",
        nearest="load Qwen/Qwen3-Embedding-8B or Qwen/Qwen3-Embedding-0.6B",
    ),
    Unserved(
        pattern=r"codesage",
        kind="an encoder of GPT-2's shape, with a tokenizer of its own",
        nearest="for code load jinaai/jina-embeddings-v2-base-code or nomic-ai/modernbert-embed-base",
    ),
)

# Classes beside a family that is served.
CLASSES = (
    Unserved(pattern=r"NomicVisionModel", kind="a tower for images", nearest="load nomic-ai/nomic-embed-text-v1.5"),
)
# Modules of sentence-transformers in code of the checkpoint's own.
MODULES = (
    Unserved(
        pattern=r"sentence_transformers_impl\.Transformer",
        kind="cde's two encoders, of which one reads a sample of the corpus",
        nearest="load nomic-ai/modernbert-embed-base or Alibaba-NLP/gte-modernbert-base",
    ),
    Unserved(
        pattern=r"SSE\.SSE",
        kind="a table of token vectors and what transforms them",
        nearest="load sentence-transformers/static-retrieval-mrl-en-v1",
    ),
)
_SPARSE = (
    "for sparse vectors load naver/splade-v3 or opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill"
)
# Hub ids of what is no checkpoint.
NAMES = (
    Unserved(pattern=r"Qdrant/bm25", kind="lists of stop words for BM25, which has no weights", nearest=_SPARSE),
    Unserved(
        pattern=r"Qdrant/minicoil-v1",
        kind="BM25 whose words have four numbers each, from a graph of ONNX and a table",
        nearest=_SPARSE,
    ),
    Unserved(
        pattern=r"Qdrant/bm42-.*-attentions",
        kind="BM25 whose words are weighted by a graph of ONNX that puts out attention",
        nearest=_SPARSE,
    ),
    Unserved(
        pattern=r"(Qdrant|DylanCouzon)/constella-zero",
        kind="a table of token vectors for queries in a graph of ONNX",
        nearest="load NovaSearch/stella_en_400M_v5, which embeds its documents, for queries too",
    ),
)


def unserved(name: str, kinds: tuple[Unserved, ...] = UNSERVED) -> Unserved | None:
    """The kind of a ``model_type``, or of a name of another table, if it is a known one."""
    return next((kind for kind in kinds if re.fullmatch(kind.pattern, name)), None)
