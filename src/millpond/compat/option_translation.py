"""OptionTranslation: a call's options of another library, read one by one into millpond's."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from millpond.errors import InvalidRequestError


class OptionTranslation:
    """The options of one adapter, as they are translated.

    Attributes:
        options: What the caller passed.
        own: The adapter's own options, which are left as they are.
        model: The hub id or folder, if it is one of the options.
        is_folder: Whether it is a folder.
        result: The translated options.
    """

    def __init__(self, options: Mapping[str, Any], own: Collection[str]) -> None:
        self.options = options
        self.own = own
        self.result: dict[str, Any] = {}
        self._sources: dict[str, str] = {}  # each translated option as the caller wrote it
        model = options.get("model") or options.get("model_name") or options.get("model_name_or_path")
        self.model = os.fspath(model) if isinstance(model, str | os.PathLike) else None
        self.is_folder = self.model is not None and Path(os.path.expanduser(self.model)).is_dir()

    def is_translated(self, name: str) -> bool:
        """Whether the option of this name was set by one of another library."""
        return name in self._sources

    def set(self, name: str, value: Any, source: str) -> None:
        """Set an option, unless the caller has set it to something else, too."""
        if self.result.get(name) is None:
            self.result[name], self._sources[name] = value, f"{source}={value!r}"
        elif self.result[name] != value:
            first = self._sources.get(name, f"{name}={self.result[name]!r}")
            raise InvalidRequestError(f"{first} and {source}={value!r} contradict each other; pass one of them")

    def add_owner(self, names: re.Pattern[str], owner: str) -> None:
        """Complete a hub id that the other library completes, too."""
        for key in ("model", "model_name"):
            name = self.result.get(key)
            if isinstance(name, str) and names.fullmatch(name) and "/" not in name and not self.is_folder:
                self.result[key] = f"{owner}/{name}"

    def top_level(self, rules: Mapping[str, Rule]) -> None:
        """Read the arguments themselves: first the adapter's own, then the others."""
        foreign = {}
        for name, value in self._once_named().items():
            if name == "trust_remote_code" and value is True:
                continue  # a permission, which is not needed
            if name not in self.own and name in rules:
                foreign[name] = value
            elif name == "device":
                self.result[name] = device_text(value)
            elif name == "dtype" and (value is None or is_torch(value)):
                if value is not None:
                    self.result[name] = dtype_text(value)
            else:
                self.result[name] = value
        for name, value in foreign.items():
            if value is not None:
                rules[name](self, name, value)

    def _once_named(self) -> Mapping[str, Any]:
        """The options with the model under one name, if the adapter knows it by two and both are given."""
        both = [name for name in ("model", "model_name") if name in self.own and name in self.options]
        if len(both) < 2:
            return self.options
        given = [name for name in both if self.options[name] is not None]
        if len(given) == 2 and self.options["model"] != self.options["model_name"]:
            first, second = (f"{name}={self.options[name]!r}" for name in both)
            raise InvalidRequestError(
                f"{first} and {second} contradict each other, and two names of one model\n"
                "are not permitted; pass one of them"
            )
        kept = given[0] if given else both[0]
        return {name: value for name, value in self.options.items() if name not in both or name == kept}

    def nested(self, where: str, value: Any, rules: Mapping[str, Rule]) -> None:
        """Read a dict of options."""
        for name, inner in mapping(where, value).items():
            source = f"{where}[{name!r}]"
            if name not in rules:
                known = ", ".join(sorted(rules))
                raise InvalidRequestError(
                    f"{source} is unknown, and might change results; leave it out if it does not (known: {known})"
                )
            if inner is not None:
                rules[name](self, source, inner)


Rule = Callable[[Any, str, Any], None]
"""Reads one option: called with the translation, the option as the caller wrote it, and its value, never ``None``."""


def mapping(where: str, value: Any) -> Mapping[str, Any]:
    """A dict of options."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidRequestError(f"{where}={value!r} must be a dict of options")
    return value


def is_torch(value: Any) -> bool:
    """Whether it is a device or a dtype of torch, without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch"


def device_text(value: Any) -> Any:
    """A device as millpond spells it: ``None`` is ``auto``, several are joined by commas, each of them once.

    What is no device is returned as it is, for the adapter to refuse.
    """
    if value is None:
        return "auto"
    if isinstance(value, list | tuple) and value:
        names = [_device_name(name) for name in value]
        if all(isinstance(name, str) for name in names):
            return ",".join(dict.fromkeys(names))
    return _device_name(value)


def _device_name(value: Any) -> Any:
    """One device; a number is a GPU's, as for torch."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"cuda:{value}" if value >= 0 else value
    return str(value) if is_torch(value) else value


_DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}


def dtype_text(value: Any) -> Any:
    """A dtype as millpond spells it; torch's and its short names are understood."""
    name = str(value).removeprefix("torch.") if is_torch(value) or isinstance(value, str) else value
    return _DTYPES.get(name, name) if isinstance(name, str) else name


def ignore(translation: OptionTranslation, source: str, value: Any) -> None:
    """A hint about resources or appearance: it changes no vector."""


def rename(name: str) -> Rule:
    """An option that only has another name."""

    def rule(translation: OptionTranslation, source: str, value: Any) -> None:
        translation.set(name, value, source)

    return rule


def refuse(reason: str, line: str) -> Rule:
    """An option that is not available; ``line`` says what to write."""

    def rule(translation: OptionTranslation, source: str, value: Any) -> NoReturn:
        raise InvalidRequestError(f"{source}={value!r} is not available: {reason}; {line}")

    return rule


def only(*accepted: Any, reason: str, line: str) -> Rule:
    """Values that mean what millpond does in any case; others are refused."""

    def rule(translation: OptionTranslation, source: str, value: Any) -> None:
        if not any(value is one or value == one for one in accepted):
            refuse(reason, line)(translation, source, value)

    return rule


def positive(translation: OptionTranslation, source: str, value: Any) -> None:
    """A number of texts: batches have a budget of tokens here, so it is checked and changes nothing."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise InvalidRequestError(f"{source}={value!r} must be a positive int; it changes nothing, so leave it out")


def flag(source: str, value: Any) -> bool:
    """A bool, and nothing that is merely true."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{source}={value!r} must be True or False")
    return value


def nested(table: Mapping[str, Rule]) -> Rule:
    """A dict of options with rules of their own."""

    def rule(translation: OptionTranslation, source: str, value: Any) -> None:
        translation.nested(source, value, table)

    return rule


def text_option(name: str) -> Rule:
    """An instruction, which is put before the text as it is."""

    def rule(translation: OptionTranslation, source: str, value: Any) -> None:
        if not isinstance(value, str):
            raise InvalidRequestError(f"{source}={value!r} must be a str; write {name}= instead")
        translation.set(name, value, source)

    return rule
