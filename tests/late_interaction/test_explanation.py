"""Explanations: the matches add up to MaxSim and name the text, and the heat maps show them safely."""

import math
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from playwright.sync_api import sync_playwright
from tests.tiny.heads import write_stanford

from millpond import Engine, TokenSpans
from millpond.errors import InvalidRequestError
from millpond.late_interaction import Ragged, TokenMatch, maxsim
from millpond.late_interaction.encoding.token_pooling import pool_tokens, pooled_rows
from millpond.late_interaction.scoring.explanation import explain, html, terminal

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def spans(text: str, *words: str) -> TokenSpans:
    """The tokens of a text; one that is not in it stands for no text."""
    offsets, at = [], 0
    for word in words:
        at = text.find(word, at)
        offsets.append((at, at + len(word)) if at >= 0 else (0, 0))
        at = max(at, 0)
    return TokenSpans(tokens=words, offsets=np.array(offsets, dtype=np.int32).reshape(-1, 2))


def rows(*angles: float) -> np.ndarray:
    return np.array([(math.cos(angle), math.sin(angle)) for angle in angles], dtype=np.float32).reshape(-1, 2)


TEXT = "still water turns a wheel"
DOCUMENT = spans(TEXT, "[CLS]", "still", " water", " turns", " wheel")
ANGLES = (3.0, 1.0, 0.0, 0.5, 2.0)


def test_each_query_token_has_its_best_match_and_the_text_there():
    matches = explain(spans("", "a", "b", "[MASK]"), rows(0.1, 1.9, 3.1), DOCUMENT, rows(*ANGLES), TEXT)
    assert [(match.token, match.start, match.end, match.text) for match in matches] == [
        ("a", 6, 11, "water"),
        ("b", 20, 25, "wheel"),
        ("[MASK]", 0, 0, ""),
    ]
    assert [match.score for match in matches] == pytest.approx([math.cos(0.1)] * 3, abs=1e-6)


def test_of_equal_similarities_the_first_token_is_the_match():
    (match,) = explain(spans("", "a"), rows(0.0), DOCUMENT, rows(2.0, 1.0, 1.0, 1.0, 2.0), TEXT)
    assert match.text == "still"


def test_a_span_of_spaces_stays():
    text = "a   b"
    document = TokenSpans(tokens=("\u2581\u2581",), offsets=np.array([[1, 3]], dtype=np.int32))
    (match,) = explain(spans("", "a"), rows(0.0), document, rows(0.0), text)
    assert (match.start, match.end, match.text) == (1, 3, "  ")


def test_a_document_without_tokens_scores_minus_infinity_and_a_query_without_tokens_has_no_matches():
    nothing = spans("")
    assert explain(spans("", "a"), rows(0.0), nothing, rows(), "") == [TokenMatch("a", -math.inf, 0, 0, "")]
    assert explain(nothing, rows(), DOCUMENT, rows(*ANGLES), TEXT) == []


def test_rows_of_another_number_or_width_are_refused():
    with pytest.raises(InvalidRequestError, match=r"query has 1 tokens and rows of shape \[2, 2\]"):
        explain(spans("", "a"), rows(0.0, 1.0), DOCUMENT, rows(*ANGLES), TEXT)
    with pytest.raises(InvalidRequestError, match=r"document has 5 tokens"):
        explain(spans("", "a"), rows(0.0), DOCUMENT, rows(0.0), TEXT)
    with pytest.raises(InvalidRequestError, match="3 wide and document rows 2"):
        explain(spans("", "a"), np.ones((1, 3), np.float32), DOCUMENT, rows(*ANGLES), TEXT)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with Engine(str(write_stanford(tmp_path_factory.mktemp("colbert"))), device="cpu", dtype="float32") as loaded:
        yield loaded


QUERY, PASSAGE = "The pond?", "A wide pond behind the weir, that turns; the wheel. Ein Teich: 池!"


def embedded(engine: Engine, text: str, role: str) -> tuple[TokenSpans, np.ndarray]:
    output = engine.token_embed([text], role=role, normalize=True)  # type: ignore[arg-type]
    return engine.token_spans([text], role=role)[0], output.embeddings[0]  # type: ignore[arg-type]


def test_the_scores_of_a_colbert_query_add_up_to_maxsim(engine):
    query, document = embedded(engine, QUERY, "query"), embedded(engine, PASSAGE, "document")
    matches = explain(*query, *document, PASSAGE)
    pair = [Ragged.from_matrices([side[1]], width=side[1].shape[1]) for side in (query, document)]
    assert sum(match.score for match in matches) == pytest.approx(maxsim(*pair)[0, 0], abs=1e-5)
    assert len(matches) == 12 and matches[-1].token == "[MASK]"
    assert all(PASSAGE[match.start : match.end] == match.text for match in matches)


def test_a_match_in_a_pooled_document_is_the_best_token_of_the_best_row(engine):
    (query, query_rows), (document, document_rows) = (
        embedded(engine, QUERY, "query"),
        embedded(engine, PASSAGE, "document"),
    )
    matrix = Ragged.from_matrices([document_rows], width=document_rows.shape[1])
    pooled, row_of = pool_tokens(matrix, 3), pooled_rows(matrix, 3)[0]
    matches = explain(query, query_rows, document, document_rows, PASSAGE, pooled=(pooled.flat, row_of))
    whole = Ragged.from_matrices([query_rows], width=query_rows.shape[1])
    assert sum(match.score for match in matches) == pytest.approx(maxsim(whole, pooled)[0, 0], abs=1e-5)
    for row, match in zip(query_rows, matches, strict=True):
        best = int((pooled.flat @ row).argmax())
        token = max(np.flatnonzero(row_of == best), key=lambda i: document_rows[i] @ row)
        assert (match.start, match.end) == tuple(document.offsets[token])


MATCHES = [
    TokenMatch("water", 0.9, 6, 11, "water"),
    TokenMatch("##er", 0.6, 9, 11, "er"),
    TokenMatch("[MASK]", 0.5, 0, 0, ""),
    TokenMatch("\u2581wheel", 0.2, 20, 25, "wheel"),
]


def test_without_colour_the_hotter_matches_stand_in_brackets():
    drawn = terminal(MATCHES, TEXT, query="What turns?", color=False)
    assert "\x1b" not in drawn
    assert "still [wat][er] turns a wheel\n" in drawn
    lines = drawn.splitlines()
    assert lines[:2] == ["What turns?", "MaxSim 2.200 over 4 query tokens"]
    assert lines[-4:] == [
        "water     0.900           6-11  water",
        "er        0.600           9-11  er",
        "[MASK]    0.500        no text",
        "wheel     0.200          20-25  wheel",
    ]


def test_colours_follow_the_heat_and_end_before_each_line_break():
    drawn = terminal([TokenMatch("a", 1.0, 0, 7, "one\ntwo")], "one\ntwo three", color=True)
    hot = "\x1b[38;5;16;48;5;208m"
    assert f"{hot}one\x1b[0m\n{hot}two\x1b[0m three" in drawn
    cool = terminal(MATCHES, TEXT, color=True)
    assert "\x1b[38;5;16;48;5;230mwheel\x1b[0m" in cool and f"{hot}er\x1b[0m" in cool


def test_colour_is_off_in_a_pipe_and_by_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" not in terminal(MATCHES, TEXT)  # pytest captures the output
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "\x1b" in terminal(MATCHES, TEXT)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in terminal(MATCHES, TEXT)


def test_a_document_cannot_give_orders_to_the_terminal():
    text = "a\x1b]0;title\x07 b\x9b31m\r\nc\td"
    drawn = terminal([TokenMatch("\x1b[2J", 1.0, 0, len(text), text)], text, query="\x1b[H", color=False)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", drawn)
    assert "\nc\td" in drawn


def test_wide_characters_do_not_move_the_columns_of_the_table():
    matches = [TokenMatch("池", 1.0, 0, 1, "池"), TokenMatch("ab", 1.0, 0, 1, "池")]
    lines = terminal(matches, "池", color=False).splitlines()
    assert lines[-2].startswith("池    1.000") and lines[-1].startswith("ab    1.000")


class Page(HTMLParser):
    """What a page holds: the tags, the text of the document, the marks."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.article = ""
        self._inside = False
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = self._inside or tag == "article"

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "article"

    def handle_data(self, data: str) -> None:
        self.article += data if self._inside else ""

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_holds_the_whole_text_and_marks_the_matches():
    page = Page(html(MATCHES, TEXT, query="What turns?", title="doc 7"))
    assert page.article == TEXT
    marks = page.all("mark")
    assert [mark["class"] for mark in marks] == ["m0", "m0 m1", "m3"]
    assert [mark["style"] for mark in marks] == ["--heat:0.600", "--heat:1.000", "--heat:0.133"]
    assert marks[1]["title"] == "water 0.900; er 0.600"
    assert [chip["id"] for chip in page.all("li")] == ["q0", "q1", "q2", "q3"]
    assert page.all("li")[2]["class"] == "blank"


def test_what_texts_and_tokens_hold_is_no_markup():
    evil = "</article><script>alert(1)</script>\"'&amp;<img src=x>"
    match = TokenMatch(evil, 1.0, 0, len(evil), evil)
    page = Page(html([match, TokenMatch(evil, 1.0, 0, 0, "")], evil, query=evil, title=evil))
    assert page.article == evil
    assert not page.all("script") and not page.all("img")
    assert page.all("mark")[0]["title"] == f"{evil} 1.000"


def test_the_page_loads_nothing_and_runs_nothing():
    source = html(MATCHES, TEXT)
    page = Page(source)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "form"})
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.tags)
    assert "url(" not in source and "@import" not in source and "http" not in source


def test_braces_and_control_characters_are_shown_as_text():
    text = "a {title} \x00 {0}"
    page = Page(html([TokenMatch("{rules}", 1.0, 2, 9, "{title}")], text, query="{query}"))
    assert page.article == "a {title} \ufffd {0}"


@pytest.mark.parametrize(
    ("matches", "text"),
    [
        ([], "text"),
        ([], ""),
        ([TokenMatch("a", -math.inf, 0, 0, "")], ""),
        ([TokenMatch("a", -0.5, 0, 4, "text")], "text"),
        ([TokenMatch("a", 0.0, 0, 4, "text")], "text"),
    ],
    ids=["no matches", "nothing", "an empty document", "a negative score", "a score of zero"],
)
def test_heat_maps_of_next_to_nothing_are_drawn(matches, text):
    assert Page(html(matches, text)).article == text
    assert "nan" not in html(matches, text)
    assert text in terminal(matches, text, color=True)


def test_matches_of_another_text_are_refused():
    for draw in (html, terminal):
        with pytest.raises(InvalidRequestError, match="20 to 25 of a text of 3 characters"):
            draw(MATCHES[3:], "abc")


@pytest.mark.parametrize(
    ("token", "shown"),
    [("##ing", "ing"), ("\u2581wheel", "wheel"), ("\u0120caf\u00c3\u00a9", "café"), ("[CLS]", "[CLS]"), ("##", "##")],
    ids=["wordpiece", "sentencepiece", "byte-level", "special", "two hashes"],
)
def test_tokens_are_shown_without_the_marks_of_vocabularies(token, shown):
    assert f">{shown}</li>" in html([TokenMatch(token, 1.0, 0, 0, "")], "text")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_pointing_at_a_query_token_outlines_its_match():
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_content(html(MATCHES, TEXT))
        outline = "element => getComputedStyle(element).outlineStyle"
        assert page.locator(".m3").evaluate(outline) == "none"
        page.locator("#q3").hover()
        assert page.locator(".m3").evaluate(outline) == "solid"
        assert page.locator(".m0").first.evaluate(outline) == "none"
        page.locator(".m3").hover()
        assert page.locator("#q3").evaluate(outline) == "solid"
        browser.close()
