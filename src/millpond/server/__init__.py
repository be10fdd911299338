"""Server: checkpoints over HTTP, for clients of OpenAI, Cohere, TEI and vLLM."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.server.app import create_app
    from millpond.server.launch.run import serve
    from millpond.server.served.models import ServedModels
    from millpond.server.settings.config import ModelConfig, ServerConfig

_MODULES = {
    "ModelConfig": "settings.config",
    "ServedModels": "served.models",
    "ServerConfig": "settings.config",
    "create_app": "app",
    "serve": "launch.run",
}

__all__ = ["ModelConfig", "ServedModels", "ServerConfig", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
