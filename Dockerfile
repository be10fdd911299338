# `make check-dockerfile` executes every line without Docker; CI builds it with Docker each night.
#
#   docker build --tag millpond .
#   docker build --tag millpond:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#   docker run --publish 127.0.0.1:8000:8000 --env MILLPOND_API_KEY --volume models:/models --stop-timeout 40 \
#       millpond BAAI/bge-small-en-v1.5
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# The C++ kernels need a compiler; without one the package is built without them.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/millpond
# torch first, from its own index: PyPI's wheels include CUDA, which a CPU does not need.
RUN /opt/millpond/bin/pip install --index-url "${TORCH_INDEX}" "torch>=2.11,<3"
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md CHANGELOG.md LICENSE ./
COPY src src
RUN /opt/millpond/bin/pip install ".[server,otel]"

FROM python:${PYTHON_VERSION}-slim
RUN useradd --create-home --uid 10001 millpond && install --directory --owner millpond --group millpond /models
COPY --from=build /opt/millpond /opt/millpond
# A container's loopback address is not reachable from outside. Access is limited by --publish and by MILLPOND_API_KEY.
ENV PATH=/opt/millpond/bin:$PATH HF_HOME=/models MILLPOND_HOST=0.0.0.0 MILLPOND_PORT=8000 PYTHONUNBUFFERED=1
USER millpond
WORKDIR /models
VOLUME /models
EXPOSE 8000
# The first start downloads the model, which may take minutes. Set another port with MILLPOND_PORT, which is read here,
# not with --port. TLS and Unix sockets need another health check. Proxy settings of the container are ignored.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"MILLPOND_PORT\"]}/health', timeout=4)"]
# Exec form, without a shell: signals reach millpond, which then drains.
ENTRYPOINT ["millpond", "serve"]
