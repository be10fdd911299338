"""AdapterContract: what every adapter of a framework over an engine must do, for its own tests to derive from.

An adapter that derives from :class:`millpond.compat.adapter.EngineSource` is tested by a class of a few lines::

    class TestMyEmbeddings(AdapterContract):
        adapter = MyEmbeddings

        def ask(self, adapter):
            return [adapter.embed_query("tides"), *adapter.embed_documents(["tides", "bread"])]

        async def aask(self, adapter):
            return [await adapter.aembed_query("tides"), *await adapter.aembed_documents(["tides", "bread"])]

        def expected(self, engine):
            documents = engine.embed(["tides", "bread"], role="document").embeddings
            return [engine.embed(["tides"], role="query").embeddings[0], *documents]

and two fixtures: ``model``, the folder of a checkpoint, and ``engine``, an engine over it with ``dtype="float32"``.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from millpond import AsyncEngine, Engine
from millpond.errors import ModelLoadError

SECRETS: tuple[dict[str, Any], ...] = (
    {"token": "hf_secret"},
    {"api_key": "hf_secret"},
    {"model_kwargs": {"token": True, "model_kwargs": {"use_auth_token": "hf_secret"}}},
)


class AdapterContract:
    """The tests of one adapter; answers are compared within ``tolerance``.

    Attributes:
        adapter: The class under test.
        options: What it needs beside a model.
        named: The field that holds the model's name.
        tolerance: The largest difference between two answers.
    """

    adapter: ClassVar[Any]
    options: ClassVar[dict[str, Any]] = {}
    named: ClassVar[str] = "model"
    tolerance: ClassVar[float] = 1e-5

    def ask(self, adapter: Any) -> Any:
        """The numbers of every synchronous method, as nested lists.

        Args:
            adapter: An object of the class under test.

        Returns:
            Numbers, arrays or nested lists, one for each answer.
        """
        raise NotImplementedError

    async def aask(self, adapter: Any) -> Any:
        """The numbers of every asynchronous method, in the same order.

        Args:
            adapter: An object of the class under test.

        Returns:
            A list as :meth:`ask` returns it.
        """
        raise NotImplementedError

    def expected(self, engine: Engine) -> Any:
        """The same numbers from the engine itself.

        Args:
            engine: An engine over the same checkpoint.

        Returns:
            A list as :meth:`ask` returns it.
        """
        raise NotImplementedError

    def build(self, **options: Any) -> Any:
        """The adapter with ``options``.

        Args:
            **options: Arguments of the class, beside :attr:`options`.

        Returns:
            An object of the class under test.
        """
        return self.adapter(**self.options, **options)

    def named_model(self, model: str) -> Any:
        """The adapter over a checkpoint, in float32.

        Args:
            model: Hub id or local folder.

        Returns:
            An object of the class under test.
        """
        return self.build(**{self.named: model, "dtype": "float32"})

    def assert_same(self, one: Any, other: Any) -> None:
        """Two answers are equal within the tolerance.

        Args:
            one: What :meth:`ask` returned.
            other: What it is compared with.

        Raises:
            AssertionError: They differ by more.
        """
        for first, second in zip(one, other, strict=True):
            np.testing.assert_allclose(first, second, atol=self.tolerance, rtol=self.tolerance)

    def test_it_answers_as_the_engine_by_name_and_by_object(self, model: str, engine: Engine) -> None:
        expected = self.expected(engine)
        assert any(np.abs(np.asarray(row) - np.asarray(expected[0])).max() > 1e-4 for row in expected[1:])
        for adapter in (self.named_model(model), self.build(engine=engine), self.build(engine=AsyncEngine(engine))):
            self.assert_same(self.ask(adapter), expected)

    async def test_async_equals_sync(self, model: str, engine: Engine) -> None:
        for adapter in (self.named_model(model), self.build(engine=engine)):
            self.assert_same(await self.aask(adapter), self.expected(engine))

    def test_nothing_is_loaded_until_a_text_comes(self) -> None:
        adapter = self.named_model("./no-such-folder")
        with pytest.raises(ModelLoadError, match="no-such-folder"):
            self.ask(adapter)

    def test_equal_configurations_share_an_engine(self, model: str) -> None:
        one, same = self.named_model(model), self.named_model(model)
        assert one._engine() is same._engine()
        other = self.build(**{self.named: model, "dtype": "float32", "max_length": 9})
        assert other._engine() is not one._engine()
        other._engine().close()

    @pytest.mark.parametrize("journey", ["pickle", "copy", "deepcopy", "dict"])
    def test_a_copy_gives_the_same_answers(self, model: str, engine: Engine, journey: str) -> None:
        built = self.named_model(model)
        journeys = {
            "pickle": lambda: pickle.loads(pickle.dumps(built)),
            "copy": lambda: copy.copy(built),
            "deepcopy": lambda: copy.deepcopy(built),
            "dict": lambda: self.adapter(**built.model_dump()),
        }
        again = journeys[journey]()
        assert again.model_dump() == built.model_dump()
        self.assert_same(self.ask(again), self.expected(engine))

    def test_an_engine_travels_with_copies_and_with_nothing_else(self, engine: Engine) -> None:
        built = self.build(engine=engine)
        for copied in (copy.copy(built), copy.deepcopy(built), built.model_copy(deep=True)):
            assert copied.engine is engine
        assert "engine" not in built.model_dump() and "engine=" not in repr(built)
        with pytest.raises(TypeError, match="engine=.*cannot be pickled"):
            pickle.dumps(built)

    def test_either_a_model_or_an_engine_with_the_options_that_it_reads(self, engine: Engine) -> None:
        for options in ({}, {self.named: "a", "engine": engine}):
            with pytest.raises(ValueError, match=f"either {self.named}= .* or engine="):
                self.build(**options)
        for option, value in (("dtype", "float32"), ("max_length", 9), ("hf_overrides", {"a": 1})):
            with pytest.raises(ValueError, match=f"{option}= is read when a model is loaded"):
                self.build(engine=engine, **{option: value})
        assert self.build(engine=engine, device="auto").engine is engine
        with pytest.raises(TypeError, match="must be a millpond.Engine, not a str"):
            self.build(engine="owner/name")

    def test_an_unknown_option_is_refused(self) -> None:
        for options in ({"modelname": "b"}, {"model_kwargs": {"whatever": 1}}, {"backend": "onnx"}):
            with pytest.raises(ValueError, match=f"{next(iter(options))}.*docs/migrate"):
                self.build(**{self.named: "owner/name"}, **options)

    def test_both_names_of_the_model_are_accepted_and_readable(self, engine: Engine, tmp_path: Path) -> None:
        for name in ("model", "model_name", "model_name_or_path"):
            built = self.build(**{name: "owner/name"})
            assert built.model == built.model_name == "owner/name"
        assert self.build(model="a", model_name="a").model == "a"
        assert self.build(model=tmp_path).model_name == str(tmp_path)
        assert self.build(engine=engine).model_name == engine.spec.name
        with pytest.raises(ValueError, match="model"):
            self.build(model="a", model_name="b")

    def test_a_device_is_none_a_name_a_number_or_a_list(self) -> None:
        given = (None, "cpu", ["cuda:0", "cuda:1"], ("cpu", "cpu"), 1, [0, 1])
        kept = ["auto", "cpu", "cuda:0,cuda:1", "cpu", "cuda:1", "cuda:0,cuda:1"]
        assert [self.build(model="a", device=device).device for device in given] == kept
        assert [self.build(model="a", model_kwargs={"device": device}).device for device in given[1:]] == kept[1:]

    def test_a_secret_is_in_no_message(self) -> None:
        for options in SECRETS:
            with pytest.raises(ValueError, match=r"\*\*\*") as caught:
                self.build(model="owner/name", **options)
            assert "hf_secret" not in f"{caught.value} {caught.value!r}"
