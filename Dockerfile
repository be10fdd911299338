# Unbuilt until someone can build it: written where no container could be run, and kept with that word until one was.
#
#   docker build --tag millpond .
#   docker build --tag millpond:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#   docker run --publish 127.0.0.1:8000:8000 --env MILLPOND_API_KEY --volume models:/models --stop-timeout 40 \
#       millpond BAAI/bge-small-en-v1.5
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# For the compiled kernels; without it the package would be built without them.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/millpond
# torch first, and from its own index: PyPI's wheels bring CUDA along, which a CPU has no use for.
RUN /opt/millpond/bin/pip install --index-url "${TORCH_INDEX}" "torch>=2.11,<3"
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md CHANGELOG.md LICENSE ./
COPY src src
RUN /opt/millpond/bin/pip install ".[server,otel]"

FROM python:${PYTHON_VERSION}-slim
RUN useradd --create-home --uid 10001 millpond && install --directory --owner millpond --group millpond /models
COPY --from=build /opt/millpond /opt/millpond
# Inside a container the loopback device reaches nobody; who may come in is the publisher's choice, and the key's.
ENV PATH=/opt/millpond/bin:$PATH HF_HOME=/models MILLPOND_HOST=0.0.0.0 MILLPOND_PORT=8000 PYTHONUNBUFFERED=1
USER millpond
WORKDIR /models
VOLUME /models
EXPOSE 8000
# The first start downloads the model, which may take minutes. Another port goes by MILLPOND_PORT, which is read here,
# not by --port; TLS and a Unix socket need a check of their own. A proxy that the container is told of is not asked.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"MILLPOND_PORT\"]}/health', timeout=4)"]
# Not by a shell: signals go to millpond itself, which drains.
ENTRYPOINT ["millpond", "serve"]
