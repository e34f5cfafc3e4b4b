"""Maps of words and statistics of heads, compared with slow computations from maps of tokens."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sightline.base.bundle import ALIGNMENT_STEPS, AlignmentStep, ChatTemplate
from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import MakeBackend, Running, Start, classifying, with_alignment
from tests.support.fake_runner import fake_manifest, fake_slots_manifest

pytestmark = pytest.mark.anyio

SOURCE = "Hund x."
SOURCE_TOKENS = [" H", "un", "d", " ", "x", ".", "</s>"]
# The token of a space belongs to the word after it.
SOURCE_WORDS = {"Hund": (0, 1, 2), "x": (3, 4), ".": (5,)}
TARGET = "a dogHund"
TARGET_TOKENS = [" a", " dog", "H", "un", "d", "</s>"]
TARGET_WORDS = {"a": (0,), "dogHund": (1, 2, 3, 4)}
SIZES: dict[str, Any] = {"max_source_tokens": 64, "max_target_tokens": 64}


async def attention(running: Running, **body: Any) -> Any:
    (output,) = (await running.result("/v1/attention", {"inputs": SOURCE, **body}))["outputs"]
    return output


def maps_of(output: Any) -> dict[str, Any]:
    return {one["kind"]: np.reshape(one["data"], one["shape"]) for one in output["maps"]}


def slow_words(maps: Any, rows: Sequence[Sequence[int]], columns: Sequence[Sequence[int]] | None) -> Any:
    """Return maps of words: the sum over the columns of a word, the mean over its rows."""
    columns = [[column] for column in range(maps.shape[-1])] if columns is None else columns
    merged = np.zeros((*maps.shape[:2], len(rows), len(columns)))
    for (layer, head, i, j), _ in np.ndenumerate(merged):
        weights = [maps[layer, head, row, column] for row in rows[i] for column in columns[j]]
        merged[layer, head, i, j] = sum(weights) / len(rows[i])
    return merged


async def test_words_of_all_kinds_equal_the_slow_twin(running: Running) -> None:
    tokens = await attention(running, targets=TARGET)
    assert (tokens["source_tokens"], tokens["target_tokens"]) == (SOURCE_TOKENS, TARGET_TOKENS)
    words = await attention(running, targets=TARGET, units="words")
    assert words["source_tokens"] == list(SOURCE_WORDS)
    assert words["target_tokens"] == words["decoder_input_tokens"] == list(TARGET_WORDS)
    assert words["text"] == tokens["text"] == TARGET
    assert words["source_offsets"] == [[0, 4], [5, 6], [6, 7]]
    assert words["target_offsets"] == [[0, 1], [2, 9]]
    source, target = list(SOURCE_WORDS.values()), list(TARGET_WORDS.values())
    inputs = [[1 + token for token in word] for word in target]  # the start token is the first input
    groups: dict[str, Any] = {"encoder": (source, source), "cross": (target, source), "decoder": (target, inputs)}
    expected, found = maps_of(tokens), maps_of(words)
    for kind, (rows, columns) in groups.items():
        np.testing.assert_allclose(found[kind], slow_words(expected[kind], rows, columns), rtol=1e-5)
    for one in words["maps"]:
        assert (one["rows"], one["columns"]) == tuple(one["shape"][2:])
        assert one["normalized"] is False  # special tokens are left out
        assert one["statistics"] is None


async def test_heads_are_reduced_after_tokens_are_merged(running: Running) -> None:
    merged = maps_of(await attention(running, targets=TARGET, units="words"))["cross"]
    for reduce, function in (("mean", np.mean), ("max", np.max)):
        found = maps_of(await attention(running, targets=TARGET, units="words", reduce=reduce, kinds=["cross"]))
        np.testing.assert_allclose(found["cross"], function(merged, axis=1, keepdims=True), rtol=1e-5)


async def test_the_last_word_is_a_column_only_if_the_decoder_reads_a_token_of_it(running: Running) -> None:
    parameters = {"target_prefix": "a dogHund", "max_new_tokens": 1, "min_new_tokens": 1}
    tokens = await attention(running, parameters=parameters, kinds=["decoder"])
    words = await attention(running, parameters=parameters, kinds=["decoder"], units="words")
    (one,) = words["maps"]
    assert len(tokens["target_tokens"]) == 6 and tokens["target_tokens"][:5] == TARGET_TOKENS[:5]
    assert one["rows"] == len(words["target_tokens"])
    assert one["columns"] == len(words["decoder_input_tokens"]) == 2
    assert words["decoder_input_tokens"] == words["target_tokens"][:2]


async def test_words_after_a_stop_string_are_left_out(running: Running) -> None:
    body: dict[str, Any] = {"parameters": {"max_new_tokens": 12, "min_new_tokens": 12}, "kinds": ["cross"]}
    whole = await attention(running, **body)
    stop = whole["text"][4:6]
    body["parameters"] |= {"stop": stop}
    found = await attention(running, **body, units="words")
    assert found["finish_reason"] == "stop"
    assert "".join(found["target_tokens"]) == "".join(found["text"].split())


async def test_only_the_rows_of_projected_keys_are_merged(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    backend = make_backend()
    backend.manifests = (fake_slots_manifest(slots=3, vocabulary=len(tokenizer), **SIZES),)
    async with start(backend) as running:
        body: dict[str, Any] = {"kinds": ["encoder_slots"]}
        tokens, words = [await attention(running, **body, units=units) for units in ("tokens", "words")]
        (one,) = words["maps"]
        assert one["shape"] == [2, 2, len(SOURCE_WORDS), 3] and one["normalized"] is True
        expected = slow_words(maps_of(tokens)["encoder_slots"], list(SOURCE_WORDS.values()), None)
        np.testing.assert_allclose(maps_of(words)["encoder_slots"], expected, rtol=1e-5)


async def test_a_decoder_only_model_has_the_words_of_its_prompt_as_columns(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    backend = make_backend()
    backend.manifests = (fake_manifest(vocabulary=len(tokenizer), decoder_start="source", **SIZES),)
    async with start(backend) as running:
        tokens, words = [await attention(running, targets=TARGET, units=units) for units in ("tokens", "words")]
        assert words["decoder_input_tokens"] == [*SOURCE_WORDS, *TARGET_WORDS]
        assert words["target_tokens"] == list(TARGET_WORDS)
        num_prompt = len(SOURCE_TOKENS)
        columns = [*SOURCE_WORDS.values(), *([num_prompt + token for token in word] for word in TARGET_WORDS.values())]
        expected = slow_words(maps_of(tokens)["decoder"], list(TARGET_WORDS.values()), columns)
        np.testing.assert_allclose(maps_of(words)["decoder"], expected, rtol=1e-5)


@pytest.mark.parametrize("prompt_rows", [False, True])
async def test_rows_of_a_prompt_are_merged_to_its_words(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer, prompt_rows: bool
) -> None:
    backend = make_backend()
    causal = fake_manifest("chat", vocabulary=len(tokenizer), decoder_start="source", **SIZES)
    backend.manifests = (causal.model_copy(update={"chat": ChatTemplate(program="{{ messages[0].content }}<s>")}),)
    async with start(backend) as running:
        body: dict[str, Any] = {"inputs": None, "messages": [{"role": "user", "content": SOURCE}], "targets": TARGET}
        body |= {"prompt_rows": prompt_rows, "statistics": True}
        tokens, words = [await attention(running, **body, units=units) for units in ("tokens", "words")]
        prompt = tokens["source_tokens"]
        assert prompt[-1] == "<s>" and "".join(prompt[:-1]).split() == ["Hund", "x."]
        first = len(prompt) - 1 if prompt_rows else 0
        # Row i of the prompt belongs to its token i + 1.
        prompt_words = [(0, 1), (2, 3), (4,)] if prompt_rows else []
        rows = [*prompt_words, *([first + token for token in word] for word in TARGET_WORDS.values())]
        columns = [
            (0, 1, 2),
            (3, 4),
            (5,),
            *([len(prompt) + token for token in word] for word in TARGET_WORDS.values()),
        ]
        np.testing.assert_allclose(
            maps_of(words)["decoder"], slow_words(maps_of(tokens)["decoder"], rows, columns), rtol=1e-5
        )
        expected = [*(SOURCE_WORDS if prompt_rows else ()), *TARGET_WORDS]
        assert words["target_tokens"] == expected
        assert words["target_offsets"] == [*[None] * len(prompt_words), [0, 1], [2, 9]]
        assert words["decoder_input_tokens"] == [*SOURCE_WORDS, *TARGET_WORDS]
        assert words["source_offsets"] == [None] * len(SOURCE_WORDS)
        special = [column for column, name in enumerate(tokens["decoder_input_tokens"]) if name in ("<s>", "</s>")]
        for head in words["maps"][0]["statistics"]:
            statistics = slow_statistics(
                maps_of(tokens)["decoder"][head["layer"], head["head"]], special, 0 if prompt_rows else len(prompt) - 1
            )
            assert {name: head[name] for name in statistics} == pytest.approx(statistics, rel=1e-5)


async def test_generate_streams_and_classify_return_the_same_words(start: Start, make_backend: MakeBackend) -> None:
    selection = {"units": "words", "kinds": ["cross"], "statistics": True}
    async with start(classifying(make_backend())) as running:
        own = await attention(running, **selection)
        for stream in (False, True):
            body: dict[str, Any] = {
                "inputs": ["dog", SOURCE],
                "parameters": {"return_attention": selection},
                "stream": stream,
            }
            response = await running.post("/v1/generate", body)
            assert response.status_code == 200
            if not stream:
                found = response.json()["outputs"][1]["attention"]
                for name in ("source_tokens", "target_tokens", "maps"):
                    assert found[name] == own[name]
            else:
                assert b'"source_tokens":["Hund","x","."]' in response.content
        body = {"model": "judge", "inputs": [SOURCE, [SOURCE, "a dog"]], "return_attention": {"units": "words"}}
        single, pair = (await running.post("/v1/classify", body)).json()["outputs"]
        assert single["source_tokens"] == list(SOURCE_WORDS)
        assert pair["source_tokens"][:3] == list(SOURCE_WORDS)
        assert single["maps"][0]["shape"] == [2, 2, 3, 3]


# Statistics


def slow_statistics(map_: Any, special_columns: Sequence[int], first: int | None) -> dict[str, float]:
    """Return the statistics of one map (rows, columns) whose rows sum to 1."""
    rows, columns = map_.shape
    entropy = distance = special = diagonal = 0.0
    for row in range(rows):
        entropy -= sum(weight * math.log2(weight) for weight in map_[row] if weight > 0)
        centre = sum(column * map_[row, column] for column in range(columns))
        if first is None:
            distance += abs((row + 0.5) / rows - (centre + 0.5) / columns)
        else:
            distance += abs(first + row - centre)
            diagonal += map_[row, first + row]
        special += sum(map_[row, column] for column in special_columns)
    return {
        "entropy": entropy / rows,
        "mean_distance": distance / rows,
        "special_share": special / rows,
        **({} if first is None else {"diagonal_share": diagonal / rows}),
    }


async def test_statistics_equal_the_slow_twin(running: Running) -> None:
    output = await attention(running, targets=TARGET, statistics=True, layers=[1, 0], heads=[-1, 0], reduce="mean")
    tokens = maps_of(await attention(running, targets=TARGET))
    end = len(SOURCE_TOKENS) - 1
    axes: dict[str, tuple[list[int], int | None]] = {"encoder": ([end], 0), "cross": ([end], None), "decoder": ([0], 0)}
    for one in output["maps"]:
        special, first = axes[one["kind"]]
        assert [(head["layer"], head["head"]) for head in one["statistics"]] == [(1, 1), (1, 0), (0, 1), (0, 0)]
        for head in one["statistics"]:
            expected = slow_statistics(tokens[one["kind"]][head["layer"], head["head"]], special, first)
            assert {name: head[name] for name in expected} == pytest.approx(expected, rel=1e-5)
            assert (head["diagonal_share"] is None) == (one["kind"] == "cross")
            assert (head["alignment_agreement"] is None) == (one["kind"] != "cross")


@pytest.mark.parametrize("step", ALIGNMENT_STEPS)
async def test_agreement_is_that_with_the_heads_that_align_words(
    start: Start, make_backend: MakeBackend, step: AlignmentStep
) -> None:
    async with start(with_alignment(make_backend(), step)) as running:
        output = await attention(running, targets=TARGET, statistics=True, kinds=["cross"])
        best = maps_of(output)["cross"][:, :, :, :-1].argmax(axis=-1)  # without the end token of the source
        aligned = best[0, 1, 1:] if step == "reads" else best[0, 1, :-1]
        found = {(one["layer"], one["head"]): one["alignment_agreement"] for one in output["maps"][0]["statistics"]}
        assert found == {
            (layer, head): pytest.approx(np.mean(best[layer, head, :-1] == aligned))
            for layer in range(2)
            for head in range(2)
        }
        assert (found[0, 1] == 1) == (step == "writes")


async def test_statistics_do_not_depend_on_units(running: Running) -> None:
    first, second = [
        await attention(running, targets=TARGET, statistics=True, units=units) for units in ("tokens", "words")
    ]
    assert [one["statistics"] for one in first["maps"]] == [one["statistics"] for one in second["maps"]]


async def test_statistics_of_projected_keys_are_those_that_need_no_tokens(
    start: Start, make_backend: MakeBackend, tokenizer: TextTokenizer
) -> None:
    backend = make_backend()
    backend.manifests = (fake_slots_manifest(slots=3, vocabulary=len(tokenizer), **SIZES),)
    async with start(backend) as running:
        output = await attention(running, statistics=True, kinds=["encoder_slots"])
        for head in output["maps"][0]["statistics"]:
            assert head["entropy"] > 0
            assert {name for name, value in head.items() if value is None} == {
                "mean_distance",
                "special_share",
                "diagonal_share",
                "alignment_agreement",
            }
