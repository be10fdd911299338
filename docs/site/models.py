"""docs/models.md, from the tables of the checkpoints that millpond knows.

After a change of a table: ``PYTHONPATH=src python docs/site/models.py`` writes the page again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from millpond.backends.torch.pooling.methods import METHODS
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import _SUFFIXES, ARCHITECTURES
from millpond.checkpoints.build_spec import MATRYOSHKA_FAMILIES
from millpond.checkpoints.rerankers import FAMILIES

PAGE = Path(__file__).parents[1] / "models.md"

_KINDS = {True: "decoder", False: "encoder"}
_ROWS = {"cls": "first token", "lasttoken": "last token"}

_TEXT = """\
# Models

<!-- Written by docs/site/models.py from the tables in src/millpond/checkpoints; do not edit. -->

A checkpoint runs if its `model_type` in config.json is in the first table, and `architectures` names a class of that
family. All others are refused by name. `millpond models` prints the table, and `millpond models MODEL` describes one
checkpoint (tasks, pooling, widths, prompts, labels) without loading its weights. `trust_remote_code` is never needed.

## Families

{families}

- **Kind** is encoder or decoder, and how it knows positions: by a learned table (absolute), by rotation (rotary), or by
  distances (relative).
- **Pooling** is the default, if the checkpoint's files name none. The methods are {methods}; several can be joined by
  `+`.
- **Classes** is where `*ForSequenceClassification` reads its logits: in a token's row, or where config.json says.
- **SPLADE** checkpoints may have the masked-language-model head of {splade}.
- **Forward**: millpond's own packed forward pass, or the class of transformers over packed rows. A configuration that
  the own one does not cover runs in the class of transformers.

`architectures` may name `HF_ColBERT` (Stanford's), the family's class with `ColBERT` before it (vLLM's), or the
family's class with one of these endings instead of `Model`: {suffixes}. Of some families there are other names:

{names}

A checkpoint with another family's `model_type` is recognized by further fields of config.json:

{recognized}

## LLM rerankers

A language model that was trained to rerank is recognized by its name and `model_type`, by a chat template for queries
and documents, or by vLLM's keys in config.json. `score_template=` replaces the template.

{rerankers}

## Matryoshka

Checkpoints whose card says that their vectors may be cut, and whose config.json does not. Any other checkpoint names
its widths in config.json (`matryoshka_dimensions`, `is_matryoshka`) or is cut by `hf_overrides={{"is_matryoshka":
True}}`.

{matryoshka}
"""


def page() -> str:
    """The page in Markdown."""
    header = ("family", "`model_type`", "kind", "pooling", "classes", "forward", "example")
    return _TEXT.format(
        families=_table(header, map(_family, ARCHITECTURES)),
        methods=_codes(METHODS),
        splade=_codes(f"{row.prefix}Model" for row in ARCHITECTURES if row.mlm),
        recognized="\n".join(
            f"- `{row.prefix}Model`: {_recognized(row)}" for row in ARCHITECTURES if row.recognized_by
        ),
        suffixes=_codes(_SUFFIXES[1:]),
        names="\n".join(f"- {row.prefix}: {_codes(row.names)}" for row in ARCHITECTURES if row.names),
        rerankers=_table(
            ("name", "`model_type`", "score"),
            [(_code(family.pattern), _codes(family.model_types), _score(family.tokens)) for family in FAMILIES],
        ),
        matryoshka=_table(
            ("name", "widths"),
            [
                (
                    _code(family.pattern),
                    f"any from {family.smallest}"
                    if family.dimensions is None
                    else ", ".join(map(str, family.dimensions)),
                )
                for family in MATRYOSHKA_FAMILIES
            ],
        ),
    )


def _family(row: Architecture) -> tuple[str, ...]:
    pooling = row.classifiers.pooling
    return (
        f"`{row.prefix}Model`",
        _codes((row.model_type, *row.aliases)),
        f"{_KINDS[row.decoder]}, {'some layers recurrent' if row.recurrent else row.positions}",
        f"`{row.pooling}`",
        _ROWS.get(pooling, pooling) if isinstance(pooling, str) else "config.json",
        "millpond" if row.forward else "transformers",
        row.example,
    )


def _recognized(row: Architecture) -> str:
    """The fields of config.json by which a family with another one's ``model_type`` is recognized."""
    return " and ".join(f"`{key}: {value}`" for key, value in row.recognized_by.items())


def _score(tokens: Sequence[str]) -> str:
    if not tokens:
        return "a score head"
    return f"logit of `{tokens[-1]}`" + (f" minus that of `{tokens[0]}`" if len(tokens) == 2 else "")


def _code(pattern: str) -> str:
    """A pattern in a cell of a table, where a bar would end the cell."""
    readable = re.sub(r"\(-\[\\w\.-\]\+\)\?|\[\\w\.-\]\*|\.\*", "*", pattern.replace(r"\.", "."))
    return f"`{readable}`".replace("|", "\\|")


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
