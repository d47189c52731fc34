# docker build -t mlxrunner .                           for the CPU
# docker build -t mlxrunner --build-arg CUDA=1 .        for NVIDIA; run it with --gpus all
#
# Inside, the server listens on all addresses, and refuses to do so without a key unless it is told
# that anyone may come in. What is published decides who can:
#
# docker run --init -p 127.0.0.1:8080:8080 mlxrunner --allow-anyone
#                                                       the built-in model, for this machine only
# docker run --init -p 8080:8080 -e MLXRUNNER_API_KEY=… -v ~/models:/models mlxrunner /models/some-model
#                                                       for the network, with a key
# docker run --rm --entrypoint mlxrunner mlxrunner key me
#                                                       a key, and the line for a file of keys
#
# Everything that is written goes to /models (downloads, and what is known of files that were
# checked) and /tmp: --read-only --tmpfs /tmp works, and with a read-only /models nothing can be
# pulled. Docker kills ten seconds after it asks; --stop-timeout 45 lets answers end (--drain).
# compose.yaml in deploy/ has all of this together.

ARG BASE=python:3.13-slim-trixie

FROM ${BASE} AS build
ARG CUDA=0
WORKDIR /build
# The environment gets no pip of its own: the image's pip fills it from outside.
RUN python -m venv --without-pip /opt/mlxrunner
ENV PIP_PYTHON=/opt/mlxrunner/bin/python PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
# Libraries first: they change less often than we do.
COPY requirements requirements
RUN lock=serve; if [ "$CUDA" = 1 ]; then lock=cuda; fi; \
    pip install --require-hashes --only-binary=:all: --requirement "requirements/$lock.txt" && \
    pip install --require-hashes --only-binary=:all: --target /build/tools \
        --requirement requirements/build.txt
# The CPU kernels want a compiler, which stays in this stage; NVIDIA's image has no use for them.
RUN if [ "$CUDA" != 1 ]; then \
        apt-get update && apt-get install --yes --no-install-recommends g++; \
    fi
COPY pyproject.toml README.md LICENSE openapi.yaml ./
COPY deploy/wheel deploy/wheel
COPY models models
COPY app app
# An install goes on without kernels; an image that is many times too slow is not worth having.
RUN if [ "$CUDA" = 1 ]; then export MLXRUNNER_BUILD_FOR=cuda; fi; \
    PYTHONPATH=/build/tools pip install --no-build-isolation --no-deps . && \
    cd /opt/mlxrunner/lib/python3*/site-packages/mlxrunner/models/kernels && \
    if [ "$CUDA" != 1 ] && ! ls _kernels.*.so; then cat not_built.txt; exit 1; fi

FROM ${BASE}
# A home in which models are looked for and may be put: /models/.cache/huggingface is the Hugging
# Face cache, /models/.ollama Ollama's store.
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
# 200 is "ready", and needs no key. Spoken plainly, without the proxies that a container may be told
# of, and without TLS, which belongs before a container.
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import http.client, os; server = http.client.HTTPConnection('127.0.0.1', int(os.environ['MLXRUNNER_PORT']), timeout=4); server.request('GET', '/health'); raise SystemExit(server.getresponse().status != 200)"]
ENTRYPOINT ["mlxrunner", "serve"]
