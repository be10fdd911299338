"""Engines shared by a process: one for each configuration, loaded at its first use and kept until it is closed.

Ten retrievers over one model hold its weights once, and a copied or unpickled adapter finds the engine again. Importing
this module does not import torch.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from millpond.checkpoints.resolve import hub_ids
from millpond.support.fork import ProcessFuture, loading
from millpond.values.config import EngineConfig

if TYPE_CHECKING:
    from millpond.cache.vector_cache import VectorCache
    from millpond.engine.engine import Engine

    Cache = str | os.PathLike[str] | VectorCache | None
    Key = tuple[Any, ...]


def get_engine(model: str | os.PathLike[str], *, cache: Cache = None, **options: Any) -> Engine:
    """The engine of this process for a configuration; thread-safe.

    Equal configurations share one engine: omitted options equal their defaults, ``device="auto"`` equals the device
    that it resolves to, and a folder equals other spellings of its path. The first caller loads the engine, the others
    wait. An engine that was closed is replaced; a forked child loads its own.

    Args:
        model: Hub id or local folder.
        cache: A path or a :class:`~millpond.VectorCache`.
        **options: The other arguments of :class:`~millpond.Engine`.

    Raises:
        TypeError: An option that :class:`~millpond.Engine` does not have.
        MillpondError: Loading failed; the next call tries again.
    """
    config = EngineConfig(model=os.fspath(model), **options)
    key = _key(config, cache)
    future, ours = _acquire(key)
    if ours:
        _resolve(key, future, partial(_engine, config, cache))
    return future.result()


async def get_engine_async(model: str | os.PathLike[str], *, cache: Cache = None, **options: Any) -> Engine:
    """As :func:`get_engine`, for an event loop: a new thread loads the engine, and the loop goes on.

    Cancelling the awaiting task does not stop the loading, which other callers may wait for.
    """
    config = EngineConfig(model=os.fspath(model), **options)
    key = _key(config, cache)
    future, ours = _acquire(key)
    if ours:
        load = partial(_engine, config, cache)
        threading.Thread(target=_resolve, args=(key, future, load), name="millpond-load", daemon=True).start()
    from asyncio import wrap_future

    return await wrap_future(future)


def close_shared(timeout: float | None = None, cancel: bool = False) -> None:
    """Close and forget every shared engine of this process, to free its memory; one that is still loading stays.

    The next call of :func:`get_engine` loads a new engine.

    Args:
        timeout: As :meth:`millpond.Engine.close`, for all engines together.
        cancel: As :meth:`millpond.Engine.close`.
    """
    end = None if timeout is None else time.monotonic() + timeout
    with _lock:
        loaded = [key for key, future in _engines.items() if key[0] == os.getpid() and future.done()]
        engines = {_engines.pop(key).result() for key in loaded}
    for engine in engines:
        engine.close(timeout=None if end is None else max(0.0, end - time.monotonic()), cancel=cancel)


_lock = threading.Lock()
_engines: dict[Key, Future[Engine]] = {}  # each done when the engine is loaded


def _acquire(key: Key) -> tuple[Future[Engine], bool]:
    """The future of an engine, and whether the caller has to load it."""
    with _lock:
        future = _engines.get(key)
        if future is not None and not (future.done() and future.result().closed):
            return future, False
        future = _engines[key] = ProcessFuture()
        future.set_running_or_notify_cancel()  # a waiter that is cancelled can no longer cancel it for the others
        return future, True


def _resolve(key: Key, future: Future[Engine], load: Callable[[], Engine]) -> None:
    """Load the engine of an acquired future, and hand it to everyone who waits for it."""
    try:
        with loading():
            engine = load()
    except BaseException as error:
        # Forget it first: the next call tries again, and no traceback here keeps half a model alive.
        with _lock:
            if _engines.get(key) is future:
                del _engines[key]
        future.set_exception(error)
    else:
        future.set_result(engine)


def _after_fork() -> None:
    """Renew the lock in a forked child: a thread that exists only in the parent may hold it.

    The parent's engines stay referenced, so that the child does not destroy them; the child's keys do not match theirs.
    """
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _engine(config: EngineConfig, cache: Cache) -> Engine:
    from millpond.backends.devices import resolve_devices
    from millpond.engine.engine import Engine

    device = ",".join(resolve_devices(config.device))
    if device != config.device:  # "auto" and the device that it resolves to share one engine
        config = replace(config, device=device)
        return get_engine(cache=cache, **_options(config))
    return Engine(cache=cache, **_options(config))


def _options(config: EngineConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


def _key(config: EngineConfig, cache: Cache) -> Key:
    """Equal for equal configurations of one process, and hashable."""
    options = _options(config)
    folder = os.path.expanduser(config.model)
    options["model"] = os.path.realpath(folder) if os.path.isdir(folder) else hub_ids(config.model)[0]
    options["hf_overrides"] = json.dumps(dict(config.hf_overrides or {}), sort_keys=True, default=repr)
    cache_key = os.path.realpath(os.path.expanduser(cache)) if isinstance(cache, str | os.PathLike) else cache
    return (os.getpid(), cache_key, *options.values())
