"""The page's files: their headers, their policy, and that a wheel contains them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from hatchling.builders.wheel import WheelBuilder

import millpond.server
from millpond.server import ServedModels, ServerConfig, create_app

ROOT = Path(millpond.server.__file__).parents[3]
FOLDER = Path(millpond.server.__file__).parent / "api/page"
FILES = {path.name: path for path in FOLDER.rglob("*.*") if path.suffix in (".html", ".css", ".js", ".svg")}
NAMES = sorted(FILES)
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@pytest.fixture
async def client(tiny: ServedModels) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(tiny, ServerConfig(api_keys=("secret",)))  # which nothing here needs
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("name", NAMES)
async def test_every_file_is_sent_as_what_it_is(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.get(f"/page/{name}")
    assert answer.status_code == 200
    assert answer.content == FILES[name].read_bytes()
    assert answer.headers["Content-Type"].partition(";")[0] == TYPES[Path(name).suffix]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    head = await client.head(f"/page/{name}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Length"] == str(len(answer.content))


BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_the_root_is_a_page_for_browsers_and_ollama_for_others(client: httpx.AsyncClient, method: str) -> None:
    page = await client.request(method, "/", headers=BROWSER)
    assert page.headers["Content-Type"].startswith("text/html")
    for accepted in ("*/*", "application/json", ""):
        running = await client.request(method, "/", headers={"Accept": accepted})
        assert running.headers["Content-Type"].startswith("text/plain")
        assert running.text == ("Ollama is running" if method == "GET" else "")
        assert (running.status_code, running.headers["Vary"], page.headers["Vary"]) == (200, "Accept", "Accept")


async def test_a_browser_asks_again_and_is_told_that_nothing_changed(client: httpx.AsyncClient) -> None:
    first = await client.get("/page/app.js")
    assert first.headers["Cache-Control"] == "no-cache"
    tag = first.headers["ETag"]
    for known in (tag, f"W/{tag}", f'"another", {tag}', "*"):
        again = await client.get("/page/app.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
    other = await client.get("/page/app.js", headers={"If-None-Match": '"another"'})
    assert other.status_code == 200
    assert (await client.get("/", headers=BROWSER)).headers["ETag"] != tag


@pytest.mark.parametrize(
    "name", ["none.js", "..%2fpage.py", "%2e%2e/app.py", "..%2fapp.py", "%2fetc%2fpasswd", "", "a/b.js"]
)
async def test_no_other_file_is_sent(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.get(f"/page/{name}")
    assert answer.status_code == 404 or answer.is_redirect
    assert b"import" not in answer.content


async def test_the_policy_allows_this_server_only(client: httpx.AsyncClient) -> None:
    for path in ("/", "/page/app.js"):
        policy = dict(
            part.split(" ", 1)
            for part in (await client.get(path, headers=BROWSER)).headers["Content-Security-Policy"].split("; ")
        )
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert set(policy.values()) == {"'none'", "'self'"}


@pytest.mark.parametrize("name", NAMES)
def test_no_file_asks_another_server_or_makes_markup_of_texts(name: str) -> None:
    content = FILES[name].read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"https?://|//cdn|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", content
    )
    assert "localStorage" not in content
    if name.endswith(".html"):
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", content)


def test_a_wheel_has_every_file() -> None:
    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"millpond/server/api/page/{path.relative_to(FOLDER).as_posix()}" for path in FILES.values()} <= packed
