"""Tiny checkpoints: random weights in the file layouts of the hub, written to a folder. Most tests start here.

``write_checkpoint(tmp_path / "model", "bert")`` writes a plain repository (config.json, weights, tokenizer);
``sentence_transformers=Layout(...)`` adds modules.json and the files it lists. Everything is deterministic, float32,
two layers deep (ModernBERT: four) and 48 wide; a text may have up to 64 tokens. The weights are much larger than those
of a newly initialized model, so that a wrong position, window or scale changes results far beyond rounding.
"""

from tests.tiny.checkpoints import TEXTS, drop_tensor, edit_json, truncate_file, write_checkpoint
from tests.tiny.families import FAMILIES, MAX_TOKENS, Family
from tests.tiny.layouts import Dense, Dropout, LayerNorm, Layout, Normalize, Other, Pooling
from tests.tiny.tokenizers import SENTENCES

__all__ = [
    "FAMILIES",
    "MAX_TOKENS",
    "SENTENCES",
    "TEXTS",
    "Dense",
    "Dropout",
    "Family",
    "LayerNorm",
    "Layout",
    "Normalize",
    "Other",
    "Pooling",
    "drop_tensor",
    "edit_json",
    "truncate_file",
    "write_checkpoint",
]
