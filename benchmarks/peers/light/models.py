"""MiniLM in the forms that other engines read: `python models.py onnx|static SOURCE TARGET`.

It runs in the environment of sentence-transformers (``onnx``) or model2vec (``static``).
"""

import json
import shutil
import sys
from pathlib import Path

WIDTH = 256  # of the static table, as of potion-base-8M


def onnx(source, target):
    """The encoder as model.onnx, beside the files of the tokenizer."""
    import torch
    from transformers import AutoModel

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = AutoModel.from_pretrained(source, attn_implementation="eager").eval()

        def forward(self, input_ids, attention_mask, token_type_ids):
            return self.model(input_ids, attention_mask, token_type_ids).last_hidden_state

    inputs = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "texts", 1: "tokens"} for name in [*inputs, "last_hidden_state"]}
    ids = torch.ones(2, 8, dtype=torch.long)
    torch.onnx.export(
        Encoder(),
        (ids, ids, ids * 0),
        target / "model.onnx",
        input_names=inputs,
        output_names=["last_hidden_state"],
        dynamic_axes=axes,
        dynamo=False,
    )
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source / name, target / name)


def static(source, target):
    """A table of the word vectors' first principal components."""
    import numpy as np
    from model2vec import StaticModel
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    tensors = load_file(source / "model.safetensors")
    (words,) = [tensor for name, tensor in tensors.items() if "word_embeddings" in name]
    words = words - words.mean(axis=0)
    _, axes = np.linalg.eigh(words.T @ words)
    table = (words @ axes[:, ::-1][:, :WIDTH]).astype(np.float32)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    assert len(table) == config["vocab_size"]
    StaticModel(table, tokenizer, normalize=True).save_pretrained(target)


if __name__ == "__main__":
    {"onnx": onnx, "static": static}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
