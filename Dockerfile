# Images of the service and of its load test. Neither has torch: what trains and exports stays outside.
#   docker build --target service -t sightline .
#   docker build --target service --build-arg RUNTIME=gpu -t sightline-gpu .
#   docker build --target loadtest -t sightline-loadtest .

# The packages, without code, so that a change of code installs nothing again.
FROM python:3.11-slim-bookworm AS packages
# A mirror of the package index, for those behind one; pip's own default where it is not given.
ARG PIP_INDEX_URL
# cpu or gpu. CUDA's libraries are packages too; the driver comes from the host.
ARG RUNTIME=cpu
WORKDIR /build
COPY pyproject.toml constraints.txt constraints-gpu.txt ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['${RUNTIME}'], sep='\n')" > requirements.txt \
 && python -m venv --without-pip /opt/venv \
 && pip --python /opt/venv install --no-cache-dir --disable-pip-version-check -r requirements.txt -c constraints.txt \
    $(if [ "$RUNTIME" = gpu ]; then echo -c constraints-gpu.txt; fi)

FROM python:3.11-slim-bookworm AS base
RUN groupadd --system --gid 10001 sightline \
 && useradd --system --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent sightline
COPY --from=packages /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app

FROM base AS loadtest
COPY tests/data/sentences.txt tests/data/sentences.txt
COPY loadtest loadtest
RUN python -m compileall -q loadtest
USER 10001:10001
ENTRYPOINT ["python", "-m", "loadtest"]

FROM base AS service
COPY bundles bundles
COPY service service
RUN python -m compileall -q service
# ONNX Runtime would report its use to its makers over the network.
ENV SIGHTLINE_HOST=0.0.0.0 SIGHTLINE_PORT=8000 ORT_DISABLE_TELEMETRY=1
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 CMD ["python", "-c", \
  "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"SIGHTLINE_PORT\"]}/health/ready', timeout=2)"]
# In exec form: SIGTERM reaches Python, which drains and exits.
ENTRYPOINT ["python", "-m", "service"]
