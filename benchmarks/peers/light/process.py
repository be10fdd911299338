"""A process of `benchmarks/light.py`: it loads a model, embeds a text, and then does what standard input asks for.

It runs in the engine's own environment and imports nothing else of this repository. The first line of its output has
the times until the first vector; `monotonic` is that of the parent when it started this process.
"""

import json
import os
import signal
import sys
import time

TEXT = "The mill stands by the pond, and its wheel turns when the gate is opened."
# Seconds in which a forked child must answer.
PATIENCE = 20
# Texts of a request for speed, 60 to 120 words each, and calls of one text.
TEXTS, CALLS = 512, 200


def millpond(model):
    """`Engine`, with its defaults."""
    import millpond

    engine_class = millpond.Engine
    yield
    engine = engine_class(model)
    yield lambda text: engine.embed([text]).embeddings[0], engine.close


def fastembed(model):
    """`TextEmbedding` with a custom model: the exported ONNX file."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    yield
    if not any(
        row["model"] == "local/minilm" for row in TextEmbedding.list_supported_models()
    ):  # a forked child has it
        TextEmbedding.add_custom_model(
            model="local/minilm",
            pooling=PoolingType.MEAN,
            normalization=True,
            sources=ModelSource(hf="local/minilm"),
            dim=384,
            model_file="model.onnx",
        )
    encoder = TextEmbedding("local/minilm", specific_model_path=model)
    yield lambda text: next(iter(encoder.embed([text]))), None


def onnxruntime(model):
    """A few lines over tokenizers and onnxruntime."""
    import numpy as np
    from onnxruntime import InferenceSession
    from tokenizers import Tokenizer

    yield
    tokenizer = Tokenizer.from_file(os.path.join(model, "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(512)
    session = InferenceSession(os.path.join(model, "model.onnx"), providers=["CPUExecutionProvider"])
    names = [put.name for put in session.get_inputs()]

    def embed(text):
        encoding = tokenizer.encode(text)
        columns = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        (states, *_) = session.run(None, {name: np.array([columns[name]], dtype=np.int64) for name in names})
        vector = states[0].mean(axis=0)
        return vector / np.linalg.norm(vector)

    yield embed, None


def model2vec(model):
    """`StaticModel`: the mean of a table's rows."""
    from model2vec import StaticModel

    yield
    encoder = StaticModel.from_pretrained(model)
    yield lambda text: encoder.encode([text])[0], None


def sentence_transformers(model):
    """`SentenceTransformer`, with its defaults on a CPU."""
    from sentence_transformers import SentenceTransformer

    yield
    encoder = SentenceTransformer(model, device="cpu")
    yield lambda text: encoder.encode([text], show_progress_bar=False)[0], None


FAMILIES = {
    "millpond": millpond,
    "fastembed": fastembed,
    "onnxruntime": onnxruntime,
    "model2vec": model2vec,
    "sentence-transformers": sentence_transformers,
}


def memory():
    """Bytes of this process: most resident so far, resident now without files, and its part of all pages."""
    found = {}
    with open("/proc/self/status", encoding="ascii") as file:
        rows = dict(line.split(":", 1) for line in file)
    for name, row in (("peak", "VmHWM"), ("anonymous", "RssAnon")):
        found[name] = int(rows[row].split()[0]) * 1024
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        next(file)
        rows = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":", 1) for line in file)}
    return {**found, "pss": rows["Pss"], "private": rows["Private_Clean"] + rows["Private_Dirty"]}


def forks(load, embed, model, count):
    """`count` forked children load the model themselves, one after the other; how many gave the parent's vector."""
    import numpy as np

    expected, done = embed(TEXT), 0
    for _ in range(count):
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)  # ends a child that hangs
            code = 1
            try:
                start = load(model)
                next(start)
                encode, _ = next(start)
                code = int(not np.allclose(encode(TEXT), expected, atol=1e-6))
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == -signal.SIGALRM:
            return {"children": done, "ended": "a child hung"}
        if status != 0:
            return {"children": done, "ended": f"a child exited with {status}"}
        done += 1
    return {"children": done, "ended": None}


def speed(embed, model):
    """Of millpond: seconds of a call with many texts, and the median of calls with one."""
    import millpond

    with millpond.Engine(model) as engine:
        texts = [" ".join([str(number), *TEXT.split() * (4 + number % 5)]) for number in range(TEXTS)]
        engine.embed(texts[:64])
        began = time.perf_counter()
        engine.embed(texts)
        bulk, calls = time.perf_counter() - began, []
        for _ in range(CALLS):
            began = time.perf_counter()
            embed(TEXT)
            calls.append(time.perf_counter() - began)
    return {"bulk_seconds": bulk, "call_seconds": sorted(calls)[CALLS // 2]}


def main():
    """Load, embed, and answer the requests of standard input until it ends."""
    family, model, began = sys.argv[1], sys.argv[2], float(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what engines print
    entered = time.monotonic()
    start = FAMILIES[family](model)
    next(start)
    imported = time.monotonic()
    embed, close = next(start)
    loaded = time.monotonic()
    vector = embed(TEXT)
    ended = time.monotonic()
    times = {
        "seconds": ended - began,
        "cpu_seconds": time.process_time(),
        "python_seconds": entered - began,
        "import_seconds": imported - entered,
        "load_seconds": loaded - imported,
        "first_seconds": ended - loaded,
    }
    print(json.dumps({**times, "vector": [float(number) for number in vector]}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "memory":
            answer = memory()
        elif request["do"] == "speed":
            answer = speed(embed, model)
        else:
            answer = forks(FAMILIES[family], embed, model, request["count"])
        print(json.dumps(answer), file=answers, flush=True)
    if close is not None:
        close()


if __name__ == "__main__":
    main()
