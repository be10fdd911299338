"""Score templates and tokenizers, read from a checkpoint's files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.tiny.tokenizers import write_tokenizer

from millpond.checkpoints.templates.chat_template import read_chat_template
from millpond.checkpoints.templates.score_template import ScoreTemplate, read_template, shipped_template
from millpond.errors import InvalidRequestError

# --- Score templates: the shipped ones, other projects' files, and what is refused ------------------------------------


# The texts of the model cards.
GOLDEN = {
    "qwen3-reranker": (
        "<|im_start|>system\n"
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
        "<Instruct>: {instruction}\n<Query>: How deep?\n<Document>: Two {{metres}}.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    "mxbai-rerank-v2": (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n"
        "{instruction}query: How deep?\ndocument: Two {{metres}}.\n"
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "bge-reranker-v2-gemma": "A: How deep?\nB: Two {{metres}}.\n{instruction}",
    "nemotron-rerank": "question:How deep? \n \n passage:Two {{metres}}.",
}
# The cards' own code writes these: tests/parity/rerankers.py has it, and test_encoder_decoder.py.
BY_ORACLE = ("bge-reranker-layers", "ctxl-rerank-v2", "jina-reranker-v3", "kalm-reranker", "zerank")
DEFAULTS = {
    "qwen3-reranker": "Given a web search query, retrieve relevant passages that answer the query",
    "mxbai-rerank-v2": "",
    "bge-reranker-v2-gemma": (
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
        "prediction of either 'Yes' or 'No'."
    ),
    "nemotron-rerank": "",
}
WITH_INSTRUCTION = {**dict.fromkeys(GOLDEN, "Find it"), "mxbai-rerank-v2": "instruction: Find it\n"}
QUERY, DOCUMENT = "How deep?", "Two {metres}."

# In the style of vLLM's files: literal text, messages selected by role, several names for the instruction.
BY_ROLE = (
    "<s>{{ instruction | default(messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first "
    "| default('Find passages', true), true) }}\n"
    "Q: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "D: {{ (messages | selectattr('role', 'eq', 'document') | first).content }}\nA:\n\n"
)
# In the style of sentence-transformers' conversions: a loop, a namespace, the system message as the instruction.
LOOPING = """\
{%- set found = namespace(query='', document='', task='Find passages') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set found.task = message.content %}
    {%- elif message['role'] == 'query' %}
        {%- set found.query = message.content %}
    {%- elif message['role'] == 'document' %}
        {%- set found.document = message.content %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{{- bos_token + found.task + '\\n' }}{{ found.query | tojson }}
{% if add_generation_prompt %}
    {{- 'opened' }}
{% endif %}
{% generation %}{{ found.document }}{% endgeneration %}
{{- eos_token }}"""
STRUCTURED = (
    "Q: {{ (messages | selectattr('role', 'eq', 'query') | first).content[0].text }} "
    "D: {% for part in (messages | selectattr('role', 'eq', 'document') | first).content %}{{ part.text }}{% endfor %}."
)
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
ASSISTANT = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def golden(name: str, instruction: str) -> str:
    return GOLDEN[name].replace("{instruction}", instruction).replace("{{metres}}", "{metres}")


@pytest.mark.parametrize("name", GOLDEN)
def test_shipped_templates_are_the_model_cards_texts(name: str) -> None:
    template = shipped_template(name, special_tokens=True)
    template.check()
    assert template.names_roles
    assert template.render(QUERY, DOCUMENT) == golden(name, DEFAULTS[name])
    assert template.render(DOCUMENT, QUERY) != golden(name, DEFAULTS[name])


@pytest.mark.parametrize("name", GOLDEN)
def test_shipped_templates_take_an_instruction_if_the_model_does(name: str) -> None:
    template = shipped_template(name, special_tokens=True)
    takes = name != "nemotron-rerank"
    assert template.takes_instruction == takes
    text = template.render(QUERY, DOCUMENT, instruction="Find it")
    assert text == golden(name, WITH_INSTRUCTION[name] if takes else "")
    assert (text != template.render(QUERY, DOCUMENT)) == takes


def test_every_shipped_file_is_listed_here() -> None:
    folder = Path(str(shipped_template.__globals__["_SHIPPED"]))
    assert {path.stem for path in folder.glob("*.jinja")} == {*GOLDEN, *BY_ORACLE, "plain"}
    assert shipped_template("plain", special_tokens=True).render(" q", "d ") == " qd "


@pytest.mark.torch
@pytest.mark.parametrize("source", [BY_ROLE, LOOPING, STRUCTURED, CHATML, GOLDEN["nemotron-rerank"] + ASSISTANT])
@pytest.mark.parametrize("instruction", [None, "Where is <it>?"])
def test_rendering_is_transformers_rendering(tmp_path: Path, source: str, instruction: str | None) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, "mistral", limit=None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    template = ScoreTemplate(source=source).bound({**TOKENS, "unk_token": "<unk>", "pad_token": "</s>"})
    for query, document in (("q", "d"), ('a "quote" & <b>', "  blanks \n and ünïcödé \n\n"), ("", "")):
        wrap: Any = (lambda text: [{"type": "text", "text": text}]) if source == STRUCTURED else str
        messages = [{"role": "system", "content": wrap(instruction)}] if instruction else []
        messages += [{"role": "query", "content": wrap(query)}, {"role": "document", "content": wrap(document)}]
        variables = {"instruction": instruction} if instruction else {}
        expected = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **variables)
        assert template.render(query, document, instruction=instruction) == expected


def test_both_styles_render_the_pair_and_the_instruction() -> None:
    for source in (BY_ROLE, LOOPING):
        template = ScoreTemplate(source=source, variables=TOKENS)
        template.check()
        assert template.names_roles
        assert template.takes_instruction
        assert "Find passages" in template.render("q", "d")
        assert "Find it" in template.render("q", "d", instruction="Find it")
        assert "Its own" in ScoreTemplate(source=source, variables=TOKENS, instruction="Its own").render("q", "d")
    structured = ScoreTemplate(source=STRUCTURED)
    assert structured.failure is None
    assert structured.render("q", "d") == "Q: q D: d."


def test_a_template_that_renders_every_role_is_not_for_pairs() -> None:
    assert ScoreTemplate(source=CHATML).failure is None
    assert not ScoreTemplate(source=CHATML).names_roles
    assert not ScoreTemplate(source=ASSISTANT).names_roles


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ (messages | selectattr('role', 'eq', 'query') | first).content }}", "has no slot for the document"),
        (ASSISTANT, "has no slot for the query and the document"),
        ("Hello", "has no slot for the query and the document"),
        ("{{ raise_exception('roles must alternate') }}", "cannot be rendered: roles must alternate"),
        ("{{ messages[0].content.nothing.at.all }}", "cannot be rendered"),
        ("{% for m in messages %}", "cannot be rendered"),
    ],
)
def test_templates_without_their_slots_are_refused_with_an_example(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"the template mine {reason}") as caught:
        ScoreTemplate(source=source, name="mine").check()
    example = str(caught.value).split("for example\n", 1)[1]
    assert ScoreTemplate(source=example).failure is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_an_untrusted_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="SecurityError"):
        ScoreTemplate(source=source).render("q", "d")


def test_the_users_template_is_a_path_or_the_source(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(BY_ROLE, encoding="utf-8")
    read = read_template(str(path))
    assert read.source == read_template(BY_ROLE).source == BY_ROLE
    assert read.name == "mine.jinja"
    assert read.special_tokens
    with pytest.raises(InvalidRequestError, match=re.escape("score_template='no/such.jinja' cannot be read")):
        read_template("no/such.jinja")


def test_each_text_is_located_whatever_its_content() -> None:
    template = ScoreTemplate(source="Q {{ messages[0].content }} D {{ messages[1].content | trim }} end")
    query, document = "D Q end", "  Q D end "
    text = template.render(query, document)
    (before_query, after_query), (before_document, after_document) = template.around(query, document, text)
    assert (before_query, after_query) == ("Q ", " D Q D end end")
    assert (before_document, after_document) == ("Q D Q end D ", " end")
    awkward = "\ue0f1\ue0f2\ue0f4 and \ue0f1\ue0f2"
    _, (before_document, after_document) = template.around("q", awkward, template.render("q", awkward))
    assert (before_document, after_document) == ("Q q D ", " end")


def test_chat_templates_are_read_from_any_of_their_files(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null}', encoding="utf-8")
    assert read_chat_template(tmp_path) is None
    config.write_text(
        '{"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": "one"},'
        ' {"name": "rank", "template": "two{{ bos_token }}"}]}',
        encoding="utf-8",
    )
    one, two = read_chat_template(tmp_path), read_chat_template(tmp_path, variant="rank")
    assert one is not None
    assert (one.source, one.special_tokens) == ("one", False)
    assert two is not None
    assert two.render("q", "d") == "two<s>"
    assert read_chat_template(tmp_path, variant="other") is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "three"}', encoding="utf-8")
    three = read_chat_template(tmp_path)
    assert three is not None
    assert three.source == "three"
    (tmp_path / "chat_template.jinja").write_text("four", encoding="utf-8")
    four = read_chat_template(tmp_path, instruction="Find it", variables={"x": 1})
    assert four is not None
    assert (four.source, four.instruction, four.variables["x"]) == ("four", "Find it", 1)
