"""/v1/embeddings, /pooling, /classify, /tokenize and /detokenize."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from tests.server.api.cases import LONG, TEXTS, Case, Engines, refused

from millpond import TokenIds

TALK = [{"role": "user", "content": "How deep is it?"}]
RENDERED = "<|im_start|>user\nHow deep is it?<|im_end|>\n"
STEP = "<extra_0>"
STEPS = [f"Two and two is four.{STEP} So it is even.{STEP}", f"The pond is deep.{STEP}"]
NULLS = dict.fromkeys("encoding_format embed_dtype endianness dimensions user priority messages input_type".split())


def embeddings(model: str, same: Any, **body: Any) -> Case:
    """A case whose vectors are those of ``same(engine)``."""

    def expected(engines: Engines) -> Any:
        rows = same(engines[model])
        rows = getattr(rows, "embeddings", rows)
        return {"model": model, "data": [{"index": i, "embedding": np.array(row)} for i, row in enumerate(rows)]}

    return Case(path="/v1/embeddings", body={"model": model, **body}, same=expected)


def pooling(model: str, same: Any, **body: Any) -> Case:
    """A case whose rows are those of ``same(engine)``."""

    def expected(engines: Engines) -> Any:
        rows = same(engines[model])
        return {"data": [{"index": i, "object": "pooling", "data": np.array(row)} for i, row in enumerate(rows)]}

    return Case(path="/pooling", body={"model": model, **body}, same=expected)


def bare(engine: Any, *texts: str) -> Any:
    """Vectors of texts rendered by a template, which adds their only special tokens."""
    return engine.submit(
        "embed", [TokenIds(tuple(ids)) for ids in engine.tokenize(list(texts), special_tokens=False)]
    ).result()


def usage(tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


IDS = [[5, 6, 7], [8, 9]]


def embedded_ids(engine: Any, ids: list[list[int]] = IDS) -> Any:
    return engine.submit("embed", [TokenIds(tuple(each)) for each in ids]).result()


def cut(limit: int, side: str) -> Any:
    def same(engine: Any) -> Any:
        (ids,), ((start, end),) = engine.tokenize([LONG], special_tokens=False), engine.tokenize([""])
        return embedded_ids(engine, [[start, *(ids[: limit - 2] if side == "right" else ids[2 - limit :]), end]])

    return same


EMBEDDINGS = [
    Case(
        path="/v1/embeddings",
        body={"model": "embedder", "input": TEXTS[:2], "user": "somebody", "request_id": "own", "extra": {"c": 1}},
        same=lambda e: {
            "id": "embd-own",
            "object": "list",
            "created": int,
            "model": "embedder",
            "usage": usage(e["embedder"].embed(TEXTS[:2]).usage.prompt_tokens),
        },
    ),
    Case(path="/v1/embeddings", body={"model": "embedder", "input": "a"}, same=lambda e: {"id": "embd-mine"}),
    embeddings("embedder", lambda e: e.embed(TEXTS), input=TEXTS),
    embeddings("embedder", lambda e: e.embed(["", "a"]), input=["", "a"], **NULLS),
    embeddings("embedder", lambda e: e.embed(TEXTS[:1]), input=TEXTS[0]),
    embeddings("embedder", embedded_ids, input=IDS),
    embeddings("embedder", lambda e: bare(e, *TEXTS), input=TEXTS, add_special_tokens=False),
    embeddings("embedder", cut(64, "right"), input=LONG, truncate_prompt_tokens=-1),
    embeddings("embedder", cut(10, "left"), input=LONG, truncate_prompt_tokens=10, truncation_side="left"),
    embeddings("embedder", lambda e: e.embed(TEXTS, normalize=False), input=TEXTS, normalize=False),
    embeddings("embedder", lambda e: embedded_ids(e, [[5, 6]]), input=[[5, 6]], role="query"),  # it has no prompt
    *(
        embeddings("prompted", lambda e: e.embed(TEXTS, role="query"), input=TEXTS, **{field: name})
        for field, name in (
            ("role", "query"),
            ("prompt_name", "query"),
            ("input_type", "query"),
            ("input_type", "search_query"),
        )
    ),
    *(
        embeddings("prompted", lambda e: e.embed(TEXTS, role="document"), input=TEXTS, **{field: name})
        for field, name in (("role", "passage"), ("input_type", "search_document"), ("input_type", "passage"))
    ),
    embeddings("prompted", lambda e: e.embed(TEXTS, prompt="", dimensions=16), input=TEXTS, dimensions=16),
    embeddings("prompted", lambda e: e.embed(TEXTS, prompt=""), input=TEXTS, dimensions=48),
    embeddings("colbert", lambda e: e.token_embed(TEXTS), input=TEXTS),
    embeddings("colbert", lambda e: e.token_embed(TEXTS, role="query"), input=TEXTS, input_type="query"),
    embeddings("llm", lambda e: bare(e, RENDERED), messages=TALK),
    embeddings("llm", lambda e: bare(e, RENDERED), input=[TALK]),
    embeddings("llm", lambda e: e.embed([RENDERED]), messages=TALK, add_special_tokens=True),
    embeddings(
        "llm",
        lambda e: bare(e, RENDERED, "<|im_start|>system\nBe brief.<|im_end|>\n" + RENDERED),
        messages=[TALK, [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *TALK]],
    ),
    embeddings(
        "llm", lambda e: bare(e, RENDERED + "<|im_start|>assistant\n"), messages=TALK, add_generation_prompt=True
    ),
    embeddings("llm", lambda e: bare(e, RENDERED[: -len("<|im_end|>\n")]), messages=TALK, continue_final_message=True),
    *refused(
        "/v1/embeddings",
        "embedder",
        [
            ({"input": []}, "You must pass at least one prompt", "input"),
            ({"input": ["a"] * 401}, "401 input in one request; this server takes 400", "input"),
            ({"input": [[]]}, "index 0 has no token ids", None),
            ({"input": [[5], [5, 1 << 40]]}, "index 1 .* out of vocabulary", None),
            ({"input": ["a", 5]}, r"input.texts.1: .*string_type", "input"),
            ({"input": [5, "a"]}, r"input.tokens.1: .*int_type", "input"),
            ({"input": [[5], "a"]}, r"input.token_lists.1: .*list_type", "input"),
            ({"input": [True]}, r"input.tokens.0: .*int_type", "input"),
            ({}, "input is missing", None),
            ({"input": "a", "messages": TALK}, "exclude each other", None),
            ({"input": "a", "encoding_format": "hex"}, "literal_error.*'hex'", "encoding_format"),
            ({"input": "a", "dimensions": 16}, "does not support Matryoshka embeddings", "dimensions"),
            ({"input": "a", "truncate_prompt_tokens": -2}, "greater_than_equal", "truncate_prompt_tokens"),
            ({"input": "a", "truncate_prompt_tokens": 65}, "^truncate_prompt_tokens value is greater than max_model_"),
            ({"input": "a", "padding": "max_length"}, "millpond never pads", None),
            ({"input": "a", "cache_salt": ""}, "string_too_short", "cache_salt"),
            ({"input": "a", "late_chunking_params": {"chunk_size": 4}}, "is not served", "late_chunking_params"),
            ({"input": "a", "input_type": "prose"}, "Unsupported input_type 'prose'", None),
            ({"input": "a", "role": "query", "input_type": "query"}, "exclude each other", "role"),
            ({"input": ["a", LONG]}, "maximum context length is 64 tokens. However.* at index 1", "input_tokens"),
            ({"input": "a", "model": "nobody"}, "^The model `nobody` does not exist.$", 404),
            ({"input": [[5, 6]], "model": "prompted", "role": "query"}, "index 0"),
            ({"input": "a", "model": "prompted", "role": "query", "add_special_tokens": False}, "index 0"),
            ({"input": "a", "model": "prompted", "dimensions": 17}, "^Model 'prompted' only supports", "dimensions"),
            ({"messages": TALK}, "embedder has none"),
        ],
    ),
    *refused(
        "/v1/embeddings",
        "llm",
        [
            ({"messages": [[]]}, "too_short"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}, "literal_error"),
            ({"messages": [TALK, [{"role": "user", "content": None}]]}, "conversation at index 1"),
            ({"messages": TALK, "chat_template": "{{ 1 }}"}, "--trust-request-chat-template is not set"),
            ({"messages": TALK, "chat_template_kwargs": {"tokenize": True}}, "holds tokenize"),
            ({"messages": TALK, "add_generation_prompt": True, "continue_final_message": True}, "Cannot set both"),
        ],
    ),
]

JUDGED = {"step_tag_id": 9, "returned_token_ids": [7, 8], "use_activation": True}

POOLING = [
    pooling("embedder", lambda e: e.embed(TEXTS).embeddings, input=TEXTS, task="embedding"),
    pooling("embedder", lambda e: e.embed(TEXTS, normalize=False).embeddings, input=TEXTS, activation=False),
    pooling("embedder", lambda e: e.encode(TEXTS, task="token_embed").embeddings, input=TEXTS, task="token_embed"),
    pooling("classifier", lambda e: e.classify(TEXTS, activation=False).probs, input=TEXTS, softmax=False),
    pooling("classifier", lambda e: e.classify(TEXTS, activation="sigmoid").probs, input=TEXTS, activation="sigmoid"),
    pooling("colbert", lambda e: e.token_embed(TEXTS, role="query").embeddings, input=TEXTS, role="query"),
    pooling("token_classifier", lambda e: e.token_classify(TEXTS).probs, input=TEXTS, task="encode"),
    pooling("llm", lambda e: e.embed(TEXTS).embeddings, input=TEXTS),  # the first task of the model
    pooling("reward_model", lambda e: e.reward(STEPS).rewards, input=STEPS, task="reward"),
    pooling(
        "reward_model",
        lambda e: e.reward(STEPS, activation=True).rewards,
        input=STEPS,
        task="reward",
        use_activation=True,
    ),
    pooling(
        "reward_model",
        lambda e: [matrix[:, 1:] for matrix in e.reward(STEPS).rewards],
        input=STEPS,
        task="reward",
        returned_token_ids=[1],
    ),
    pooling(
        "reward_model",
        lambda e: e.reward([[*TALK, {"role": "assistant", "content": f"Done. {STEP}"}]]).rewards,
        messages=[*TALK, {"role": "assistant", "content": f"Done. {STEP}"}],
        task="reward",
    ),
    Case(
        path="/pooling",
        body={"model": "llm", "input": [[5, 9, 6, 9], [9]], "task": "reward", **JUDGED},
        same=lambda _: {"id": re.compile("^pooling-"), "data": [{"data": [list, list]}, {"data": [list]}]},
    ),
    *refused(
        "/pooling",
        "embedder",
        [
            ({"input": "a", "task": "generate"}, r"^Unsupported task: 'generate' Supported tasks: \(", "task"),
            ({"input": "a", "task": "classify"}, r"'classify' Supported tasks: \('embed',", "task"),
            ({"input": "a", "dimensions": 16}, "dimensions is currently not supported", "dimensions"),
            ({"input": "a", "model": "classifier", "role": "query"}, "role='query' means nothing to classify", None),
            ({"input": "a", "model": "reward_model", "task": "reward", "step_tag_id": -1}, "greater_than_equal"),
            (
                {"input": "a", "model": "reward_model", "task": "reward", "returned_token_ids": [0, 9]},
                "returned_token_ids holds 9",
            ),
            ({"input": "a", "model": None}, "several models serve the Pooling API"),
        ],
    ),
]


def classified(same: Any, **body: Any) -> Case:
    return Case(
        path="/classify",
        body={"model": "classifier", **body},
        same=lambda e: {
            "id": re.compile("^classify-"),
            "data": [
                {"index": i, "label": top[0].label, "probs": row, "num_classes": 3}
                for i, (top, row) in enumerate(
                    zip(same(e["classifier"]).top(1), same(e["classifier"]).probs, strict=True)
                )
            ],
            "usage": usage(same(e["classifier"]).usage.prompt_tokens),
        },
    )


CLASSIFY = [
    classified(lambda e: e.classify(TEXTS), input=TEXTS),
    classified(lambda e: e.classify(TEXTS[:1], activation=False), input=TEXTS[0], softmax=False),
    classified(lambda e: e.classify([LONG]), input=LONG, truncate_prompt_tokens=-1),
    Case(
        path="/classify",
        body={"model": "nli", "input": TEXTS, "labels": ["water", "bread"], "template": "On {}", "multi_label": True},
        same=lambda e: {
            "data": [
                {"probs": row, "label": ("water", "bread")[int(row.argmax())], "num_classes": 2}
                for row in e["nli"].classify(TEXTS, labels=["water", "bread"], template="On {}", multi_label=True).probs
            ]
        },
    ),
    *refused(
        "/classify",
        "classifier",
        [
            ({"input": "a", "model": "embedder"}, "^The model does not support Classification API$", 501),
            ({"input": "a", "use_activation": 1}, "bool_type"),
            ({"input": "a", "labels": ["a"]}, "none of which begins with entail; labels= needs a model of natural"),
            ({"input": "a", "labels": ["a"], "model": "nli", "template": "on"}, "must have one {}, the place"),
        ],
    ),
]


def tokenized(text: str, *, model: str = "embedder", special: bool = True, **body: Any) -> Case:
    return Case(
        path="/tokenize",
        body={"model": model, **body},
        same=lambda e: {"tokens": e[model].tokenize([text], special_tokens=special)[0]},
    )


TOKENIZE = [
    Case(
        path="/tokenize",
        body={"model": "embedder", "prompt": "a pond", "return_token_strs": True},
        same=lambda e: {"count": 4, "max_model_len": 64, "token_strs": ["[CLS]", "a", "pond", "[SEP]"]},
    ),
    tokenized(LONG, prompt=LONG),
    tokenized("池", prompt="池", special=False, add_special_tokens=False),
    tokenized(RENDERED + "<|im_start|>assistant\n", model="llm", special=False, messages=TALK),
    tokenized(RENDERED, model="llm", messages=TALK, add_generation_prompt=False, add_special_tokens=True),
    tokenized(
        "sonar\n" + RENDERED,
        model="llm",
        special=False,
        messages=TALK,
        add_generation_prompt=False,
        tools=[{"name": "sonar"}],
    ),
    *refused(
        "/tokenize",
        "embedder",
        [
            ({}, "pass prompt or messages"),
            ({"messages": TALK}, "embedder has none"),
            ({"model": "llm", "messages": [TALK, TALK]}, "2 conversations"),
        ],
    ),
    Case(
        path="/detokenize",
        body={"model": "embedder", "tokens": [5, 6, 7]},
        same=lambda _: {"prompt": "',."},  # as transformers cleans up "' , ."
    ),
    Case(path="/detokenize", body={"model": "embedder", "tokens": []}, same=lambda _: {"prompt": ""}),
    *refused(
        "/detokenize",
        "embedder",
        [
            ({"tokens": [5, 360]}, "360 at index 1 is out of vocabulary; embedder has 360 tokens"),
            ({"tokens": [(1 << 63) - 1]}, "out of vocabulary"),
            ({"tokens": [1 << 63]}, "less_than"),
            ({"tokens": [-1]}, "greater_than_equal"),
            ({"tokens": [5] * ((1 << 17) + 1)}, "131073 tokens in one request; this server takes 131072", "tokens"),
        ],
    ),
]

OPENAI = [*EMBEDDINGS, *POOLING, *CLASSIFY, *TOKENIZE]
