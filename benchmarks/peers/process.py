"""The process of one engine: one request per line on standard input, one answer per line on standard output.

It runs in the engine's own environment and imports nothing else of this repository. Requests and answers are JSON
objects: `do` names a method below, the other fields of a request are its arguments.
"""

import json
import os
import sys
import time
from pathlib import Path

# A cap of `peers.caps` below AVX512-BF16.
NO_BFLOAT16 = os.environ.get("MILLPOND_ISA") in ("avx2", "avx512")


class LoadedModel:
    """The engine of this process, the inputs read so far, and the last result."""

    def __init__(self):
        self.work = None  # (inputs, batch) -> arrays by name
        self.inputs = {}
        self.result = None

    def load(self, family, task, model, options):
        """Import the engine and load the model; the seconds of both."""
        begin = time.perf_counter()
        prepare = FAMILIES[family](task)
        imported = time.perf_counter()
        self.work = prepare(model, options)
        return {"import_seconds": imported - begin, "load_seconds": time.perf_counter() - imported}

    def export(self, task, model, backend, to, inputs):
        """Export the model to another runtime's format, so that the export is not part of measured starts.

        `inputs`: texts by which int8 is calibrated.
        """
        import sentence_transformers

        runtime, _, precision = backend.partition("-")
        classes = {"embed": "SentenceTransformer", "rerank": "CrossEncoder", "tokens": "MultiVectorEncoder"}
        # Under a cap OpenVINO would compile for bfloat16, without kernels for it.
        more = {"model_kwargs": {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}} if runtime == "openvino" else {}
        loaded = getattr(sentence_transformers, classes[task])(model, device="cpu", backend=runtime, **more)
        loaded.save_pretrained(to)
        # fastembed takes the smaller of two limits, one of which other engines do not look at.
        settings = Path(to, "tokenizer_config.json")
        content = json.loads(settings.read_text(encoding="utf-8"))
        settings.write_text(json.dumps({**content, "max_length": content["model_max_length"]}), encoding="utf-8")
        if precision == "int8":
            {"onnx": quantize_onnx, "openvino": quantize_openvino}[runtime](loaded, to, self.read(inputs))
        return {}

    def run(self, inputs, batch=None):
        """One pass over all inputs."""
        texts = self.read(inputs)
        begin = time.perf_counter()
        self.result = self.work(texts, batch)
        return {"seconds": time.perf_counter() - begin}

    def calls(self, inputs, size, batch=None):
        """One pass in calls of `size` texts each."""
        texts = self.read(inputs)
        begin = time.perf_counter()
        for start in range(0, len(texts), size):
            self.work(texts[start : start + size], batch)
        return {"seconds": time.perf_counter() - begin}

    def crowd(self, inputs, size, callers):
        """One pass in calls of `size` texts each, from `callers` threads."""
        import threading

        texts = self.read(inputs)
        chunks, lock = iter([texts[start : start + size] for start in range(0, len(texts), size)]), threading.Lock()

        def call():
            while True:
                with lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                self.work(chunk, None)

        threads = [threading.Thread(target=call) for _ in range(callers)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"seconds": time.perf_counter() - begin}

    def singles(self, inputs, start, count, discard):
        """The time of each of `count` calls with one text, after `discard` warm-up calls."""
        texts = self.read(inputs)
        seconds = []
        for index in range(start - discard, start + count):
            begin = time.perf_counter()
            self.work([texts[index % len(texts)]], 1)
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds[discard:]}

    def save(self, path):
        """Write the arrays of the last result to a .npz file."""
        import numpy as np

        np.savez(path, **{name: np.asarray(array) for name, array in self.result.items()})
        return {}

    def memory(self):
        """Peak resident memory of this process, in bytes; on Linux `getrusage` would begin with the parent's."""
        import resource

        if os.path.exists("/proc/self/status"):
            with open("/proc/self/status", encoding="ascii") as file:
                return {"bytes": next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"bytes": peak if sys.platform == "darwin" else peak * 1024}

    def read(self, path):
        """The content of a file of inputs, read once."""
        if path not in self.inputs:
            with open(path, encoding="utf-8") as file:
                self.inputs[path] = json.load(file)
        return self.inputs[path]


def millpond(task):
    """`Engine` with the given options, and defaults for all others."""
    from millpond import Engine

    def prepare(model, options):
        # "auto" asks the processor: without its bfloat16 it would be float32.
        engine = Engine(model, **{**({"dtype": "float32"} if NO_BFLOAT16 else {}), **options})

        def embed(texts, batch):
            return {"vectors": engine.embed(texts).embeddings}

        def tokens(texts, batch):
            rows = engine.token_embed(texts, role="document").embeddings
            return {"vectors": rows.flat, "offsets": rows.offsets}

        def rerank(inputs, batch):
            import numpy as np

            scores = np.empty(len(inputs["documents"]), dtype=np.float32)
            for result in engine.rerank(inputs["query"], inputs["documents"]):
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
        suffix = "_int8" if options.get("int8") else ""
        files = {"onnx": f"onnx/model{suffix}.onnx", "openvino": f"openvino/openvino_model{suffix}.xml"}
        if options.get("backend") in files:
            arguments["model_kwargs"]["file_name"] = files[options["backend"]]
        if options.get("backend") == "openvino" and NO_BFLOAT16:
            # OpenVINO sees that the processor has bfloat16, chooses it, and finds no kernel under the cap.
            arguments["model_kwargs"]["ov_config"] = {"INFERENCE_PRECISION_HINT": "f32"}
        encoder = Encoder(model, device="cpu", **arguments)

        def embed(texts, batch):
            return {"vectors": encoder.encode(texts, batch_size=batch or 32, show_progress_bar=False)}

        def tokens(texts, batch):
            import numpy as np

            rows = encoder.encode_document(
                texts, batch_size=batch or 32, show_progress_bar=False, convert_to_numpy=True
            )
            return {"vectors": np.concatenate(rows), "offsets": np.cumsum([0, *(len(row) for row in rows)])}

        def rerank(inputs, batch):
            pairs = [(inputs["query"], document) for document in inputs["documents"]]
            return {"scores": encoder.predict(pairs, batch_size=batch or 32, show_progress_bar=False)}

        return {"embed": embed, "tokens": tokens, "rerank": rerank}[task]

    return prepare


def quantize_onnx(loaded, to, texts):
    """Weights in int8, states when they are computed, as sentence-transformers' page says for AVX2."""
    from sentence_transformers.backend import export_dynamic_quantized_onnx_model

    export_dynamic_quantized_onnx_model(loaded, "avx2", to, file_suffix="int8")


def quantize_openvino(loaded, to, texts):
    """Weights and states in int8 by NNCF, as sentence-transformers' page says, whose ranges are those of `texts`."""
    import nncf
    import openvino

    tokenizer = loaded.tokenizer
    rows = [dict(tokenizer(text, truncation=True, max_length=512, return_tensors="np")) for text in texts]
    model = openvino.Core().read_model(os.path.join(to, "openvino", "openvino_model.xml"))
    names = {name for each in model.inputs for name in each.names}
    dataset = nncf.Dataset([{name: row[name] for name in names} for row in rows])
    quantized = nncf.quantize(model, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(rows))
    openvino.save_model(quantized, os.path.join(to, "openvino", "openvino_model_int8.xml"))


def fastembed(task):
    """`TextEmbedding` with a custom model, the exported ONNX file; no other task of a sentence-transformers model."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    def prepare(model, options):
        with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
            width = json.load(file)["hidden_size"]
        TextEmbedding.add_custom_model(
            model="local/exported",
            pooling=PoolingType.MEAN,
            normalization=True,
            sources=ModelSource(hf="local/exported"),
            dim=width,
            model_file="onnx/model.onnx",
        )
        encoder = TextEmbedding("local/exported", specific_model_path=model)

        def embed(texts, batch):
            return {"vectors": list(encoder.embed(texts, batch_size=batch or 256))}

        return {"embed": embed}[task]

    return prepare


def transformers(task):
    """Plain transformers: texts sorted by length, padded batches, mean pooling; options: dtype, max_length."""
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
                tensors = tokenizer(
                    [texts[i] for i in chosen], padding=True, truncation=True, max_length=limit, return_tensors="pt"
                )
                mask = tensors["attention_mask"].unsqueeze(-1).float()
                states = backbone(**tensors).last_hidden_state.float() * mask
                mean = states.sum(1) / mask.sum(1)
                vectors[chosen] = torch.nn.functional.normalize(mean, dim=-1).numpy()
            return {"vectors": vectors}

        @torch.inference_mode()
        def rerank(inputs, batch):
            documents = inputs["documents"]
            scores = np.empty(len(documents), dtype=np.float32)
            for chosen in batches([len(text) for text in documents], batch or 32):
                pairs = tokenizer(
                    [inputs["query"]] * len(chosen),
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
    """vLLM's offline class `LLM`, with the options; it batches by itself."""
    import numpy as np

    if NO_BFLOAT16:
        without_bfloat16()
    from vllm import LLM

    def prepare(model, options):
        llm = LLM(model=model, runner="pooling", disable_log_stats=True, **options)

        def embed(texts, batch):
            outputs = llm.encode(
                texts, pooling_task="embed", use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1}
            )
            return {"vectors": np.stack([one.outputs.data.float().numpy() for one in outputs])}

        def rerank(inputs, batch):
            outputs = llm.score(
                inputs["query"],
                inputs["documents"],
                use_tqdm=False,
                tokenization_kwargs={"truncate_prompt_tokens": -1},
            )
            return {"scores": np.array([one.outputs.score for one in outputs], dtype=np.float32)}

        return {"embed": embed, "rerank": rerank}[task]

    return prepare


def without_bfloat16():
    """Make vLLM load its library for processors without AVX512-BF16: it asks torch, which asks the processor.

    The environment variables of `peers.caps` cap torch and oneDNN, but not these questions.
    """
    import torch

    torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False
    if os.environ["MILLPOND_ISA"] == "avx2":
        torch.cpu._is_avx512_supported = lambda: False


FAMILIES = {
    "fastembed": fastembed,
    "millpond": millpond,
    "sentence-transformers": sentence_transformers,
    "transformers": transformers,
    "vllm": vllm,
}


def main():
    """Answer requests until the input ends; the answer to a failed request is its error."""
    # Exports and engines print to standard output, so answers go to a duplicate of it, and file 1 becomes stderr.
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
