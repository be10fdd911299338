"""A GLiNER written out from the published code: every span's layers one after another, in torch, one text at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

LEAD = "token_rep_layer.bert_layer.model."


class Found(NamedTuple):
    """An entity."""

    start: int
    end: int
    label: str
    score: float


class Oracle:
    """A checkpoint whose tokenizer is beside it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel, AutoTokenizer
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.config = json.loads((folder / "gliner_config.json").read_text(encoding="utf-8"))
        fields = self.config["encoder_config"]
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tensors = load_file(folder / "model.safetensors")
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
        self.encoder = AutoModel.from_config(config, attn_implementation="eager").eval()
        missing, unexpected = self.encoder.load_state_dict(
            {name.removeprefix(LEAD): tensor for name, tensor in tensors.items() if name.startswith(LEAD)}, strict=False
        )
        assert all("position_ids" in name for name in unexpected)
        assert all("pooler" in name for name in missing)
        self._spans: dict[tuple[str, ...], dict[tuple[int, int, int], float]] = {}
        self.tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(LEAD)}

    def linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def two(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(f"{name}.3", self.linear(f"{name}.0", rows).relu())

    @torch.inference_mode()
    def states(self, words: Sequence[str], labels: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """``[words, d]`` and ``[labels, d]``."""
        prompt = [part for label in labels for part in ("<<ENT>>", label)] + ["<<SEP>>"]
        read = self.tokenizer([[*prompt, *words]], is_split_into_words=True, return_tensors="pt")
        hidden = self.encoder(input_ids=read.input_ids, attention_mask=read.attention_mask).last_hidden_state[0]
        if "token_rep_layer.projection.weight" in self.tensors:
            hidden = self.linear("token_rep_layer.projection", hidden)
        first = {word: place for place, word in reversed(list(enumerate(read.word_ids(0)))) if word is not None}
        of_words = torch.stack([hidden[first[len(prompt) + i]] for i in range(len(words))])
        marker = self.config["class_token_index"]
        of_labels = hidden[(read.input_ids[0] == marker).nonzero()[:, 0]]
        layers, width = self.config["num_rnn_layers"], self.config["hidden_size"]
        if layers:
            lstm = nn.LSTM(width, width // 2, num_layers=layers, bidirectional=True, batch_first=True)
            lstm.load_state_dict(
                {name.removeprefix("rnn.lstm."): t for name, t in self.tensors.items() if "rnn" in name}
            )
            of_words = lstm(of_words[None])[0][0]
        return of_words, of_labels

    @torch.inference_mode()
    def spans(self, words: Sequence[str], labels: Sequence[str]) -> dict[tuple[int, int, int], float]:
        """The probability of each (first word, last word, label)."""
        of_words, of_labels = self.states(words, labels)
        if self.config["span_mode"] == "token_level":
            return self._by_words(of_words, of_labels)
        name = "span_rep_layer.span_rep_layer"
        begins, ends = self.two(f"{name}.project_start", of_words), self.two(f"{name}.project_end", of_words)
        prompts = self.two("prompt_rep_layer", of_labels)
        scores = {}
        for start, more in product(range(len(words)), range(self.config["max_width"])):
            if start + more < len(words):
                both = torch.cat((begins[start], ends[start + more])).relu()
                single = self.config["span_mode"] == "marker"
                span = self.linear(f"{name}.out_project", both) if single else self.two(f"{name}.out_project", both)
                for column, each in enumerate((prompts @ span).sigmoid().tolist()):
                    scores[start, start + more, column] = each
        return scores

    def _by_words(self, of_words: torch.Tensor, of_labels: torch.Tensor) -> dict[tuple[int, int, int], float]:
        width = self.config["hidden_size"]
        word, label = self.linear("scorer.proj_token", of_words), self.linear("scorer.proj_label", of_labels)
        probs = torch.stack(
            [torch.stack([self.two("scorer.out_mlp", _joined(w, c, width)).sigmoid() for c in label]) for w in word]
        )  # [words, labels, 3]
        return {
            (start, end, column): float(
                min(probs[start, column, 0], probs[end, column, 1], probs[start : end + 1, column, 2].min())
            )
            for start, end, column in product(range(len(word)), range(len(word)), range(len(label)))
            if end >= start
        }

    def entities(
        self,
        text: str,
        labels: Sequence[str],
        *,
        threshold: float = 0.5,
        nested: bool = False,
        multi_label: bool = False,
    ) -> list[Found]:
        """The entities of a text."""
        matches = list(re.finditer(r"\w+(?:[-_]\w+)*|\S", text))[: self.config["max_len"]]
        if not matches:
            return []
        words = [match.group() for match in matches]
        key = (*labels, *words)
        scores = self._spans[key] = self._spans.get(key) or self.spans(words, labels)
        chosen: list[tuple[int, int, int, float]] = []
        for (start, end, column), score in sorted(scores.items(), key=lambda item: -item[1]):
            if score > threshold and not any(_clash(start, end, a, b, nested, multi_label) for a, b, _, _ in chosen):
                chosen.append((start, end, column, score))
        return [
            Found(matches[start].start(), matches[end].end(), labels[column], score)
            for start, end, column, score in sorted(chosen, key=lambda each: each[0])
        ]


class Oracle2(Oracle):
    """A GLiNER2's entities."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer
        from transformers import AutoModel
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.config = {"span_mode": "markerV0", "max_len": 10_000, **json.loads((folder / "config.json").read_text())}
        fields = json.loads((folder / "encoder_config" / "config.json").read_text(encoding="utf-8"))
        # transformers' own would split a word of the tiny vocabulary another way, with pieces of the same scores.
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tensors, lead = load_file(folder / "model.safetensors"), "encoder."
        self.encoder = AutoModel.from_config(CONFIG_MAPPING[fields["model_type"]].from_dict(fields)).eval()
        own = {name.removeprefix(lead): tensor for name, tensor in tensors.items() if name.startswith(lead)}
        assert not self.encoder.load_state_dict(own, strict=False).unexpected_keys
        self._spans = {}
        self.tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(lead)}

    @torch.inference_mode()
    def spans(self, words: Sequence[str], labels: Sequence[str]) -> dict[tuple[int, int, int], float]:
        """The probability of each (first word, last word, label); none of a text without structures."""
        prompt = [
            "(",
            "[P]",
            "entities",
            "(",
            *(part for label in labels for part in ("[E]", label)),
            ")",
            ")",
            "[SEP_TEXT]",
        ]
        pieces = [self.tokenizer.encode(each, add_special_tokens=False).ids for each in [*prompt, *words]]
        ids = [piece for each in pieces for piece in each]
        first = [sum(map(len, pieces[:i])) for i in range(len(pieces))]
        hidden = self.encoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
        of_words = hidden[[first[len(prompt) + i] for i in range(len(words))]]
        markers = hidden[[first[1], *(first[4 + 2 * i] for i in range(len(labels)))]]
        count = self.linear("count_pred.2", self.linear("count_pred.0", markers[0]).relu()).argmax()
        if not count:
            return {}
        queries, name = self._queries(markers[1:]), "span_rep.span_rep_layer"
        begins, ends = self.two(f"{name}.project_start", of_words), self.two(f"{name}.project_end", of_words)
        return {
            (start, start + more, column): each
            for start, more in product(range(len(words)), range(self.config["max_width"]))
            if start + more < len(words)
            for span in [self.two(f"{name}.out_project", torch.cat((begins[start], ends[start + more])).relu())]
            for column, each in enumerate((queries @ span).sigmoid().tolist())
        }

    def _queries(self, labels: torch.Tensor) -> torch.Tensor:
        width, lead = labels.shape[1], "count_embed.transformer."
        gru = nn.GRUCell(width, width)
        own = {name.split(".")[-1].removesuffix("_l0"): t for name, t in self.tensors.items() if ".gru." in name}
        gru.load_state_dict(own)
        states = gru(self.tensors["count_embed.pos_embedding.weight"][:1].expand(len(labels), -1), labels)
        if self.config["counting_layer"] == "count_lstm":
            joined = torch.cat((states, labels), dim=-1)
            return self.linear("count_embed.projector.2", self.linear("count_embed.projector.0", joined).relu())
        states = states + labels
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        transformer = nn.TransformerEncoder(layer, 2).eval()
        inner = f"{lead}transformer."
        transformer.load_state_dict({n.removeprefix(inner): t for n, t in self.tensors.items() if n.startswith(inner)})
        rows = torch.cat((transformer(self.linear(f"{lead}in_projector", states)[None])[0], states), dim=-1)
        for i in (0, 2):
            rows = self.linear(f"{lead}out_projector.{i}", rows).relu()
        return self.linear(f"{lead}out_projector.4", rows)

    def entities(
        self,
        text: str,
        labels: Sequence[str],
        *,
        threshold: float = 0.5,
        nested: bool = False,
        multi_label: bool = False,
    ) -> list[Found]:
        """The entities of a text, each label's apart; without those of the sign that is put behind the text."""
        matches = list(re.finditer(WORDS2, text, re.IGNORECASE))
        if not matches:
            return []
        places = [match.span() for match in matches]
        words = [match.group().lower() for match in matches]
        if not text.endswith((".", "!", "?")):
            places, words = [*places, (len(text), len(text))], [*words, "."]
        scores, found = self.spans(words, labels), []
        for column, label in enumerate(labels):
            chosen: list[tuple[int, int]] = []
            own = sorted(((score, key) for key, score in scores.items() if key[2] == column), key=lambda each: -each[0])
            for score, (start, end, _) in own:
                if score >= threshold and not any(_clash(start, end, a, b, nested, False) for a, b in chosen):
                    chosen.append((start, end))
                    if places[start][0] < len(text):
                        found.append(Found(places[start][0], places[end][1], label, score))
        return found


WORDS2 = r"https?://\S+|www\.\S+|[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}|@[a-z0-9_]+|\w+(?:[-_]\w+)*|\S"


def _joined(word: torch.Tensor, label: torch.Tensor, width: int) -> torch.Tensor:
    return torch.cat((word[:width], label[:width], word[width:] * label[width:]))


def _clash(start: int, end: int, a: int, b: int, nested: bool, multi_label: bool) -> bool:
    if (start, end) == (a, b):
        return not multi_label
    apart = start > b or a > end
    inside = (start <= a and end >= b) or (a <= start and b >= end)
    return not apart and not (nested and inside)


def by_package(folder: Path, texts: Sequence[str], labels: Sequence[str], **options: Any) -> list[list[Found]]:
    """The same by the library gliner."""
    from gliner import GLiNER

    model = GLiNER.from_pretrained(str(folder), local_files_only=True)
    options["flat_ner"] = not options.pop("nested", False)
    found = model.inference(list(texts), list(labels), **options)
    return [[Found(each["start"], each["end"], each["label"], each["score"]) for each in own] for own in found]


def by_package2(folder: Path, texts: Sequence[str], labels: Sequence[str], *, threshold: float) -> list[list[Found]]:
    """The entities by the library gliner2, without those of the sign that it puts behind a text."""
    from gliner2 import GLiNER2

    model = GLiNER2.from_pretrained(str(folder))
    options = {"threshold": threshold, "include_confidence": True, "include_spans": True}
    found = [model.extract_entities(text, list(labels), **options)["entities"] for text in texts]
    return [
        [
            Found(each["start"], min(each["end"], len(text)), label, each["confidence"])
            for label, own in by_label.items()
            for each in own
            if each["start"] < len(text)
        ]
        for text, by_label in zip(texts, found, strict=True)
    ]
