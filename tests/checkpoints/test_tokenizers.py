"""Tokenizers built without transformers: tokenizer.json as the library itself reads it, other files as transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import FAMILIES, TEXTS, write_checkpoint
from tokenizers import Tokenizer
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


def equals_file(folder: Path) -> None:
    """Every step is the file's; tokens that the settings add are no part of it."""
    read = read_tokenizer(folder)
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.add_tokens([token for _, token in sorted(read.backend.get_added_tokens_decoder().items())])
    reference.encode_special_tokens = read.backend.encode_special_tokens
    for mine, expected in zip(everything(read.backend), everything(reference), strict=True):
        assert mine == expected


def complete(folder: Path) -> None:
    """Give tokenizer.json all steps, as files on the hub have them."""
    backend = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    backend.save(str(folder / "tokenizer.json"))


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


# Families whose class is not that of their tiny tokenizer; transformers 5 takes its steps if no file names another.
OTHER_CLASS = ("rembert", "gpt-neox", "qwen3.5")


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"roformer"}))
def test_a_checkpoint_s_tokenizer_is_transformers(family, lowercase, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family, lowercase=lowercase)
    equals_file(folder)
    complete(folder)
    equals_transformers(folder)
    AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).save_pretrained(folder)
    equals_transformers(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    if family == "roformer":
        with pytest.raises(NotBuiltError, match="RoFormerTokenizer"):
            read_tokenizer(folder)
    elif family in OTHER_CLASS:
        equals_file(folder)
    else:
        equals_transformers(folder)


def test_a_pair_of_deberta(tmp_path):
    """As in transformers 4, with which its cross-encoders were trained; transformers 5 has a second separator."""
    folder = write_checkpoint(tmp_path / "model", "deberta")
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]), encoding="utf-8")
    (folder / "tokenizer.json").unlink()
    pair = read_tokenizer(folder).backend.encode("a", "b")
    assert pair.tokens == ["[CLS]", "a", "[SEP]", "b", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 1, 1]


def test_words_that_roformer_splits_by_its_own_code(tmp_path):
    """Its tokenizer.json has another splitter in the place of that."""
    folder = write_checkpoint(tmp_path / "model", "roformer")
    equals_transformers(folder)  # by a class that tokenizer_config.json names
    edit(folder, "tokenizer_config.json", lambda config: config.update(tokenizer_class="RoFormerTokenizer"))
    with pytest.raises(NotBuiltError, match="its class is RoFormerTokenizer"):
        read_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(NotBuiltError, match="its class is RoFormerTokenizer"):
        read_tokenizer(folder)


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


_BERT = frozenset({"do_lower_case", "strip_accents", "tokenize_chinese_chars"})
# The settings that a class of transformers 4 takes instead of tokenizer.json's, where transformers 5 takes them, too.
TAKEN = {
    **dict.fromkeys(("bert", "distilbert"), _BERT),
    "mpnet": _BERT - {"tokenize_chinese_chars"},
    **dict.fromkeys(("roberta", "gpt2"), frozenset({"add_prefix_space"})),
}
_ENDS = frozenset({"add_bos_token", "add_eos_token"})
# Those that only transformers 4 takes.
TAKEN_BY_4 = {
    **dict.fromkeys(("modernbert", "eurobert", "qwen2", "llama"), frozenset({"add_prefix_space"})),
    "gemma": _ENDS,
    "mistral": _ENDS | {"add_prefix_space"},  # its files name LlamaTokenizer
}
# The last: a list of added tokens, beside which transformers 5 does not take those of tokenizer.json.
STEPS = _BERT | _ENDS | {"added_tokens_decoder", "add_prefix_space", "legacy", "keep_accents", "split_by_punct"}


def options_of(change: Callable[[dict[str, Any]], Any]) -> frozenset[str]:
    """The settings of steps that a change of tokenizer_config.json makes."""
    content = {"tokenizer_class": "", "model_max_length": 1}
    change(content)
    return STEPS & content.keys()


@pytest.mark.parametrize("family", [*CLASSES, "gemma", "gpt2", "modernbert", "eurobert"])
def test_what_the_files_say_changes_what_it_changes_for_transformers(family, tmp_path):
    original = write_checkpoint(tmp_path / "model", family)
    complete(original)
    texts = {path: path.read_bytes() for path in original.glob("*.json")}
    compared = 0
    for number, (name, change) in enumerate(CHANGES):
        options = options_of(change) if name == "tokenizer_config.json" else frozenset()
        if options & TAKEN_BY_4.get(family, frozenset()):
            continue
        edit(original, name, change)
        try:
            AutoTokenizer.from_pretrained(original, local_files_only=True, trust_remote_code=False)
        except Exception:  # transformers does not take the files either
            pass
        else:
            by_file = name in ("tokenizer.json", "config.json") or (
                options and not options & TAKEN.get(family, frozenset())
            )
            try:
                (equals_file if by_file else equals_transformers)(original)
            except AssertionError as error:
                raise AssertionError(f"change {number} of {name}") from error
            compared += 1
        for path, content in texts.items():
            path.write_bytes(content)
    assert compared > 20


SMALL = {"type": "Lowercase"}


def steps(*changed: tuple[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """A change of a tokenizer.json: its steps by name; a function gives the new one from the old."""
    return lambda file: file.update({name: step(file[name]) if callable(step) else step for name, step in changed})


def sequence(kind: str, *parts: Any) -> Callable[[Any], Any]:
    """``parts`` and the step that the file has, the `Ellipsis` among them."""
    return lambda held: {"type": "Sequence", kind: [held if part is ... else part for part in parts]}


def without_end(processor: Any) -> Any:
    """A template that no longer ends the text."""
    return {**processor, "single": processor["single"][:-1], "pair": processor["pair"][:-1]}


DIGITS = {"type": "Digits", "individual_digits": True}
WORDS = {"type": "Split", "pattern": {"Regex": "[a-z]+| "}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
FILES = {
    "xlm-roberta, lower case": ("xlm-roberta", steps(("normalizer", SMALL))),
    "xlm-roberta without end": ("xlm-roberta", steps(("post_processor", without_end))),
    "bert, split at spaces": ("bert", steps(("pre_tokenizer", {"type": "WhitespaceSplit"}))),
    "bert, composed": ("bert", steps(("normalizer", {"type": "NFC"}))),
    "bert, longer pieces": ("bert", lambda file: file["model"].update(continuing_subword_prefix="@@")),
    "roberta, lower case": ("roberta", steps(("normalizer", SMALL))),
    "roberta, digits": ("roberta", steps(("pre_tokenizer", sequence("pretokenizers", DIGITS, ...)))),
    "llama without the first space": (
        "mistral",
        steps(("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}), ("pre_tokenizer", None)),
    ),
    "qwen2, other words": (
        "qwen2",
        steps(("normalizer", None), ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [WORDS, BYTES]})),
    ),
    "deberta-v2, lower case": ("deberta-v2", steps(("normalizer", SMALL))),
    "albert with case": ("albert", steps(("normalizer", {"type": "NFKC"}))),
    "mpnet, composed": ("mpnet", steps(("normalizer", {"type": "NFC"}))),
    "camembert, digits": ("camembert", steps(("pre_tokenizer", sequence("pretokenizers", ..., DIGITS)))),
    "gemma, lower case": ("gemma", steps(("normalizer", sequence("normalizers", SMALL, ...)))),
    "gpt2, lower case": ("gpt2", steps(("normalizer", SMALL))),
}


@pytest.mark.parametrize("name", FILES)
def test_the_steps_of_a_file_are_taken_where_its_class_has_others(name, tmp_path):
    family, change = FILES[name]
    folder = write_checkpoint(tmp_path / "model", family)
    if name.startswith("llama"):
        edit(folder, "config.json", lambda config: config.update(model_type="llama"))
    complete(folder)
    edit(folder, "tokenizer.json", change)
    equals_file(folder)
    with pytest.raises(AssertionError):  # transformers 5 loses them
        equals_transformers(folder)


@pytest.mark.parametrize("name", ["HerbertTokenizerFast", "BarthezTokenizer", "SomebodysTokenizer"])
@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "roberta", "llama"])
def test_the_file_of_a_class_that_is_not_known_here(family, name, tmp_path):
    """transformers 5 gives it the steps of the class, or finds none of its vocabulary."""
    folder = write_checkpoint(tmp_path / "model", family)
    edit(folder, "tokenizer_config.json", lambda config: config.update(tokenizer_class=name))
    equals_file(folder)


@pytest.mark.parametrize(("family", "token"), [("gemma", "<mask>"), ("t5", "<extra_id_0>")])
def test_a_token_of_the_class_that_the_file_lacks_is_no_row_of_the_weights(family, token, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    assert read_tokenizer(folder).backend.token_to_id(token) is None
    # One that the checkpoint's own files name is added, as transformers does.
    edit(folder, "tokenizer_config.json", lambda config: config.update(mask_token=token))
    assert read_tokenizer(folder).backend.token_to_id(token) is not None


def test_a_pair_without_post_processor_has_the_types_of_its_texts(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert")
    edit(folder, "tokenizer.json", steps(("post_processor", None)))
    (pair,) = TextTokenizer.load(folder, lower=False).encode_pairs([("the mill", "a pond")])
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("the mill", "a pond")
    assert (pair.ids.tolist(), pair.type_ids.tolist()) == (expected.ids, expected.type_ids)
    assert set(expected.type_ids) == {0, 1}


def ids(folder: Path, text: str = "Mill 12 é") -> list[int]:
    return list(read_tokenizer(folder).backend.encode(text).ids)


@pytest.mark.parametrize(
    ("family", "setting", "normalizer", "pre_tokenizer"),
    [
        ("bert", {"do_lower_case": True}, {"lowercase": True}, {}),
        ("bert", {"do_lower_case": False, "strip_accents": True}, {"lowercase": False, "strip_accents": True}, {}),
        ("distilbert", {"tokenize_chinese_chars": False}, {"handle_chinese_chars": False}, {}),
        ("mpnet", {"do_lower_case": False}, {"lowercase": False}, {}),
        ("roberta", {"add_prefix_space": True}, {}, {"add_prefix_space": True}),
        ("modernbert", {"add_prefix_space": True}, {}, {"add_prefix_space": True}),
        ("mistral", {"add_prefix_space": False}, {}, {"prepend_scheme": "never"}),
        ("albert", {"do_lower_case": True, "keep_accents": True}, {}, {}),
        ("deberta-v2", {"do_lower_case": True, "split_by_punct": True}, {}, {}),
        ("xlm-roberta", {"do_lower_case": True}, {}, {}),
    ],
)
def test_the_settings_that_transformers_4_took_instead_of_the_file(
    family, setting, normalizer, pre_tokenizer, tmp_path
):
    folder = write_checkpoint(tmp_path / "model", family)
    complete(folder)
    edit(folder, "tokenizer_config.json", lambda config: config.update(setting))
    found = ids(folder), ids(folder, "池塘 a. b")
    for step, changed in (("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer)):
        edit(folder, "tokenizer.json", lambda file, step=step, changed=changed: (file[step] or {}).update(changed))
    changed_file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert found == tuple(changed_file.encode(text).ids for text in ("Mill 12 é", "池塘 a. b"))


@pytest.mark.parametrize("family", ["gemma", "mistral"])
def test_ends_that_are_asked_for(family, tmp_path):
    """An absent ``add_bos_token`` means the token, beside ``add_eos_token``; where both are absent, the file says."""
    folder = write_checkpoint(tmp_path / "model", family)
    complete(folder)
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ids(folder) == file.encode("Mill 12 é").ids
    bare = file.encode("Mill 12 é", add_special_tokens=False).ids
    specials = read_tokenizer(folder).specials
    first, last = (file.token_to_id(specials[role]) for role in ("bos_token", "eos_token"))
    for bos, eos, expected in (
        (None, True, [first, *bare, last]),
        (False, None, bare),
        (False, True, [*bare, last]),
        (True, False, [first, *bare]),
    ):
        settings = {"add_bos_token": bos, "add_eos_token": eos}
        edit(folder, "tokenizer_config.json", lambda config, settings=settings: config.update(settings))
        assert ids(folder) == expected


def test_a_file_s_dropout_of_training_is_left_out(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen2")
    expected = ids(folder)
    edit(folder, "tokenizer.json", lambda file: file["model"].update(dropout=1.0))
    assert ids(folder) == expected
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Mill 12 é").ids != expected


@pytest.mark.parametrize(
    ("family", "names"),
    [
        *((family, ("vocab.txt",)) for family in ("bert", "distilbert", "electra", "mpnet", "nomic")),
        *((family, ("vocab.json", "merges.txt")) for family in ("roberta", "longformer", "qwen2", "qwen3", "gpt2")),
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


@pytest.mark.parametrize("name", ["PhobertTokenizer", "BertweetTokenizer", "BertJapaneseTokenizer"])
def test_tokenizers_in_python_are_refused_unless_there_is_a_file(name, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "roberta")
    edit(folder, "tokenizer_config.json", lambda config: config.update(tokenizer_class=name))
    if name == "PhobertTokenizer":
        equals_file(folder)
    (folder / "tokenizer.json").unlink()
    for file in ("vocab.txt", "bpe.codes"):
        (folder / file).write_text("a 1\n")
    with pytest.raises(ModelLoadError, match=f"no tokenizer.json, and .* {name}, splits texts in Python .*bge-m3"):
        TextTokenizer.load(folder, lower=False)
    (folder / "tokenizer_config.json").unlink()  # its files tell it, too
    with pytest.raises(ModelLoadError, match="splits texts in Python .by vocab.txt and bpe.codes"):
        TextTokenizer.load(folder, lower=False)


@pytest.mark.parametrize("content", ["{broken", "{}", ""])
def test_a_damaged_file_is_named(content, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=rf"{folder}/tokenizer.json is no tokenizer .*; fetch it again"):
        TextTokenizer.load(folder, lower=False)


def test_what_is_not_built_is_left_to_transformers(tmp_path, monkeypatch):
    """Without transformers the message names the extra, and so does the one of a user's own tokenizer."""
    folder, known = write_checkpoint(tmp_path / "model", "xlm-roberta"), write_checkpoint(tmp_path / "known")
    edit(folder, "tokenizer_config.json", lambda config: config.update(fast_tokenizer_files=["tokenizer.json"]))
    with pytest.raises(NotBuiltError, match="tokenizer_config.json has fast_tokenizer_files"):
        read_tokenizer(folder)
    ids = TextTokenizer.load(folder, lower=False).ids(TEXTS, special_tokens=True)
    assert ids == AutoTokenizer.from_pretrained(folder)(list(TEXTS))["input_ids"]
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ModelLoadError, match=r"needs transformers \(tokenizer_config.json has fast_tok\w+\): .*millpond\[torch\]"
    ):
        TextTokenizer.load(folder, lower=False)
    with pytest.raises(MissingExtraError, match=r"millpond\[torch\]"):
        _ = TextTokenizer.load(known, lower=False).hf_tokenizer
