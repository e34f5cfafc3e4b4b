"""Documents over HTTP: multipart forms, translated files, and the store of those that wait."""

import asyncio
import os
import time
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from sightline.service.api_errors import ApiError
from sightline.service.body_fields import UploadedFile
from sightline.service.http.http_call import parse_form
from sightline.service.inference import document_store, documents
from sightline.service.inference.document_store import DocumentStore
from sightline.service.inference.translation import translate_marked
from tests.service.conftest import MakeBackend, Running, Start, with_languages

pytestmark = pytest.mark.anyio

TEXT = b"# a dog\r\n\r\n12 {name}\r\n"
PAIR = {"source": "en", "target": "de"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"sightline-{os.getuid()}"


async def send(running: Running, path: str, fields: Any, name: str = "Ä b.md", data: bytes = TEXT) -> Any:
    return await running.client.post(path, data=fields, files={"file": (name, data)})


async def upload(running: Running, data: bytes = TEXT, **fields: str) -> tuple[str, dict[str, str]]:
    """Begin a translation, and return the path of its status and the key."""
    handle = (await send(running, "/v2/document", {"target_lang": "DE", **fields}, data=data)).json()
    return f"/v2/document/{handle['document_id']}", {"document_key": handle["document_key"]}


async def ended(running: Running, path: str, key: Any) -> Any:
    while (status := await running.result(path, key))["status"] == "translating":
        await asyncio.sleep(0.01)
    return status


async def test_every_api_for_documents_has_the_same_translation(
    start: Start, make_backend: MakeBackend, folder: Path
) -> None:
    async with start(with_languages(make_backend(), fake="en-de")) as running:
        whole = (await running.result("/v1/translate", {"inputs": "a dog"}))["outputs"][0]["text"]
        expected = TEXT.replace(b"a dog", whole.encode())
        response = await send(running, "/v1/translate", {"source_language": "auto", "num_beams": "1"})
        assert (response.status_code, response.content) == (200, expected)
        assert response.headers["content-disposition"] == "attachment; filename*=UTF-8''%C3%84%20b.md"
        assert response.headers["content-type"] == "application/octet-stream"

        url = (await send(running, "/translate_file", PAIR)).json()["translatedFileUrl"]
        assert url.startswith("http://test/download_file/") and url.endswith(".md")
        for _ in range(2):
            assert (await running.client.get(url)).content == expected

        path, key = await upload(running)
        status = await ended(running, path, key)
        assert status == {
            "document_id": path.rpartition("/")[2], "status": "done", "seconds_remaining": None, "error_message": None
        }  # fmt: skip
        assert (await running.post(path, {"document_key": "x"})).status_code == 404
        assert (await running.post(f"{path}/result", key)).content == expected
        assert (await running.post(path, key)).status_code == 404
        assert [file.read_bytes() for file in folder.iterdir()] == [b"done\n" + expected]
        assert not any(name.name in url for name in folder.iterdir())


async def test_what_is_wrong_with_a_document_is_named(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", " " * 400_000)
    cases = (
        ("a.exe", b"", "file has no known format; the formats are .txt, .md"),
        ("a.txt", b"\xff", "file is not UTF-8, at line 1; convert it to UTF-8"),
        ("a.docx", stream.getvalue(), "file has more than 0 MiB of content; make it smaller"),
    )
    async with start(with_languages(make_backend(), fake="en-de"), max_body_bytes=10_000) as running:
        for name, data, message in cases:
            for path, fields in (
                ("/v1/translate", {}),
                ("/translate_file", PAIR),
                ("/v2/document", {"target_lang": "DE"}),
            ):
                response = await send(running, path, fields, name, data)
                assert response.status_code == (400 if "v2" in path else 422)
                assert message in response.text
        assert "target_lang" in (await send(running, "/v2/document", {"target_lang": "FR"})).text
        response = await running.client.post("/v1/translate", files={"file": (None, TEXT)})
        assert response.json()["error"]["message"] == (
            "file must be a file with a name; send the form as multipart/form-data."
        )
        monkeypatch.setitem(documents.__dict__, "read_document", missing)
        assert "because lxml is missing" in (await send(running, "/v1/translate", {})).text
        monkeypatch.undo()
        monkeypatch.setattr(documents, "translate_marked", fail)
        path, key = await upload(running)
        status = await ended(running, path, key)
        assert status["error_message"].startswith("Internal error")
        assert (await running.post(f"{path}/result", key)).status_code == 400


def missing(*_: Any) -> None:
    raise ModuleNotFoundError(name="lxml")


async def fail(*_: Any) -> None:
    raise RuntimeError


async def test_a_full_queue_delays_a_document(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    async def reject_first(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ApiError("overloaded")
        return await translate_marked(*arguments)

    monkeypatch.setattr(documents, "translate_marked", reject_first)
    async with start(with_languages(make_backend(), fake="en-de")) as running:
        assert (await send(running, "/v1/translate", {})).status_code == 429
        calls.clear()
        path, key = await upload(running)
        assert (await running.post(f"{path}/result", key)).status_code == 503
        monkeypatch.setattr(documents, "MAX_RUNNING", 1)
        assert (await send(running, "/v2/document", {"target_lang": "DE"})).status_code == 429
        await ended(running, path, key)
        assert len(calls) == 2


async def test_the_time_that_is_left_is_stored_and_returned(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, put = list[tuple[Any, ...]](), DocumentStore.put

    def record(store: DocumentStore, key: str, *state: Any) -> None:
        states.append(state)
        put(store, key, *state)

    monkeypatch.setattr(DocumentStore, "put", record)
    monkeypatch.setattr("sightline.translation.files.document.MAX_TEXTS", 1)
    async with start(with_languages(make_backend(), fake="en-de")) as running:
        path, key = await upload(running, b"a dog\n\na dog\n", model="fake")
        await ended(running, path, key)
        assert [state for state, *_ in states] == ["translating", "translating", "translating", "done"]
        assert states[1][1].isdigit() and states[2][1] == b"0"
        DocumentStore(100).put("a.md:b", "translating", b"7")
        assert (await running.result("/v2/document/a.md", {"document_key": "b"}))["seconds_remaining"] == 7


async def test_the_store_has_limits(folder: Path) -> None:
    store = DocumentStore(100)
    store.put("one", "done", b"x" * 60)
    with pytest.raises(ApiError, match="may have 100 bytes together"):
        store.put("two", "done", b"x" * 60)
    for file in folder.iterdir():
        os.utime(file, (0, time.time() - document_store.MAX_AGE_S - 1))
    store.put("two", "done", b"x" * 60)
    with pytest.raises(ApiError, match="There is no such document"):
        store.get("one")
    assert DocumentStore(100).get("two") == ("done", b"x" * 60)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rename(folder.with_name("other"))
    folder.symlink_to(folder.with_name("other"))
    with pytest.raises(ApiError, match="cannot write to its temporary folder"):
        store.put("three", "done")


async def test_forms_in_parts(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_languages(make_backend(), fake="en-de")) as running:
        expected = await running.result("/translate", {"q": "a dog", **PAIR, "alternatives": 1})
        parts = {name: (None, value) for name, value in {"q": "a dog", **PAIR, "alternatives": "1"}.items()}
        response = await running.client.post("/translate", files=parts)
        assert (response.status_code, response.json()) == (200, expected)
        settings = await running.get("/frontend/settings")
        assert ".docx" in settings["supportedFilesFormat"] and not settings["keyRequired"]
        response = await running.client.post("/translate", files={f"f{index}": (None, "x") for index in range(65)})
        assert response.status_code == 400 and "at most 64 fields, got 65" in response.text


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("multipart/form-data", "--x\nContent-Disposition: form-data; name=a\n\nb\n--x--"),  # no boundary
        ("multipart/form-data; boundary=x", ""),
        ("multipart/form-data; boundary=x", "--x\nContent-Disposition: form-data; name=a\n\nb\n--x"),  # no end
        ("multipart/form-data; boundary=x", "--x\nContent-Disposition: form-data; name=a\n\n\xe4\n--x--"),  # no UTF-8
    ],
)
async def test_a_form_that_is_not_complete_is_rejected(header: str, body: str) -> None:
    with pytest.raises(ApiError, match="The body is not a form in UTF-8"):
        parse_form(body.replace("\n", "\r\n").encode("latin-1"), header.encode())


async def test_parts_keep_their_bytes() -> None:
    data = b"\r\n--y\r\n\0\r\n\r\n--\r"
    body = b'--x y\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xa4.md"\r\n\r\n' + data
    body += b'\r\n--x y\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n--x y--\r\n'
    fields = parse_form(body, b'multipart/form-data; boundary="x y"')
    assert fields == {"file": UploadedFile("ä.md", data), "a": ""}
