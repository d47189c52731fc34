# docker build -t mlxrunner .                           for the CPU
# docker build -t mlxrunner --build-arg CUDA=1 .        for NVIDIA; run it with --gpus all
#
# In the container, the server listens on all addresses, so it requires an API key or --allow-anyone.
# The published port determines who can connect:
#
# docker run --init -p 127.0.0.1:8080:8080 mlxrunner --allow-anyone
#                                                       the built-in model, for this machine only
# docker run --init -p 8080:8080 -e MLXRUNNER_API_KEY=… -v ~/models:/models mlxrunner /models/some-model
#                                                       for the network, with a key
# docker run --rm --entrypoint mlxrunner mlxrunner key me
#                                                       a key, and the line for a file of keys
#
# The server writes only to /models (downloads, and digests of checked files) and /tmp. The options
# --read-only --tmpfs /tmp therefore work; with a read-only /models, it cannot download models. Docker
# kills a container ten seconds after SIGTERM; --stop-timeout 45 lets running requests finish (--drain).
# deploy/compose.yaml contains all of this.

ARG BASE=python:3.13-slim-trixie

FROM ${BASE} AS build
ARG CUDA=0
WORKDIR /build
# The environment has no pip: the image's pip installs into it.
RUN python -m venv --without-pip /opt/mlxrunner
ENV PIP_PYTHON=/opt/mlxrunner/bin/python PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
# Libraries first, because they change less often than our code.
COPY requirements requirements
RUN lock=serve; if [ "$CUDA" = 1 ]; then lock=cuda; fi; \
    pip install --require-hashes --only-binary=:all: --requirement "requirements/$lock.txt" && \
    pip install --require-hashes --only-binary=:all: --target /build/tools \
        --requirement requirements/build.txt
# The CPU kernels need a compiler, in this stage only. The image for NVIDIA has no CPU kernels.
RUN if [ "$CUDA" != 1 ]; then \
        apt-get update && apt-get install --yes --no-install-recommends g++; \
    fi
COPY pyproject.toml README.md LICENSE openapi.yaml ./
COPY deploy/wheel deploy/wheel
COPY models models
COPY app app
# pip continues if the kernels cannot be built. An image without them would be many times slower, so
# this step fails.
RUN if [ "$CUDA" = 1 ]; then export MLXRUNNER_BUILD_FOR=cuda; fi; \
    PYTHONPATH=/build/tools pip install --no-build-isolation --no-deps . && \
    cd /opt/mlxrunner/lib/python3*/site-packages/mlxrunner/models/kernels && \
    if [ "$CUDA" != 1 ] && ! ls _kernels.*.so; then cat not_built.txt; exit 1; fi

FROM ${BASE}
# The home directory /models contains the models: /models/.cache/huggingface is the Hugging Face cache,
# /models/.ollama is Ollama's store.
RUN useradd --system --uid 10001 --home-dir /models --no-create-home --shell /usr/sbin/nologin \
        mlxrunner && install --directory --owner=10001 --mode=755 /models && \
    install --directory --owner=10001 --mode=700 /keys && \
    install --directory --owner=10001 --mode=755 /secrets/prometheus /secrets/grafana
COPY --from=build /opt/mlxrunner /opt/mlxrunner
ENV PATH=/opt/mlxrunner/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/models \
    MLXRUNNER_HOST=0.0.0.0 MLXRUNNER_PORT=8080 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /models
VOLUME /models
EXPOSE 8080
STOPSIGNAL SIGTERM
# The status is 200 if the server is ready; /health needs no key. http.client ignores proxy variables.
# TLS belongs in a proxy in front of the container.
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import http.client, os; server = http.client.HTTPConnection('127.0.0.1', int(os.environ['MLXRUNNER_PORT']), timeout=4); server.request('GET', '/health'); raise SystemExit(server.getresponse().status != 200)"]
ENTRYPOINT ["mlxrunner", "serve"]
