"""Tokenizers built without transformers give what its own classes give, from every form of their files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import FAMILIES, TEXTS, write_checkpoint
from transformers import AutoTokenizer

from millpond.checkpoints.tokenizers.read import read_tokenizer
from millpond.checkpoints.tokenizers.settings import NotBuiltError
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.errors import MissingExtraError, ModelLoadError

pytestmark = [pytest.mark.contract, pytest.mark.torch]

ODD = (
    *("", " ", "Hello  WORLD—café", "a [SEP] b </s> c <mask> d<s>", "x" * 130, "Überİ ẞ ﬁ ①", "``quoted'' text"),
    *(
        "池塘 \U0001f986 👨‍👩‍👧 日本語テキスト 한국어",
        "tab\tnl\r\n\n  end  ",
        "\0\1\ufeff zero\u200bwidth\u00a0nbsp",
        "  leading",
    ),
    *("don't I'll we've 1234567 3.14 a_b", "<|endoftext|> [CLS][MASK] <eos>x<bos>", "naïve résumé e\u0301", "a  b   c"),
    *("▁x ▁", "العربية עברית हिन्दी", "<unk> [UNK] <0x41>", "x " * 600, "\ud7ff\ue000 \U0001d518", "a\u2028b\x85d"),
    *("[MILL] and [Q]un[q] \u2047", "mask<mask>mask <mask> mask", "A\u030a \u1e9b\u0323"),
)
PAIRS = tuple(zip(TEXTS, reversed(TEXTS), strict=True))


def everything(backend: Any) -> list[Any]:
    """Everything that a tokenizer returns for the texts, alone and in pairs."""
    backend.no_padding()
    backend.no_truncation()
    return [
        *(
            (e.ids, e.type_ids, e.offsets, e.special_tokens_mask, e.tokens)
            for e in backend.encode_batch([*TEXTS, *ODD, *PAIRS])
        ),
        *(e.ids for e in backend.encode_batch([*TEXTS, *ODD], add_special_tokens=False)),
        *(backend.decode(e.ids, skip_special_tokens=False) for e in backend.encode_batch([*TEXTS, *ODD])),
    ]


def equals_transformers(folder: Path) -> None:
    read = read_tokenizer(folder)
    reference = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for mine, expected in zip(everything(read.backend), everything(reference.backend_tokenizer), strict=True):
        assert mine == expected
    assert read.specials == {role: str(token) for role, token in reference.special_tokens_map.items()}
    assert list(read.specials) == list(reference.special_tokens_map)
    assert read.typed == ("token_type_ids" in reference.model_input_names)
    assert read.limit == reference.model_max_length or (read.limit is None and reference.model_max_length > 10**20)


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_checkpoint_s_tokenizer_is_transformers(family, lowercase, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, lowercase=lowercase)
    equals_transformers(folder)
    AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).save_pretrained(folder)
    equals_transformers(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    equals_transformers(folder)


def add_token(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    token = {**content["added_tokens"][-1], "id": len(vocabulary), "content": "[MILL]", "special": False}
    content["added_tokens"].append({**token, "normalized": True})


TOKEN = {"content": "[Q]", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
CHANGES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("tokenizer_config.json", lambda config: config.pop("tokenizer_class")),
    ("tokenizer_config.json", lambda config: config.update(tokenizer_class=config["tokenizer_class"] + "Fast")),
    ("tokenizer_config.json", lambda config: config.update(tokenizer_class="PreTrainedTokenizerFast")),
    ("tokenizer_config.json", lambda config: config.pop("model_max_length")),
    ("tokenizer_config.json", lambda config: config.update(model_input_names=["input_ids", "token_type_ids"])),
    ("tokenizer_config.json", lambda config: config.update(extra_special_tokens={}, additional_special_tokens=[])),
    ("tokenizer_config.json", lambda config: config.update(do_lower_case=True)),
    ("tokenizer_config.json", lambda config: config.update(do_lower_case=False, strip_accents=True)),
    ("tokenizer_config.json", lambda config: config.update(tokenize_chinese_chars=False)),
    ("tokenizer_config.json", lambda config: config.update(split_special_tokens=True)),
    ("tokenizer_config.json", lambda config: config.update(add_prefix_space=True)),
    ("tokenizer_config.json", lambda config: config.update(add_prefix_space=False)),
    ("tokenizer_config.json", lambda config: config.update(add_bos_token=True, add_eos_token=True)),
    ("tokenizer_config.json", lambda config: config.update(legacy=True)),
    ("tokenizer_config.json", lambda config: config.update(keep_accents=True, split_by_punct=True)),
    ("tokenizer_config.json", lambda config: config.update(additional_special_tokens=["[Q]", "[MILL]"])),
    ("tokenizer_config.json", lambda config: config.update(extra_special_tokens={"mill_token": "[MILL]"})),
    ("tokenizer_config.json", lambda config: config.update(added_tokens_decoder={})),
    ("tokenizer_config.json", lambda config: config.update(added_tokens_decoder={"90000": TOKEN, "7": TOKEN})),
    ("tokenizer_config.json", lambda config: config.update(pad_token={**TOKEN, "__type": "AddedToken"})),
    ("special_tokens_map.json", lambda config: config.update(mask_token="[MUSK]")),
    ("special_tokens_map.json", lambda config: config.update(mask_token={**TOKEN, "content": "[MUSK]"})),
    ("special_tokens_map.json", lambda config: config.update(additional_special_tokens=["[Q]"])),
    ("tokenizer.json", lambda file: file.update(normalizer=None)),
    ("tokenizer.json", lambda file: file.update(normalizer={"type": "Lowercase"})),
    ("tokenizer.json", lambda file: file.update(pre_tokenizer={"type": "Whitespace"})),
    ("tokenizer.json", lambda file: file.update(post_processor=None)),
    ("tokenizer.json", lambda file: file["model"].update(max_input_chars_per_word=5, fuse_unk=False)),
    ("tokenizer.json", lambda file: file.update(truncation={"max_length": 3, "stride": 0, "strategy": "LongestFirst"})),
    ("tokenizer.json", add_token),
    ("tokenizer.json", lambda file: file["model"].update(unk_id=9)),
    ("tokenizer.json", lambda file: file["model"].update(byte_fallback=True)),
    ("config.json", lambda config: config.update(model_type="unheard-of")),
]
# One family for each class of tokenizers.
CLASSES = (
    "bert",
    "distilbert",
    "mpnet",
    "roberta",
    "xlm-roberta",
    "camembert",
    "albert",
    "deberta-v2",
    "llama",
    "mistral",
    "qwen2",
)


@pytest.mark.parametrize("family", [*CLASSES, "gemma", "gpt2", "modernbert", "eurobert"])
def test_what_the_files_say_changes_what_it_changes_for_transformers(family, tmp_path):
    original = write_checkpoint(tmp_path / "model", family)
    texts = {path: path.read_bytes() for path in original.glob("*.json")}
    compared = 0
    for number, (name, change) in enumerate(CHANGES):
        edit(original, name, change)
        try:
            AutoTokenizer.from_pretrained(original, local_files_only=True, trust_remote_code=False)
        except Exception:  # transformers does not take the files either
            pass
        else:
            try:
                equals_transformers(original)
            except AssertionError as error:
                raise AssertionError(f"change {number} of {name}") from error
            compared += 1
        for path, content in texts.items():
            path.write_bytes(content)
    assert compared > 20


@pytest.mark.parametrize(
    ("family", "names"),
    [
        *((family, ("vocab.txt",)) for family in ("bert", "distilbert", "electra", "mpnet", "nomic")),
        *((family, ("vocab.json", "merges.txt")) for family in ("roberta", "qwen2", "qwen3", "gpt2")),
    ],
)
@pytest.mark.parametrize("settings", [True, False])
def test_vocabularies_without_tokenizer_json(family, names, settings, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, lowercase=True)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    if names != ("vocab.txt",):
        (folder / names[0]).write_text(json.dumps(model["vocab"]), encoding="utf-8")
        merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
        (folder / names[1]).write_text("#version: 0.2\n" + "".join(f"{merge}\n" for merge in merges), encoding="utf-8")
    (folder / "tokenizer.json").unlink()
    if not settings:
        (folder / "tokenizer_config.json").unlink()
        (folder / "special_tokens_map.json").unlink()
    equals_transformers(folder)
    (folder / "added_tokens.json").write_text(json.dumps({"[MILL]": len(model["vocab"])}), encoding="utf-8")
    equals_transformers(folder)
    (folder / names[-1]).unlink()
    with pytest.raises(ModelLoadError, match="neither tokenizer.json nor .*complete"):
        read_tokenizer(folder)


def test_what_is_not_built_is_left_to_transformers(tmp_path, monkeypatch):
    """Without transformers the message names the extra, and so does the one of a user's own tokenizer."""
    folder, known = write_checkpoint(tmp_path / "model", "xlm-roberta"), write_checkpoint(tmp_path / "known")
    edit(folder, "tokenizer_config.json", lambda config: config.update(tokenizer_class="BarthezTokenizer"))
    with pytest.raises(NotBuiltError, match="its class is BarthezTokenizer"):
        read_tokenizer(folder)
    ids = TextTokenizer.load(folder, lower=False).ids(TEXTS, special_tokens=True)
    assert ids == AutoTokenizer.from_pretrained(folder)(list(TEXTS))["input_ids"]
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ModelLoadError, match=r"needs transformers \(its class is BarthezTokenizer\): .*millpond\[torch\]"
    ):
        TextTokenizer.load(folder, lower=False)
    with pytest.raises(MissingExtraError, match=r"millpond\[torch\]"):
        _ = TextTokenizer.load(known, lower=False).hf_tokenizer
