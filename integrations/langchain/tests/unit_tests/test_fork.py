"""A warmed parent that forks, as gunicorn does with ``--preload``: every method of the children works."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import asyncio, os, signal, sys, traceback
from langchain_core.documents import Document
from langchain_millpond import MillpondCrossEncoder, MillpondEmbeddings, MillpondReranker

model = sys.argv[1]
texts = [f"text {i} about tides, rivers and the moon that moves them" for i in range(40)]
documents = [Document(page_content=text) for text in texts]
embeddings, reranker = MillpondEmbeddings(model=model), MillpondReranker(model=model)
embeddings.embed_documents(texts)
methods = {
    "embed_query": lambda: embeddings.embed_query("tides"),
    "embed_documents": lambda: embeddings.embed_documents(texts),
    "aembed_query": lambda: asyncio.run(embeddings.aembed_query("tides")),
    "aembed_documents": lambda: asyncio.run(embeddings.aembed_documents(texts)),
    "rerank": lambda: reranker.compress_documents(documents, "tides"),
    "arerank": lambda: asyncio.run(reranker.acompress_documents(documents, "tides")),
    "score": lambda: MillpondCrossEncoder(model=model).score([("tides", text) for text in texts]),
    "another adapter": lambda: MillpondEmbeddings(model=model, max_length=64).embed_query("tides"),
}
children = {}
for name, method in methods.items():
    children[name] = os.fork()
    if children[name] == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            for _ in range(3):
                assert method()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
for name, child in children.items():
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=": ")
assert embeddings.embed_documents(texts)
"""


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.timeout(200)
def test_children_of_a_parent_that_has_embedded_answer(minilm: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "2"}  # with one thread, none would be missing in the child
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, minilm],
        capture_output=True,
        text=True,
        env=env,
        timeout=190,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    statuses = dict(line.split(": ") for line in done.stdout.splitlines())
    assert len(statuses) == 8
    assert set(statuses.values()) == {"0"}, statuses
