"""tokenizer.json read directly, compared with transformers; and files that only transformers reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import TEXTS, write_checkpoint
from transformers import AutoTokenizer

from millpond.checkpoints.tokenizer_file import read_as_is
from millpond.engine.tokenize.text_tokenizer import TextTokenizer

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

DIRECT = ("bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta")
ODD = (
    "",
    " ",
    "Hello  WORLD\u2014caf\u00e9",
    "a [SEP] b </s> c <mask> d",
    "x" * 130,
    "\u00dcber\u0130",
    "\u6c60\u5858 \U0001f986",
)
PAIRS = tuple(zip(TEXTS, reversed(TEXTS), strict=True))


def everything(backend: Any) -> list[Any]:
    """Everything that a tokenizer returns for the texts, alone and in pairs."""
    backend.no_padding()
    backend.no_truncation()
    return [
        (e.ids, e.type_ids, e.offsets, e.special_tokens_mask, e.tokens)
        for e in backend.encode_batch([*TEXTS, *ODD, *PAIRS])
    ]


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def equals_transformers(folder: Path) -> None:
    read = read_as_is(folder)
    assert read is not None
    reference = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert everything(read.backend) == everything(reference.backend_tokenizer)
    assert read.specials == {role: str(token) for role, token in reference.special_tokens_map.items()}
    assert list(read.specials) == list(reference.special_tokens_map)
    assert read.typed == ("token_type_ids" in reference.model_input_names)
    assert read.limit == reference.model_max_length or (read.limit is None and reference.model_max_length > 10**20)


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("family", DIRECT)
def test_a_file_read_directly_equals_transformers(family, lowercase, tmp_path):
    equals_transformers(write_checkpoint(tmp_path / "model", family, lowercase=lowercase))


@pytest.mark.parametrize("family", DIRECT)
def test_a_file_that_transformers_saved_equals_it(family, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(folder)
    equals_transformers(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.pop("tokenizer_class"),
        lambda config: config.update(tokenizer_class="BertTokenizerFast"),
        lambda config: config.pop("model_max_length"),
        lambda config: config.update(model_input_names=["input_ids", "attention_mask"]),
        lambda config: config.update(extra_special_tokens={}, additional_special_tokens=[]),
        lambda config: config.update(cls_token={"content": "[CLS]", "lstrip": True, "__type": "AddedToken"}),
    ],
    ids=["no class", "fast", "no limit", "input names", "no more tokens", "token object"],
)
def test_equivalent_files_give_the_same_tokens(change, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert")
    edit(folder, "tokenizer_config.json", change)
    equals_transformers(folder)


def test_a_folder_without_optional_files_gives_the_same_tokens(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert", lowercase=True)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        (folder / name).unlink()
    equals_transformers(folder)


def add_token(content: dict[str, Any]) -> None:
    token = {**content["added_tokens"][-1], "id": len(content["model"]["vocab"]) + 7, "content": "[MILL]"}
    content["added_tokens"].append(token)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer_config.json", lambda config: config.update(do_lower_case=True)),
        ("tokenizer_config.json", lambda config: config.update(strip_accents=True)),
        ("tokenizer_config.json", lambda config: config.update(split_special_tokens=True)),
        ("tokenizer_config.json", lambda config: config.update(chat_template="{{ messages }}")),
        ("tokenizer_config.json", lambda config: config.update(tokenizer_class="RobertaTokenizer")),
        ("special_tokens_map.json", lambda config: config.update(mask_token="[MUSK]")),
        ("tokenizer_config.json", lambda config: config.update(added_tokens_decoder={})),
        ("special_tokens_map.json", lambda config: config.update(additional_special_tokens=["[Q]"])),
        ("tokenizer.json", lambda file: file.update(normalizer=None)),
        ("tokenizer.json", lambda file: file.update(pre_tokenizer={"type": "Whitespace"})),
        ("tokenizer.json", lambda file: file.update(post_processor=None)),
        ("tokenizer.json", lambda file: file["model"].update(max_input_chars_per_word=5)),
        ("tokenizer.json", add_token),
        ("config.json", lambda config: config.update(model_type="nomic_bert")),
    ],
)
def test_a_file_that_transformers_rebuilds_differently_is_read_by_transformers(name, change, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert")
    assert read_as_is(folder) is not None
    edit(folder, name, change)
    assert read_as_is(folder) is None


def test_a_file_that_is_not_rebuilt_would_give_other_ids(tmp_path):
    """tokenizer_config.json folds case and tokenizer.json does not; transformers follows the former."""
    folder = write_checkpoint(tmp_path / "model", "bert")
    as_written = read_as_is(folder)
    assert as_written is not None
    edit(folder, "tokenizer_config.json", lambda config: config.update(do_lower_case=True))
    reference = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert everything(as_written.backend) != everything(reference.backend_tokenizer)


def test_transformers_tokenizer_is_loaded_on_first_use(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert")
    loaded = TextTokenizer.load(folder, lower=False)
    assert "transformers" not in vars(loaded)
    text = "The wheel."
    assert loaded.hf_tokenizer(text)["input_ids"] == loaded.ids([text], special_tokens=True)[0]
    shutil.rmtree(folder)
    assert loaded.hf_tokenizer(text)["input_ids"]  # read once
