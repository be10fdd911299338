"""docs/models.md, from the tables of the checkpoints that millpond knows.

After a change of a table: ``PYTHONPATH=src python docs/site/models.py`` writes the page again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from millpond.backends.native.families import has_plan
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import _SUFFIXES, ARCHITECTURES
from millpond.checkpoints.build_spec import MATRYOSHKA_FAMILIES
from millpond.checkpoints.families.remote_code import KNOWN, RemoteCode
from millpond.checkpoints.rerankers import FAMILIES, RerankerFamily
from millpond.engine.census import Verdict, census
from millpond.values.spec import PoolingMode

PAGE = Path(__file__).parents[1] / "models.md"
ERRORS = Path(__file__).with_name("errors.json")  # written by tests/parity/measured.py

_KINDS = {True: "decoder", False: "encoder"}
# The columns of the table of tasks, and the families that have such checkpoints.
COLUMNS: Mapping[str, Callable[[Architecture], bool]] = {
    "embedder": lambda row: not row.encodes_apart,
    "classifier": lambda row: not row.encodes_apart and "ForSequenceClassification" not in row.refused,
    "cross-encoder": lambda row: not row.encodes_apart and "ForSequenceClassification" not in row.refused,
    "token classifier": lambda row: not row.encodes_apart and "ForTokenClassification" not in row.refused,
    "reward model": lambda row: not row.encodes_apart and "ForRewardModel" not in row.refused,
    "late interaction": lambda row: not row.encodes_apart,
    "LLM reranker": lambda row: row.decoder and "ForCausalLM" not in row.refused,
    "SPLADE": lambda row: row.mlm is not None,
}
_MODULES = (
    ("Transformer, MLMTransformer", "first", ""),
    ("StaticEmbedding", "first", ""),
    (
        "WordEmbeddings",
        "first",
        "PhraseTokenizer, whose rules are NLTK's; `cls` pooling, which has no vector there, either",
    ),
    ("BoW", "first, without a pooling", ""),
    ("Router, Asym", "first", ""),
    ("WeightedLayerPooling", "behind a Transformer", "families that keep no states of layers here"),
    ("WordWeights, Dense", "before the pooling", ""),
    ("CNN", "before the pooling", "even kernels and strides, which pool the padding of a batch"),
    ("LSTM", "before the pooling, behind WordEmbeddings", ""),
    ("Pooling", "", ""),
    ("Dense, LayerNorm, Normalize", "behind the pooling or a first module without one", ""),
    ("Dropout", "anywhere", ""),
)
_ROWS = {"cls": "first token", "lasttoken": "last token"}

_TEXT = """\
# Models

<!-- Written by docs/site/models.py from the tables in src/millpond/checkpoints; do not edit. -->

A checkpoint runs if its `model_type` in config.json is in the first table, and `architectures` names a class of that
family. All others are refused by name. `millpond models` prints the table, and `millpond models MODEL` describes one
checkpoint (tasks, pooling, widths, prompts, labels) without loading its weights. `trust_remote_code` is never needed.

Weights are read from safetensors, whole or in shards, in any precision that is not quantized; from `pytorch_model.bin`
where torch is installed; and, where there is neither, from the initializers of `model.onnx` (also
`model_optimized.onnx`, `model_fp16.onnx`, and in `onnx/`), as torch's exporters and onnxruntime's optimizer write it.
No graph is run.

## Families

{families}

- **Kind** is encoder or decoder (or both, for two parts of a text), and how it knows positions: by a learned table
  (absolute), by rotation (rotary), or by distances (relative).
- **Pooling** is the default, if the checkpoint's files name none. The methods are {methods}; several can be joined by
  `+`.
- **Classes** is where `*ForSequenceClassification` reads its logits: in a token's row, or where config.json says.
- **SPLADE** checkpoints may have the masked-language-model head of {splade}.
- **Backend** on a CPU is `native`, which needs no torch, or `torch`. In the backend torch a family runs in millpond's
  own packed forward pass, or, where the next column says transformers, in its class over packed rows.
- **Error** is the largest difference from a reference, native and in torch: the states of a packed batch in float32
  beside those of transformers' class (or of the published formulas, where it has none) of one text at a time, of a
  small checkpoint with random weights, relative to the largest value (`python -m tests.parity.measured`).

`architectures` may name `HF_ColBERT` (Stanford's), the family's class with `ColBERT` before it (vLLM's), or the
family's class with one of these endings instead of `Model`: {suffixes}. Of some families there are other names:

{names}

A checkpoint with another family's `model_type` is recognized by further fields of config.json:

{recognized}

## Code of a checkpoint's own

`auto_map` in config.json names classes in files of the repository, which millpond never runs. Where the code of a
family above became transformers', it is the same. Of other code these names (`file.Class`) are known; what they change
is part of the model here. A class without a file is known in any, and where `architectures` name it. Any other code is
refused, since it may compute something else under the same names: `hf_overrides={{"auto_map": None}}` says that it does
not, and `{{"auto_map": None, "is_causal": False}}` that it only drops the causal mask.

{codes}

## Tasks

What runs each kind of checkpoint on a CPU. **native** needs no torch, and `backend="torch"` runs it too; **torch**
needs `pip install "millpond[torch]"`; **refused** is refused by name before its weights are read. A test runs every
cell.

{tasks}

- An **embedder** has `embed` and `token_embed`, a **classifier** `classify` and `token_classify`, a **cross-encoder**
  (one label) `score`, `rerank` and `reward` too, a **token classifier** `token_classify`, a **reward model**
  (`*ForRewardModel`) `reward`, **late interaction** (ColBERT) `token_embed`, `score` and `rerank`, an **LLM reranker**
  (a language model that scores pairs by tokens of its vocabulary) `score` and `rerank`, **SPLADE** `sparse_embed`.
  BGE-M3 and gte-multilingual-base have `sparse_embed` by a weight for each token, and an embedder that ends with a
  SparseAutoEncoder (CSR) has it alone; `convert="embed"` gives the vectors before the code.
- A **GLiNER** (gliner_config.json; any encoder of the table) has `token_classify` with
  [labels of your own](tasks.md#entities), a classifier of entailment `classify` with
  [labels of your own](tasks.md#classes).
- **NV-Embed** (nvidia/NV-Embed-v1, -v2): its code appends `</s>` to each text, and so does millpond: leave it out of
  yours. Prompts (`Instruct: ...`) are left out of the mean, counted as sentence-transformers counts them.
- **EmbeddingGemma 2** and **NeoMME** read text alone, and not the weights for images and sound.
- **Longformer** attends within its windows, as transformers does without global attention. **BigBird** attends to all
  tokens of a text up to `(5 + 2 num_random_blocks) block_size` (704), where its texts end. **MobileBERT** reads a
  token's neighbours, and past the ends of a text nothing: in transformers it reads the padding of a batch there.
- BERT and its relatives run with `position_embedding_type` `relative_key` and `relative_key_query` too, as in
  transformers 4.
- A native checkpoint needs torch [for some options](engine.md#backends), on a processor without the kernels, from
  pickled or already quantized weights, and in a few configurations: the convolution of deberta-v2-xlarge and -xxlarge,
  an activation or a scaling of rotary positions that the kernels do not have. `millpond models MODEL` says it of one.

## Census

`millpond models --census` (`--format json`) goes through published checkpoints that embedding libraries list, mteb,
fastembed, TEI, Infinity and sentence-transformers among them, each with the layout of its files, from a table
(`millpond/checkpoints/published.json`) that says nothing of what is served: the layout is written as files without
weights, and read like any checkpoint. Of {count} names {served} are served:

{census}

The others, in the words of the error that loading one raises:

{refused}

## Modules of sentence-transformers

`modules.json` is run module by module, in both backends, or refused by the name of the module: none is skipped.

{modules}

A text has the vector that sentence-transformers gives it when it is alone. In a batch of texts the CNN there reads the
padding of the shorter ones, which changes their vectors; here it does not. A text without known words is the zero
vector, in max pooling too, where sentence-transformers gives minus infinity. WeightedLayerPooling takes effect if
config.json has `output_hidden_states`, as there; the mean of layers is native over encoders like BERT (post-norm), and
in torch over ModernBERT and decoders like Llama.

## LLM rerankers

A language model that was trained to rerank is recognized by its name and `model_type`, by a chat template for queries
and documents, or by vLLM's keys in config.json. `score_template=` replaces the template. Any other language model whose
README.md says `text-ranking` or `text-classification` is refused, with what to pass, as its vectors would mean nothing.

{rerankers}

Two have heads behind their last layers: `hf_overrides={{"cutoff_layers": 28}}` runs so many layers only. Tokens are not
compressed (`compress_ratio`). `JinaForRanking` (jina-reranker-v3, v3.5) is a [listwise](engine.md#scores) reranker: its
score depends on the list.

KaLM-Reranker-V1 is an encoder that reads the document, and a decoder that reads the query; a `score_template=` for it
has the character `\\ue0f5` between the two. As in the published code, the decoder attends to the means of four
neighbouring states each (`hf_overrides={{"encoder_chunk_size": 1}}` compresses nothing); documents are cut to 1,024
tokens and queries to 512 (`document_max_length`, `query_max_length`). Of checkpoints that read images too, such as
LightOn-rerank, the text is run; LightOn-rerank-LW writes the order of four documents, and millpond writes nothing.

## Matryoshka

Checkpoints whose card says that their vectors may be cut, and whose config.json does not. Any other checkpoint names
its widths in config.json (`matryoshka_dimensions`, `is_matryoshka`) or is cut by `hf_overrides={{"is_matryoshka":
True}}`.

{matryoshka}
"""


def page() -> str:
    """The page in Markdown."""
    verdicts = list(census())
    served = [verdict for verdict in verdicts if verdict.served]
    header = ("family", "`model_type`", "kind", "pooling", "classes", "backend", "in torch", "error", "example")
    return _TEXT.format(
        families=_table(header, map(_family, ARCHITECTURES)),
        tasks=_table(("family", *COLUMNS), map(_tasks, ARCHITECTURES)),
        methods=_codes(get_args(PoolingMode)),
        splade=_codes(f"{row.prefix}Model" for row in ARCHITECTURES if row.mlm),
        recognized="\n".join(
            f"- `{row.prefix}Model`: {_recognized(row)}" for row in ARCHITECTURES if row.recognized_by
        ),
        suffixes=_codes(_SUFFIXES[1:]),
        names="\n".join(f"- {row.prefix}: {_codes(row.names)}" for row in ARCHITECTURES if row.names),
        codes=_table(("code", "`model_type`", "what it changes"), map(_own_code, KNOWN)),
        count=len(verdicts),
        served=len(served),
        census=_table(("family", "names", "tasks", "for example"), _by_family(served)),
        refused="\n".join(f"- {_reason(verdict)}" for verdict in verdicts if not verdict.served),
        modules=_table(("module", "place", "what is refused"), _MODULES),
        rerankers=_table(
            ("name", "`model_type`", "score"),
            [(_code(family.pattern), _codes(family.model_types), _score(family)) for family in FAMILIES],
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


def _by_family(served: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """The names of each family, counted, with all their tasks and the first of them."""
    families: dict[str, list[Verdict]] = {}
    for verdict in served:
        families.setdefault(verdict.family, []).append(verdict)
    return [
        (f"`{family}`", str(len(of)), _codes(sorted({task for verdict in of for task in verdict.tasks})), of[0].name)
        for family, of in sorted(families.items(), key=lambda item: -len(item[1]))
    ]


def _reason(verdict: Verdict) -> str:
    """Why a name is not served; what is to be written is code."""
    text = verdict.reason.replace(verdict.name, f"`{verdict.name}`", 1)
    return re.sub(r"(hf_overrides=\{.*?\})(?=$|[,; ])", r"`\1`", text).replace("*For", "\\*For")


def _family(row: Architecture) -> tuple[str, ...]:
    pooling = row.classifiers.pooling
    kind = "both" if row.encodes_apart else _KINDS[row.decoder]
    return (
        f"`{row.prefix}Model`",
        _codes((row.model_type, *row.aliases)),
        f"{kind}, {'some layers recurrent' if row.recurrent else row.positions}",
        f"`{row.pooling}`",
        _ROWS.get(pooling, pooling) if isinstance(pooling, str) else "config.json",
        _backend(row),
        "millpond" if row.forward else "transformers",
        _errors(row),
        row.example,
    )


def _errors(row: Architecture) -> str:
    """What was measured, native and in torch."""
    found = json.loads(ERRORS.read_text(encoding="utf-8")).get(row.prefix, {})
    return " / ".join(f"{found[backend]:.0e}" if backend in found else "-" for backend in ("native", "torch"))


def cell(row: Architecture, column: str) -> str:
    """What runs a family's checkpoints of one kind on a CPU: native, torch or refused."""
    return _backend(row) if COLUMNS[column](row) else "refused"


def _tasks(row: Architecture) -> tuple[str, ...]:
    return (f"`{row.prefix}`", *(cell(row, column) for column in COLUMNS))


def _backend(row: Architecture) -> str:
    return "native" if has_plan(row) else "torch"


def _own_code(code: RemoteCode) -> tuple[str, ...]:
    named = "" if code.names == ".*" else f" of {_code(code.names)}"
    parts = [", ".join(f"`{name}: {str(value).lower()}`" for name, value in code.fields.items())]
    if code.pooling is not None:
        prompt = "" if code.pooling.include_prompt else " without the prompt"
        parts.append(f"pooling `{'+'.join(code.pooling.modes)}`{prompt}")
    if code.weighted:
        parts.append("weighted by position")
    if code.splade:
        parts.append("SPLADE")
    if code.projection:
        parts.append(f"states times `{code.projection}`")
    pattern = code.pattern.replace(r"(.*\.)?", "")  # in any file
    return (_code(pattern) + named, _codes(code.model_types), "; ".join(filter(None, parts)) or "nothing")


def _recognized(row: Architecture) -> str:
    """The fields of config.json by which a family with another one's ``model_type`` is recognized."""
    return " and ".join(
        f"`{key}: {value}`" + (" or more" if isinstance(value, int) else "") for key, value in row.recognized_by.items()
    )


def _score(family: RerankerFamily) -> str:
    if family.refused:
        return "refused: it writes"
    if family.layer_heads:
        return (
            "the head of the last layer run" if family.layer_heads == "own" else "the first head, of the last layer run"
        )
    if not family.tokens:
        return "a score head"
    named = [f"token {token}" if isinstance(token, int) else f"`{token}`" for token in family.tokens]
    less = f" minus that of {named[0]}" if len(named) == 2 else ""
    told = "" if family.template else "; its template is not known: pass `score_template=`, unless its files have one"
    return f"logit of {named[-1]}{less}" + (f", divided by {family.divisor:g}" if family.divisor != 1 else "") + told


def _code(pattern: str) -> str:
    """A pattern in a cell of a table, where a bar would end the cell."""
    readable = re.sub(r"\(-\[\\w\.-\]\+\)\?|\[\\w\.-\]\*|\.\*|\\w[+*]", "*", pattern.replace(r"\.", "."))
    return f"`{readable}`".replace("|", "\\|")


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
