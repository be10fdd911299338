"""The page at /, in a real browser with a real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from millpond import Engine
from millpond.late_interaction import MemoryIndex, TokenMatch
from millpond.server import ModelConfig, ServedModels, ServerConfig
from tests.server.conftest import running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]

TEXTS = ["The pond is still.", "A wheel turns in the stream.", "How deep is it?"]
QUERY = "What turns the wheel?"
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>",
    "'\"`$(touch owned) \\ </style>{{7*7}}\t%00 &amp; \u2028 🌊",
    "\u202etxet desrever\u202c שלום עולם مرحبا",
    "x" * 3000,
)
# Kept by the page about itself: what it asked for, and what the policy stopped.
WATCH = """
  window.violations = [];
  document.addEventListener('securitypolicyviolation', (event) => violations.push(event.violatedDirective));
"""
PATIENCE = 60_000  # milliseconds; the machine may be busy with something else


@dataclass(kw_only=True)
class Visit:
    """What a page did while it was open."""

    page: Page
    address: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def count(self, path: str) -> int:
        return self.requests.count(f"{self.address}/{path}")

    def run(self, tool: str) -> None:
        """Press the button of ``tool`` and wait for the result."""
        self.page.locator(f"#tab-{tool}").click()
        self.page.locator(f"#{tool} .primary").click()
        expect(self.page.locator(f"#{tool} .answer[aria-busy=false]")).to_have_attribute("data-state", "done")

    def write(self, tool: str, texts: list[str]) -> None:
        """Write ``texts`` into the list of ``tool``, one field each."""
        self.page.locator(f"#tab-{tool}").click()
        panel = self.page.locator(f"#{tool} .texts")
        panel.get_by_role("button", name="Clear").click()
        for i, text in enumerate(texts):
            if i:
                panel.get_by_role("button", name="Add").click()
            panel.locator("textarea").nth(i).fill(text)

    def values(self, selector: str) -> list[float]:
        """The numbers shown there, with all digits."""
        items = self.page.locator(f"{selector} data")
        return [float(value) for value in items.evaluate_all("nodes => nodes.map((node) => node.value)")]

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> Iterator[dict[str, Engine]]:
    """The engines of ``site``, by the names of their models."""
    names = {"tagger": "token_classifier"} | {name: name for name in ("embedder", "colbert", "classifier")}
    folders = {name: request.getfixturevalue(fixture) for name, fixture in names.items()}
    folders["cross-encoder"] = request.getfixturevalue("cross_encoder")
    engines = {name: Engine(folder, dtype="float32") for name, folder in folders.items()}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module")
def site(models: dict[str, Engine]) -> Iterator[str]:
    """The address of a server with every kind of model; the embedder has two names."""
    configs = [
        ModelConfig(
            model=engine.spec.name, dtype="float32", names=(name, "other name") if name == "embedder" else (name,)
        )
        for name, engine in models.items()
    ]
    with running(ServedModels.load(configs)) as address:
        yield address


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Callable[..., Visit]]:
    """Opens pages; none may raise an error, violate its policy or contact another host."""
    visits: list[Visit] = []
    with ExitStack() as stack:

        def opened(address: str, *, clock: bool = False, path: str = "/", **options: Any) -> Visit:
            context = stack.enter_context(_context(chromium, **options))
            page = context.new_page()
            page.set_default_timeout(PATIENCE)
            seen = Visit(page=page, address=address)
            visits.append(seen)
            page.on("pageerror", lambda error: seen.errors.append(str(error)))
            page.on(
                "console", lambda line: seen.errors.append(line.text) if line.type in ("error", "warning") else None
            )
            page.on("request", lambda request: seen.requests.append(request.url))
            page.add_init_script(WATCH)
            if clock:
                page.clock.install()
            page.goto(address + path)
            return seen

        expect.set_options(timeout=PATIENCE)
        yield opened
        for seen in visits:
            # A refusal that the page puts into words stands in the console, too: Chromium writes it there.
            assert [line for line in seen.errors if not line.startswith("Failed to load resource")] == []
            assert seen.page.evaluate("violations") == []
            assert [url for url in seen.requests if not url.startswith(f"{seen.address}/")] == []


@contextmanager
def _context(chromium: Browser, **options: Any) -> Iterator[BrowserContext]:
    context = chromium.new_context(**options)
    yield context
    context.close()


def test_models_are_shown_with_what_they_can_do(visit: Any, site: str, models: dict[str, Engine]) -> None:
    page = visit(site).page
    expect(page.locator(".model-card:visible")).to_have_count(len(models))
    expect(page.locator("#models-note")).to_have_text("5 models")
    for name, engine in models.items():
        card = page.locator(f"[data-model='{name}']")
        assert sorted(card.locator(".tasks li").all_text_contents()) == sorted(engine.tasks)
        expect(card).to_contain_text(f"{engine.spec.max_length} tokens")
    expect(page.locator("[data-model=embedder]")).to_contain_text("48 dimensions")
    expect(page.locator("[data-model=embedder]")).to_contain_text("also called other name")
    expect(page.locator("#pulse-dot")).to_have_attribute("data-state", "on")


def test_cosines_are_those_of_the_engine(visit: Any, site: str, models: dict[str, Engine]) -> None:
    seen = visit(site)
    seen.write("similarity", TEXTS)
    seen.run("similarity")
    vectors = models["embedder"].embed(TEXTS).embeddings.astype(np.float64)
    expected = vectors @ vectors.T
    drawn = np.reshape(seen.values("#similarity .matrix"), (3, 3))
    np.testing.assert_allclose(drawn, expected, atol=1e-6)
    i, j = max(((0, 1), (0, 2), (1, 2)), key=lambda pair: expected[pair])
    assert seen.texts("#similarity blockquote") == [TEXTS[i], TEXTS[j]]  # the closest two


@pytest.mark.parametrize("name", ["embedder", "cross-encoder", "colbert"])
def test_documents_are_ranked_as_the_engine_ranks_them(
    visit: Any, site: str, models: dict[str, Engine], name: str
) -> None:
    seen = visit(site, path="/#/rerank")
    seen.write("rerank", TEXTS)
    seen.page.get_by_label("Query").fill(QUERY)
    seen.page.locator("#rerank-model").select_option(name)
    seen.run("rerank")
    expected = models[name].rerank(QUERY, TEXTS, method="cosine" if name == "embedder" else "auto")
    np.testing.assert_allclose(
        seen.values("#rerank .ranking"), [row.relevance_score for row in expected], atol=1e-5, rtol=1e-5
    )
    assert seen.texts("#rerank .bar-text") == [row.document for row in expected]
    seen.page.get_by_label("Keep the best").fill("1")
    seen.run("rerank")
    expect(seen.page.locator("#rerank .bar-text")).to_have_text([expected[0].document])
    answer = seen.page.locator("#rerank .answer")
    expect(answer).to_contain_text("2 more scored lower")
    expect(answer).to_contain_text({"embedder": "cosines", "colbert": "MaxSim"}.get(name, "the cross-encoder's own"))


@pytest.mark.parametrize(
    "text", ["The wheel turns, the pond is still.", "  Hanna Jørgensen,\n1871: café 池 🌊. ", "..."]
)
def test_tokens_have_the_labels_of_the_engine(visit: Any, site: str, models: dict[str, Engine], text: str) -> None:
    seen = visit(site)
    seen.page.locator("#tab-tokens").click()
    seen.page.locator("#tokens-model").select_option("tagger")
    seen.page.locator("#tokens-text").fill(text)
    seen.run("tokens")
    engine = models["tagger"]
    rows = engine.token_classify([text]).probs[0][1:-1]  # without [CLS] and [SEP]
    labels = [engine.spec.labels[best] for best in rows.argmax(axis=1)]
    runs = [label for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
    assert seen.texts("#tokens mark .tag bdi") == runs
    gather = "node => { node.querySelectorAll('.tag').forEach((tag) => tag.remove()); return node.textContent }"
    assert seen.page.locator("#tokens .labelled").evaluate(gather) == text.rstrip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_command_does_the_same_in_a_terminal(visit: Any, site: str, tmp_path: Path) -> None:
    seen = visit(site)
    texts = [TEXTS[0], HOSTILE[0], HOSTILE[1]]
    seen.write("similarity", texts)
    seen.page.get_by_label("Cut texts").nth(0).check()
    seen.run("similarity")
    (command,) = seen.texts("#similarity pre code")
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=tmp_path, capture_output=True, check=True, env={**os.environ, "no_proxy": "*"}
    )
    rows = np.array([entry["embedding"] for entry in json.loads(done.stdout)["data"]])
    np.testing.assert_allclose(
        seen.values("#similarity .matrix"),
        (rows @ rows.T / np.outer(*[np.linalg.norm(rows, axis=1)] * 2)).ravel(),
        atol=1e-6,
    )
    assert not list(tmp_path.iterdir())


def test_a_key_is_asked_for_and_stays_in_the_tab(visit: Any, embedder: Path) -> None:
    models = ServedModels.load([ModelConfig(model=str(embedder), names=("embedder",))])
    with running(models, ServerConfig(api_keys=("secret",))) as address:
        seen = visit(address)
        page = seen.page
        expect(page.get_by_text("This server needs an API key")).to_be_visible()
        expect(page.get_by_role("button", name="Compare")).to_be_disabled()
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_have_text("The server does not accept this key.")
        page.get_by_label("API key").fill("no\u2003ascii")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_contain_text("ASCII only")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        seen.run("similarity")
        assert '-H "Authorization: Bearer $MILLPOND_API_KEY"' in seen.texts("#similarity pre code")[0]
        assert page.evaluate("Object.keys(localStorage).length") == 0
        assert "secret" not in page.content() + page.url + "".join(seen.requests)
        assert page.context.cookies() == []
        page.reload()
        expect(page.locator(".model-card")).to_have_count(1)  # the tab still knows it
        page.get_by_role("button", name="Forget key").click()
        expect(page.locator("#key-form")).to_be_visible()
        assert page.evaluate("Object.keys(sessionStorage).length") == 0
        expect(page.locator(".model-card")).to_have_count(0)


def test_hostile_texts_are_only_texts(visit: Any, site: str) -> None:
    seen = visit(site)
    for tool in ("similarity", "rerank", "classify"):
        seen.write(tool, list(HOSTILE))
        seen.page.locator(f"#{tool} .check input").first.check()
        if tool == "rerank":
            seen.page.get_by_label("Query").fill(HOSTILE[0])
        seen.run(tool)
        shown = seen.page.locator(f"#{tool} .answer bdi").evaluate_all("nodes => nodes.map((n) => n.textContent)")
        assert set(HOSTILE) <= set(shown)
        assert seen.page.locator(f"#{tool} .answer :is(img, script)").count() == 0
    assert seen.page.title() == "millpond"


@pytest.mark.parametrize("tool", ["similarity", "rerank", "classify", "tokens"])
def test_an_over_long_text_is_named_and_can_be_cut(visit: Any, site: str, tool: str) -> None:
    seen = visit(site)
    page = seen.page
    page.locator(f"#tab-{tool}").click()
    long = "the wheel turns and " * 40
    if tool == "tokens":
        page.locator("#tokens-text").fill(long)
    else:
        seen.write(tool, ["short", long])
    if tool == "rerank":
        page.locator("#rerank-model").select_option("cross-encoder")
    page.locator(f"#{tool} .primary").click()
    failure = page.locator(f"#{tool} .failure")
    expect(failure).to_contain_text("maximum context length is 64 tokens")
    expect(failure).to_contain_text("400 BadRequestError")
    at_fault = page.locator(f"#{tool} textarea[aria-invalid=true]")
    expect(at_fault).to_have_value(long)
    page.locator(f"#{tool} .actions .check input").check()
    seen.run(tool)
    expect(failure).to_have_count(0)


def test_a_server_that_is_gone_is_said_and_found_again(visit: Any, embedder: Path) -> None:
    models = ServedModels.load([ModelConfig(model=str(embedder))])
    with running(models) as address:
        seen = visit(address, clock=True)
        expect(seen.page.locator("#pulse-dot")).to_have_attribute("data-state", "on")
    seen.page.locator("#similarity .primary").click()
    expect(seen.page.locator("#similarity .failure")).to_contain_text("The server does not answer.")
    seen.page.clock.run_for(2000)
    expect(seen.page.locator("#pulse-words")).to_have_text("Not connected")
    with running(ServedModels.load([ModelConfig(model=str(embedder))]), ServerConfig(port=0)) as other:
        # Another port is another origin: that one answers here in the place of the first.
        seen.page.route("**/stats", lambda route: route.continue_(url=f"{other}/stats"))
        seen.page.clock.run_for(60_000)
        expect(seen.page.locator("#pulse-dot")).to_have_attribute("data-state", "on")


def test_every_control_has_a_name(visit: Any, site: str) -> None:
    seen = visit(site)
    for tool in ("similarity", "rerank", "classify", "tokens", "explain"):
        seen.run(tool)
        tree = seen.page.locator("body").aria_snapshot()
        unnamed = ("- button", "- textbox", "- combobox", "- checkbox", "- spinbutton", "- tab", "- link", "- img")
        bare = [line for line in tree.splitlines() if line.strip().partition(":")[0].partition(" [")[0] in unnamed]
        assert bare == []


# Emoji of one, two and seven code points, a flag, a combining accent, right-to-left words, a tab and a line break.
MIXED = "  🌊 The wheel\tturns, 👩‍🔬 שלום world 🇳🇴 cafe\u0301\n👍🏽 how deep 池 is مرحبا it?"
GATHERED = "nodes => nodes.map((node) => node.textContent).join('')"


def explained(engine: Engine, query: str, text: str) -> list[TokenMatch]:
    with MemoryIndex(engine, codec="float32") as index:
        index.add(["a"], [text])
        return index.explain(query, "a")


def ask(seen: Visit, model: str, question: str, text: str, *, cut: bool = False) -> None:
    seen.page.locator("#tab-explain").click()
    seen.page.locator("#explain-model").select_option(model)
    seen.page.locator("#explain-question").fill(question)
    seen.page.locator("#explain-text").fill(text)
    seen.page.locator("#explain .actions .check input").set_checked(cut)
    seen.run("explain")


def chosen(seen: Visit) -> str:
    return str(seen.page.locator("#explain .heat-text mark.chosen").evaluate_all(GATHERED))


@pytest.mark.parametrize("name", ["colbert", "embedder"])
@pytest.mark.parametrize("text", ["The wheel turns, the pond is deep.", MIXED], ids=["plain", "mixed"])
def test_tokens_are_matched_as_the_engine_matches_them(
    visit: Any, site: str, models: dict[str, Engine], name: str, text: str
) -> None:
    seen = visit(site)
    ask(seen, name, "how deep 🌊 world?", text, cut=name == "colbert")
    matches = explained(models[name], "how deep 🌊 world?", text)
    np.testing.assert_allclose(
        seen.values("#explain .match-tokens"), [match.score for match in matches], atol=1e-5, rtol=1e-5
    )
    assert seen.page.locator("#explain .heat-text").evaluate("node => node.textContent") == text
    buttons = seen.page.locator("#explain .match-tokens button")
    assert sum(bool(match.text) for match in matches) > 2
    for i, match in enumerate(matches):
        buttons.nth(i).hover()
        expect(buttons.nth(i)).to_have_class("chosen" if match.text else "blank chosen")
        assert chosen(seen) == match.text
        expect(seen.page.locator("#explain .match-detail")).to_contain_text(match.text or "stands for no text")
