"""The models of a server: loading, and finding the model for a request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from millpond import Engine, Pair, PoolingParams
from millpond.errors import InvalidRequestError, ModelLoadError
from millpond.server import ModelConfig, ServedModels

PAIRS = "{% for message in messages if message.role in ('query', 'document') %}{{ message.content }} {% endfor %}mill"
CHAT = "{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}"


def load(*configs: ModelConfig) -> ServedModels:
    return ServedModels.load(configs)


def config(model: Path, **options: object) -> ModelConfig:
    return ModelConfig(model=str(model), device="cpu", dtype="float32", **options)  # type: ignore[arg-type]


def scores(models: ServedModels) -> np.ndarray:
    (model,) = models
    pairs = [Pair("one", "two"), Pair("one", "three four")]
    output: np.ndarray = model.pooling.submit_score(pairs, PoolingParams()).result().scores
    models.close()
    return output


def test_a_chat_template_for_pairs_is_a_rerankers_score_template(cross_encoder: Path, tmp_path: Path):
    file = tmp_path / "pairs.jinja"
    file.write_text(PAIRS)
    plain = scores(load(config(cross_encoder)))
    rendered = scores(load(config(cross_encoder, score_template=PAIRS)))
    assert np.abs(plain - rendered).max() > 1e-3
    for template in (PAIRS, str(file)):
        np.testing.assert_allclose(scores(load(config(cross_encoder, chat_template=template))), rendered, atol=1e-6)
    # One for conversations leaves pairs alone, and one for pairs leaves an embedder alone.
    np.testing.assert_allclose(scores(load(config(cross_encoder, chat_template=CHAT))), plain, atol=1e-6)
    other = load(config(cross_encoder, chat_template=CHAT, score_template=PAIRS))
    assert next(iter(other)).chat_template == CHAT
    np.testing.assert_allclose(scores(other), rendered, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int3"}, "quantization='int3' is unknown"),
        ({"pooler_config": {"pooling_type": "BEST"}}, "pooling type 'BEST' is unknown"),
        ({"chat_template": "none.jinja"}, "chat_template='none.jinja' cannot be read"),
    ],
)
def test_a_mistake_in_the_last_is_told_before_the_first_is_loaded(
    options: dict[str, object], message: str, tmp_path: Path
):
    with pytest.raises(InvalidRequestError, match=message):
        load(config(tmp_path / "not-there"), config(tmp_path, **options))


def test_a_model_that_fails_closes_those_before_it(embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    closed: list[Engine] = []
    close = Engine.close
    monkeypatch.setattr(Engine, "close", lambda engine: (closed.append(engine), close(engine))[1])
    with pytest.raises(ModelLoadError):
        load(config(embedder), config(tmp_path))
    assert [engine.closed for engine in closed] == [True]


def test_options_reach_the_engine(embedder: Path, tmp_path: Path):
    models = load(
        config(
            embedder,
            names=("a", "b"),
            max_model_len=16,
            pooler_config={"pooling_type": "CLS"},
            hf_overrides={"is_matryoshka": True},
            cache=tmp_path / "vectors.sqlite",
            max_batch_tokens=99,
            max_queue=7,
            trust_remote_code=True,
            task="embed",
        )
    )
    (model,) = models
    engine = model.engine
    assert (model.names, model.name, model.root, model.max_model_len) == (("a", "b"), "a", str(embedder), 16)
    assert engine.spec.pooling == ("cls",)
    assert engine.spec.matryoshka
    assert engine.cache is not None
    assert (engine.config.max_batch_tokens, engine.config.max_queue, engine.config.convert) == (99, 7, "embed")
    models.close()
    assert engine.closed
