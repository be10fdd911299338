"""docs/migrate: both blocks of every pair run as they are written, and compute the same."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compat import hub_cache
from tests.compat.hub_cache import WRITERS, HubCache, write_onnx
from tests.compat.migration_page import INDEX, PAGES, SERVERS, Pair, assert_pair, cosines, read_all, results

from langchain_millpond import MillpondEmbeddings

pytestmark = pytest.mark.contract

INPUTS, PAIRS = read_all()
FLASHRANK = ("ms-marco-MiniLM-L-12-v2", "flashrank-MiniLM-L-12-v2_Q.onnx")


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> HubCache:
    return HubCache(tmp_path_factory.mktemp("hub"))


@pytest.fixture(autouse=True)
def environment(hub: HubCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hub ids lead to the cache in every library, and files go to a folder of the test."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(hub.folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FASTEMBED_CACHE_PATH", str(hub.folder))
    monkeypatch.setenv("LLAMA_INDEX_CACHE_DIR", str(hub.folder))
    monkeypatch.chdir(tmp_path)


def prepare(hub: HubCache, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the repositories that a block names, and those that fastembed and FlashRank would download."""
    for name in WRITERS:
        if f'"{name}"' in code:
            hub.add(name)
    if "fastembed" in code.lower() or "models.Document" in code:
        for name, repository, export, file in (
            (hub_cache.MINILM, "Qdrant/all-MiniLM-L6-v2-onnx", hub_cache.token_states, "model.onnx"),
            (
                "BAAI/bge-small-en-v1.5",
                "Qdrant/bge-small-en-v1.5-onnx-Q",
                hub_cache.token_states,
                "model_optimized.onnx",
            ),
            ("prithivida/Splade_PP_en_v1", "Qdrant/Splade_PP_en_v1", hub_cache.vocabulary_logits, "model.onnx"),
            ("colbert-ir/colbertv2.0", "colbert-ir/colbertv2.0", hub_cache.projected_states, "model.onnx"),
            ("BAAI/bge-reranker-base", "BAAI/bge-reranker-base", hub_cache.logits, "onnx/model.onnx"),
        ):
            if f'"{name}"' in code:
                hub.add_onnx(name, repository, export, file)
    if FLASHRANK[0] in code:
        source = hub.add("cross-encoder/ms-marco-MiniLM-L12-v2")
        write_onnx(source, Path(FLASHRANK[0]), hub_cache.logits(source), FLASHRANK[1])
        from flashrank import Ranker

        monkeypatch.setattr(Ranker.__init__, "__defaults__", (FLASHRANK[0], ".", 512, "INFO"))  # cache_dir was /tmp


def run(code: str, name: str) -> dict[str, Any]:
    """The variables of a block, which runs after the inputs of all examples."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(INPUTS, "inputs", "exec"), namespace)
    given = set(namespace)
    exec(compile(code, name, "exec"), namespace)
    return {key: value for key, value in namespace.items() if key not in given}


@contextmanager
def other_peoples_warnings() -> Iterator[None]:
    """The libraries that are replaced may warn, and leave sockets open; millpond may not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        gc.collect()


def skip_without_packages(pair: Pair, *more: str) -> None:
    missing = [*pair.missing(), *more]
    if missing:
        pytest.skip(f"{', '.join(missing)}: pip install --no-deps -r tests/compat/replaced.txt")


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, id=pair.name) for pair in PAIRS if pair.kind == "before"],
)
def test_both_blocks_compute_the_same(pair: Pair, hub: HubCache, monkeypatch: pytest.MonkeyPatch) -> None:
    with other_peoples_warnings():
        skip_without_packages(pair)
        prepare(hub, pair.old + pair.new, monkeypatch)
        old = results(run(pair.old, "before"))
    assert_pair(old, results(run(pair.new, "after")), is_exact=pair.is_exact)


REPLACEMENTS = {
    "HuggingFaceEmbeddings": ("langchain_millpond", "MillpondEmbeddings"),
    "HuggingFaceBgeEmbeddings": ("langchain_millpond", "MillpondBgeEmbeddings"),
    "HuggingFaceCrossEncoder": ("langchain_millpond", "MillpondCrossEncoder"),
    "HuggingFaceEmbedding": ("llama_index.embeddings.millpond", "MillpondEmbedding"),
    "SentenceTransformerRerank": ("llama_index.postprocessor.millpond_rerank", "MillpondRerank"),
}
IMPORT = re.compile(rf"^from \S+ import ({'|'.join(REPLACEMENTS)})$", re.MULTILINE)


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, id=pair.name) for pair in PAIRS if IMPORT.search(pair.old)],
)
def test_only_the_import_has_to_change(pair: Pair, hub: HubCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old block runs with millpond's class under the old name, and computes what the new block computes."""
    prepare(hub, pair.new, monkeypatch)
    found = IMPORT.search(pair.old)
    assert found is not None
    module, name = REPLACEMENTS[found[1]]
    code = IMPORT.sub(
        f"import functools\nfrom {module} import {name}\n{found[1]} = functools.partial({name}, dtype='float32')",
        pair.old,
    )
    changed = results(run(code, "only the import"))
    assert_pair(changed, results(run(pair.new, "after")), is_exact=pair.is_exact)


# --- Clients --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(hub: HubCache) -> Iterator[str]:
    """The server of the page, started by its command."""
    command = re.search(r"^millpond (serve .*)$", SERVERS.read_text(encoding="utf-8"), re.MULTILINE)
    assert command is not None
    words = command[1].split()
    for name in words:
        if name in WRITERS:
            hub.add(name)
    environment = os.environ | {"HF_HUB_CACHE": str(hub.folder), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "millpond", *words, "--port", "0"], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.match(r"serving at (http://\S+)", line)
            assert found is not None, line
            yield found[1]
        finally:
            server.terminate()


@pytest.mark.parametrize("pair", [pytest.param(pair, id=pair.name) for pair in PAIRS if pair.kind == "client"])
def test_a_client_gets_what_the_engine_computes(
    pair: Pair, hub: HubCache, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    with other_peoples_warnings(), monkeypatch.context() as patch:
        skip_without_packages(pair)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)  # it may talk to this machine
        huggingface_hub.close_session()
        assert "http://localhost:8000" in pair.old
        old = results(run(pair.old.replace("http://localhost:8000", address), "client"))
        huggingface_hub.close_session()
    assert_pair(old, results(run(pair.new, "in process")))


# --- What the page says ---------------------------------------------------------------------------------------------


def test_prompts_separate_an_old_index_from_new_questions(hub: HubCache) -> None:
    """What the section "An existing index is protected" says, and its way out."""
    from sentence_transformers import SentenceTransformer

    folder = hub.add("google/embeddinggemma-300m")
    page = INDEX.read_text(encoding="utf-8")
    block = re.search(r'```python title="keep old vectors"\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    assert block is not None
    kept = run(block[1], "keep old vectors")["embeddings"]
    text = ["Bread rises because of yeast."]
    old = SentenceTransformer(str(folder)).encode(text)
    np.testing.assert_allclose(kept.embed_documents(text), old, atol=1e-5)
    np.testing.assert_allclose(kept.embed_query(text[0]), old[0], atol=1e-5)
    prompted = MillpondEmbeddings(model="google/embeddinggemma-300m", dtype="float32")
    assert cosines(prompted.embed_documents(text), old)[0] < 0.99
    assert cosines(prompted.embed_query(text[0]), old[0]) < 0.99


def test_the_page_quotes_the_notice_that_protects_an_index(
    hub: HubCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "google"  # the line is logged once for each name
    folder.symlink_to(hub.add("google/embeddinggemma-300m"))
    MillpondEmbeddings(model=folder).embed_query("a")
    told = [record.getMessage().replace(str(folder), "google/embeddinggemma-300m") for record in caplog.records]
    quoted = re.findall(r"^```text\n(.*?)\n```$", INDEX.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert [" ".join(text.split()) for text in quoted] == told


def test_the_index_leads_to_every_library() -> None:
    """Each name of the table is on the page that its row links to, and every page is linked."""
    rows = re.findall(r"^\| (`.*?) \| \[.*?\]\((\w+\.md)\) \|$", INDEX.read_text(encoding="utf-8"), re.MULTILINE)
    assert {page for _, page in rows} == {page.name for page in PAGES.glob("*.md")} - {"index.md"}
    for names, page in rows:
        text = (PAGES / page).read_text(encoding="utf-8")
        assert [name for name in re.findall(r"`(.*?)`", names) if name.lower() not in text.lower()] == []
