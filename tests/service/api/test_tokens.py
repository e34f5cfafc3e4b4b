import pytest

from tests.service.conftest import Running

pytestmark = pytest.mark.anyio


async def test_tokens_are_returned_with_their_offsets_in_the_input(running: Running) -> None:
    response = (await running.post("/v1/tokenize", {"inputs": ["a dog", "x"]})).json()
    assert response["model"] == "fake"
    assert [(one["text"], one["start"], one["end"], one["special"]) for one in response["outputs"][0]] == [
        (" a", 0, 1, False),
        (" dog", 1, 5, False),
        ("</s>", 5, 5, True),
    ]
    assert len(response["outputs"]) == 2


@pytest.mark.parametrize("side", ["source", "target"])
async def test_special_tokens_can_be_left_out(running: Running, side: str) -> None:
    response = await running.post("/v1/tokenize", {"inputs": "a", "add_special_tokens": False, "side": side})
    assert [one["text"] for one in response.json()["outputs"][0]] == [" a"]


async def test_detokenize_reverses_tokenize(running: Running) -> None:
    texts = ["a dog", "Größe 🙂", "</s>"]
    tokens = (await running.post("/v1/tokenize", {"inputs": texts})).json()["outputs"]
    ids = [[one["id"] for one in output] for output in tokens]
    assert (await running.post("/v1/detokenize", {"ids": ids})).json() == {"model": "fake", "texts": texts}
    named = await running.post("/v1/detokenize", {"ids": ids[:1], "skip_special_tokens": False})
    assert named.json()["texts"] == ["a dog</s>"]


async def test_a_call_detokenizes_100_000_ids(running: Running) -> None:
    assert len((await running.post("/v1/detokenize", {"ids": [[40] * 100_000]})).json()["texts"][0]) >= 100_000


async def test_an_empty_list_of_ids_is_an_empty_text(running: Running) -> None:
    assert (await running.post("/v1/detokenize", {"ids": [[]]})).json()["texts"] == [""]


async def test_a_call_tokenizes_100_000_bytes(running: Running) -> None:
    assert (await running.post("/v1/tokenize", {"inputs": "x" * 100_000})).status_code == 200
