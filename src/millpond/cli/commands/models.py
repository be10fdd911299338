"""``millpond models``: list the supported architectures, describe one checkpoint, or print the census."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millpond.cli.arguments.groups import EngineOptions, grouped
from millpond.cli.arguments.options import FORMAT
from millpond.cli.output.columns import aligned
from millpond.errors import InvalidRequestError
from millpond.values.config import EngineConfig

if TYPE_CHECKING:
    from millpond.values.spec import ModelSpec

# Of several lengths and scripts, with capitals, digits, signs and code.
_SENTENCES = (
    "Water turns the wheel.",
    "How does baking soda make dough rise?",
    "ADA LOVELACE (1815-1852) wrote the first program, long before there was a machine to run it.",
    "for i in range(10):\n    print(f'{i ** 2:>4}')",
    "Der Müller öffnet früh am Morgen die Schleuse.",
    "L'été, la rivière coule à peine.",
    "水车在河边慢慢地转动。",
    "Мельница стоит над рекой.",
    "A pond.",
    "Prices rose by 3.5 % in May; e-mail office@example.org for the table, or see https://example.org/q2?id=7.",
)


@grouped
def models(
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, local folder or GGUF file of the checkpoint to describe.", metavar="[MODEL]"),
    ] = None,
    *,
    source: Annotated[
        str | None,
        typer.Option(
            help="The checkpoint that a GGUF file was converted from, or any other: embed sentences by both and print "
            "how far their vectors differ.",
            metavar="MODEL",
        ),
    ] = None,
    census: Annotated[
        bool,
        typer.Option("--census", help="Say of each published checkpoint that is known by name what it is served for."),
    ] = False,
    format: Annotated[Literal["table", "json"], typer.Option(help=FORMAT)] = "table",
    options: EngineOptions,
) -> None:
    """List the supported architectures, describe one checkpoint without loading its weights, or print the census."""
    if census:
        if model is not None:
            raise InvalidRequestError(
                f"--census is about every known checkpoint; leave {model} out, or leave --census out"
            )
        return _print_census(format)
    if source is not None and model is None:
        raise InvalidRequestError(f"--source {source} is compared with a model; name it first")
    if model is not None:
        from millpond.engine.loading import backend_of

        facts = _facts(options.describe(model))
        facts.insert(2, ("backend", backend_of(EngineConfig(model=model, **options.settings))))
        if source is not None:
            facts += _difference(model, source, options)
        print(*aligned(facts), sep="\n")
        return
    from millpond.backends.native.families import has_plan
    from millpond.checkpoints.architectures import ARCHITECTURES

    rows = [("model_type", "class", "pooling*", "positions", "kind", "backend**", "example")]
    for row in ARCHITECTURES:
        kind = "decoder" if row.decoder else "encoder"
        backend = "native" if has_plan(row) else "torch"
        rows.append((row.model_type, row.model_class, row.pooling, row.positions, kind, backend, row.example))
    print(*aligned(rows), sep="\n")
    print("* default, if the checkpoint names none", "** on a CPU; `millpond models MODEL` says it of one", sep="\n")


def _print_census(format: str) -> None:
    """Every published checkpoint with what it is served for, or why not, and the numbers."""
    from millpond.engine.census import census

    verdicts = list(census())
    served = sum(verdict.served for verdict in verdicts)
    if format == "json":
        facts = [{"served": verdict.served, **asdict(verdict)} for verdict in verdicts]
        print(json.dumps({"names": len(verdicts), "served": served, "checkpoints": facts}, indent=1))
        return
    rows = [
        (verdict.name, verdict.family, verdict.backend, ", ".join(verdict.tasks))
        for verdict in verdicts
        if verdict.served
    ]
    print(*aligned([("name", "family", "backend*", "tasks"), *rows]), sep="\n")
    print("* on a CPU", "", "Not served:", sep="\n")
    print(*(verdict.reason for verdict in verdicts if not verdict.served), sep="\n")
    print(f"\n{served} of {len(verdicts)} are served")


def _difference(model: str, source: str, options: EngineOptions) -> list[tuple[str, str]]:
    """How far the vectors of two checkpoints differ."""
    with options.load(model) as one, options.load(source) as other:
        if one.spec.dimensions != other.spec.dimensions:
            raise InvalidRequestError(
                f"{model} has vectors of {one.spec.dimensions} numbers and {source} of {other.spec.dimensions}, so it "
                "is not its source"
            )
        # Without prompts, which a GGUF file does not have.
        mine, theirs = (engine.embed(_SENTENCES, prompt="", normalize=True).embeddings for engine in (one, other))
        equal = sum(a == b for a, b in zip(one.tokenize(_SENTENCES), other.tokenize(_SENTENCES), strict=True))
    cosines = (mine * theirs).sum(axis=1)
    return [
        ("source", source),
        ("same tokens", f"in {equal} of {len(_SENTENCES)} sentences"),
        ("cosine", f"{cosines.min():.6f} at least, {cosines.mean():.6f} on average"),
    ]


def _facts(spec: ModelSpec) -> list[tuple[str, str]]:
    if not spec.matryoshka:
        widths = "no"
    elif spec.matryoshka_dimensions is not None:
        widths = ", ".join(map(str, spec.matryoshka_dimensions))
    else:
        widths = f"{spec.matryoshka_smallest} to {spec.dimensions}"
    facts = [
        ("name", spec.name),
        ("architecture", f"{spec.architecture} ({spec.model_type})"),
        ("tasks", ", ".join(sorted(spec.tasks))),
        ("pooling", " + ".join(spec.pooling)),
        ("normalize", "yes" if spec.normalize else "no"),
        ("dimensions", str(spec.dimensions)),
        ("default width", "" if spec.default_dimensions is None else str(spec.default_dimensions)),
        ("matryoshka", widths),
        ("hidden size", str(spec.hidden_size)),
        ("max length", f"{spec.max_length} tokens"),
        ("labels", ", ".join(spec.labels)),
        ("activation", spec.activation if spec.labels else ""),
        ("score type", spec.score_type or ""),
        ("similarity", spec.similarity if spec.score_type == "bi-encoder" else ""),
        ("step tag", "" if spec.step_tag_id is None else str(spec.step_tag_id)),
        ("adapters", ", ".join(spec.adapters)),
        ("default prompt", spec.default_prompt_name or ""),
        *((f"prompt {name!r}", repr(prompt)) for name, prompt in spec.prompts.items()),
        ("fingerprint", spec.fingerprint),
    ]
    return [fact for fact in facts if fact[1]]
