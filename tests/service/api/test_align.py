from typing import Any

import numpy as np
import pytest

from sightline.base.bundle import Alignment
from sightline.base.text.words import words_of
from sightline.service.tasks.align import strongest_links
from tests.service.conftest import MakeBackend, Running, Start, multilingual_backend

pytestmark = pytest.mark.anyio
SOURCE, TARGET = "Hund x.", "a dogHund"


async def respond(running: Running, **body: Any) -> Any:
    return await running.result("/v1/align", {"inputs": SOURCE, **body})


async def aligned(running: Running, **body: Any) -> Any:
    (output,) = (await respond(running, **body))["outputs"]
    return output


async def test_a_forced_target_is_linked_to_the_source_word_with_the_largest_share(running: Running) -> None:
    response = await respond(running, targets=TARGET, layer=0, head=1)
    assert response["usage"] == {"input_tokens": 7, "output_tokens": 6}
    (output,) = response["outputs"]
    words = [tuple(word.values()) for side in ("source", "target") for word in output[f"{side}_words"]]
    assert list(output["source_words"][0]) == ["text", "start", "end"]
    assert words == [("Hund", 0, 4), ("x", 5, 6), (".", 6, 7), ("a", 0, 1), ("dogHund", 2, 9)]
    assert (output["index"], output["text"], output["layer"], output["head"], output["heads"]) == (0, TARGET, 0, 1, [1])
    body = {"inputs": SOURCE, "targets": TARGET, "kinds": ["cross"], "layers": [0], "heads": [1], "units": "words"}
    (maps,) = (await running.post("/v1/attention", body)).json()["outputs"][0]["maps"]
    weights = np.reshape(maps["data"], maps["shape"])[0, 0]
    shares = [
        [one * one / sum(row) / sum(column) for one, column in zip(row, weights.T, strict=True)] for row in weights
    ]
    best = [int(np.argmax(row)) for row in shares]
    expected = [(source, word, weights[word, source]) for word, source in enumerate(best)]
    assert [tuple(link[:2]) for link in output["links"]] == [link[:2] for link in expected]
    assert [link[2] for link in output["links"]] == pytest.approx([link[2] for link in expected], rel=1e-6)
    assert output["pharaoh"] == " ".join(f"{source}-{word}" for source, word, _ in expected)


def slow_links(attended: Any, shift: int) -> list[tuple[int, list[float]]]:
    """Return the target words with weights, and their weights to each source word.

    Args:
        attended: output of `POST /v1/attention` with one map of tokens.
        shift: number of rows between the row of a token and the row that counts.
    """
    weights = np.reshape(attended["maps"][0]["data"], attended["maps"][0]["shape"])[0, 0]
    sources, targets = (
        words_of(text, [None if one is None else (one[0], one[1]) for one in attended[f"{side}_offsets"]])
        for text, side in ((SOURCE, "source"), (attended["text"], "target"))
    )
    found = []
    for number, word in enumerate(targets):
        rows = [weights[token + shift] for token in word.tokens if token + shift < len(weights)]
        sums = [float(sum(row[token] for row in rows for token in one.tokens)) for one in sources]
        if rows:
            found.append((number, [one / len(word.tokens) for one in sums]))
    return found


@pytest.mark.parametrize(
    ("body", "is_complete"),
    [
        ({"targets": TARGET}, True),
        ({"parameters": {"target_prefix": "a dog", "max_new_tokens": 9}}, True),
        ({"parameters": {"max_new_tokens": 1}}, False),  # no step reads the only word
        ({"parameters": {"target_prefix": "a dog", "max_new_tokens": 1}}, False),  # nor the last word here
    ],
)
async def test_links_of_both_steps_equal_the_slow_twin(running: Running, body: Any, is_complete: bool) -> None:
    attended = (
        await running.post("/v1/attention", {"inputs": SOURCE, **body, "kinds": ["cross"], "layers": [0], "heads": [1]})
    ).json()["outputs"][0]
    outputs = []
    for step, shift in (("writes", 0), ("reads", 1)):
        output = await aligned(running, **body, step=step, layer=0, head=1)
        assert (output["step"], output["text"]) == (step, attended["text"])
        expected = slow_links(attended, shift)
        assert [word for _, word, _ in output["links"]] == [word for word, _ in expected]
        totals = np.sum([weights for _, weights in expected], axis=0)
        for (source, _, weight), (_, weights) in zip(output["links"], expected, strict=True):
            assert weight == pytest.approx(weights[source], rel=1e-5)
            shares = [one * one / total for one, total in zip(weights, totals, strict=True)]
            assert shares[source] == pytest.approx(max(shares), rel=1e-5)  # rounding decides between equal ones
        outputs.append(output)
    written, read = outputs
    assert written["links"] != read["links"]
    assert len(written["links"]) == len(written["target_words"])
    assert (len(read["links"]) == len(read["target_words"])) == is_complete
    assert await aligned(running, **body, layer=0, head=1) == written


async def test_without_targets_the_generated_text_is_aligned(running: Running) -> None:
    parameters = {"num_beams": 3, "target_prefix": "a", "max_new_tokens": 9}
    output = await aligned(running, parameters=parameters)
    attended = (
        await running.post("/v1/attention", {"inputs": SOURCE, "parameters": parameters, "units": "words"})
    ).json()["outputs"][0]
    assert output["text"] == attended["text"]
    assert [word["text"] for word in output["target_words"]] == attended["target_tokens"]
    assert all(output["text"][word["start"] : word["end"]] == word["text"] for word in output["target_words"])


async def test_the_default_is_the_alignment_of_the_manifest(start: Start, make_backend: MakeBackend) -> None:
    backend = make_backend("plain", "chosen", "mixed")
    measured: dict[str, Any] = {"criterion": "test", "agreement": 0.5, "baseline": 0.4}
    alignments = (
        None,
        Alignment(step="reads", layer=0, heads=(1,), sentences=1, **measured),
        Alignment(step="writes", layer=1, heads=(0, 1), sentences=1, **measured),
    )
    backend.manifests = tuple(
        manifest.model_copy(update={"alignment": alignment})
        for manifest, alignment in zip(backend.manifests, alignments, strict=True)
    )
    async with start(backend) as running:
        expected: dict[str, tuple[str, int, int | None, list[int]]] = {
            "plain": ("writes", 1, None, [0, 1]),  # all heads of the last layer
            "chosen": ("reads", 0, 1, [1]),
            "mixed": ("writes", 1, None, [0, 1]),
        }
        names = ("step", "layer", "head", "heads")
        for name, (step, layer, head, heads) in expected.items():
            output = await aligned(running, model=name, targets=TARGET)
            assert tuple(output[one] for one in names) == (step, layer, head, heads)
            same = await aligned(running, model=name, targets=TARGET, step=step, layer=layer, head=head)
            assert same == output
        output = await aligned(running, model="chosen", layer=-1, head=None)
        assert tuple(output[one] for one in names) == ("writes", 1, None, [0, 1])
        output = await aligned(running, model="chosen", head=-2)
        assert tuple(output[one] for one in names) == ("reads", 0, 0, [0])
        output = await aligned(running, model="chosen", step="writes")
        assert tuple(output[one] for one in names) == ("writes", 0, 1, [1])
        cards = {card["id"]: card["alignment"] for card in (await running.client.get("/v1/models")).json()["data"]}
        assert cards["chosen"] == {"step": "reads", "layer": 0, "heads": [1], **measured}
        assert cards["plain"] == {"step": "writes", "layer": 1, "heads": [0, 1], **dict.fromkeys(measured)}


def test_among_equal_shares_the_first_source_word_is_linked() -> None:
    weights = np.array([[0.25, 0.5, 0.5], [0.1, 0.1, 0.1]], np.float32)
    assert strongest_links(weights) == [(1, 0, 0.5), (0, 1, pytest.approx(0.1))]
    weights = np.array([[0.1, 0.9], [0.4, 0.5]], np.float32)  # the first word has the second one for itself
    assert [link[:2] for link in strongest_links(weights)] == [(1, 0), (0, 1)]
    assert strongest_links(np.zeros((0, 3), np.float32)) == []
    assert strongest_links(np.array([[0, 0], [0, 0.5]], np.float32)) == [(1, 1, 0.5)]


async def test_each_input_of_a_list_has_the_output_that_it_has_alone(running: Running) -> None:
    inputs, targets = ["a dog", SOURCE, "Hund Hund"], ["Hund a", TARGET, "x"]
    for more in ({}, {"targets": targets}):
        response = await respond(running, inputs=inputs, **more)
        for index, output in enumerate(response["outputs"]):
            own = {"targets": targets[index]} if more else {}
            assert output == {**await aligned(running, inputs=inputs[index], **own), "index": index}


async def test_languages_choose_the_tokens_and_the_model(start: Start, make_backend: MakeBackend) -> None:
    languages = {"source_language": "de", "target_language": "en"}
    async with start(multilingual_backend(make_backend), default_model="plain") as running:
        response = await respond(running, targets=TARGET, **languages)
        assert response["model"] == "many"
        assert response["usage"] == {"input_tokens": 9, "output_tokens": 6}
        (output,) = response["outputs"]
        assert [word["text"] for word in output["source_words"]] == ["Hund", "x", "."]
        assert [word["text"] for word in output["target_words"]] == ["a", "dogHund"]
        body = {"model": "many", "inputs": SOURCE, "kinds": ["cross"], "units": "words", "parameters": languages}
        (same,) = (await running.result("/v1/attention", body))["outputs"]
        generated = await aligned(running, **languages)
        assert same["target_tokens"] == [word["text"] for word in generated["target_words"]]


async def test_maps_that_are_too_large_are_rejected_with_the_way_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.service.inference.results.MAX_NUMBERS", 50)
    monkeypatch.setattr("sightline.service.inference.maps.MAX_NUMBERS", 50)
    async with start() as running:
        long = {"inputs": [SOURCE] * 2, "targets": [TARGET] * 2}  # 2 * 7 * 6 numbers
        assert await running.error("/v1/align", long) == (422, "response_too_large", None)
        assert (await respond(running, targets=TARGET))["outputs"][0]["text"] == TARGET
        many = {"parameters": {"max_new_tokens": 60, "stop": "\u1234"}, "inputs": [SOURCE] * 8}
        response = await running.post("/v1/align", many)
        assert response.json()["error"]["message"] == (
            "The attention maps of this call are too large. Send fewer or shorter inputs in a call."
        )
