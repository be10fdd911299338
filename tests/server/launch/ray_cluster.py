"""A local Ray cluster with our deployment in its own process: one job per line on stdin, its answer on stdout.

Ray's threads, signal handlers and sockets are so kept out of the tests' process, whose sockets are guarded.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def deploy(args: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the deployment; returns the states of the replicas, or the reason why there are none."""
    from ray import serve

    from millpond.server.ray.deployment import build_app

    try:
        serve.run(build_app(args))
    except RuntimeError as error:  # it says no more than that this failed
        messages = [
            states.message for app in serve.status().applications.values() for states in app.deployments.values()
        ]
        return {"error": " ".join([str(error), *messages])}
    return replicas()


def replicas() -> dict[str, Any]:
    from ray import serve

    applications = serve.status().applications.values()
    return {
        name: {"status": states.status.value, "replicas": states.replica_states}
        for application in applications
        for name, states in application.deployments.items()
    }


def remove() -> dict[str, Any]:
    from ray import serve

    serve.delete("default")
    return replicas()


def main(folder: str, port: int) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Ray tells of its workers on standard output

    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, _temp_dir=folder)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            answer = {"deploy": deploy, "remove": remove}[job.pop("do")](**job)
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
