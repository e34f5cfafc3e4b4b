# Images of the service and of its load test. Neither contains PyTorch or models.
#   docker build --target service -t sightline .
#   docker build --target service --build-arg RUNTIME=gpu -t sightline-gpu .
#   docker build --target loadtest -t sightline-loadtest .
# Build arguments:
#   RUNTIME        cpu (default) or gpu (experimental: not yet run on one). CUDA's libraries are Python packages in
#                  the image; the driver is the host's.
#   VERSION        version in the image's labels; by default that of pyproject.toml.
#   REVISION       commit in the image's labels. `make image` sets VERSION and REVISION.
#   PIP_INDEX_URL  mirror of the package index; by default PyPI.

# The packages have a stage of their own, so that a change of the code does not install them again.
FROM python:3.11-slim-bookworm AS packages
ARG PIP_INDEX_URL
ARG RUNTIME=cpu
WORKDIR /build
COPY requirements-cpu.txt requirements-gpu.txt ./
# Each image installs exactly the files whose hashes `make lock` wrote.
RUN python -m venv --without-pip /opt/venv \
 && pip --python /opt/venv install --no-cache-dir --disable-pip-version-check --require-hashes --only-binary :all: \
    -r "requirements-$RUNTIME.txt"

FROM python:3.11-slim-bookworm AS base
RUN groupadd --system --gid 10001 sightline \
 && useradd --system --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent sightline
COPY --from=packages /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app

FROM base AS loadtest
COPY sightline sightline
COPY loadtest sightline/loadtest
RUN python -m compileall -q sightline
USER 10001:10001
ENTRYPOINT ["python", "-m", "sightline", "load"]
ARG VERSION=0.4.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Sightline load test" \
      org.opencontainers.image.description="Measures a running Sightline service." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"

FROM base AS service
COPY sightline sightline
COPY export sightline/export
COPY loadtest sightline/loadtest
COPY model sightline/model
COPY service sightline/service
COPY translation sightline/translation
# A new volume for the bundles gets the owner of this folder.
RUN python -m compileall -q sightline && install --directory --owner 10001 --group 10001 /bundles
# HF_HOME: downloads of models stay in the volume of the bundles.
# ORT_DISABLE_TELEMETRY: otherwise, ONNX Runtime sends usage data over the network.
ENV SIGHTLINE_HOST=:: SIGHTLINE_PORT=8000 SIGHTLINE_BUNDLES=/bundles HF_HOME=/bundles/.cache ORT_DISABLE_TELEMETRY=1
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m --retries=3 CMD \
  ["python", "-m", "sightline.service.health_check"]
# The exec form lets Python receive SIGTERM, so that it drains and exits.
ENTRYPOINT ["python", "-m", "sightline", "serve"]
# Labels come last: another version or revision only changes the image's metadata. The licence is
# that of the code; the weights of a model have their own, in its MODEL_CARD.md or its manifest.
ARG VERSION=0.4.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Sightline" \
      org.opencontainers.image.description="Serves trained attention models over HTTP, and shows what they attend to." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
