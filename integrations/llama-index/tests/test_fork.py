"""A warmed parent that forks, as gunicorn does with ``--preload``: every method of the children works."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import asyncio, os, signal, sys, traceback
import torch
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.millpond import MillpondEmbedding
from llama_index.postprocessor.millpond_rerank import MillpondRerank

model = sys.argv[1]
texts = [f"text {i} about tides, rivers and the moon that moves them" for i in range(40)]
nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in texts]
query = QueryBundle("tides")
embedding, reranker = MillpondEmbedding(model_name=model), MillpondRerank(model=model)
embedding.get_query_embedding("tides")
torch.ones(1 << 22).sum()
assert torch.get_num_threads() == 2
methods = {
    "query": lambda: embedding.get_query_embedding("tides"),
    "texts": lambda: embedding.get_text_embedding_batch(texts),
    "async query": lambda: asyncio.run(embedding.aget_query_embedding("tides")),
    "async texts": lambda: asyncio.run(embedding.aget_text_embedding_batch(texts)),
    "rerank": lambda: reranker.postprocess_nodes(nodes, query),
    "async rerank": lambda: asyncio.run(reranker.apostprocess_nodes(nodes, query)),
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
assert embedding.get_text_embedding_batch(texts)
"""


@pytest.mark.contract
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
    assert len(statuses) == 6
    assert set(statuses.values()) == {"0"}, statuses
