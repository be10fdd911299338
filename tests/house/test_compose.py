"""compose.yaml: what it names is in the Dockerfile and in the server's settings."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_compose_file_fits_the_dockerfile_and_the_settings():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    server = services["millpond"]
    assert all(f"ARG {name}=" in dockerfile for name in server["build"]["args"])
    assert all(mapping.startswith("127.0.0.1:") for service in services.values() for mapping in service["ports"])
    port = server["ports"][0].rpartition(":")[2]
    assert f"EXPOSE {port}" in dockerfile and f"MILLPOND_PORT={port}" in dockerfile
    assert all(f"VOLUME {volume.partition(':')[2]}" in dockerfile for volume in server["volumes"])
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    assert server["environment"] and all(f"`{name}`" in page for name in server["environment"])
    assert int(server["stop_grace_period"].removesuffix("s")) > 30  # --drain-timeout
