"""NativeModel: a backbone and its heads in compiled kernels and numpy, on the CPU."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from millpond.backends.backend import BackendName, OutputSpec, PackedBatch, Pending, ReadRows, TextVector, Threads
from millpond.backends.native.encoder import NativeEncoder
from millpond.backends.native.families import build_encoder
from millpond.backends.native.heads.activations import activation_of, torch_activation_of
from millpond.backends.native.heads.bag import BagHead
from millpond.backends.native.heads.classifier import ClassifierHead
from millpond.backends.native.heads.heads import Heads, Reading
from millpond.backends.native.heads.modules import Modules
from millpond.backends.native.heads.sparse_code import SparseCodeHead
from millpond.backends.native.heads.splade import SpladeHead, vocabulary_activation
from millpond.backends.native.heads.token_modules import TokenModules
from millpond.backends.native.heads.token_presence import TokenPresenceHead
from millpond.backends.native.heads.token_weights import TokenWeightHead, read_token_vectors
from millpond.backends.native.kernels import Int8, Precision
from millpond.backends.native.packing.weight_packer import NotSupported
from millpond.backends.native.pooled_text import PooledText, finishes_as_numpy
from millpond.backends.native.prefix_encoder import PrefixEncoder
from millpond.backends.native.static import StaticEncoder
from millpond.backends.native.threads import NativeThreads
from millpond.checkpoints.build_spec import backbone_width
from millpond.checkpoints.description import ModelDescription
from millpond.checkpoints.layouts.sparse import SparseCode, Splade, StaticWeights
from millpond.checkpoints.layouts.static import read_rows, read_weights
from millpond.checkpoints.modules import Dense, WordWeights


class NativeModel:
    """A checkpoint in memory; any number of threads may run batches at once."""

    backend: BackendName = "native"
    device = "cpu"
    overlaps = False

    def __init__(self, encoder: NativeEncoder | StaticEncoder, heads: Heads, *, offset: int) -> None:
        """``offset``: position of a text's first token."""
        self.encoder = encoder
        self.heads = heads
        self.position_offset = offset
        self._prefixes = PrefixEncoder(encoder) if isinstance(encoder, NativeEncoder) else None
        sparse = heads.sparse
        self._threads = NativeThreads(encoder.plan.weights + (0 if sparse is None else sparse.weights))
        self.threads: Threads | None = self._threads

    def run(self, batch: PackedBatch, outputs: Set[OutputSpec], *, threads: int | None = None) -> ReadRows:
        """The result of each sequence for each output; no more rows are computed than the outputs read."""
        threads = self._threads.of_batch() if threads is None else threads
        wanted = {self.heads.rows_of(output) for output in outputs}
        rows = wanted.pop() if len(wanted) == 1 else "all"
        if rows == "first" and batch.skip is not None:
            rows = "all"  # the first token after the prompt is not the first row
        hidden = None
        if rows == "last" and self._prefixes is not None:
            hidden = self._prefixes.encode(batch, offset=self.position_offset, threads=threads)
        if hidden is None:
            hidden = self.encoder.encode(
                batch.ids,
                batch.bounds,
                offset=self.position_offset,
                types=batch.types,
                keys=None if batch.keys is None else np.array(batch.keys, dtype=np.int32),
                skip=batch.skip if rows == "mean" else None,
                leads=None if batch.prefixes is None else np.array(batch.prefixes, dtype=np.int32),
                rows=rows,
                adapters=None if batch.adapters is None else batch.adapters[batch.bounds[:-1]],
                threads=threads,
            )
        if rows != "all" and all(map(self.heads.is_plain, outputs)):
            vectors = list(hidden)
            return dict.fromkeys(outputs, vectors)
        if rows == "all":
            bounds, skip, ids = batch.bounds, batch.skip, batch.ids
        else:
            bounds, skip, ids = np.arange(len(batch.bounds), dtype=np.int32), None, batch.ids[batch.bounds[:-1]]
        reading = Reading(heads=self.heads, hidden=hidden, bounds=bounds, skip=skip, ids=ids, threads=threads)
        return {output: reading.read(output) for output in outputs}

    def text_vector(self, output: OutputSpec, *, width: int, unit: bool, skip: int) -> TextVector | None:
        """What computes an output's vector of one text, if nothing but the pooling lies behind the layers."""
        encoder, rows = self.encoder, self.heads.rows_of(output)
        plain = rows != "all" and self.heads.is_plain(output) and not (skip and rows == "first")
        if not plain or not isinstance(encoder, NativeEncoder) or encoder.plan.chunk or not finishes_as_numpy():
            return None
        return PooledText(encoder, rows=rows, offset=self.position_offset, width=width, unit=unit, skip=skip)

    def start(self, batch: PackedBatch, outputs: Set[OutputSpec]) -> Pending:
        """Not called: a CPU runs one batch on its cores after another."""
        raise NotImplementedError

    def prepare(self, output: OutputSpec) -> None:
        """Read an output's weights now, so that no batch waits for them."""
        if output.kind == "head_rows":
            self.heads.vocabulary_rows(output.token_ids)

    def leaves_caller(self) -> bool:
        """Never: no state of a thread changes what the kernels compute."""
        return False

    def free_memory(self) -> None:
        """Forget the prefix of the last batch."""
        if self._prefixes is not None:
            self._prefixes.drop()


def build_model(description: ModelDescription, *, dtype: Precision, int8: Int8 = "none") -> NativeModel:
    """Read a checkpoint's weights; heads are in float32, but for SPLADE's, which is in ``dtype``.

    Raises:
        NotSupported: There are no kernels for the backbone, for a head, or for this processor.
        WeightMismatchError: config.json and the weights disagree.
        ModelLoadError: A weight file is missing or damaged, or a module is not run.
    """
    heads = build_heads(description, dtype)  # first: what is wrong with them is noticed before gigabytes are read
    encoder: NativeEncoder | StaticEncoder
    sparse = description.layout.sparse
    if isinstance(sparse, StaticWeights):
        encoder = StaticEncoder(read_weights(sparse))
    elif description.layout.static is None:
        encoder = build_encoder(description.checkpoint, description.architecture, dtype=dtype, int8=int8)
    else:
        encoder = StaticEncoder(read_rows(description.layout.static))
    return NativeModel(encoder, heads, offset=description.position_offset)


def build_heads(description: ModelDescription, dtype: Precision) -> Heads:
    """Read the weights of a checkpoint's heads; raises what :func:`build_model` does."""
    layout, config = description.layout, description.checkpoint.config
    classifier, sparse, vectors = description.detected.classifier, layout.sparse, layout.token_vectors
    width = backbone_width(config)
    vocabulary, table = int(config.get("vocab_size") or 1), layout.static
    of_tokens = [head.out_features for head in layout.token_heads if not isinstance(head, WordWeights)]
    pooled = (of_tokens[-1] if of_tokens else width) * len(description.pooling.modes)
    weigher: SpladeHead | TokenWeightHead | TokenPresenceHead | SparseCodeHead | None = None
    if isinstance(sparse, Splade):
        weigher = SpladeHead(sparse, config, width=width, dtype=dtype)
    elif isinstance(sparse, StaticWeights):
        weigher = TokenPresenceHead()
    elif isinstance(sparse, SparseCode):
        dense = [head.out_features for head in layout.heads if isinstance(head, Dense)]
        weigher = SparseCodeHead(sparse, width=dense[-1] if dense else pooled)
    elif sparse is not None:
        weigher = TokenWeightHead(sparse, width=width)
    return Heads(
        modes=description.pooling.modes,
        token_heads=TokenModules(
            layout.token_heads, width=width, vocabulary=vocabulary, nothing=None if table is None else vocabulary
        ),
        bag=None if table is None or table.bag is None else BagHead(table.bag),
        heads=Modules(layout.heads, width=pooled),
        classifier=None if classifier is None else ClassifierHead(classifier, width=width),
        sparse=weigher,
        token_vectors=None if vectors is None else read_token_vectors(vectors, width=width),
        language_head=layout.transformer if description.has_language_head else None,
    )


def missing_head(description: ModelDescription) -> str | None:
    """Why a checkpoint's heads do not run here, by its description alone; ``None``: they do, as far as that says."""
    layout, classifier = description.layout, description.detected.classifier
    masked = description.architecture.mlm
    try:
        for step in () if classifier is None else classifier.steps:
            if isinstance(step, str):
                activation_of(step)
        for head in (*layout.token_heads, *layout.heads):
            if isinstance(head, Dense):
                torch_activation_of(head.activation)
        if layout.layer_mean is not None and not description.architecture.averages_layers:
            raise NotSupported(f"{description.architecture.prefix} has no native plan that averages its layers")
        if isinstance(layout.sparse, Splade) and masked is not None:
            vocabulary_activation(description.checkpoint.config, masked)
    except NotSupported as reason:
        return str(reason)
    return None
