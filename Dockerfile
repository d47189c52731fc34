# docker build -t mlxrunner .                           for the CPU
# docker build -t mlxrunner --build-arg CUDA=1 .        for NVIDIA; run it with --gpus all
# docker run -p 8080:8080 mlxrunner                     the built-in model
# docker run -p 8080:8080 -v ~/models:/models mlxrunner /models/some-model

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
    pip install --require-hashes --only-binary=:all: --requirement "requirements/$lock.txt"
COPY pyproject.toml README.md LICENSE ./
COPY models models
COPY app app
RUN pip install --no-build-isolation --no-deps . && pip uninstall --yes setuptools

FROM ${BASE}
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin mlxrunner
COPY --from=build /opt/mlxrunner /opt/mlxrunner
ENV PATH=/opt/mlxrunner/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /models
VOLUME /models
EXPOSE 8080
# Status 0 is "ready"; a model that is still loading answers too, with another number.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import json, urllib.request as web; status = json.load(web.urlopen('http://127.0.0.1:8080/v1/status', timeout=4)); raise SystemExit(status['Status'] != 0)"]
ENTRYPOINT ["mlxrunner", "serve", "--host", "0.0.0.0"]
