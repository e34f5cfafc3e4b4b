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


async def test_too_many_ids_are_rejected_with_their_count(running: Running) -> None:
    for ids in ([[1] * 120_000], [[1] * 60_000] * 2):
        response = await running.post("/v1/detokenize", {"ids": ids})
        assert response.json()["error"]["code"] == "response_too_large"
        assert "120000 ids" in response.json()["error"]["message"]
    assert len((await running.post("/v1/detokenize", {"ids": [[40] * 100_000]})).json()["texts"][0]) >= 100_000


async def test_unknown_ids_in_a_long_list_are_rejected_with_their_index(running: Running) -> None:
    error = await running.error("/v1/detokenize", {"ids": [[1] * 60_000, [1, 10**6]]})
    assert error == (422, "invalid_parameter", "ids[1][1]")


async def test_an_empty_list_of_ids_is_an_empty_text(running: Running) -> None:
    assert (await running.post("/v1/detokenize", {"ids": [[]]})).json()["texts"] == [""]


async def test_too_much_text_is_rejected_with_its_length_before_tokenisation(running: Running) -> None:
    """Regression: tokens were counted only after tokenisation: sixteen bodies of 1 MB used 3 GB and
    delayed health checks by 9 s.
    """
    for inputs in ("ä" * 60_000, ["x" * 60_000, "y" * 60_000]):
        response = await running.post("/v1/tokenize", {"inputs": inputs})
        assert response.json()["error"]["code"] == "response_too_large"
        assert "120000 bytes" in response.json()["error"]["message"]
    assert (await running.post("/v1/tokenize", {"inputs": "x" * 100_000})).status_code == 200
