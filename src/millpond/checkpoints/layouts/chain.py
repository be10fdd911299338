"""The modules of modules.json behind the first one: heads on token rows, the pooling, heads on the pooled row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from millpond.checkpoints.layouts.token_modules import READERS, read_layer_mean
from millpond.checkpoints.modules import Codes, Dense, Head, LayerMean, LayerNorm, Normalize, Pooling, TokenHead
from millpond.checkpoints.resolve import read_json_object
from millpond.errors import ModelLoadError
from millpond.values.spec import PoolingMode

# In the order in which sentence-transformers concatenates the modes of an old config.
_OLD_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_NEW_MODES: dict[str, PoolingMode] = {"mean_sqrt_len_tokens": "mean_sqrt_len"}


def read_chain(modules: list[tuple[str, Path]], listed: Path, *, words: bool = False) -> dict[str, Any]:
    """Everything after the first module, as fields of :class:`PipelineLayout`; ``words``: that is a WordEmbeddings."""
    if not modules and not listed.is_file():
        return {}
    run = [module for module in modules if module[0] != "Dropout"]
    names = [name for name, _ in run]
    if "Pooling" not in names:
        raise ModelLoadError(f"{listed} lists no Pooling, and no Dense on tokens either, so it describes no embedder")
    place = names.index("Pooling")
    layers: LayerMean | None = None
    if place and names[0] == "WeightedLayerPooling" and not words:
        layers = read_layer_mean(run[0][1])
    before = run[0 if layers is None else 1 : place]
    pooling, heads = read_pooling(run[place][1]), [read_head(*module, listed) for module in run[place + 1 :]]
    if words:  # sentence-transformers tells neither the pooling how long a prompt is, nor which row is the first
        pooling = replace(pooling, include_prompt=True)
        if "cls" in pooling.modes:
            raise ModelLoadError(
                f"{listed} pools the first word of a WordEmbeddings, which sentence-transformers has no vector of, "
                f"either; name another pooling_mode in {run[place][1] / 'config.json'}"
            )
    normalize = bool(heads) and isinstance(heads[-1], Normalize)
    return {
        "token_heads": tuple(_read_token_head(*module, listed, words=words) for module in before),
        "layer_mean": layers,
        "pooling": pooling,
        "heads": tuple(heads[:-1] if normalize else heads),
        "normalize": normalize,
    }


def _read_token_head(name: str, folder: Path, listed: Path, *, words: bool) -> TokenHead:
    """A module before the pooling."""
    if name == "Dense":
        return read_dense(folder, "token_embeddings")
    if name == "LSTM" and not words:
        raise ModelLoadError(
            f"{listed} lists LSTM behind a Transformer, which tells it no lengths, so that sentence-transformers does "
            "not run it either; it runs behind WordEmbeddings"
        )
    if name not in READERS:
        raise not_run(name, "before", listed)
    return READERS[name](folder)


def read_head(name: str, folder: Path, listed: Path, *, output: str | None = None) -> Head:
    """A module after the pooling; a Dense may write ``output``."""
    if name == "Dense":
        return read_dense(folder, "sentence_embedding", output=output)
    if name == "Normalize":
        return read_normalize(folder)
    if name == "Codes":
        return Codes()
    if name != "LayerNorm":
        raise not_run(name, "after", listed)
    config = read_json_object(folder / "config.json")
    width = config.get("dimension", config.get("embedding_dimension"))
    if not isinstance(width, int):
        raise ModelLoadError(f"{folder / 'config.json'} must give dimension as an int")
    return LayerNorm(folder=folder, dimensions=width)


def not_run(name: str, place: str, listed: Path) -> ModelLoadError:
    """The error of a module that stands where millpond runs none of its kind."""
    runs = (
        "WeightedLayerPooling behind the Transformer, Dense, WordWeights, CNN, LSTM and Dropout there"
        if place == "before"
        else "Dense, LayerNorm, Normalize and Dropout there"
    )
    return ModelLoadError(
        f"{listed} lists {name} {place} Pooling, which millpond does not run (it runs {runs}); refusing to skip it"
    )


def read_pooling(folder: Path) -> Pooling:
    """A Pooling module's config: ``pooling_mode`` (new) or the ``pooling_mode_*`` booleans (old)."""
    path = folder / "config.json"
    config = read_json_object(path)
    modes: list[PoolingMode] = []
    if "pooling_mode" in config:
        names = config["pooling_mode"]
        for name in [names] if isinstance(names, str) else names:
            mode = _NEW_MODES.get(name, name)
            if mode not in get_args(PoolingMode):
                raise ModelLoadError(f"{path}: pooling_mode {name!r} is unknown; millpond has {get_args(PoolingMode)}")
            modes.append(cast("PoolingMode", mode))
    else:
        unknown = [k for k, v in config.items() if k.startswith("pooling_mode_") and v and k not in _OLD_MODES]
        if unknown:
            raise ModelLoadError(f"{path}: {unknown[0]} is a pooling mode that millpond does not have")
        # As in sentence-transformers, a file that switches no mode on means the mean.
        modes = [mode for key, mode in _OLD_MODES.items() if config.get(key)] or ["mean"]
    if not modes:
        raise ModelLoadError(f"{path} switches every pooling mode off")
    return Pooling(modes=tuple(modes), include_prompt=bool(config.get("include_prompt", True)))


def read_dense(folder: Path, stage: str, *, unnamed: str = "sentence_embedding", output: str | None = None) -> Dense:
    """A Dense module's config.

    It must read ``stage`` and write the same or ``output``; ``unnamed`` is the stage of a config that names none.
    """
    path = folder / "config.json"
    config = read_json_object(path)
    reads = config.get("module_input_name") or unnamed
    writes = config.get("module_output_name") or reads
    if (reads, writes) not in ((stage, stage), (stage, output)):
        raise ModelLoadError(f"{path}: a Dense from {reads} to {writes} does not fit its place; it must be on {stage}")
    try:
        widths = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path} must give in_features and out_features as ints") from error
    activation = config.get("activation_function") or "torch.nn.modules.activation.Tanh"
    if not str(activation).startswith("torch.nn."):
        raise ModelLoadError(f"{path}: activation_function {activation!r} is code of the checkpoint's own; refusing it")
    return Dense(
        folder=folder,
        in_features=widths[0],
        out_features=widths[1],
        bias=bool(config.get("bias", True)),
        activation=str(activation),
        residual=bool(config.get("use_residual", False)),
    )


def read_normalize(folder: Path, stage: str = "sentence_embedding") -> Normalize:
    """A Normalize module's config; it must read ``stage``."""
    path = folder / "config.json"
    reads = read_json_object(path, optional=True).get("module_input_name") or "sentence_embedding"
    if reads != stage:
        raise ModelLoadError(f"{path}: a Normalize of {reads} in the place of one of {stage}; refusing to skip it")
    return Normalize()
