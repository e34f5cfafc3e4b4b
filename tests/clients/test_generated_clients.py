"""Clients generated from the OpenAPI document: their types, and their calls with a key.

The generators have an environment of their own, which `make test-clients` creates.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from lab.bench.server import serving
from sightline.service.keys import add_key

pytestmark = pytest.mark.clients

TOOLS = Path(".venv-clients").resolve()
MODEL = "multi30k-en-de"
# Like program.ts, it takes the address and a key, and prints a text, the size of a vector, and the
# kind and shape of an attention map.
PYTHON = """
import json, sys
from client import AuthenticatedClient
from client.api.sightline import encode_texts, generate_text, show_attention
from client.models import AttentionBody, AttentionBodyKindsType0Item, AttentionResult, EncodeBody, EncodeResult
from client.models import ErrorResponse, GenerateBody, GenerateParameters, GenerateResult

client = AuthenticatedClient(sys.argv[1], sys.argv[2])
body = GenerateBody(inputs="A dog runs.", parameters=GenerateParameters(max_new_tokens=20))
generated = generate_text.sync(client=client, body=body)
encoded = encode_texts.sync(client=client, body=EncodeBody(inputs="A dog runs."))
selected = AttentionBody(inputs="A dog runs.", kinds=[AttentionBodyKindsType0Item.CROSS])
shown = show_attention.sync(client=client, body=selected)
assert isinstance(generated, GenerateResult) and isinstance(encoded, EncodeResult)
assert isinstance(shown, AttentionResult)
stranger = AuthenticatedClient(sys.argv[1], "another key")
rejected = generate_text.sync(client=stranger, body=body)
assert isinstance(rejected, ErrorResponse) and rejected.error.code == "unauthorized"
(attention,) = shown.outputs[0].maps
print(json.dumps([generated.outputs[0].text, len(encoded.embeddings[0]), attention.kind, attention.shape]))
"""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """The OpenAPI document of a running service in a file, its address and a key."""
    folder = tmp_path_factory.mktemp("clients")
    shutil.copytree(Path("bundles", MODEL), folder / "bundles" / MODEL)
    key = add_key(folder / "keys.json", "alice", "use")
    with serving(folder / "bundles", keys=folder / "keys.json") as server:
        path, request = folder / "openapi.json", Request(f"{server.url}/openapi.json", headers={"X-API-Key": key})
        with urlopen(request, timeout=60) as response:
            path.write_bytes(response.read())
        yield path, server.url, key


def run(folder: Path, *words: str | Path) -> str:
    done = subprocess.run([*map(str, words)], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check(printed: str) -> None:
    text, size, kind, shape = json.loads(printed)
    assert (text, size, kind) == ("Ein Hund rennt.", 128, "cross")
    assert shape == [4, 4, 5, 5]  # layers, heads and tokens


def test_a_client_for_python(document: tuple[Path, str, str], tmp_path: Path) -> None:
    path, *arguments = document
    (tmp_path / "config.yaml").write_text("post_hooks: []", encoding="utf-8")  # they would format the code
    options: list[str | Path] = ["--path", path, "--meta", "none", "--output-path", "client"]
    generator = TOOLS / "bin" / "openapi-python-client"
    assert run(tmp_path, generator, "generate", *options, "--config", "config.yaml") == "Generating client\n"
    openapi: dict[str, Any] = json.loads(path.read_bytes())
    names = {operation["operationId"] for operations in openapi["paths"].values() for operation in operations.values()}
    modules = {module.stem: module for module in tmp_path.glob("client/api/*/[a-z]*.py")}
    assert modules.keys() == names
    for module in modules.values():  # the type of each result is known
        assert not re.search(
            r"^\) -> .*\bAny\b", module.read_text(encoding="utf-8").split("def sync_detailed")[1], re.M
        )
    (tmp_path / "program.py").write_text(PYTHON, encoding="utf-8")
    check(run(tmp_path, TOOLS / "bin" / "python", "program.py", *arguments))


def test_a_client_for_typescript(document: tuple[Path, str, str], tmp_path: Path) -> None:
    path, *arguments = document
    programs = TOOLS / "node_modules" / ".bin"
    run(tmp_path, programs / "openapi-ts", "--input", path, "--output", "client")
    shutil.copy("tests/clients/program.ts", tmp_path)
    options = ("--strict", "--target", "es2022", "--module", "commonjs", "--moduleResolution", "node10")
    run(tmp_path, programs / "tsc", *options, "program.ts")
    check(run(tmp_path, "node", "program.js", *arguments))
