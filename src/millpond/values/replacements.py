"""Names that users of other libraries write, and what to write here; errors about unknown names say it.

The names are those of sentence-transformers, fastembed, FlagEmbedding, PyLate, and the classes of LangChain and
LlamaIndex over them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from types import FunctionType
from typing import Any, Never, TypeVar, get_args, get_type_hints

_NO_BATCHES = "leave it out, since the engine forms its batches itself (max_batch_tokens= of Engine bounds one)"
_MODEL = 'write the hub id or folder first, as in Engine("BAAI/bge-m3"), or model= in an adapter'
_DEVICES = 'leave it out: one engine uses all cores, and device=["cuda:0", "cuda:1"] two GPUs'
_HUB_CACHE = "set HF_HUB_CACHE in the environment before Python starts"
_WEIGHTS = 'leave it out: weights are safetensors; for speed write dtype="bfloat16" or quantization="int8"'
_NUMPY = "leave it out: results are numpy arrays, and torch.from_numpy() makes a tensor of one"
_ROLES = 'write role="query" or role="document" for the checkpoint\'s own prompts, or prompt="..."'
_ADAPTER_PROMPTS = f"{_ROLES}; in an adapter query_prompt= and document_prompt="
_ACTIVATION = 'write activation="sigmoid", "softmax" or "identity"'
_DTYPE = 'write dtype="float16", "bfloat16" or "float32" to Engine or the adapter'
_KINDS = "leave it out: embed(), sparse_embed() and token_embed() return one kind each"

OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("batch_size", "chunk_size", "batchsize", "mini_batch_size", "embed_batch_size"), _NO_BATCHES),
    **dict.fromkeys(("show_progress_bar", "use_tqdm", "progress_bar", "verbose"), "write show_progress=True"),
    **dict.fromkeys(("convert_to_numpy", "convert_to_tensor", "return_tensors", "as_tensor"), _NUMPY),
    **dict.fromkeys(("normalize_embeddings", "normalize_L2"), "write normalize=True"),
    **dict.fromkeys(("truncate_dim", "matryoshka_dim", "output_dimension", "dim"), "write dimensions="),
    "dimension": "write dimensions=",
    **dict.fromkeys(("top_k", "topk", "topn"), "write top_n= for rerank, k= for a search"),
    "top_n": "write k= for a search; rerank has top_n=",
    "return_documents": "leave it out: each result has .document",
    "passages": "write documents=",
    **dict.fromkeys(("sentences", "inputs"), "write the list of texts first, without a name"),
    **dict.fromkeys(("model_name", "model_name_or_path", "model_id", "model_path"), _MODEL),
    **dict.fromkeys(("max_seq_length", "model_max_length"), "write max_length= to Engine or the adapter"),
    **dict.fromkeys(("device_map", "devices", "target_devices"), "write device=, a name or a list of names"),
    **dict.fromkeys(("multi_process", "pool", "parallel", "num_workers", "parallel_process"), _DEVICES),
    **dict.fromkeys(("torch_dtype", "use_fp16", "use_bf16", "half"), _DTYPE),
    **dict.fromkeys(
        ("model_kwargs", "model_args", "encode_kwargs", "automodel_args"),
        "write its entries as arguments of their own: dtype= and device= to Engine, normalize= to embed()",
    ),
    "tokenizer_kwargs": "write max_length= to Engine or the adapter, and truncate= to the method",
    "config_kwargs": "write hf_overrides= to Engine or the adapter",
    **dict.fromkeys(("cache_folder", "cache_dir"), _HUB_CACHE),
    "local_files_only": "set HF_HUB_OFFLINE=1 in the environment before Python starts",
    **dict.fromkeys(("token", "use_auth_token", "hf_token"), "set HF_TOKEN in the environment"),
    "threads": "set OMP_NUM_THREADS in the environment before Python starts",
    "providers": 'write device="cpu" or "cuda"',
    "cuda": 'write device="cuda" to Engine or the adapter',
    "lazy_load": "leave it out",
    **dict.fromkeys(("file_name", "specific_model_path", "folder_name", "export"), _WEIGHTS),
    "backend": f"{_WEIGHTS}; millpond's own backends are chosen with Engine(model, backend=)",
    **dict.fromkeys(("load_in_8bit", "quantization_config", "load_in_4bit"), 'write quantization="int8"'),
    **dict.fromkeys(("tokenizer", "tokenizer_name"), "leave it out: the tokenizer is the checkpoint's"),
    **dict.fromkeys(("prompts", "query_instruction", "text_instruction", "embed_instruction"), _ADAPTER_PROMPTS),
    **dict.fromkeys(("query_instruction_for_retrieval", "query_instruction_format", "is_query"), _ROLES),
    **dict.fromkeys(("passage_instruction_for_retrieval", "doc_embed_type", "input_type"), _ROLES),
    "default_prompt_name": "write prompt_name=; in an adapter query_prompt_name= and document_prompt_name=",
    "precision": "write output_dtype= to embed()",
    "output_value": "call token_embed() for the vectors of tokens",
    **dict.fromkeys(("return_dense", "return_sparse", "return_colbert_vecs"), _KINDS),
    **dict.fromkeys(("activation_fn", "activation_fct", "default_activation_function", "apply_softmax"), _ACTIVATION),
    "num_labels": "leave it out: classify() has as many labels as the checkpoint",
    "trust_remote_code": "leave it out: no code of a checkpoint is run",
    "pooling_mode": "write pooling= to Engine or the adapter",
    "similarity_fn_name": "leave it out: score() has the checkpoint's; method='cosine' or 'maxsim' overrides it",
    "repo_id": _MODEL,
}
"""What to write in place of an option; each is the end of a sentence."""

_QUERIES = 'write embed([query], role="query").embeddings'
_DOCUMENTS = 'write embed(texts, role="document").embeddings'
_PAIRS = "write score(queries, documents).scores, or rerank(query, documents)"

METHODS: Mapping[str, str] = {
    **dict.fromkeys(("encode_query", "query_embed", "encode_queries", "embed_query"), _QUERIES),
    **dict.fromkeys(("encode_document", "passage_embed", "encode_corpus", "embed_documents"), _DOCUMENTS),
    **dict.fromkeys(("get_text_embedding", "get_text_embedding_batch"), _DOCUMENTS),
    "get_query_embedding": _QUERIES,
    "encode_multi_process": _DOCUMENTS,
    **dict.fromkeys(("start_multi_process_pool", "stop_multi_process_pool"), _DEVICES),
    **dict.fromkeys(("predict", "compute_score"), f"{_PAIRS}; classify(texts) has the probabilities of classes"),
    "rank": "write rerank(query, documents)",
    **dict.fromkeys(
        ("similarity", "similarity_pairwise"),
        'write queries.embeddings @ documents.embeddings.T of normalized vectors, or score(..., method="cosine")',
    ),
    **dict.fromkeys(
        ("get_sentence_embedding_dimension", "get_embedding_dimension", "embedding_size"), "read spec.dimensions"
    ),
    **dict.fromkeys(("max_seq_length", "get_max_seq_length"), "read spec.max_length; max_length= of Engine sets it"),
    "prompts": "read spec.prompts",
    "token_count": "write count_tokens(texts)",
    **dict.fromkeys(("to", "cuda", "cpu"), "write device= to Engine"),
    **dict.fromkeys(("half", "float", "bfloat16"), _DTYPE),
    **dict.fromkeys(("eval", "warmup"), "leave it out: an engine only computes outputs"),
    **dict.fromkeys(
        ("generate", "chat", "beam_search"), "millpond embeds, classifies and scores, and generates no text"
    ),
}
"""What to write in place of a method or attribute."""

# What a call that lacks an argument may have meant.
_MISSING: Mapping[str, str] = {
    "encode": 'write embed(texts) for vectors; encode(texts, task="embed") runs any task by its name',
    "score": "write score(queries, documents), two lists or a query and a list, for pairs: score(*zip(*pairs))",
    "rerank": "write rerank(query, documents)",
}

Class = TypeVar("Class", bound=type)


def names_replacements(cls: Class) -> Class:
    """A class whose errors about unknown arguments and attributes say what to write instead; calls cost the same."""
    for name, member in list(vars(cls).items()):
        plain = isinstance(member, FunctionType) and not inspect.iscoroutinefunction(member)
        if plain and not inspect.isasyncgenfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, _explained(member))
    if not hasattr(cls, "__getattr__"):
        cls.__getattr__ = _missing_attribute  # type: ignore[attr-defined]  # for type checkers there is none
    return cls


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except TypeError as error:
            known = _options_of(method)
            if known is None:
                raise
            unknown = [name for name in options if name not in known]
            trace = error.__traceback__
            if not unknown and not (trace is not None and trace.tb_next is None):
                raise  # from inside the call
            raise TypeError(_explanation(method, str(error), unknown, known)) from None

    return call


def _options_of(method: Callable[..., Any]) -> frozenset[str] | None:
    """The names of a method's arguments, those of ``**options: Unpack[...]`` included.

    ``None``: it takes any, and says itself which of them it does not know.
    """
    parameters = inspect.signature(method).parameters
    names = set(parameters)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            typed = get_args(get_type_hints(method, include_extras=True).get(name))
            if not typed:
                return None
            names |= set(typed[0].__annotations__)
    return frozenset(names)


def _explanation(method: Callable[..., Any], message: str, unknown: list[str], known: frozenset[str]) -> str:
    owner, _, name = method.__qualname__.rpartition(".")
    called = owner if name == "__init__" else name
    if not unknown:
        text = message.removeprefix(f"{method.__qualname__}() ")
        hint = _MISSING.get(name)
        return f"{called}() {text}" + (f"; {hint}" if hint else "")
    named = "; no ".join(f"{option}=: {instead_of(option, known)}" for option in unknown)
    other = f"; {_MISSING[name]}" if name == "encode" and "task" in known else ""  # sentence-transformers' encode()
    return f"{called}() has no {named}{other}"


def instead_of(option: str, known: frozenset[str] = frozenset()) -> str:
    """What to write in place of an option that is not in ``known``."""
    if option in OPTIONS:
        return OPTIONS[option]
    similar = get_close_matches(option, known, n=1)
    return f"did you mean {similar[0]}=?" if similar else "leave it out"


def _missing_attribute(self: object, name: str) -> Never:
    kind = type(self).__name__
    hint = f"; {METHODS[name]}" if name in METHODS else ""
    raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint}", name=name, obj=self)
