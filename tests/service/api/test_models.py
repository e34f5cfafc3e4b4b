import pytest

from service.bundle import Languages
from tests.service.conftest import MakeBackend, Start

pytestmark = pytest.mark.anyio


async def test_models_are_listed_by_name(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend("b", "a")) as running:
        answer = (await running.client.get("/v1/models")).json()
        assert answer["object"] == "list"
        assert [(one["id"], one["object"]) for one in answer["data"]] == [("a", "model"), ("b", "model")]
        assert set(answer["data"][0]) >= {"created", "owned_by", "architecture", "description", "tasks", "attention"}


async def test_a_model_tells_its_limits_its_attention_and_what_runs_it(start: Start) -> None:
    async with start() as running:
        answer = (await running.client.get("/v1/models/fake")).json()
        assert answer["limits"] == {"max_input_tokens": 64, "max_output_tokens": 64, "vocabulary": 265}
        assert answer["attention"][0] == {
            "kind": "encoder",
            "layers": 2,
            "heads": 2,
            "normalized": True,
            "columns": None,
            "window": None,
        }
        assert (answer["provider"], answer["dtype"], answer["architecture"]) == ("cpu", "float32", "fake")
        assert answer["tasks"] == ["generate", "encode", "attention", "similar", "score", "tokenize"]
        assert answer["sentence_similarity"] is False
        assert len(answer["sha256"]) == 64


async def test_a_model_that_translates_tells_its_languages_and_no_other_does(
    start: Start, make_backend: MakeBackend
) -> None:
    backend = make_backend("plain", "translator")
    plain, translator = backend.manifests
    languages = Languages(source="en", target="de")
    backend.manifests = (plain, translator.model_copy(update={"languages": languages}))
    async with start(backend) as running:
        cards = (await running.client.get("/v1/models")).json()["data"]
        cards.append((await running.client.get("/v1/models/translator")).json())
        assert [card.get("languages") for card in cards] == [None, *[{"source": "en", "target": "de"}] * 2]
        assert cards[0]["languages"] is None


@pytest.mark.parametrize("name", ["other", "%2e%2e", "fake%00", "F" * 300])
async def test_an_unknown_model_is_not_found(start: Start, name: str) -> None:
    async with start() as running:
        answer = await running.client.get(f"/v1/models/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
