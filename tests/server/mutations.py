"""Mutated requests: valid bodies for every route, and the mistakes of careless or hostile clients in them."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Deep?"}]}]
QUERY, TEXTS = "How deep is the mill pond?", ["A wheel turns.", "The pond is two metres deep."]
PAIRS = {"query": QUERY, "documents": [*TEXTS, {"text": "Flour.", "year": 1790}]}
RANKED = {"query": QUERY, "texts": TEXTS, "raw_scores": False, "return_text": True, "truncate": True}

# Valid bodies of every route; models are called as the fixtures that write them.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/embeddings": [
        {"model": "embedder", "input": TEXTS, "user": "somebody", "encoding_format": "float"},
        {"model": "prompted", "input": QUERY, "dimensions": 16, "encoding_format": "base64", "input_type": "query"},
        {"model": "embedder", "input": [[5, 6, 7], [8]], "truncate_prompt_tokens": 8, "truncation_side": "left"},
        {"model": "llm", "messages": TALK, "add_generation_prompt": True, "chat_template_kwargs": {"thinking": False}},
        {"model": "colbert", "input": TEXTS, "encoding_format": "bytes", "embed_dtype": "float16", "endianness": "big"},
    ],
    "/pooling": [
        {"model": "embedder", "input": TEXTS, "task": "token_embed", "normalize": True},
        {"model": "classifier", "input": [5, 6], "task": "classify", "activation": "softmax", "request_id": "mine"},
        {"model": "token_classifier", "input": TEXTS, "encoding_format": "bytes_only"},
        {"model": "llm", "input": TEXTS, "task": "token_classify", "step_tag_id": 5, "returned_token_ids": [6, 7]},
        {"model": "reward_model", "messages": [TALK], "encoding_format": "base64", "embed_dtype": "bfloat16"},
        {"model": "outcome_reward", "messages": TALK, "task": "reward", "softmax": False},
        {"model": "bge_m3", "input": TEXTS, "task": "token_embed", "truncate_prompt_tokens": 5},
    ],
    "/classify": [
        {"model": "classifier", "input": TEXTS, "use_activation": False, "priority": 3, "cache_salt": "salt"},
        {"model": "classifier", "input": [[5, 6], [7]], "activation": "sigmoid", "add_special_tokens": False},
    ],
    "/tokenize": [
        {"model": "embedder", "prompt": QUERY, "add_special_tokens": True, "return_token_strs": True},
        {"model": "llm", "messages": TALK, "tools": [{"name": "measure"}], "add_generation_prompt": False},
    ],
    "/detokenize": [{"model": "embedder", "tokens": [5, 6, 7, 8]}],
    "/score": [
        {"model": "cross_encoder", "text_1": QUERY, "text_2": TEXTS, "use_activation": True},
        {"model": "llm_reranker", "text_1": QUERY, "text_2": TEXTS, "instruction": "Judge.", "activation": False},
        {"model": "colbert", "queries": TEXTS, "documents": [{"content": "Deep."}, "Flat."], "instruction": None},
        {"model": "embedder", "data_1": QUERY, "data_2": TEXTS, "max_tokens_per_query": 4, "max_tokens_per_doc": 8},
    ],
    "/v1/score": [{"model": "cross_encoder", "queries": [QUERY], "items": TEXTS, "truncate_prompt_tokens": -1}],
    "/rerank": [
        {"model": "cross_encoder", **PAIRS, "top_n": 2, "return_documents": True, "rank_fields": ["text", "year"]},
        {"model": "colbert", **RANKED, "truncation_direction": "Left"},
        {"model": "llm_reranker", **PAIRS, "max_tokens_per_doc": 5, "chat_template_kwargs": {"instruction": "Judge."}},
    ],
    "/v1/rerank": [
        {"model": "embedder", **PAIRS, "return_documents": False},
        {"model": "cross_encoder", **RANKED},
        {"model": "cross_encoder", **PAIRS, "budget_ms": 20},
    ],
    "/v2/rerank": [{"model": "cross_encoder", **PAIRS, "max_tokens_per_doc": 4096, "priority": 0}],
    "/explain": [
        {"model": "embedder", "query": QUERY, "document": TEXTS[1], "truncate": "start"},
        {"model": "colbert", "query": QUERY, "document": TEXTS[0], "truncate": "end"},
    ],
    "/v1/indexes/docs/search": [
        {"query": QUERY, "k": 3, "filter": {"year": [1790, 1812], "kind": "mill"}, "exact": True},
        {"queries": [QUERY, "Flour."], "ids": ["pond", "wheel"], "candidates": 20},
    ],
    "/v1/indexes/docs/explain": [{"query": QUERY, "id": "pond"}],
    "/v1/indexes/drafts/add": [
        {"ids": ["a", "é 🌊"], "texts": TEXTS, "metadata": [{"year": 1790, "tags": ["deep"], "open": True}, None]},
        {"ids": [], "texts": []},
    ],
    "/v1/indexes/drafts/delete": [{"ids": ["a", "gone"]}, {"filter": {"year": 1812}}],
    "/v2/embed": [
        {"model": "embedder", "texts": TEXTS, "input_type": "search_query", "embedding_types": ["float", "ubinary"]},
        {"model": "prompted", "inputs": [{"content": TALK[1]["content"]}], "output_dimension": 16, "max_tokens": 9},
    ],
    "/v1/embed": [{"model": "embedder", "texts": TEXTS, "truncate": "NONE", "embedding_types": ["int8", "base64"]}],
    "/embed": [
        {"model": "embedder", "inputs": TEXTS, "normalize": False, "truncate": True, "truncation_direction": "Right"},
        {"model": "prompted", "inputs": QUERY, "prompt_name": "query", "dimensions": 32},
    ],
    "/embed_all": [{"model": "embedder", "inputs": [TEXTS[0], [5, 6]]}, {"model": "colbert", "inputs": QUERY}],
    "/embed_sparse": [
        {"model": "sparse_embedder", "inputs": TEXTS, "truncate": False},
        {"model": "bge_m3", "inputs": QUERY, "prompt_name": None},
    ],
    "/similarity": [
        {
            "model": "embedder",
            "inputs": {"source_sentence": QUERY, "sentences": TEXTS},
            "parameters": {"truncate": True, "prompt_name": None},
        }
    ],
    "/predict": [
        {"model": "classifier", "inputs": QUERY, "parameters": {"top_k": 2, "function_to_apply": "sigmoid"}},
        {"model": "classifier", "inputs": [["a", "b"], ["c"]], "raw_scores": True},
    ],
    "/api/embed": [
        {"model": "embedder", "input": TEXTS, "truncate": True, "keep_alive": "5m", "options": {"num_ctx": 32}},
        {"model": "prompted:latest", "input": QUERY, "dimensions": 16, "keep_alive": -1, "options": None},
    ],
    "/api/embeddings": [{"model": "embedder", "prompt": QUERY, "keep_alive": 300.5, "options": {"temperature": 0}}],
    "/api/show": [{"model": "embedder", "verbose": True}, {"name": "llm"}],
    "/?model=embedder": [{"inputs": TEXTS}],
    "/?model=cross_encoder": [{"query": QUERY, "texts": TEXTS}],
    "/?model=classifier": [{"inputs": QUERY, "raw_scores": True}],
    "/ping": [{}],
}
KEY = "a key"  # of the server: without one it changes no index
INDEXES = ("docs", "drafts")  # of the ColBERT: one is searched, the other changed
MODELS = (
    "embedder prompted colbert cross_encoder classifier token_classifier reward_model sparse_embedder llm "
    "llm_reranker bge_m3 outcome_reward"
).split()


def template_of(path: str) -> str:
    """The path in the API's description: ``/v1/indexes/docs/search`` is ``/v1/indexes/{name}/search``."""
    for name in INDEXES:
        path = path.replace(f"/{name}/", "/{name}/")
    return path


def _nested(depth: int, kind: type) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


# What stands in the place of a value; Python's json writes NaN and halves of characters as they must not be.
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 64, 65, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, 10**400),
    *(0.5, -0.0, 5e-324, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", " ", "\x00", "a\x00b", "\n", "\ud800", "\udfff\ud800", "\uffff", "\u202e", "é" * 70, "😀" * 70, "5", "true"),
    *("a" * 100_000, "mill " * 20_000, "[MASK][SEP][CLS] [PAD]", "<|im_start|>", "{{ 7 * 7 }}", "{% raise %}"),
    *("../../etc/passwd", "%s%n", "' OR 1=1 --", "none", "query", "float", "embed", "-1", "NaN"),
    *([], [[]], [[[]]], {}, [{}], {"": ""}, [None], [[None]], [""], ["", ""], [0], [[0]], [-1], [[1 << 40]], [0.5]),
    *(["a", 1], [1, "a"], [["a"], "a"], ["a", None], [[1], ["a"]], [True], ["a"] * 3000, list(range(3000))),
    *(
        [[5] * 70],
        [[5]] * 2100,
        [""] * 2000,
        ["mill " * 40] * 500,
        "a b " * 70_000,
        {"content": None},
        {"content": [{"type": "image_url"}]},
        {"content": [{"text": 5}]},
    ),
    *([{"role": "user"}], [{"role": 5, "content": []}], [[{"role": "user", "content": "a"}], []], {"text": {}}),
    *(_nested(60, list), _nested(60, dict)),
)
CONTENT_TYPES = (
    *("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonl"),
    *("application/json; charset=utf-16", "APPLICATION/JSON", "application/json, text/plain", "json", ";", "é" * 400),
    "application/vnd.api+json",
)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A request."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


def mutants(path: str, count: int, *, seed: int = 0) -> Iterator[Mutant]:
    """``count`` requests to ``path``, deterministic."""
    for number in range(count):
        chance = random.Random(f"{seed} {path} {number}")
        value = copy.deepcopy(chance.choice(BODIES[path]))
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            value = chance.choice(_OF_VALUES)(value, chance)
        body = json.dumps(value, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")
        if chance.random() < 0.4:
            body = chance.choice(_OF_BYTES)(body, chance)
        yield Mutant(path=path, body=body, headers=_headers(chance))


def _headers(chance: random.Random) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if chance.random() < 0.06:
        headers["Content-Type"] = chance.choice(CONTENT_TYPES)
    if chance.random() < 0.04:
        headers["Content-Encoding"] = chance.choice(("gzip", "identity", "br, gzip", "", "é"))
    if chance.random() < 0.04:
        headers["X-Request-Id"] = chance.choice(("", "a" * 5000, "{}\t%00", "é", "../.."))
    if chance.random() < 0.04:
        headers["Accept"] = chance.choice(("", "text/html", "application/octet-stream", "*/*;q=0"))
    return headers


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield value, key
        yield from _places(part)


def _replaced(value: Any, chance: random.Random) -> Any:
    places = list(_places(value))
    if not places:
        return copy.deepcopy(chance.choice(STRANGE))  # a further mutation would change it for all
    container, key = chance.choice(places)
    container[key] = copy.deepcopy(chance.choice(STRANGE))
    return value


def _removed(value: Any, chance: random.Random) -> Any:
    places = list(_places(value))
    if places:
        container, key = chance.choice(places)
        del container[key]
    return value


def _added(value: Any, chance: random.Random) -> Any:
    """Adds a field of another body, or an unknown one."""
    if isinstance(value, dict):
        other = chance.choice(chance.choice(list(BODIES.values())))
        key = chance.choice([*other, "", "__proto__", "é", "images", "late_chunking_params", "chat_template", "model"])
        value[key] = copy.deepcopy(other.get(key, chance.choice(STRANGE)))
    return value


def _wrapped(value: Any, chance: random.Random) -> Any:
    places = list(_places(value))
    if not places:
        return [value]
    container, key = chance.choice(places)
    part = container[key]
    container[key] = chance.choice(([part], {"a": part}, str(part), [part] * 3, {"content": part}, json.dumps(part)))
    return value


def _of_another_model(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        value["model"] = chance.choice([*MODELS, *MODELS, "gpt-4", "", None])
    return value


_OF_VALUES: tuple[Callable[[Any, random.Random], Any], ...] = (
    *(_replaced, _replaced, _replaced, _replaced, _removed, _added, _added, _wrapped, _of_another_model),
)


def _cut(body: bytes, chance: random.Random) -> bytes:
    return body[: chance.randrange(len(body))]


def _flipped(body: bytes, chance: random.Random) -> bytes:
    changed = bytearray(body)
    for _ in range(chance.randint(1, 8)):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _inserted(body: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(body))
    more = (chance.randbytes(8), *(b'\xff\xfe \xed\xa0\x80 \x00 NaN 1e999 /**/ \\ud83d " ,').split(b" "))
    return body[:at] + chance.choice(more) + body[at:]


def _repeated(body: bytes, chance: random.Random) -> bytes:
    first, last = sorted(chance.sample(range(len(body) + 1), 2))
    times = chance.choice((1, 1, 2, 200))
    return body[:last] + body[first:last] * (times if last - first < 4000 else 2) + body[last:]


def _shortened(body: bytes, chance: random.Random) -> bytes:
    first, last = sorted(chance.sample(range(len(body) + 1), 2))
    return body[:first] + body[last:]


def _buried(body: bytes, chance: random.Random) -> bytes:
    """Nests the body in many brackets, which overflows a recursive parser."""
    depth = chance.choice((100, 5000, 200_000))
    opened, closed = chance.choice(((b"[", b"]"), (b'{"input":', b"}"), (b'{"a":[', b"]}")))
    return opened * depth + body + closed * chance.choice((0, depth))


def _written_otherwise(body: bytes, chance: random.Random) -> bytes:
    text = body.decode("utf-8", "replace")
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: text.encode("utf-16"),
        lambda: text.encode("utf-32-be"),
        lambda: b"\xef\xbb\xbf" + body,
        lambda: gzip.compress(body),
        lambda: text.replace('"', "'").encode(),
        lambda: body + b"\n" + body,
        lambda: b" " * 70_000 + body,
        lambda: json.dumps(text).encode(),
    )
    return chance.choice(kinds)()


def _another(body: bytes, chance: random.Random) -> bytes:
    others = b' null 0 "" [] {} [{}] true \x00 - "\\u {'.split(b" ")
    return chance.choice((b" ", *others, chance.randbytes(99)))


def _of_numbers(body: bytes, chance: random.Random) -> bytes:
    """Replaces a digit, if there is one, by another kind of number."""
    digits = [i for i, byte in enumerate(body) if chr(byte).isdigit()]
    if not digits:
        return body
    at = chance.choice(digits)
    kinds = (*b"NaN -Infinity 1e400 -0 01 0x10 1.0 1e2 -9223372036854775809".split(), b"9" * 5000)
    return body[:at] + chance.choice(kinds) + body[at + 1 :]


_OF_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_cut, _flipped, _flipped, _inserted, _inserted, _repeated, _shortened, _buried, _written_otherwise),
    *(_another, _of_numbers),
)
