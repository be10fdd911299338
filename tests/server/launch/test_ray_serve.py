"""The deployment on Ray Serve: its settings, one replica in this process, and a local cluster that answers requests."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from millpond import Engine
from millpond.errors import DeviceLostError, EngineClosedError, InvalidRequestError
from millpond.server import ModelConfig, ServerConfig

pytestmark = pytest.mark.contract

TEXTS = ["still water", "a mill by the water", "grain"]
CLUSTER = Path(__file__).with_name("ray_cluster.py")

# Settings, which need no cluster


ray_serve = pytest.importorskip("millpond.server.ray.deployment", exc_type=ImportError)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "num_replicas"),
        ({"replicas": 1.5}, "replicas=1.5: Input should be a valid integer"),
        ({"num_cpus": -1}, "num_cpus cannot be negative"),
        ({"health_check_period": 0}, "health_check_period_s"),
        ({"replicas": 2, "autoscaling": {"max_replicas": 3}}, "replicas=2 contradicts autoscaling"),
        ({"max_ongoing_requests": 8, "autoscaling": {"max_replicas": 3}}, "no load would ever add a replica"),
        ({"autoscaling": "{"}, "is not JSON"),
        ({"autoscaling": {}}, "autoscaling.max_replicas={}: Field required"),
        ({"autoscaling": {"max_replicas": 2, "min_replica": 3}}, "autoscaling.min_replica=3: Unexpected"),
        ({"autoscaling": {"max_replicas": 2, "min_replicas": 3}}, "max_replicas"),
    ],
)
def test_replicas_that_make_no_sense_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        ray_serve.build_app({"model": "a/model", **settings})


# The application, which is bound without a cluster


def options(app: Any) -> Any:
    """Ray's configuration of the deployment."""
    return app._bound_deployment._deployment_config


def arguments(app: Any) -> tuple[tuple[ModelConfig, ...], ServerConfig]:
    return app._bound_deployment.init_args  # type: ignore[no-any-return]


MODELS = [ModelConfig(model="a/model")]


def test_a_deployment_takes_its_options_over():
    resources = {"num_cpus": 3, "num_gpus": 0.5}
    replicas = ray_serve.Replicas(replicas=2, **resources, max_ongoing_requests=9, health_check_period=4)
    app = ray_serve.deployment(MODELS, ServerConfig(drain_timeout=7), replicas=replicas)
    found = options(app)
    assert (found.num_replicas, found.max_ongoing_requests, found.graceful_shutdown_timeout_s) == (2, 9, 7)
    assert (found.health_check_period_s, found.autoscaling_config) == (4, None)
    assert app._bound_deployment.ray_actor_options.items() >= resources.items()
    assert arguments(app) == ((ModelConfig(model="a/model"),), ServerConfig(drain_timeout=7))


def test_autoscaling_is_taken_over():
    app = ray_serve.build_app(
        {"model": "a", "autoscaling": '{"min_replicas": 2, "max_replicas": 5, "upscale_delay": "3"}'}
    )
    found = options(app).autoscaling_config
    assert (found.min_replicas, found.max_replicas, found.upscale_delay_s) == (2, 5, 3)


def test_only_names_and_settings_travel():
    sent = arguments(ray_serve.deployment(MODELS, ServerConfig(api_keys=("k",))))
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_an_app_is_built_of_the_words_of_serve_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MILLPOND_API_KEY", "k")
    monkeypatch.setenv("MILLPOND_PORT", "9000")  # of an image that is made for a single server
    words = {"model": "a/b, c/d", "served-model-name": "b,d", "max_inputs": "5", "replicas": "2", "name": "pool"}
    app = ray_serve.build_app(words)
    models, config = arguments(app)
    assert [(model.model, model.names) for model in models] == [("a/b", ("b",)), ("c/d", ("d",))]
    assert config == ServerConfig(max_inputs=5, api_keys=("k",))
    assert options(app).num_replicas == 2 and app._bound_deployment.name == "pool"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "no model to serve"),
        ({"model": "a/b", "port": "8000"}, "its proxies listen"),
        ({"model": "a/b", "modle": "c"}, "is no setting of the server"),
    ],
)
def test_an_app_that_makes_no_sense_is_refused(args: dict[str, str], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        ray_serve.build_app(args)


def test_a_deployment_listens_nowhere_and_needs_a_model():
    with pytest.raises(InvalidRequestError, match="ssl_certfile: on Ray Serve its proxies listen"):
        ray_serve.deployment(MODELS, ServerConfig(ssl_certfile=Path("x.pem")))
    with pytest.raises(InvalidRequestError, match="name at least one"):
        ray_serve.deployment([])


# One replica, in this process


async def test_a_replica_answers_and_is_well_until_it_is_shut_down(embedder: Path):
    replica = ray_serve.Replica([ModelConfig(model=str(embedder), names=("tiny",))], ServerConfig(api_keys=("k",)))
    app = replica.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica")
        async with client:
            body = {"model": "tiny", "input": TEXTS}
            assert (await client.post("/v1/embeddings", json=body)).status_code == 401
            answer = await client.post("/v1/embeddings", json=body, headers={"Authorization": "Bearer k"})
        assert answer.status_code == 200 and len(answer.json()["data"]) == 3
        replica.check_health()
    with pytest.raises(EngineClosedError, match="tiny"):
        replica.check_health()


@pytest.mark.torch
def test_a_replica_that_has_lost_a_device_is_to_be_replaced(embedder: Path, backends: list[Any]):
    import torch

    model = ModelConfig(model=str(embedder), names=("tiny",), device="cpu", dtype="float32")
    replica = ray_serve.Replica([model], ServerConfig())
    replica.check_health()
    backends[0].lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    (served,) = replica._models
    with pytest.raises(DeviceLostError):
        served.engine.embed(["a"])
    with pytest.raises(DeviceLostError, match="the device cpu is lost"):
        replica.check_health()
    replica._models.close()


def test_without_ray_the_extra_is_named():
    code = "import sys; sys.modules['ray'] = None; import millpond.server.ray.deployment"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "MissingExtraError" in done.stderr and "pip install 'millpond[ray]'" in done.stderr


# A local cluster


class Cluster:
    """The process of ``ray_cluster.py``."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "cluster.log"
        environ = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the user's home
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(CLUSTER), str(folder), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
                start_new_session=True,
            )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text(encoding="utf-8")[-3000:]
        return json.loads(line)  # type: ignore[no-any-return]

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def embed(self, texts: list[str]) -> httpx.Response:
        body = {"model": "tiny", "input": texts}
        headers = {"Authorization": "Bearer k"}
        return httpx.post(f"{self.url}/v1/embeddings", json=body, headers=headers, timeout=120)

    def close(self) -> None:
        """End it and its remaining processes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # a short path: Ray's sockets are in it
    cluster = Cluster(folder)
    try:
        assert cluster.answer() == {"ready": True}
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_replicas_answer_as_the_engine_does(cluster: Cluster, embedder: Path):
    args = {"model": str(embedder), "served_model_name": "tiny", "api_key": "k", "replicas": "2", "num_cpus": "0.5"}
    deployed = cluster.ask("deploy", args=args)
    assert deployed == {"millpond": {"status": "HEALTHY", "replicas": {"RUNNING": 2}}}
    with Engine(str(embedder)) as engine:
        expected = engine.embed(TEXTS).embeddings
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(cluster.embed, [TEXTS] * 24))
    for answer in answers:
        assert answer.status_code == 200, answer.text
        vectors = np.array([row["embedding"] for row in answer.json()["data"]], dtype=np.float32)
        np.testing.assert_allclose(vectors, expected, atol=1e-6)
    refused = httpx.post(f"{cluster.url}/v1/embeddings", json={"model": "tiny", "input": TEXTS})
    assert refused.status_code == 401 and httpx.get(f"{cluster.url}/health").status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_runs_is_finished_before_a_replica_goes(cluster: Cluster, embedder: Path):
    scaling = {"min_replicas": 1, "max_replicas": 2}
    args = {"model": str(embedder), "served_model_name": "tiny", "api_key": "k", "num_cpus": 1, "autoscaling": scaling}
    deployed = cluster.ask("deploy", args=args)
    assert deployed == {"millpond": {"status": "HEALTHY", "replicas": {"RUNNING": 1}}}
    texts = [f"{i} {TEXTS[1]}" for i in range(2000)]
    answers: list[httpx.Response] = []
    callers = [threading.Thread(target=lambda: answers.append(cluster.embed(texts))) for _ in range(4)]
    for caller in callers:
        caller.start()
    try:
        while True:
            parsed = httpx.get(f"{cluster.url}/metrics", timeout=60).text
            under_way = re.search(r"^millpond_requests_in_flight (\d+)", parsed, re.MULTILINE)
            assert under_way is not None, parsed
            # The question is a request, too.
            if int(float(under_way[1])) >= 4 or len(answers) == 4:
                break
        assert cluster.ask("remove") == {}
    finally:
        for caller in callers:
            caller.join()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {len(answer.json()["data"]) for answer in answers} == {2000}
