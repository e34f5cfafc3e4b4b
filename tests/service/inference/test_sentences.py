"""Sentences of texts, `split_sentences`, and texts that are copied. Over the fake model."""

import asyncio
import json
import threading
from collections.abc import Callable
from itertools import repeat
from typing import Any

import pytest

from sightline.base.text.sentences import SplitText, split_sentences
from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.engine.worker import RequestFuture, Worker
from sightline.service.inference.admission import AdmissionController, Reservation
from sightline.service.inference.sentence_splitting import _starts
from tests.service.conftest import FakeBackend, MakeBackend, Start, changed, generate, until, with_languages
from tests.support.fake_runner import Faults
from tests.support.tables import read_table

pytestmark = pytest.mark.anyio

TEXT = "  A dog.  A man!\r\n\r\n\tHund?\n"
SENTENCES = ["A dog.", "A man!", "Hund?"]
FRAME = "  {}  {}\r\n\r\n\t{}\n"
PAIR = {"source": "en", "target": "de"}
Translating = Callable[..., FakeBackend]


@pytest.fixture
def translating(make_backend: MakeBackend) -> Translating:
    """Return a function that creates a backend whose models translate from English to German."""

    def make(**options: Any) -> FakeBackend:
        return with_languages(make_backend(**options), fake="en-de")

    return make


def test_a_part_is_not_found_in_the_text_before_it() -> None:
    assert [*_starts("2.\n2. a", ["2.", "a"], ["2.\n", " ", ""])] == [3, 6]
    assert [*_starts("x y z", ["x", "z"], repeat(""))] == [0, 4]
    assert [*_starts("a) a", ["a"], ["a) ", ""])] == [3]
    assert [*_starts("a)5.a", ["a"], ["a) 5. ", ""])] == [4]  # gaps that are copied get spaces


@pytest.mark.parametrize("parameters", read_table(__file__, "parameters"), ids=str)
async def test_outputs_join_those_of_the_sentences(
    start: Start, translating: Translating, parameters: dict[str, Any]
) -> None:
    async with start(translating()) as running:
        whole = await generate(running, [TEXT, "Hund"], split_sentences=True, **parameters)
        alone = await generate(running, [*SENTENCES, "Hund"], **parameters)
    count = parameters.get("num_return_sequences", 1)
    assert [(one["index"], one["rank"]) for one in whole["outputs"]] == [(i, r) for i in (0, 1) for r in range(count)]
    for rank, output in enumerate(whole["outputs"][:count]):
        parts = [one for one in alone["outputs"] if one["rank"] == rank][:3]
        assert output["text"] == FRAME.format(*(part["text"] for part in parts))
        assert output["tokens"] == [token for part in parts for token in part["tokens"]]
        assert output["score"] == pytest.approx(sum(part["score"] for part in parts))
        assert output["finish_reason"] == ("length" if any(p["finish_reason"] == "length" for p in parts) else "eos")
        assert output["seed"] == parts[0]["seed"]
        assert output["attention"] is None
        position = 0
        for sentence, source, part in zip(output["sentences"], SENTENCES, parts, strict=True):
            assert (sentence["source"], sentence["text"], sentence["score"]) == (source, part["text"], part["score"])
            tokens = output["tokens"][position : position + sentence["num_tokens"]]
            assert tokens == part["tokens"]
            position += sentence["num_tokens"]
    assert whole["outputs"][count:] == [{**one, "index": 1} for one in alone["outputs"] if one["index"] == 3]
    assert whole["usage"] == alone["usage"]


async def test_attention_maps_are_those_of_the_sentences(start: Start, translating: Translating) -> None:
    selection = {"kinds": ["cross"], "layers": [-1], "reduce": "mean"}
    async with start(translating()) as running:
        (whole,) = (await generate(running, TEXT, split_sentences=True, return_attention=selection))["outputs"]
        alone = (await generate(running, SENTENCES, return_attention=selection))["outputs"]
        assert whole["attention"] is None
        assert [one["attention"] for one in whole["sentences"]] == [one["attention"] for one in alone]
        assert whole["sentences"][0]["attention"]["maps"]
        (single,) = (await generate(running, "A dog.", split_sentences=True, return_attention=selection))["outputs"]
        assert (single["attention"], "sentences" in single) == (alone[0]["attention"], False)


@pytest.fixture
def of_sentences(translating: Translating) -> FakeBackend:
    """A backend whose model was trained on sentences."""
    return changed(translating(), training_unit="sentence")


def warnings_about(*params: str) -> list[dict[str, str]]:
    message = (
        "{} has several sentences, but fake was trained on single sentences and may leave out some of them. Set "
        "split_sentences of POST /v1/generate to true, or send each sentence as an input of its own."
    )
    return [{"code": "several_sentences", "message": message.format(param), "param": param} for param in params]


@pytest.mark.parametrize(("inputs", "params"), read_table(__file__, "warnings"))
async def test_several_sentences_in_a_text_that_is_not_split_are_a_warning(
    start: Start, of_sentences: FakeBackend, inputs: Any, params: list[str]
) -> None:
    async with start(of_sentences) as running:
        whole = await generate(running, inputs, top_logprobs=1)
        assert whole.get("warnings", []) == warnings_about(*params)
        assert ("warnings" in whole) == bool(params)
        for is_split in (True, False):
            assert "warnings" not in await generate(running, inputs, top_logprobs=1, split_sentences=is_split)
        body = {"inputs": inputs, "stream": True, "parameters": {"top_logprobs": 1}}
        events = await running.events("/v1/generate", body)
        assert [one for event in events for one in event.get("warnings", [])] == warnings_about(*params)
        params = [param.replace("inputs", "prompt") for param in params]
        body = {"model": "fake", "prompt": inputs, "logprobs": 0}
        assert (await running.result("/v1/completions", body)).get("warnings", []) == warnings_about(*params)
        events = await running.events("/v1/completions", body | {"stream": True})
        assert [one for event in events for one in event.get("warnings", [])] == warnings_about(*params)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", {"inputs": TEXT, "parameters": {"top_n_tokens": 1, "details": True}}),
        ("/generate", {"inputs": TEXT, "parameters": {"top_n_tokens": 1, "details": True}}),
        ("/api/generate", {"model": "fake", "prompt": TEXT, "logprobs": True}),
    ],
)
async def test_a_header_warns_in_every_api(start: Start, of_sentences: FakeBackend, path: str, body: Any) -> None:
    async with start(of_sentences) as running:
        assert (await running.post(path, body)).headers["x-sightline-warning"] == "several_sentences"
        body = {name: "a dog" if value == TEXT else value for name, value in body.items()}
        assert "x-sightline-warning" not in (await running.post(path, body)).headers


@pytest.mark.parametrize(
    "parameters",
    [
        {"split_sentences": False},
        *({"top_logprobs": 1}, {"return_attention": True}, {"target_prefix": "Ein"}, {"hidden_source_tokens": [0]}),
        {"num_beams": 2, "num_return_sequences": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("text", [TEXT, "12!"])
async def test_texts_that_a_call_needs_as_a_whole_are_not_split(
    start: Start, of_sentences: FakeBackend, parameters: dict[str, Any], text: str
) -> None:
    async with start(of_sentences) as running:
        outputs = (await generate(running, text, **parameters))["outputs"]
        assert not any("sentences" in output for output in outputs)
        is_copied = text == "12!" and not parameters.keys().isdisjoint({"split_sentences", "num_beams"})
        assert [output["text"] == text for output in outputs] == [is_copied] * len(outputs)
        assert running.backend.runners[0].num_encodes == (not is_copied)
        if is_copied:
            assert [(one["tokens"], one["score"], one["finish_reason"]) for one in outputs] == [([], 0, "eos")] * len(
                outputs
            )


READS: dict[str, tuple[Any, Callable[[Any], Any]]] = {  # of each API: body for a text, and the text of the response
    "/v1/generate": (lambda text: {"inputs": text}, lambda body: body["outputs"][0]["text"]),
    "/v1/completions": (lambda text: {"model": "fake", "prompt": text}, lambda body: body["choices"][0]["text"]),
    "/generate": (lambda text: {"inputs": text, "parameters": {"details": True}}, lambda body: body["generated_text"]),
    "/": (lambda text: {"inputs": text}, lambda body: body[0]["generated_text"]),
    "/api/generate": (lambda text: {"model": "fake", "prompt": text, "stream": False}, lambda body: body["response"]),
    "/v2/models/fake/infer": (
        lambda text: {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [text]}]},
        lambda body: next(one["data"][0] for one in body["outputs"] if one["name"] == "text_output"),
    ),
    "/translate": (lambda text: {"q": text, **PAIR}, lambda body: body["translatedText"]),
}
STREAMS: dict[str, Callable[[Any], str]] = {  # of each API: new text of an event
    "/v1/generate": lambda event: event["text"] if "token" in event else "",
    "/v1/completions": lambda event: event["choices"][0]["text"],
    "/generate_stream": lambda event: event["token"]["text"],
    "/": lambda event: event["token"]["text"],
    "/api/generate": lambda event: event["response"],
}
# A text, and the parts of it that are translated; the others are copied.
TEXTS = [
    (TEXT, SENTENCES),
    ("A dog.", ["A dog."]),
    ("12! A dog. — 3.\n\nHund?\n***", ["A dog.", "Hund?"]),
    ("\t— 12 !!\n", []),
    ("\u200b12", []),
]


@pytest.mark.parametrize("path", READS)
async def test_every_api_translates_each_sentence_and_copies_what_has_no_letter(
    start: Start, of_sentences: FakeBackend, path: str
) -> None:
    body_of, text_of = READS[path]
    async with start(of_sentences) as running:
        for text, sentences in TEXTS:
            expected, (runner,) = text, running.backend.runners
            for sentence in sentences:
                (alone,) = (await generate(running, sentence))["outputs"]
                expected = expected.replace(sentence, alone["text"])
            before = runner.num_encoded
            response = await running.result(path, body_of(text))
            assert (text_of(response), "warnings" in response) == (expected, False)
            assert runner.num_encoded - before == len(sentences)  # how many run together depends on their timing


@pytest.mark.parametrize("path", STREAMS)
async def test_every_stream_joins_the_sentences_in_order(start: Start, of_sentences: FakeBackend, path: str) -> None:
    body_of, text_of = READS[path.removesuffix("_stream")][0], STREAMS[path]
    async with start(of_sentences, max_rows=4, max_inputs=3) as running:
        for text in (*(text for text, _ in TEXTS), "A dog. Two men! " * 5):
            (whole,) = (await generate(running, text))["outputs"]
            response = await running.post(path, {**body_of(text), "stream": True})
            lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
            events = [json.loads(line) for line in lines if line not in ("", "[DONE]")]
            assert "".join(map(text_of, events)) == whole["text"]


async def test_a_stream_of_sentences_ends_as_the_whole_output(start: Start, of_sentences: FakeBackend) -> None:
    parameters = {"do_sample": True, "seed": 5, "num_return_sequences": 2, "max_new_tokens": 4}
    async with start(of_sentences) as running:
        whole = await generate(running, [TEXT, "a dog", "12"], **parameters)
        body = {"inputs": [TEXT, "a dog", "12"], "parameters": parameters, "stream": True}
        events = await running.events("/v1/generate", body)
        ends = {(one["index"], one["rank"]): one for one in events if "finish_reason" in one}
        for output in whole["outputs"]:
            end = ends.pop((output["index"], output["rank"]))
            for field in ("text", "finish_reason", "seed"):
                assert end[field] == output[field]
            assert end["score"] == pytest.approx(output["score"])
            tokens = [one["token"]["id"] for one in events if "token" in one and one["index"] == output["index"]]
            assert not output["tokens"] or set(tokens) >= {token["id"] for token in output["tokens"]}
            assert end["usage"]["output_tokens"] == len(output["tokens"])
        assert not ends


async def test_a_model_that_does_not_translate_reads_every_text(start: Start, make_backend: MakeBackend) -> None:
    async with start(make_backend()) as running:
        for text in (TEXT, "12"):
            (output,) = (await generate(running, text))["outputs"]
            assert (output["text"] != text, "sentences" in output, bool(output["tokens"])) == (True, False, True)


async def test_the_sentences_of_long_texts_are_counted_in_a_thread(
    start: Start, of_sentences: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def split(*arguments: Any, **options: Any) -> SplitText | None:
        threads.append(threading.get_ident())
        return split_sentences(*arguments, **options)

    monkeypatch.setattr("sightline.service.inference.sentence_splitting.split_sentences", split)
    async with start(of_sentences) as running:
        for limit in (100, 10):
            monkeypatch.setattr("sightline.service.inference.call.INLINE_CHARACTERS", limit)
            whole = await generate(running, "A dog. A man!", top_logprobs=1)
            assert whole["warnings"] == warnings_about("inputs")
    assert [one == threading.get_ident() for one in threads] == [True, False]


async def test_a_model_of_texts_gives_no_warnings(start: Start, translating: Translating) -> None:
    async with start(translating()) as running:
        assert "warnings" not in await generate(running, TEXT)


async def test_a_model_of_sentences_without_languages_splits_texts(start: Start, make_backend: MakeBackend) -> None:
    async with start(changed(make_backend(), training_unit="sentence")) as running:
        (whole,) = (await generate(running, TEXT, split_sentences=True))["outputs"]
        alone = (await generate(running, SENTENCES))["outputs"]
        assert whole["text"] == FRAME.format(*(one["text"] for one in alone))


async def test_sentences_that_wait_run_together(start: Start, translating: Translating) -> None:
    hang = threading.Event()
    async with start(translating(faults=Faults(hang=hang)), max_rows=4) as running:
        first = asyncio.ensure_future(generate(running, "a"))
        await until(lambda: running.backend.runners[0].num_encodes == 1)
        text = asyncio.ensure_future(generate(running, TEXT, split_sentences=True))
        await until(lambda: running.backend.num_busy == 4)
        hang.set()
        await asyncio.gather(first, text)
        assert running.backend.runners[0].num_encodes == 2


async def test_a_stop_string_in_one_sentence_is_the_reason_of_the_text(start: Start, translating: Translating) -> None:
    async with start(translating()) as running:
        (first, second) = (await generate(running, SENTENCES[:2], min_new_tokens=12))["outputs"]
        stop = next(piece for piece in (first["text"][i : i + 3] for i in range(3, 9)) if piece not in second["text"])
        text = " ".join(SENTENCES[:2])
        (output,) = (await generate(running, text, min_new_tokens=12, stop=stop, split_sentences=True))["outputs"]
        assert output["finish_reason"] == "stop"
        assert output["text"] == f"{first['text'][: first['text'].index(stop)]} {second['text']}"


async def test_one_sentence_is_an_input_as_without_the_parameter(start: Start, translating: Translating) -> None:
    async with start(translating()) as running:
        split = await generate(running, ["a dog", "Hund"], split_sentences=True)
        plain = await generate(running, ["a dog", "Hund"], split_sentences=False)
        assert (split["outputs"], split["usage"]) == (plain["outputs"], plain["usage"])


async def test_a_long_text_is_split_in_a_thread(start: Start, translating: Translating) -> None:
    text = "A dog." + "\n" * 20_000 + "A man!"
    async with start(translating()) as running:
        (output,) = (await generate(running, text, split_sentences=True))["outputs"]
        alone = (await generate(running, SENTENCES[:2]))["outputs"]
        assert output["text"] == ("\n" * 20_000).join(one["text"] for one in alone)


async def test_too_many_sentences_are_rejected_with_both_numbers(
    start: Start, translating: Translating, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 64
    monkeypatch.setattr("sightline.service.inference.sentence_splitting.MAX_SENTENCES", most)
    async with start(translating(), max_inputs=2) as running:
        fitting = "A dog.\n" * (most - 1)
        assert (await generate(running, [fitting, "a"], split_sentences=True, max_new_tokens=1))["outputs"]
        limit = f"A call generates at most {most} sequences from sentences, got"
        advice = "Send the text in several calls."
        for inputs, parameters, found in (
            ([fitting, "A man. A cat."], {}, f"more than {most} sentences"),
            ("A dog.\n" * 10_000, {}, f"more than {most} sentences"),
            (
                "A dog.\n" * 33,
                {"do_sample": True, "num_return_sequences": 2},
                "33 sentences, each with parameters.num_return_sequences 2",
            ),
        ):
            body = {"inputs": inputs, "parameters": {"split_sentences": True, **parameters}}
            response = await running.post("/v1/generate", body)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (422, "invalid_parameter", "inputs")
            assert error["message"] == f"inputs: {limit} {found}. {advice}"
        response = await running.post("/translate", {"q": fitting + "A man. A cat.", **PAIR})
        expected = {"error": f"q: {limit} {most + 1} sentences. {advice}"}
        assert (response.status_code, response.json()) == (422, expected)


async def test_500_sentences_are_translated_while_few_of_them_are_in_the_engine(
    start: Start, translating: Translating, monkeypatch: pytest.MonkeyPatch
) -> None:
    reservations: list[int] = []
    in_engine: list[int] = []
    original_reserve, original_submit = AdmissionController.reserve, Worker.submit

    def reserve(self: AdmissionController, *arguments: Any) -> Reservation:
        reservations.append(arguments[0])
        return original_reserve(self, *arguments)

    def submit(self: Worker, *arguments: Any) -> RequestFuture:
        future = original_submit(self, *arguments)
        in_engine.append(sum(not one.is_done for one in self._open))
        return future

    sentences = [f"A dog number {number} runs." for number in range(500)]
    paragraphs = [" ".join(sentences[first : first + 10]) for first in range(0, 500, 10)]
    text = "\n\n".join(paragraphs)
    async with start(translating(), max_rows=4) as running:
        alone = []
        for first in range(0, 500, 25):
            outputs = (await generate(running, sentences[first : first + 25], max_new_tokens=4))["outputs"]
            alone += [one["text"] for one in outputs]
        expected = "\n\n".join(" ".join(alone[first : first + 10]) for first in range(0, 500, 10))
        monkeypatch.setattr(AdmissionController, "reserve", reserve)
        monkeypatch.setattr(Worker, "submit", submit)
        (output,) = (await generate(running, text, split_sentences=True, max_new_tokens=4))["outputs"]
        assert output["text"] == expected
        assert reservations == [1]
        assert (len(in_engine), max(in_engine)) == (500, 64)  # a quarter of the sequences that may wait
        admission = running.app.state.service.models["fake"].admission
        assert (admission.num_sequences, admission.num_bytes, admission.num_tokens) == (0, 0, 0)


async def test_a_long_text_leaves_capacity_in_the_queue(start: Start, translating: Translating) -> None:
    hang = threading.Event()
    backend = translating(faults=Faults(hang=hang))
    async with start(backend, max_rows=1, max_waiting_sequences=3, max_inputs=2) as running:
        body = {"inputs": "A dog.\n" * 40, "parameters": {"split_sentences": True, "max_new_tokens": 2}}
        long = asyncio.ensure_future(running.post("/v1/generate", body))
        await until(lambda: running.backend.num_busy == 2)
        assert running.app.state.service.models["fake"].admission.num_sequences == 2
        short = asyncio.ensure_future(running.post("/v1/generate", {"inputs": "a"}))
        await until(lambda: running.backend.num_busy == 3)
        rejected = await running.post("/v1/generate", {"inputs": ["a", "b"]})
        assert rejected.json()["error"]["code"] == "overloaded"
        hang.set()
        assert [(await one).status_code for one in (short, long)] == [200, 200]


async def test_a_sentence_that_fails_ends_the_call(
    start: Start, translating: Translating, tokenizer: TextTokenizer
) -> None:
    poison = tokenizer.encode("~")[1]
    async with start(translating(faults=Faults(nan_id=poison)), max_inputs=2) as running:
        body = {"inputs": "A dog.\nx ~\n" + "A man.\n" * 60, "parameters": {"split_sentences": True}}
        assert (await running.post("/v1/generate", body)).json()["error"]["code"] == "internal"
        await until(lambda: running.backend.num_busy == 0)
        admission = running.app.state.service.models["fake"].admission
        assert (admission.num_calls, admission.num_sequences, admission.num_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("text", "frame", "sentences"),
    [
        ("A dog. A man! Hund?", "{} {} {}", ["A dog.", "A man!", "Hund?"]),
        ("1. A dog.\n2. A man! Hund?\n", "1. {}\n2. {} {}\n", ["A dog.", "A man!", "Hund?"]),
        ("- a dog\n\n  - a man\n", "{}\n\n  {}\n", ["- a dog", "- a man"]),
        ("\n \nA dog.\n\n\nA man.\t", "\n \n{}\n\n\n{}\t", ["A dog.", "A man."]),
    ],
    ids=["paragraph", "numbered list", "bullets", "blank lines"],
)
async def test_texts_keep_their_spacing(
    start: Start, translating: Translating, text: str, frame: str, sentences: list[str]
) -> None:
    async with start(translating()) as running:
        alone = [one["text"] for one in (await generate(running, sentences, max_new_tokens=6))["outputs"]]
        (output,) = (await generate(running, text, split_sentences=True, max_new_tokens=6))["outputs"]
        assert output["text"] == frame.format(*alone)


async def test_translate_keeps_lines_and_spacing(start: Start, translating: Translating) -> None:
    async with start(translating()) as running:
        alone = [one["text"] for one in (await generate(running, SENTENCES))["outputs"]]
        response = await running.post("/translate", {"q": TEXT, **PAIR})
        assert response.json() == {"translatedText": FRAME.format(*alone)}
        beams = (await generate(running, SENTENCES, num_beams=3, num_return_sequences=3))["outputs"]
        joined = [FRAME.format(*(one["text"] for one in beams if one["rank"] == rank)) for rank in range(3)]
        response = await running.post("/translate", {"q": [TEXT, "a dog"], **PAIR, "alternatives": 2})
        assert response.json()["translatedText"][0] == joined[0]
        assert response.json()["alternatives"][0] == list(dict.fromkeys(joined))[1:]


async def test_openapi_describes_the_parameter(start: Start) -> None:
    async with start() as running:
        schemas = (await running.client.get("/openapi.json")).json()["components"]["schemas"]
    field = schemas["GenerateParameters"]["properties"]["split_sentences"]
    assert (field["anyOf"][0]["type"], "default" in field) == ("boolean", False)
    assert field["description"].startswith("Translate each sentence of the inputs, and join the translations")
    assert "split_sentences" not in schemas["InferParameters"]["properties"]
