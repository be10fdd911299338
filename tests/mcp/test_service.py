"""The tools without the protocol: several targets, budgets, addresses, and the command's mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from millpond.cli.app import app
from millpond.errors import InvalidRequestError, MissingExtraError, SourceNotFoundError
from millpond.mcp.launch import read_address
from millpond.mcp.results import fit
from millpond.mcp.service import SearchService, names_of, open_target
from millpond.mcp.targets.collection import CollectionTarget
from millpond.mcp.targets.folder import FolderTarget
from millpond.mcp.targets.target import Found, Target, TargetOptions
from millpond.search.stages import StagePlan
from millpond.support.api_keys import ApiKeys

OPTIONS = TargetOptions(plan=StagePlan())


class ListTarget(Target):
    """Texts that begin with the query."""

    description = "a list"

    def __init__(self, name: str, texts: list[str]) -> None:
        super().__init__(name)
        self.texts = texts

    def load(self) -> None:
        if "broken" in self.texts:
            raise InvalidRequestError("this target is broken")

    def search(self, query: str, k: int, filter: Mapping[str, Any] | None) -> list[Found]:
        return [
            Found(id=str(n), text=text, metadata={}) for n, text in enumerate(self.texts) if text.startswith(query)
        ][:k]

    def get(self, id: str) -> Found | None:
        return (
            Found(id=id, text=self.texts[int(id)], metadata={})
            if id.isdecimal() and int(id) < len(self.texts)
            else None
        )

    def engine(self) -> Any:
        raise AssertionError

    def delete(self, ids: Any) -> None:
        self.texts = [text for n, text in enumerate(self.texts) if str(n) not in ids]


def service(**targets: list[str]) -> SearchService:
    made = SearchService([], OPTIONS)
    made.targets = [ListTarget(name, texts) for name, texts in targets.items()]
    made.start()
    return made


def test_the_best_of_each_target_take_turns():
    both = service(one=["a1", "a2", "b"], two=["a3", "a4", "a5"])
    assert [each.id for each in both.search("a", 4, None)] == ["one::0", "two::0", "one::1", "two::1"]
    assert [each.id for each in both.search("a", 2, None, "two")] == ["two::0", "two::1"]
    assert both.get("two::2").text == "a5" and both.get("two::2").id == "two::2"
    assert both.delete(None, ["two::0", "two::1"]) == "two"
    assert [each.text for each in both.search("a", 9, None, "two")] == ["a5"]
    for id in ("two::9", "0", "three::0", "two::"):
        with pytest.raises(InvalidRequestError, match=r"no text of id|is none of"):
            both.get(id)
    with pytest.raises(InvalidRequestError, match="is none of"):
        both.add(None, ["x"], ["x"], [{}])


def test_one_target_needs_no_name():
    alone = service(one=["a1"])
    assert alone.search("a", 1, None)[0].id == "0" and alone.get("0").text == "a1"
    with pytest.raises(InvalidRequestError, match="cannot be changed"):
        alone.add(None, ["x"], ["x"], [{}])
    with pytest.raises(InvalidRequestError, match="blank"):
        alone.add(None, ["x"], [" "], [{}])


def test_what_keeps_a_target_from_loading_is_told_by_each_tool():
    broken = service(one=["broken"])
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="this target is broken"):
            broken.search("a", 1, None)


def test_names_of_targets(tmp_path: Path):
    (tmp_path / "a" / "docs").mkdir(parents=True)
    words = [str(tmp_path / "a" / "docs"), "qdrant+path:x#docs", "milvus+file:y.db#other"]
    assert names_of(words) == ["docs", "docs-2", "other"]


def test_kinds_of_targets(tmp_path: Path):
    (tmp_path / "file.txt").write_text("x")
    assert isinstance(open_target(str(tmp_path), "x", OPTIONS), FolderTarget)
    assert isinstance(open_target("qdrant+path:secret@x#docs", "x", OPTIONS), CollectionTarget)
    assert "secret" not in open_target("qdrant+path:secret@x#docs", "x", OPTIONS).description
    for word, message in (
        (tmp_path / "none", "neither a folder nor the URL"),
        (tmp_path / "file.txt", "name the folder"),
    ):
        with pytest.raises(SourceNotFoundError, match=message):
            open_target(str(word), "x", OPTIONS)


@pytest.mark.parametrize("budget", [300, 1000, 5000, 100_000])
def test_answers_are_cut_to_a_budget(budget: int):
    found = [Found(id=f"id{n}", text="x" * size, metadata={"n": n}) for n, size in enumerate([10, 3000, 20, 3000, 900])]
    hits = fit(found, budget)
    assert hits and sum(len(hit.text) + len(str(hit.metadata)) + len(hit.id) for hit in hits) <= budget
    assert all(hit.truncated == (len(hit.text) < len(each.text)) for hit, each in zip(hits, found, strict=False))
    if budget == 5000:
        assert [len(hit.text) for hit in hits if not hit.truncated] == [10, 20, 900]  # short ones stay whole
        assert len({len(hit.text) for hit in hits if hit.truncated}) <= 2
    if budget == 100_000:
        assert not any(hit.truncated for hit in hits)


def test_addresses():
    assert read_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert read_address("[::1]:0") == ("::1", 0)
    for text in ("80", ":80", "host:", "host:x", "host:70000"):
        with pytest.raises(InvalidRequestError, match="HOST:PORT"):
            read_address(text)


def test_keys():
    keys = ApiKeys(["right", "other"])
    assert keys and not ApiKeys([])
    assert keys.accept(["Bearer right"]) and keys.accept(["bearer  other"])
    for sent in ([], ["right"], ["Bearer wrong"], ["Basic right"], ["Bearer right", "Bearer right"]):
        assert not keys.accept(sent)
    assert not ApiKeys([]).accept(["Bearer "])


def test_the_command_names_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("millpond.cli.commands.mcp.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs mcp, .*pip install 'millpond\[mcp\]'"):
        get_command(app).main(["mcp", "."], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--http", "nonsense"], {}, "HOST:PORT"),
        (["--http", "127.0.0.1:0", "--api-key", ""], {}, "empty"),
        (["--http", "127.0.0.1:0"], {"MILLPOND_API_KEY": ""}, "empty"),
        (["--api-key", "x"], {}, "needs no key"),
    ],
)
def test_mistakes(monkeypatch: pytest.MonkeyPatch, words: list[str], environment: dict[str, str], message: str):
    monkeypatch.setattr("millpond.cli.commands.mcp.find_spec", lambda name: name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Exception, match=message):
        get_command(app).main(["mcp", ".", *words], standalone_mode=False)
