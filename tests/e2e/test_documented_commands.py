"""Every command and example of the documentation runs as printed, or names what it needs.

Shell and Python blocks run from the root of the repository against a service with the shipped
bundles, unless the line before them is `<!-- needs: ... -->`. Their output is compared with the
block after `<!-- output -->`, in which `...` stands for any text. JSON output may be wrapped
anywhere.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lab.bench.server import RunningServer
from tests.e2e.ready_process import CLIENT
from tests.service.conftest import wait_until

PAGES = sorted([Path("README.md"), Path("CONTRIBUTING.md"), *Path("docs").rglob("*.md")])
FENCE = re.compile(
    r"(?:^<!-- needs: (?P<needs>[^\n]+) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```\n"
    r"(?:\n<!-- output -->\n```(?P<kind>json|text)\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
RUN = {"sh", "bash", "console", "python"}
SHOWN = {"text", "json", "yaml"}  # no commands
# Commands that change the machine or its environments must never run as a test.
UNSAFE = re.compile(r"\b(make|pip|docker|docker-compose|sudo|systemctl|rm)\b")
CLIENTS = "packages of these clients"
CLIENT_PACKAGES = ("langchain-openai", "llama-index-llms-openai-like", "llama-index-embeddings-openai-like", "litellm")
NEEDS = {
    "network": "downloads packages",
    CLIENTS: "packages that the tests do not install",
    "Debian": "root, and packages of Debian",
    "Docker": "a Docker engine",
    "GPU": "a GPU with CUDA",
    "data": "training data or a checkpoint",
    "glossaries": "a service with a folder of glossaries",
    "quiet machine": "measures for minutes",
    "root": "root",
    "Chromium": "Chromium",
    "systemd": "a machine that systemd runs",
    "Kubernetes": "a cluster, and a registry of images",
    "nginx": "nginx in front of the service",
    "Prometheus": "a Prometheus server",
    "collector": "a collector of OpenTelemetry",
    "Ray": "the extra ray, and a Ray cluster",
    "perf_analyzer": "Triton's perf_analyzer",
    "time": "runs for minutes",
}

# Pages on which every command needs the same.
PAGE_NEEDS = {
    Path("docs/performance.md"): "quiet machine",
    Path("docs/explanation/reliability.md"): "quiet machine",
    Path("docs/explanation/quantization.md"): "data",
}
# The measuring commands record themselves in these parts of a page.
RECORDS = re.compile(r"<!-- figures: .*?<!-- end of figures -->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    needs: str | None
    code: str
    kind: str | None  # of the expected output
    output: str


def read_text(page: Path) -> str:
    """Return the text of a page without records, with the same number of lines."""
    return RECORDS.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))


def read_blocks(page: Path) -> list[Block]:
    text = read_text(page)
    return [
        Block(
            page,
            text.count("\n", 0, match.start("code")),
            match["language"],
            match["needs"] or PAGE_NEEDS.get(page),
            match["code"],
            match["kind"],
            match["output"] or "",
        )
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def has_pattern(expected: str, text: str) -> bool:
    """Compare a text with an expected one, in which `...` stands for any text."""
    parts = (re.escape(part) for part in expected.split("..."))
    return re.fullmatch(".*?".join(parts), text, re.DOTALL) is not None


def is_safe(block: Block) -> bool:
    return block.language == "python" or block.language in SHOWN or not UNSAFE.search(block.code)


def test_every_block_runs_or_names_what_it_needs() -> None:
    for block in BLOCKS:
        assert block.language in RUN | SHOWN, f"{block.page}:{block.line}"
        assert block.needs is None or block.needs in NEEDS, f"{block.page}:{block.line}"
        assert is_safe(block) or block.needs, f"{block.page}:{block.line} changes the machine: name what it needs"


def test_no_fence_is_overlooked() -> None:
    for page in PAGES:
        fences = re.findall(r"^\s*(```|~~~)", read_text(page), flags=re.MULTILINE)
        blocks = [block for block in BLOCKS if block.page == page]
        assert len(fences) == sum(2 + 2 * (block.kind is not None) for block in blocks), page


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.fixture(scope="module")
def ready_command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The command `sightline` in copies of a process that has imported what it needs."""
    folder = tmp_path_factory.mktemp("ready")
    path, client = folder / "socket", folder / "sightline"
    client.write_text(CLIENT.format(python=sys.executable, path=str(path)), encoding="utf-8")
    client.chmod(0o755)
    with subprocess.Popen([sys.executable, "-m", "tests.e2e.ready_process", str(path)]) as process:
        wait_until(path.exists)
        yield client
        process.kill()


@pytest.mark.parametrize(
    "block", [one for one in BLOCKS if one.language in RUN and one.needs is None and is_safe(one)], ids=name_of
)
def test_a_block_prints_what_the_page_shows(shipped: RunningServer, ready_command: Path, block: Block) -> None:
    ready = replace(block, code=block.code.replace(".venv/bin/sightline", str(ready_command)))
    check_output(shipped, ready, Path(sys.executable))


@pytest.fixture(scope="module")
def python_with_clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the packages that the page names and `.venv` does not have."""
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *CLIENT_PACKAGES], check=True)
    return python


@pytest.mark.download
@pytest.mark.parametrize("block", [one for one in BLOCKS if one.needs == CLIENTS], ids=name_of)
def test_a_block_for_another_client_prints_what_the_page_shows(
    shipped: RunningServer, block: Block, python_with_clients: Path
) -> None:
    page = block.page.read_text(encoding="utf-8")
    assert all(f"`{package}`" in page for package in CLIENT_PACKAGES)
    check_output(shipped, block, python_with_clients, warnings="default")


def check_output(server: RunningServer, block: Block, python: Path, warnings: str = "error") -> None:
    address = server.url.removeprefix("http://")
    code = block.code.replace("127.0.0.1:8000", address)
    code = re.sub(r"\.venv(-serve-cpu)?/bin/", f"{python.parent}/", code)
    code = code.replace("sightline load ", "sightline load --max-lag 1m ")  # other tests may take the processors
    command = [str(python), "-W", warnings, "-c", code] if block.language == "python" else ["sh", "-e", "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    expected, printed = block.output, done.stdout
    if block.kind == "json":
        expected, printed = ("".join(text.split()) for text in (expected, printed))
    assert has_pattern(expected.strip(), printed.strip()), printed
