"""Token spans: where in the caller's text each row of ``token_embed`` comes from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millpond.engine.input import resolve
from millpond.engine.input.model import LoadedModel
from millpond.engine.tokenize.tokenized import Tokenized
from millpond.tasks import Role, Truncate
from millpond.values.inputs import SpannedText
from millpond.values.outputs import TokenSpans
from millpond.values.params import PoolingParams


def token_spans(
    texts: Sequence[str], loaded: LoadedModel, *, role: Role | None, truncate: Truncate
) -> list[TokenSpans]:
    """The tokens of the rows that ``token_embed`` returns for each text."""
    params = PoolingParams(role=role, truncate=truncate)
    plan = resolve.plan(resolve.check_task("token_embed", params, loaded), params, loaded, count=len(texts))
    items = [SpannedText(text, ()) for text in texts]  # texts with spans are tokenized with their alignment
    return [_spans(item, loaded) for item in loaded.encoder.encode(items, plan, index_of=lambda i: i)]


def _spans(item: Tokenized, loaded: LoadedModel) -> TokenSpans:
    alignment = item.alignment
    assert alignment is not None
    ids = item.ids if item.kept is None else item.ids[item.kept]
    outside = alignment.offsets[:, 0] >= alignment.offsets[:, 1]  # special tokens and prompts: their spans are empty
    offsets = np.where(outside[:, None], np.int32(0), alignment.offsets)
    offsets.flags.writeable = False
    return TokenSpans(tokens=loaded.encoder.texts.token_names(ids.tolist()), offsets=offsets)
