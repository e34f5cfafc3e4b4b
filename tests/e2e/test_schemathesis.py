"""Valid and invalid requests generated from the OpenAPI document get the declared responses.

`make test` sends some 900, the same each time: examples and random requests of all
routes, and all bounds and types of the parameters of the paths `COVERED`. `make test-all` covers
the parameters of all routes, and `make fuzz` sends many more requests, others each time.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from lab.bench.server import RunningServer, serving

GLOSSARIES = (
    *(("POST", ""), *((method, "/{glossary_id}") for method in ("GET", "DELETE")), ("GET", "/{glossary_id}/entries")),
    *(("PATCH", "/{glossary_id}"), *((method, "/{glossary_id}/dictionaries") for method in ("PUT", "DELETE"))),
)
EXAMPLES = os.environ.get("FUZZ_EXAMPLES")  # of each route; the few of every time where it is not set
# No shipped model reranks, tags, answers or predicts tokens, models are controlled and glossaries
# are stored only if a setting allows it, random names are no files of the page,
# and random bytes no documents.
NEVER_ACCEPTED = {
    "GET /docs/{file}",
    "GET /page/{file}",
    "POST /v2/document",
    "POST /v2/document/{document_id}",
    "POST /v2/document/{document_id}/result",
    "POST /translate_file",
    "GET /download_file/{name}",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /rerank",
    "POST /v1/tag",
    "POST /v1/answer",
    "POST /v1/fill-mask",
    "POST /embed_sparse",
    "POST /v2/repository/models/{model_name}/load",
    "POST /v2/repository/models/{model_name}/unload",
    *(f"{method} /v1/glossaries/{{glossary_id}}" for method in ("GET", "PUT", "DELETE")),
    *(f"{method} /v2/glossaries{path}" for method, path in GLOSSARIES[:4]),
    *(f"{method} /v3/glossaries{path}" for method, path in GLOSSARIES),
}
MODELS = ("multi30k-en-de", "smalltalk-chat-gatt", "sst2-sentiment")  # one of each kind
COVERED = ("/v1/generate", "/v2/models/{model_name}/ready")  # paths whose parameters are covered each time
PATIENCE_S = 300  # a machine that is slow is no fault
NAMES = ("body.model", "query.model", "path.model_id", "path.model_name")  # what routes call a model

CONFIG = """
hooks = "tests.e2e.schemathesis_hooks"
continue-on-failure = true
request-timeout = {patience_s}

[cache]
enabled = false

[generation]
database = "none"
deterministic = {is_deterministic}
max-examples = {examples}

[dictionaries.models]
values = {models}

[parameters]
{parameters}

[reports.json]
path = "{report}"

[[operations]]
exclude-path = {covered}
phases.coverage.enabled = {covers_all}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    for name in MODELS:
        shutil.copytree(Path("bundles", name), tmp_path / "bundles" / name)
    with serving(
        tmp_path / "bundles",
        default_model="multi30k-en-de",
        queue_timeout_s=PATIENCE_S,
        request_timeout_s=PATIENCE_S,
        workers=1,
    ) as server:
        yield server


@pytest.mark.parametrize("covers_all", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_operation_conforms_to_the_document(server: RunningServer, tmp_path: Path, covers_all: bool) -> None:
    config, document, report = (tmp_path / name for name in ("schemathesis.toml", "openapi.json", "report.json"))
    with urlopen(f"{server.url}/openapi.json", timeout=PATIENCE_S) as response:
        document.write_bytes(response.read())  # schemathesis would omit the route of a document from a URL
    bindings = (f'"{name}" = {{ dictionary = "models", probability = 0.9 }}' for name in NAMES)
    config.write_text(
        CONFIG.format(
            is_deterministic=json.dumps(EXAMPLES is None),
            examples=EXAMPLES or 3,
            patience_s=PATIENCE_S,
            models=json.dumps(MODELS),
            parameters="\n".join(bindings),
            report=report,
            covered=json.dumps(COVERED),
            covers_all=json.dumps(covers_all),
        ),
        encoding="utf-8",
    )
    words = ["--config-file", str(config), "run", str(document), "--url", server.url]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}  # for the hooks
    command = [sys.executable, "-m", "schemathesis.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    paths = json.loads(document.read_bytes())["paths"]
    can_succeed = {
        f"{method.upper()} {path}": "200" in operation["responses"]
        for path, operations in paths.items()
        for method, operation in operations.items()
    }
    assert found["operations"]["tested"] == len(can_succeed)
    rates = found["valid_rates"]
    succeeded = {name for name, phases in rates.items() if any(one["accepted"] for one in phases.values())}
    assert succeeded == {name for name, can in can_succeed.items() if can} - NEVER_ACCEPTED
