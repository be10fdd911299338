"""One engine in a process of its own, driven over standard input: `embed` runs a pass, `save PATH` keeps its vectors.

Usage: python peer.py ENGINE MODEL TEXTS.json    (run with the interpreter of the engine's own environment)
"""

import json
import os
import sys
import time

import numpy as np


def load(engine, model):
    """A function from a list of texts to an array of vectors."""
    if engine.startswith("millpond"):
        from millpond import Engine

        option = engine.partition("-")[2]
        loaded = Engine(model, quantization="int8") if option == "int8" else Engine(model, dtype=option or "auto")
        return lambda texts: loaded.embed(texts).embeddings
    from sentence_transformers import SentenceTransformer

    backend, _, precision = engine.removeprefix("st-").partition("-")
    options = {}
    if backend == "torch" and precision == "bf16":
        import torch

        options["model_kwargs"] = {"torch_dtype": torch.bfloat16}
    st = SentenceTransformer(model, device="cpu", backend=backend, **options)
    batch = int(os.environ.get("PEER_BATCH", "32"))
    return lambda texts: st.encode(texts, batch_size=batch, show_progress_bar=False)


def main():
    """Answer commands until the input ends."""
    engine, model, path = sys.argv[1:4]
    with open(path) as file:
        texts = json.load(file)
    # Exports of other runtimes print to standard output; the answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    encode = load(engine, model)
    vectors = np.asarray(encode(texts[:64]))
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "embed":
            start = time.perf_counter()
            vectors = np.asarray(encode(texts))
            answer = {"seconds": time.perf_counter() - start}
        elif command == "single":
            start = time.perf_counter()
            encode(texts[:1])
            answer = {"seconds": time.perf_counter() - start}
        else:
            np.save(argument, vectors.astype(np.float32))
            answer = {}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
