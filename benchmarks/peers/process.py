"""One engine in a process of its own: a request per line on standard input, an answer per line on standard output.

Run with the interpreter of the engine's own environment, which need not have anything else of this repository. Requests
are JSON objects; `do` names a function below, the rest are its arguments, and so are the fields of the answers.
"""

import json
import os
import sys
import time


class LoadedModel:
    """What one process holds: its engine, the inputs it has read, and the last result."""

    def __init__(self):
        self.work = None  # (inputs, batch) -> arrays by name
        self.inputs = {}
        self.result = None

    def load(self, family, task, model, options):
        """Import the engine, load the model; both in seconds."""
        begin = time.perf_counter()
        prepare = FAMILIES[family](task)
        imported = time.perf_counter()
        self.work = prepare(model, options)
        return {"import_seconds": imported - begin, "load_seconds": time.perf_counter() - imported}

    def export(self, task, model, backend, to):
        """Write the model as another runtime reads it, so that no later start pays for that."""
        import sentence_transformers

        classes = {"embed": "SentenceTransformer", "rerank": "CrossEncoder", "tokens": "MultiVectorEncoder"}
        loaded = getattr(sentence_transformers, classes[task])(model, device="cpu", backend=backend)
        loaded.save_pretrained(to)
        return {}

    def run(self, inputs, batch=None):
        """One pass over all inputs."""
        given = self.read(inputs)
        begin = time.perf_counter()
        self.result = self.work(given, batch)
        return {"seconds": time.perf_counter() - begin}

    def calls(self, inputs, size, batch=None):
        """One pass in calls of `size` texts each."""
        given = self.read(inputs)
        begin = time.perf_counter()
        for start in range(0, len(given), size):
            self.work(given[start : start + size], batch)
        return {"seconds": time.perf_counter() - begin}

    def crowd(self, inputs, size, callers):
        """One pass in calls of `size` texts each, from as many threads as there are callers."""
        import threading

        given = self.read(inputs)
        left, lock = iter([given[start : start + size] for start in range(0, len(given), size)]), threading.Lock()

        def call():
            while True:
                with lock:
                    chunk = next(left, None)
                if chunk is None:
                    return
                self.work(chunk, None)

        crew = [threading.Thread(target=call) for _ in range(callers)]
        begin = time.perf_counter()
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        return {"seconds": time.perf_counter() - begin}

    def singles(self, inputs, start, count, discard):
        """The time of each of `count` calls of one text, after `discard` calls that wake the processor's caches."""
        given = self.read(inputs)
        seconds = []
        for index in range(start - discard, start + count):
            begin = time.perf_counter()
            self.work([given[index % len(given)]], 1)
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds[discard:]}

    def save(self, path):
        """Keep the last result, as float32."""
        import numpy as np

        np.savez(path, **{name: np.asarray(array) for name, array in self.result.items()})
        return {}

    def memory(self):
        """Most bytes this process ever held."""
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"bytes": peak if sys.platform == "darwin" else peak * 1024}

    def read(self, path):
        """A file of inputs, read before the clock runs."""
        if path not in self.inputs:
            with open(path, encoding="utf-8") as file:
                self.inputs[path] = json.load(file)
        return self.inputs[path]


def millpond(task):
    """`Engine` with the options given, the defaults else."""
    from millpond import Engine

    def prepare(model, options):
        engine = Engine(model, **options)

        def embed(texts, batch):
            return {"vectors": engine.embed(texts).embeddings}

        def tokens(texts, batch):
            rows = engine.token_embed(texts, role="document").embeddings
            return {"vectors": rows.flat, "offsets": rows.offsets}

        def rerank(given, batch):
            import numpy as np

            scores = np.empty(len(given["documents"]), dtype=np.float32)
            for result in engine.rerank(given["query"], given["documents"]):
                scores[result.index] = result.relevance_score
            return {"scores": scores}

        return {"embed": embed, "tokens": tokens, "rerank": rerank}[task]

    return prepare


def sentence_transformers(task):
    """`SentenceTransformer`, `CrossEncoder` or `MultiVectorEncoder`; options: backend, dtype."""
    if task == "embed":
        from sentence_transformers import SentenceTransformer as Encoder
    elif task == "rerank":
        from sentence_transformers import CrossEncoder as Encoder
    else:
        from sentence_transformers import MultiVectorEncoder as Encoder

    def prepare(model, options):
        arguments = {"backend": options.get("backend", "torch"), "model_kwargs": {}}
        if "dtype" in options:
            import torch

            arguments["model_kwargs"]["torch_dtype"] = getattr(torch, options["dtype"])
        if files := {"onnx": "onnx/model.onnx", "openvino": "openvino/openvino_model.xml"}.get(options.get("backend")):
            arguments["model_kwargs"]["file_name"] = files
        encoder = Encoder(model, device="cpu", **arguments)

        def embed(texts, batch):
            return {"vectors": encoder.encode(texts, batch_size=batch or 32, show_progress_bar=False)}

        def tokens(texts, batch):
            import numpy as np

            rows = encoder.encode_document(
                texts, batch_size=batch or 32, show_progress_bar=False, convert_to_numpy=True
            )
            return {"vectors": np.concatenate(rows), "offsets": np.cumsum([0, *(len(row) for row in rows)])}

        def rerank(given, batch):
            pairs = [(given["query"], document) for document in given["documents"]]
            return {"scores": encoder.predict(pairs, batch_size=batch or 32, show_progress_bar=False)}

        return {"embed": embed, "tokens": tokens, "rerank": rerank}[task]

    return prepare


def transformers(task):
    """What one writes by hand: texts sorted by length, padded batches, the mean of the states; options: dtype."""
    import numpy as np
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    def prepare(model, options):
        tokenizer = AutoTokenizer.from_pretrained(model)
        kind = AutoModel if task == "embed" else AutoModelForSequenceClassification
        backbone = kind.from_pretrained(model, dtype=getattr(torch, options["dtype"])).eval()
        limit = options["max_length"]

        def batches(lengths, batch):
            order = np.argsort([-length for length in lengths], kind="stable")
            return [order[start : start + batch] for start in range(0, len(order), batch)]

        @torch.inference_mode()
        def embed(texts, batch):
            vectors = np.empty((len(texts), backbone.config.hidden_size), dtype=np.float32)
            for chosen in batches([len(text) for text in texts], batch or 32):
                given = tokenizer(
                    [texts[i] for i in chosen], padding=True, truncation=True, max_length=limit, return_tensors="pt"
                )
                mask = given["attention_mask"].unsqueeze(-1).float()
                states = backbone(**given).last_hidden_state.float() * mask
                mean = states.sum(1) / mask.sum(1)
                vectors[chosen] = torch.nn.functional.normalize(mean, dim=-1).numpy()
            return {"vectors": vectors}

        @torch.inference_mode()
        def rerank(given, batch):
            documents = given["documents"]
            scores = np.empty(len(documents), dtype=np.float32)
            for chosen in batches([len(text) for text in documents], batch or 32):
                pairs = tokenizer(
                    [given["query"]] * len(chosen),
                    [documents[i] for i in chosen],
                    padding=True,
                    truncation=True,
                    max_length=limit,
                    return_tensors="pt",
                )
                scores[chosen] = backbone(**pairs).logits.float().sigmoid()[:, 0].numpy()
            return {"scores": scores}

        return {"embed": embed, "rerank": rerank}[task]

    return prepare


def vllm(task):
    """vLLM's offline class; options go to it. It batches for itself."""
    import numpy as np
    from vllm import LLM

    def prepare(model, options):
        llm = LLM(model=model, runner="pooling", disable_log_stats=True, **options)

        def embed(texts, batch):
            found = llm.encode(
                texts, pooling_task="embed", use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1}
            )
            return {"vectors": np.stack([one.outputs.data.float().numpy() for one in found])}

        def rerank(given, batch):
            found = llm.score(
                given["query"],
                given["documents"],
                use_tqdm=False,
                tokenization_kwargs={"truncate_prompt_tokens": -1},
            )
            return {"scores": np.array([one.outputs.score for one in found], dtype=np.float32)}

        return {"embed": embed, "rerank": rerank}[task]

    return prepare


FAMILIES = {
    "millpond": millpond,
    "sentence-transformers": sentence_transformers,
    "transformers": transformers,
    "vllm": vllm,
}


def main():
    """Answer requests until the input ends; a request that fails answers with its error."""
    # Exports and engines print to standard output; the answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    loaded = LoadedModel()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(loaded, request.pop("do"))(**request)
        except Exception as error:
            import traceback

            traceback.print_exc()
            text = str(error).strip() or type(error).__name__
            answer = {"error": f"{type(error).__name__}: {text.splitlines()[-1][:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
