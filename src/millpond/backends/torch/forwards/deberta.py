"""DeBERTa v2 and v3, packed: one file top to bottom over the weights that transformers loaded.

To the score of a query i and a key j its attention adds two products with the embedding of their distance i - j: the
query times it (content to position) and the key times it (position to content), computed for each run of texts of equal
length, or on CUDA for texts of similar lengths filled up to one (``attention/padded_row.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from millpond.backends.torch.attention.padded_row import PaddedRow
from millpond.backends.torch.attention.segments import Run, Segments, on_device
from millpond.backends.torch.forwards.add_norm import AddNorm
from millpond.backends.torch.forwards.encoder import Output
from millpond.backends.torch.forwards.linear import joined
from millpond.checkpoints.checkpoint import Checkpoint

# Attention scores that are computed at once.
_SCORE_BLOCK = 1 << 24
# Length of texts that the first table of distances is made for; it doubles for longer ones.
_REACH = 512


def finish(backbone: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """The packed forward over the loaded weights."""
    return PackedDeberta(backbone)


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Rows of the position table by the distance of two tokens."""

    span: int  # the table has `2 span` rows; row `span` is distance 0
    buckets: bool  # near distances have a row each, far ones share logarithmic buckets
    farthest: int  # the distance at which the last bucket begins

    def rows(self, length: int) -> torch.Tensor:
        """The rows of distances ``1 - length`` to ``length - 1``: int64 ``[2 length - 1]`` on the host."""
        distance = torch.arange(1 - length, length)
        if self.buckets:
            distance = self._bucket(distance)
        return (distance + self.span).clamp(0, 2 * self.span - 1)

    def _bucket(self, distance: torch.Tensor) -> torch.Tensor:
        """DeBERTa v2's formula (in the code of arXiv:2006.03654, not in the text), in float32 as in training."""
        exact = self.span // 2
        far = distance.abs().clamp(min=exact) / exact
        reach = torch.log(torch.tensor((self.farthest - 1) / exact))
        bucket = (torch.log(far) / reach * (exact - 1)).ceil().long() + exact
        return torch.where(distance.abs() <= exact, distance, bucket * distance.sign())


@dataclass(frozen=True, kw_only=True, eq=False)
class Batches:
    """The dense batches that attention computes, for all layers of a forward."""

    runs: tuple[Run, ...]  # the batches, in the packed row or in the padded one
    row: PaddedRow | None  # where the tokens are in the padded row; `None`: the packed row itself holds the batches
    # int64 `[2 length - 1]` on the device for each length of a batch: rows of the position table
    distances: Mapping[int, torch.Tensor]

    def laid_out(self, states: torch.Tensor) -> torch.Tensor:  # [tokens, ...] -> [padded, ...]
        """Each token's states where the batches have them; a token that fills a text up repeats its last one."""
        return states if self.row is None else states.index_select(0, self.row.rows)

    def packed(self, states: torch.Tensor) -> torch.Tensor:  # [padded, ...] -> [tokens, ...]
        """The states of each token of the packed row."""
        return states if self.row is None else states.index_select(0, self.row.places)


class PackedDeberta(nn.Module):
    """A loaded DeBERTa v2 or v3 backbone, run on one packed row."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        config: Any = backbone.config
        encoder: Any = backbone.encoder
        self.embeddings: nn.Module = backbone.embeddings  # type: ignore[assignment]
        with torch.no_grad():
            table = encoder.get_rel_embedding()  # [2 span, hidden], normed; None without relative attention
        distances: Distances | None = None
        if table is not None:
            buckets, farthest = int(getattr(config, "position_buckets", -1)), int(config.max_relative_positions)
            farthest = config.max_position_embeddings if farthest < 1 else farthest
            span = buckets if buckets > 0 else farthest
            distances = Distances(span=span, buckets=buckets > 0, farthest=farthest)
            table = table[: 2 * span]
        self.layers = nn.ModuleList(PackedLayer(layer, table, config.hidden_act) for layer in encoder.layer)
        self.convolution = None if encoder.conv is None else Convolution(encoder.conv)
        self._batches = DistanceBatches(None if distances is None else distances.rows)

    def forward(
        self,
        *,
        input_ids: torch.Tensor,  # [1, tokens]
        position_ids: torch.Tensor,  # [1, tokens]
        segments: Segments,
        token_type_ids: torch.Tensor | None = None,  # [1, tokens]
    ) -> Output:
        """Hidden states of every token."""
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        embedded = self.embeddings(input_ids=input_ids, position_ids=position_ids, token_type_ids=types)[0]
        batches = self._batches.of(segments, embedded.device)
        hidden = embedded  # [tokens, hidden]
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, batches)
            if i == 0 and self.convolution is not None:
                hidden = self.convolution(embedded, hidden, segments)
        return Output(last_hidden_state=hidden[None])


class DistanceBatches:
    """Makes the batches of a forward, and keeps the rows of distances on the device."""

    def __init__(self, rows: Callable[[int], torch.Tensor] | None) -> None:
        """``rows``: as ``Distances.rows``; ``None``: there is no table."""
        self._rows = rows
        self._table: torch.Tensor | None = None  # int64 [2 reach - 1]: rows of the distances up to a power of two

    def of(self, segments: Segments, device: torch.device) -> Batches:
        """Those of a packed row."""
        row = _row(segments, device)
        runs = segments.runs if row is None else row.runs
        distances = {}
        if self._rows is not None:
            table = self._distance_rows(self._rows, segments.max_seqlen, device)
            reach = (len(table) + 1) // 2
            distances = {run.length: table[reach - run.length : reach + run.length - 1] for run in runs}
        return Batches(runs=runs, row=row, distances=distances)

    def _distance_rows(self, rows: Callable[[int], torch.Tensor], length: int, device: torch.device) -> torch.Tensor:
        """The rows of at least this length's distances, on the device: copied there when a longer text than ever comes.

        Lanes that share the model may each make the table; they make the same.
        """
        table = self._table
        if table is None or table.device != device or len(table) < 2 * length - 1:
            table = on_device(rows(max(_REACH, 1 << (length - 1).bit_length())), device)
            self._table = table
        return table


class PackedLayer(nn.Module):
    """One post-norm layer over the weights of the loaded one."""

    def __init__(self, layer: Any, table: torch.Tensor | None, activation: str) -> None:
        super().__init__()
        attention = layer.attention.self
        used = frozenset(attention.pos_att_type)
        # One factor for all three products: it gives their sum the variance of a single product.
        width = attention.attention_head_size * (1 + len(used & {"c2p", "p2c"}))
        self.qkv = joined(attention.query_proj, attention.key_proj, attention.value_proj)
        keys = queries = None  # a layer's projections of the table never change
        if table is not None and "c2p" in used:
            keys = _projected(attention.key_proj if attention.share_att_key else attention.pos_key_proj, table)
        if table is not None and "p2c" in used:
            queries = _projected(attention.query_proj if attention.share_att_key else attention.pos_query_proj, table)
        self.attention = DistanceAttention(attention.num_attention_heads, 1 / math.sqrt(width), keys, queries)
        self.attention_out = joined(layer.attention.output.dense)
        self.attention_norm = AddNorm(layer.attention.output.LayerNorm)
        self.up = joined(layer.intermediate.dense, activation=activation)
        self.down = joined(layer.output.dense)
        self.norm = AddNorm(layer.output.LayerNorm)

    def forward(self, hidden: torch.Tensor, batches: Batches) -> torch.Tensor:
        """``[tokens, hidden]`` in and out."""
        mixed = self.attention(self.qkv(hidden), batches)  # [tokens, hidden]
        hidden = self.attention_norm(self.attention_out(mixed), hidden)
        return self.norm(self.down(self.up(hidden)), hidden)  # type: ignore[no-any-return]


class DistanceAttention(nn.Module):
    """Attention with a product of each query, of each key, or both, and the embedding of their distance."""

    def __init__(
        self,
        heads: int,
        scale: float,  # of all products
        keys: torch.Tensor | None,  # [rows, heads dim], of which queries take their products; None: no such term
        queries: torch.Tensor | None,  # [rows, heads dim], of which keys take theirs; None: no such term
    ) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        tables = (
            None if table is None else table.unflatten(-1, (heads, -1)).transpose(0, 1).contiguous()
            for table in (keys, queries)
        )
        self.position_key: torch.Tensor | None  # [heads, rows, dim]
        self.position_query: torch.Tensor | None  # [heads, rows, dim], scaled
        for name, table, factor in zip(("position_key", "position_query"), tables, (1, scale), strict=True):
            self.register_buffer(name, None if table is None else table * factor, persistent=False)

    def forward(self, qkv: torch.Tensor, batches: Batches) -> torch.Tensor:
        """``[tokens, 3 heads dim]`` to ``[tokens, heads dim]``."""
        qkv = batches.laid_out(qkv).unflatten(-1, (3, self.heads, -1))  # [padded, 3, heads, dim]
        mixed = qkv.new_empty(len(qkv), self.heads, qkv.shape[-1])
        for run in batches.runs:
            out_of_sight = None
            if batches.row is not None:
                out_of_sight = batches.row.hidden[run.start : run.stop].view(run.count, 1, 1, run.length)
            self._attend(qkv, run, batches.distances.get(run.length), out_of_sight, mixed)
        return batches.packed(mixed).flatten(1)

    def _attend(
        self,
        qkv: torch.Tensor,  # [padded, 3, heads, dim]
        run: Run,
        rows: torch.Tensor | None,  # [2 length - 1]
        hidden: torch.Tensor | None,  # bool [texts, 1, 1, length]
        mixed: torch.Tensor,  # [padded, heads, dim]
    ) -> None:
        """Attention within each text of a run, to all keys but ``hidden``; the output goes to its part of ``mixed``."""
        shape = (run.count, run.length)
        parts = qkv[run.start : run.stop].unflatten(0, shape).permute(2, 0, 3, 1, 4)  # [3, texts, heads, length, dim]
        out = mixed[run.start : run.stop].unflatten(0, shape).transpose(1, 2)  # [texts, heads, length, dim]
        key_table = _at_distances(self.position_key, rows)
        query_table = _at_distances(self.position_query, rows)
        for texts, first, last in _score_blocks(run, self.heads):
            query, key, value = parts[:, texts]
            query = query[:, :, first:last] * self.scale
            scores = query @ key.transpose(-1, -2)  # [texts, heads, rows, length]
            if key_table is not None:  # falling distances: last row to first key, ..., first row to last key
                reached = key_table[:, first : last + run.length - 1].flip(1)
                scores += skewed(query @ reached.transpose(-1, -2))
            if query_table is not None:
                reached = query_table[:, first : last + run.length - 1]
                scores += skewed(key @ reached.transpose(-1, -2)).transpose(-1, -2)
            if hidden is not None:
                scores = scores.masked_fill_(hidden[texts], float("-inf"))
            elif run.keys is not None:
                scores[..., run.keys :] = float("-inf")
            out[texts, :, first:last] = scores.softmax(-1) @ value


class Convolution(nn.Module):
    """DeBERTa v2 xlarge's convolution over neighbouring tokens, parallel to the first layer."""

    def __init__(self, loaded: Any) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        self.conv: nn.Module = loaded.conv
        self.activate = ACT2FN[loaded.conv_act]
        self.norm: nn.Module = loaded.LayerNorm

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, segments: Segments) -> torch.Tensor:
        """``[tokens, hidden]`` in and out; each text is padded with zeros at both ends."""
        row = _row(segments, embedded.device)
        if row is not None:  # zeros, where the layout for attention repeats a token
            zeros = embedded.new_zeros(len(row.rows), embedded.shape[1])
            embedded = zeros.index_copy_(0, row.places, embedded)  # [padded, hidden]
        local = torch.empty_like(embedded)
        for run in segments.runs if row is None else row.runs:
            texts = embedded[run.start : run.stop].unflatten(0, (run.count, run.length))
            local[run.start : run.stop] = self.conv(texts.transpose(1, 2)).transpose(1, 2).flatten(0, 1)
        if row is not None:
            local = local.index_select(0, row.places)  # [tokens, hidden]
        return self.norm(hidden + self.activate(local))  # type: ignore[no-any-return]


def _row(segments: Segments, device: torch.device) -> PaddedRow | None:
    """The padded row of a forward; ``None`` where the packed row's own runs are computed."""
    return PaddedRow.of(segments, device) if device.type == "cuda" else None


def _projected(part: nn.Module, table: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        rows: torch.Tensor = part(table)
    return rows


def skewed(products: torch.Tensor) -> torch.Tensor:
    """A view of ``[..., n, n + m - 1]`` as ``[..., n, m]``: row i begins at column ``n - 1 - i``."""
    n, m = products.shape[-2], products.shape[-1] - products.shape[-2] + 1
    products = products.contiguous()
    return products.as_strided(
        (*products.shape[:-1], m), (*products.stride()[:-2], n + m - 2, 1), products.storage_offset() + n - 1
    )


def _at_distances(table: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor | None:
    """The rows of a position table for each distance: ``[heads, 2 length - 1, dim]``."""
    return None if table is None or rows is None else table.index_select(1, rows)


def _score_blocks(run: Run, heads: int) -> Iterator[tuple[slice, int, int]]:
    """(texts, first row, last row + 1) of blocks whose scores stay below the limit."""
    texts = max(1, _SCORE_BLOCK // (heads * run.length**2))
    rows = min(run.length, max(1, _SCORE_BLOCK // (heads * run.length)))
    for text in range(0, run.count, texts):
        for row in range(0, run.length, rows):
            yield slice(text, text + texts), row, min(row + rows, run.length)
