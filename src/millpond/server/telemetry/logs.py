"""The server's log: plain lines or JSON, each with its request's id; never a body, and never a key."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

logger = logging.getLogger("millpond.access")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")

_FIELDS = "_millpond_fields"


def access(scope: Scope, *, status: int | None, seconds: float) -> None:
    """One line about a request that is over; ``status`` is missing where nothing was answered."""
    if not logger.isEnabledFor(logging.INFO):
        return
    state = scope.get("state", {})
    route = scope.get("route")
    fields: dict[str, Any] = {
        "request_id": state.get("request_id"),
        "client": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        # Of a path that leads nowhere the log keeps no more than that somebody tried.
        "route": getattr(route, "path", None),
        "model": state.get("model"),
        "status": status,
        "tokens": state.get("tokens"),
        "milliseconds": round(seconds * 1000, 2),
    }
    told = {key: value for key, value in fields.items() if value is not None}
    line = " ".join(f"{key}={value}" for key, value in told.items() if key != "request_id")
    logger.info("%s", line, extra={_FIELDS: told})


class Formatter(logging.Formatter):
    """Log records with the id of the request that they are about.

    Args:
        style: ``plain`` is made for eyes, ``json`` for collectors: one object a line.
    """

    def __init__(self, style: str = "plain") -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")
        self._json = style == "json"

    def format(self, record: logging.LogRecord) -> str:
        """One record: one line, but for a plain traceback."""
        fields = getattr(record, _FIELDS, None)
        request_id = REQUEST_ID.get() if fields is None else fields["request_id"]
        if not self._json:
            record.__dict__["request_id"] = request_id
            return super().format(record)
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": request_id,
            **(fields if fields is not None else {"message": record.getMessage()}),
        }
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)
