"""Models of Firefox come from a server that answers as Mozilla's does."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sightline.__main__ import main
from sightline.base.bundle_files import read_bundle
from sightline.base.errors import UsageError
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.download import UnreachableError
from sightline.export.sources.firefox.published import RECORDS, downloaded_model, find_model, published_models
from tests.export.firefox.models import VOCABULARY, random_tensors, write_folder, write_shortlist

FILES = {
    "model": ("model.ende.intgemm.alphas.bin", b"weights" * 999),
    "vocab": ("vocab.ende.spm", b"pieces"),
    "lex": ("lex.50.50.ende.s2t.bin", b"words"),
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Mozilla:
    """Content and behaviour of the server, and the requests that it received."""

    records: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)  # by location
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # path and Range
    cut: dict[str, int] = field(default_factory=dict)  # bytes after which a transfer breaks off, by location
    has_ranges: bool = True

    def publish(
        self,
        pair: str = "en-de",
        version: str = "3.0",
        architecture: str = "tiny",
        files: Mapping[str, tuple[str, bytes]] | None = None,
        **changes: Any,
    ) -> None:
        source, target = pair.split("-", 1)
        for kind, (name, data) in (files or FILES).items():
            packed, location = zstandard.compress(data), f"models/{pair}-{version}-{architecture}/{name}.zst"
            self.files[location] = packed
            attachment = {"hash": sha256(packed), "size": len(packed), "filename": f"{name}.zst", "location": location}
            record = {"name": name, "schema": 1, "version": version, "fileType": kind, "attachment": attachment}
            record |= {"architecture": architecture, "sourceLanguage": source, "targetLanguage": target}
            record |= {"decompressedHash": sha256(data), "decompressedSize": len(data), "filter_expression": ""}
            self.records.append(record | {"id": location, "last_modified": len(self.records)} | changes)


class Handler(BaseHTTPRequestHandler):
    mozilla: Mozilla
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        mozilla, wanted = self.mozilla, self.headers.get("Range")
        mozilla.requests.append((self.path, wanted))
        data = mozilla.files.get(self.path.removeprefix("/files/"))
        if self.path == "/v1/":
            data = json.dumps({"capabilities": {"attachments": {"base_url": "/files/"}}}).encode()
        elif self.path == f"/v1/{RECORDS}":
            data = json.dumps({"data": mozilla.records}).encode()
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and mozilla.has_ranges else 0
        self.send_response(404 if data is None else 206 if start else 200)
        rest = (data or b"")[start:]
        self.send_header("Content-Length", str(len(rest)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{start + len(rest) - 1}/{start + len(rest)}")
        self.end_headers()
        end = mozilla.cut.pop(self.path.removeprefix("/files/"), None)
        self.wfile.write(rest[:end])
        self.close_connection = end is not None


@pytest.fixture
def mozilla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mozilla]:
    mozilla = Mozilla()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"mozilla": mozilla}))
    server.daemon_threads = True
    monkeypatch.setenv("FIREFOX_MODELS_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}/v1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield mozilla
    server.shutdown()
    server.server_close()
    thread.join()


def get(pair: str = "en-de") -> dict[str, bytes]:
    """Return the files of a downloaded model."""
    with downloaded_model(find_model(pair, published_models())) as got:
        return {path.name: path.read_bytes() for path in got.folder.iterdir()}


def test_the_newest_complete_version_is_listed(mozilla: Mozilla, capsys: pytest.CaptureFixture[str]) -> None:
    mozilla.publish(version="3.0")
    mozilla.publish(version="3.10", architecture="base-memory")
    mozilla.publish(version="3.9", architecture="base")
    mozilla.publish(version="3.10", architecture="tiny")
    mozilla.publish(version="4.0a1")  # not released
    mozilla.publish(version="5.0", files={"model": FILES["model"], "srcvocab": ("srcvocab.ende.spm", b"s")})
    mozilla.publish("de-en", "3.0a1")
    mozilla.publish("en-zh-Hans", "1.0")
    mozilla.publish("en-fr", "new")
    mozilla.publish("en-es", name="../../model.enes.bin")
    mozilla.publish("en-it", fileType="qualityModel")
    mozilla.records += [{}, "text", {"fileType": "model"}]  # type: ignore[list-item]
    listed = {pair: (str(model.version), model.architecture) for pair, model in published_models().items()}
    assert listed == {"de-en": ("3.0a1", "tiny"), "en-de": ("3.10", "base-memory"), "en-zh-Hans": ("1.0", "tiny")}
    assert main(["models", "list", "firefox"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2] == ["firefox:en-de", "3.10", "base-memory", "0.0", "MB"]
    assert main(["models", "list", "firefox", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [line[0] for line in lines[1:]]


def test_the_files_are_unpacked_with_their_metadata(mozilla: Mozilla) -> None:
    mozilla.publish()
    files = get("EN_de")
    metadata = json.loads(files.pop("metadata.json"))
    assert files == dict(FILES.values())
    assert metadata == {
        "sourceLanguage": "en",
        "targetLanguage": "de",
        "architecture": "tiny",
        "version": "3.0",
        "hash": sha256(FILES["model"][1]),
    }
    mozilla.requests.clear()
    assert get().keys() == {*files, "metadata.json"}
    assert not any("/files/" in path for path, _ in mozilla.requests)  # they are kept


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_download_that_breaks_off_is_continued(mozilla: Mozilla, has_ranges: bool) -> None:
    name, data = FILES["model"][0], os.urandom(12 << 20)
    mozilla.publish(files={**FILES, "model": (name, data)})
    mozilla.has_ranges = has_ranges
    location = mozilla.records[0]["attachment"]["location"]
    mozilla.cut[location] = 11 << 20  # the library writes 10 MiB at once
    assert get()[name] == data
    assert [wanted for path, wanted in mozilla.requests if location in path] == [None, f"bytes={10 << 20}-"]


def test_the_same_command_continues_a_download(mozilla: Mozilla, tmp_path: Path) -> None:
    mozilla.publish()
    attachment = mozilla.records[0]["attachment"]
    data = mozilla.files.pop(attachment["location"])
    part = tmp_path / "home" / "firefox-models" / f"{attachment['hash']}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(data[:7])
    with pytest.raises(UnreachableError, match=r"answered 404; .*the same command continues a download"):
        get()
    mozilla.files[attachment["location"]] = data
    assert get()[FILES["model"][0]] == FILES["model"][1]
    assert mozilla.requests[-3][1] == "bytes=7-" and not part.exists()


def other(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [other, lambda data: data + b"more", lambda data: data + bytes(99)])
def test_another_file_is_not_used(mozilla: Mozilla, change: Any, tmp_path: Path) -> None:
    mozilla.publish()
    location = mozilla.records[0]["attachment"]["location"]
    mozilla.files[location] = change(mozilla.files[location])
    with pytest.raises(ImportFailedError, match=r"has another size or SHA-256 than the list of models states"):
        get()
    assert not list((tmp_path / "home").rglob("*.part"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decompressedHash": "0" * 64}, "has another size or SHA-256 after unpacking"),
        ({"decompressedSize": 1}, "has another size or SHA-256 after unpacking"),
    ],
)
def test_the_unpacked_file_is_checked(mozilla: Mozilla, changes: dict[str, Any], message: str) -> None:
    mozilla.publish(**changes)
    with pytest.raises(ImportFailedError, match=message):
        get()


def test_a_file_that_is_no_zstd_is_an_error(mozilla: Mozilla) -> None:
    mozilla.publish()
    attachment = mozilla.records[0]["attachment"]
    mozilla.files[attachment["location"]] = b"text"
    attachment |= {"hash": sha256(b"text"), "size": 4}
    with pytest.raises(ImportFailedError, match=r"cannot be unpacked: "):
        get()


def test_a_small_file_that_unpacks_to_a_huge_one_is_stopped(mozilla: Mozilla, tmp_path: Path) -> None:
    mozilla.publish(files={**FILES, "model": (FILES["model"][0], bytes(64 << 20))}, decompressedSize=1000)
    with pytest.raises(ImportFailedError, match="has another size or SHA-256 after unpacking"):
        get()


def test_a_pair_that_is_not_published_is_an_error_with_a_way(mozilla: Mozilla) -> None:
    mozilla.publish("de-en")
    mozilla.publish("en-fr")
    models = published_models()
    with pytest.raises(UsageError, match=r"no Firefox model for de-fr.*firefox:de-en.*firefox:en-fr.* by way of"):
        find_model("de-fr", models)
    with pytest.raises(UsageError, match=r"no Firefox model for en-ga.*`sightline models list firefox` has the pairs"):
        find_model("en-ga", models)


@pytest.mark.parametrize(
    ("records", "message"),
    [([], "has no model that can be imported"), ({"a": 1}, "has no list of models")],
)
def test_a_list_without_models_is_an_error(mozilla: Mozilla, records: Any, message: str) -> None:
    mozilla.records = records
    with pytest.raises(ImportFailedError, match=message):
        published_models()


def test_a_server_that_cannot_be_reached_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FIREFOX_MODELS_ENDPOINT", "http://127.0.0.1:9/v1/")
    assert main(["models", "list", "firefox"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: http://127.0.0.1:9/v1/{RECORDS} cannot be reached (ConnectError); check the network"
    )
    monkeypatch.setenv("FIREFOX_MODELS_ENDPOINT", "nowhere")
    assert main(["models", "list", "firefox"]) == 1


@pytest.mark.usefixtures("few_sentences")
def test_published_models_become_bundles(
    mozilla: Mozilla, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "ende", random_tensors())
    model = (folder / "model.ende.intgemm8.bin").read_bytes()
    shortlist = write_shortlist([[1]] * VOCABULARY)
    for pair in ("en-de", "de-en"):
        word = pair.replace("-", "")
        files = {"model": (f"model.{word}.intgemm8.bin", model), "lex": (f"lex.50.50.{word}.s2t.bin", shortlist)}
        files["vocab"] = (f"vocab.{word}.spm", (folder / "vocab.ende.spm").read_bytes())
        mozilla.publish(pair, files=files)
    monkeypatch.chdir(tmp_path)
    status = main(["models", "get", "firefox", "--pairs", "en-de, de-en,en-fr", "--bits", "32"])
    errors = capsys.readouterr().err
    assert (status, errors.count("error: there is no Firefox model for en-fr")) == (2, 1), errors
    for pair in ("en-de", "de-en"):
        manifest = read_bundle(tmp_path / "bundles" / f"firefox-{pair}")
        assert manifest.origin is not None and manifest.languages is not None
        assert (manifest.origin.kind, manifest.origin.repository) == ("firefox", f"firefox:{pair}")
        assert (manifest.origin.revision, manifest.license, manifest.name) == ("3.0", "MPL-2.0", f"firefox-{pair}")
        assert f"{manifest.languages.source}-{manifest.languages.target}" == pair


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["firefox"], "the model firefox and --pairs need each other"),
        (["minilm", "--pairs", "en-de"], "the model firefox and --pairs need each other"),
        (["firefox", "--pairs", " ,"], "the model firefox and --pairs need each other"),
        (["firefox", "--pairs", "en-de,de-en", "--out", "x"], "--out, --keep and --name are of one model"),
    ],
)
def test_options_that_contradict_each_other(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "get", *words])
    assert message in capsys.readouterr().err
