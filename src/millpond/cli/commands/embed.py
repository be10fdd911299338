"""``millpond embed``: texts to vectors as JSONL, in bounded memory."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.groups import EngineOptions, TextOptions, grouped, open_cache
from millpond.cli.arguments.input_texts import check_piped
from millpond.cli.arguments.options import option
from millpond.cli.arguments.written import writing
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.pipe import is_pipe
from millpond.support.progress import draw_bar
from millpond.tasks import Role, Truncate

logger = logging.getLogger(__name__)

_TEXTS_AHEAD = 4096  # of a pipe
# No int8 and uint8: their range depends on all texts of a call.
StreamDtype = Literal["float32", "float16", "binary", "ubinary"]


@dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """Which vectors: the options of :meth:`millpond.Engine.embed_iter`."""

    dimensions: options.Width = None
    role: Role | None = option(None, "Apply the checkpoint's prompt for this role.")
    prompt: str | None = option(None, "Put this before every text.", "TEXT")
    prompt_name: str | None = option(None, "Apply this prompt of the checkpoint.", "NAME")
    output_dtype: StreamDtype = option("float32", "Data type of the vectors.")
    truncate: Truncate = option(
        "auto", "Which end of a text that is too long is cut (auto: the checkpoint's); error refuses it."
    )


@grouped
def embed(
    source: options.TextSource = "-",
    *,
    model: options.Model,
    vectors: VectorOptions,
    texts: TextOptions,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to this file instead of standard output.", metavar="PATH"),
    ] = None,
    cache: options.Cache = None,
    engine_options: EngineOptions,
) -> None:
    """Turn texts into vectors: one line {"id": ..., "embedding": [...]} per text, in input order.

    Standard input is read as JSONL if it begins with {, else as one text per line with the line number as id.
    Blank lines are skipped. An invalid line is reported, the others are embedded, and the exit code is 1.
    """
    check_piped(source, "SOURCE")
    stream = _Stream(texts.read(source))
    with ExitStack() as stack:
        if vectors.dimensions is not None:
            engine_options.describe(model).check_dimensions(vectors.dimensions)
        engine = stack.enter_context(engine_options.load(model, cache=open_cache(stack, cache)))
        show = output is not None or not sys.stdout.isatty()
        rows = engine.embed_iter(stream.texts(), show_progress=show, **vars(vectors))
        if source == "-" or is_pipe(Path(source)):  # printed as they come
            rows = stream.bursts(partial(engine.embed_iter, **vars(vectors)), show=show)
        # Opened last, so that a refused request does not overwrite an existing file.
        write = partial(print, end="") if output is None else _create(stack, output)
        template = ""
        for row in rows:  # [d]
            if not template:
                # Nine digits are enough to restore a float32 exactly; json would write the 17 of a float64.
                number = "%.9g" if row.dtype.kind == "f" else "%d"
                template = f'{{"id": %s, "embedding": [{", ".join([number] * len(row))}]}}\n'
            write(template % (json.dumps(stream.ids.popleft()), *row.tolist()))
    if stream.failed:
        raise typer.Exit(1)


class _Stream:
    """Feeds texts to the engine and keeps their ids until the vectors arrive."""

    def __init__(self, items: Iterable[Record | Rejected]) -> None:
        self._items = items
        self.ids: deque[str] = deque()
        self.failed = 0

    def texts(self) -> Iterator[str]:
        for item in self._items:
            if isinstance(item, Record):
                self.ids.append(item.id)
                yield item.text
            else:
                self.failed += 1
                logger.error("%s: %s", item.where, item.reason)

    def bursts(self, embed: Callable[[Iterable[str]], Iterator[Any]], *, show: bool) -> Iterator[Any]:
        """The vectors of the texts that are there, then of those that are there by then, and so on."""
        ready: queue.Queue[str | BaseException | None] = queue.Queue(_TEXTS_AHEAD)
        threading.Thread(target=self._read, args=(ready,), name="millpond-reader", daemon=True).start()
        ended: list[BaseException | None] = []

        def burst(text: str | BaseException | None) -> Iterator[str]:
            while isinstance(text, str):
                yield text
                try:
                    text = ready.get_nowait()
                except queue.Empty:
                    return
            ended.append(text)

        with draw_bar(show=show, unit=" texts") as bar:
            while not ended:
                for row in embed(burst(ready.get())):
                    yield row
                    bar.update()
                print(end="", flush=True)
        if ended[0] is not None:
            raise ended[0]

    def _read(self, ready: queue.Queue[str | BaseException | None]) -> None:
        try:
            for text in self.texts():
                ready.put(text)
            ready.put(None)
        except BaseException as error:  # raised again by `bursts`
            ready.put(error)


def _create(stack: ExitStack, path: Path) -> Callable[[str], None]:
    """What writes to a file, which is closed with the stack."""
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{str(path)!r} cannot be written ({error.strerror})", param_hint="--output") from None

    def close() -> None:
        with writing(path):
            file.close()

    def write(text: str) -> None:
        with writing(path):
            file.write(text)

    stack.callback(close)
    return write
