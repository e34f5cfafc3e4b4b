"""Glossaries that clients store, over the fake model."""

import json
from pathlib import Path
from typing import Any

import pytest

from sightline.service.inference import glossaries
from tests.service.conftest import MakeBackend, Running, Start, with_languages

pytestmark = pytest.mark.anyio
KEYS = Path("tests/data/keys.json")


async def ask(running: Running, method: str, path: str, key: str = "", **options: Any) -> tuple[int, Any]:
    headers = {"x-api-key": key} if key else {}
    response = await running.client.request(method, f"/v1/glossaries{path}", headers=headers, **options)
    return response.status_code, response.json()


def body(**terms: str) -> dict[str, Any]:
    return {"dictionaries": [{"source_language": "en", "target_language": "de", "terms": terms}]}


async def test_a_stored_glossary_is_used_by_its_id(start: Start, make_backend: MakeBackend, tmp_path: Path) -> None:
    async with start(with_languages(make_backend(), fake="en-de"), glossaries=tmp_path / "new") as running:
        status, written = await ask(running, "PUT", "/pets", json=body(dog="Hund"))
        assert (status, written["id"], written["dictionaries"]) == (200, "pets", body(dog="Hund")["dictionaries"])
        assert await ask(running, "GET", "/pets") == (200, written)
        assert await ask(running, "GET", "") == (200, {"pets": [["en", "de"]]})

        async def translate(**fields: Any) -> str:
            (output,) = (await running.result("/v1/translate", {"inputs": "dog", **fields}))["outputs"]
            return str(output["text"])

        assert await translate(glossary_id="pets") == await translate(glossary={"dog": "Hund"})
        assert "Köter" in await translate(glossary_id="pets", glossary={"dog": "Köter"})
        await ask(running, "PUT", "/pets", json=body(dog="Welpe"))
        assert "Welpe" in await translate(glossary_id="pets")
        assert (await ask(running, "DELETE", "/pets"))[0] == 200
        response = await running.post("/v1/translate", {"inputs": "a dog", "glossary_id": "pets"})
        assert (response.status_code, response.json()["error"]["param"]) == (404, "glossary_id")


async def test_a_glossary_of_other_languages_is_rejected(
    start: Start, make_backend: MakeBackend, tmp_path: Path
) -> None:
    async with start(with_languages(make_backend(), fake="en-de"), glossaries=tmp_path) as running:
        pairs = [("en-GB", "fr"), ("fr", "de")]
        dictionaries = [{"source_language": one, "target_language": other, "terms": {"a": "b"}} for one, other in pairs]
        await ask(running, "PUT", "/x", json={"dictionaries": dictionaries})
        error = (await running.post("/v1/translate", {"inputs": "a dog", "glossary_id": "x"})).json()["error"]
        assert (error["code"], error["message"]) == (
            "invalid_parameter",
            "glossary_id: The glossary has no terms for en to de, only for en-GB to fr, fr to de.",
        )


async def test_a_call_over_a_language_between_may_have_terms(
    start: Start, make_backend: MakeBackend, tmp_path: Path
) -> None:
    backend = with_languages(make_backend("a", "b"), a="de-en", b="en-fr")
    async with start(backend, glossaries=tmp_path) as running:
        dictionary = {"source_language": "de", "target_language": "fr", "terms": {"Hund": "clebs"}}
        await ask(running, "PUT", "/x", json={"dictionaries": [dictionary]})
        languages = {"source_language": "de", "target_language": "fr"}
        for glossary in ({"glossary_id": "x"}, {"glossary": {"Hund": "clebs"}}):
            request = {"inputs": "<p><b>Hund</b></p>x", "markup": "html", "parameters": languages, **glossary}
            (output,) = (await running.result("/v1/translate", request))["outputs"]
            assert output["text"].count("<b>") == 1 and len(output["route"]) == 2


async def test_each_key_has_its_own_glossaries(start: Start, make_backend: MakeBackend, tmp_path: Path) -> None:
    async with start(make_backend(), glossaries=tmp_path, keys=KEYS) as running:
        await ask(running, "PUT", "/pets", "sl-alice", json=body(dog="Hund"))
        assert (await ask(running, "GET", "/pets", "sl-alice"))[0] == 200
        assert (await ask(running, "GET", "/pets", "sl-boss"))[0] == 404
        assert (await ask(running, "DELETE", "/pets", "sl-boss"))[0] == 404
        assert (await ask(running, "GET", "", "sl-boss"))[1] == {}
        assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.json")] == [Path("alice/pets.json")]


async def test_what_cannot_be_stored_is_rejected(
    start: Start, make_backend: MakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glossaries, "MAX_GLOSSARIES", 2)
    monkeypatch.setattr(glossaries, "MAX_TERMS", 3)
    async with start(make_backend(), glossaries=tmp_path) as running:
        for path, content, message in (
            ("/.x", body(a="b"), "glossary_id must have 1 to 64 letters"),
            ("/x%0A", body(a="b"), "glossary_id must have 1 to 64 letters"),
            ("/x", {"dictionaries": []}, "A glossary must have 1 to 3 terms, got 0."),
            ("/x", body(a="b", c="d", e="f", g="h"), "A glossary must have 1 to 3 terms, got 4."),
            ("/x", body(a=" "), "dictionaries[0].terms.a must match"),
            ("/x", {"dictionaries": [{**body(a="b")["dictionaries"][0], "source_language": "?"}]}, "dictionaries[0]"),
        ):
            status, response = await ask(running, "PUT", path, json=content)
            assert status == 422 and response["error"]["message"].startswith(message), response
        for name in "xyx":
            assert (await ask(running, "PUT", f"/{name}", json=body(a="b")))[0] == 200
        message = "There must be at most 2 glossaries; delete others first."
        assert (await ask(running, "PUT", "/z", json=body(a="b")))[1]["error"]["message"] == message
        for damaged in ("{", "[]", json.dumps({"name": "x", "created": 1})):
            (tmp_path / "x.json").write_text(damaged, encoding="utf-8")
            assert (await ask(running, "GET", "/x"))[0] == 404
            assert list((await ask(running, "GET", ""))[1]) == ["y"]
