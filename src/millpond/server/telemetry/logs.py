"""Logs: plain lines or JSON, each with the id of its request; never a body, and never a key."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

from millpond.server.telemetry.scope import declared_path, request_state

logger = logging.getLogger("millpond.access")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")

_FIELDS = "_millpond_fields"


def access(scope: Scope, *, status: int | None, seconds: float) -> None:
    """Log one line about a request that has ended; ``status`` is ``None`` if no response was started."""
    if not logger.isEnabledFor(logging.INFO):
        return
    state = request_state(scope)
    fields: dict[str, Any] = {
        "request_id": state.get("request_id"),
        "client": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        # An unknown path is not logged, because it may contain anything.
        "route": declared_path(scope),
        "model": state.get("model"),
        "status": status,
        "tokens": state.get("tokens"),
        "milliseconds": round(seconds * 1000, 2),
    }
    shown = {key: value for key, value in fields.items() if value is not None}
    line = " ".join([f"{key}={value}" for key, value in shown.items() if key != "request_id"])
    # As `logger.info`, without a search for the line of code that it was called from.
    logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, line, (), None, extra={_FIELDS: shown}))


class Formatter(logging.Formatter):
    """Log records with the id of their request."""

    def __init__(self, style: str = "plain") -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")
        self._json = style == "json"

    def format(self, record: logging.LogRecord) -> str:
        """One record as one line, except for a plain traceback."""
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
