"""Why a config.json is refused: what it is, the nearest that is served, and the line that overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.unserved import CLASSES, unserved

_NEAREST_DECODER = "Qwen/Qwen3-Embedding-0.6B"
_NEAREST = f"for vectors load BAAI/bge-m3 or {_NEAREST_DECODER}, for scores of pairs BAAI/bge-reranker-v2-m3"
# Heads of transformers' classes that are not run here.
_OTHER_HEADS = "QuestionAnswering|MultipleChoice|NextSentencePrediction|ConditionalGeneration"
# In the names of classes that read images or sound, too.
_MORE_THAN_TEXTS = re.compile(r"Vision|Image|Audio|Speech|VL(?![a-z])")


def with_article(noun: object) -> str:
    """A class's name with its article."""
    return f"{'an' if str(noun)[:1] in 'AEIO' else 'a'} {noun}"


def backbone_alone(row: Architecture) -> str:
    """How a checkpoint with a head that is not run here is loaded without it."""
    return f'for the backbone alone pass hf_overrides={{"architectures": ["{row.prefix}Model"]}}'


def unknown_class(config: Mapping[str, Any], claimed: str, row: Architecture) -> str:
    """Why a class is refused that the family of ``row`` does not have."""
    kind = unserved(claimed, CLASSES)
    if kind is not None:
        return f"{kind.kind}, which millpond does not run; {kind.nearest}"
    if _MORE_THAN_TEXTS.search(claimed):
        return f"which reads more than texts; the nearest for texts that millpond serves is {_nearest(row)}"
    if re.fullmatch(rf"{row.prefix}For({_OTHER_HEADS})", claimed):
        return f"another head than millpond runs; {backbone_alone(row)}"
    code = {"auto_map": None} if config.get("auto_map") else {}
    return (
        f"a class that millpond does not know beside {row.model_class}, and which may compute something else; "
        f"{in_place_of_code(row, {'architectures': [f'{row.prefix}Model'], **code})}"
    )


def in_place_of_code(row: Architecture, overrides: Mapping[str, Any]) -> str:
    """What is served in place of code of a checkpoint's own, and how somebody who knows that code loads it.

    A decoder's own code most often drops the causal mask: the family's class alone would give other vectors.
    """
    values = {**overrides, **({"is_causal": False} if row.decoder else {})}
    return (
        f"the nearest that is served is {_nearest(row)}; if it computes what {row.model_class} does, pass "
        f"hf_overrides={_in_python(values)}" + ", without is_causal if it has the causal mask" * row.decoder
    )


def unknown_family(
    config: Mapping[str, Any],
    name: str,
    rows: Sequence[Architecture],
    class_names: Callable[[Architecture], Collection[str]],
) -> str:
    """What a config.json is whose family is in no row."""
    model_type, claimed = config.get("model_type"), (config.get("architectures") or [None])[0]
    if model_type is None:
        row = next((row for row in rows if claimed in class_names(row)), None)
        named = "and no architectures either" if claimed is None else f"and architectures names {claimed}"
        way_out = (
            "name the family" if row is None else f"if its weights are those of {row.model_class}, name the family"
        )
        example = "bert" if row is None else row.model_type
        return (
            f"{name} has no model_type in config.json, {named}, so its family is not known; {way_out}, as in "
            f'hf_overrides={{"model_type": "{example}"}}'
        )
    remote = " and needs code of its own (auto_map)" if config.get("auto_map") else ""
    what = f"{name} is {with_article(claimed or 'model')} of model_type {model_type!r}{remote}"
    kind = unserved(str(model_type))
    if kind is not None:
        return f"{what}: {kind.kind}, which millpond does not run; {kind.nearest}"
    known = [kind for row in rows for kind in (row.model_type, *row.aliases)]
    near = get_close_matches(str(model_type), known, 1, cutoff=0.8)
    similar = f"of a similar name it runs {near[0]}, and " if near else ""
    return f"{what}, which millpond cannot run; {similar}`millpond models` lists what it runs; {_NEAREST}"


def _nearest(row: Architecture) -> str:
    return _NEAREST_DECODER if row.decoder else row.example


def _in_python(values: Mapping[str, Any]) -> str:
    """A dictionary as code has it."""
    return json.dumps(values).replace("null", "None").replace("false", "False")
