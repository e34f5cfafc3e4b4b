"""Coverage of source words, support of target words, and repair, over HTTP."""

from typing import Any

import numpy as np
import pytest

from sightline.base.bundle import Coverage
from sightline.base.text.words import words_of
from sightline.service.inference import confirmation, maps, repair, results
from tests.service.conftest import MakeBackend, Running, Start, changed, with_coverage, with_languages

pytestmark = pytest.mark.anyio
SOURCE, TARGET = "Hund x.", "a dogHund"
CONFIRMS = {"confirm_omissions": True}
PAIR = {"source": "en", "target": "de"}
ONE_HEAD = {"kinds": ["cross"], "layers": [0], "heads": [0], "units": "words"}
RELIABLE = Coverage(layer=0, head=1, auroc=0.95, insertions=100, threshold=0.3, untranslated=("x",))
STRICT = RELIABLE.model_copy(update={"threshold": 1.1})  # all words are omitted


@pytest.fixture
async def covering(start: Start, make_backend: MakeBackend) -> Any:
    async with start(with_coverage(make_backend(), RELIABLE)) as running:
        yield running


async def score(running: Running, **body: Any) -> Any:
    body = {"inputs": SOURCE, "targets": TARGET, "return_coverage": True, **body}
    (output,) = (await running.result("/v1/score", body))["outputs"]
    return output


async def test_the_coverage_is_the_largest_weight_of_the_chosen_head(covering: Running) -> None:
    output = await score(covering)
    coverage = output["coverage"]
    body = {"inputs": SOURCE, "targets": TARGET, "kinds": ["cross"], "layers": [0], "heads": [1]}
    (attended,) = (await covering.result("/v1/attention", body))["outputs"]
    weights = np.reshape(attended["maps"][0]["data"], attended["maps"][0]["shape"])[0, 0]
    words = coverage["source_words"]
    assert [(word["text"], word["start"], word["end"]) for word in words] == [("Hund", 0, 4), ("x", 5, 6), (".", 6, 7)]
    spans = [None if span is None else (span[0], span[1]) for span in attended["source_offsets"]]
    for word, own in zip(words, words_of(SOURCE, spans), strict=True):
        assert word["coverage"] == pytest.approx(weights[:, list(own.tokens)].sum(axis=1).max(), rel=1e-5)
    assert coverage["coverage"] == words[0]["coverage"]  # the others cannot be omitted
    assert [word["omitted"] for word in words] == [words[0]["coverage"] < 0.3, False, False]


async def test_the_support_of_a_word_is_the_log_probability_of_its_tokens(covering: Running) -> None:
    output = await score(covering)
    words = output["coverage"]["target_words"]
    assert [(word["text"], word["start"], word["end"]) for word in words] == [("a", 0, 1), ("dogHund", 2, 9)]
    total = sum(word["logprob"] for word in words)
    assert total == pytest.approx(output["score"] - output["tokens"][-1]["logprob"], abs=1e-4)
    assert [word["doubtful"] for word in words] == [word["logprob"] < np.log(0.1) for word in words]


@pytest.mark.parametrize(
    "parameters", [{}, {"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True, "seed": 1}]
)
async def test_generated_texts_are_those_without_coverage(covering: Running, parameters: dict[str, Any]) -> None:
    body: dict[str, Any] = {"inputs": [SOURCE, "a dog"], "parameters": {**parameters, "max_new_tokens": 6}}
    plain = (await covering.result("/v1/generate", body))["outputs"]
    body["parameters"]["return_coverage"] = True
    covered = (await covering.result("/v1/generate", body))["outputs"]
    for one, other in zip(plain, covered, strict=True):
        coverage = other.pop("coverage")
        assert one.pop("coverage") is None
        assert other == one
        assert all(other["text"][word["start"] : word["end"]] == word["text"] for word in coverage["target_words"])


async def test_coverage_and_attention_maps_can_be_requested_together(covering: Running) -> None:
    parameters = {"max_new_tokens": 6, "return_coverage": True}
    alone = (await covering.result("/v1/generate", {"inputs": SOURCE, "parameters": parameters}))["outputs"][0]
    for kinds in (["cross"], ["encoder"], ["decoder"]):
        attention = {"kinds": kinds, "layers": [1], "heads": [0]}
        body: dict[str, Any] = {"inputs": SOURCE, "parameters": {**parameters, "return_attention": attention}}
        both = (await covering.result("/v1/generate", body))["outputs"][0]
        assert both["coverage"] == alone["coverage"]
        del body["parameters"]["return_coverage"]
        assert both["attention"] == (await covering.result("/v1/generate", body))["outputs"][0]["attention"]


@pytest.mark.parametrize(
    ("coverage", "reason"),
    [
        (None, "no head was chosen for it; its operator can run `sightline coverage` on its bundle."),
        (
            Coverage(layer=0, head=0, auroc=0.5, insertions=9),
            "its best head tells omitted words from others with an AUROC of 0.5, and 0.85 is needed.",
        ),
    ],
)
async def test_a_model_without_a_reliable_head_says_why(
    start: Start, make_backend: MakeBackend, coverage: Coverage | None, reason: str
) -> None:
    async with start(with_coverage(make_backend(), coverage)) as running:
        response = await running.post("/v1/score", {"inputs": SOURCE, "targets": TARGET, "return_coverage": True})
        assert response.status_code == 422
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "return_coverage")
        assert error["message"].endswith(reason)
        (card,) = (await running.client.get("/v1/models")).json()["data"]
        assert (card["coverage"] is None) == (coverage is None)


async def test_conflicting_parameters_are_rejected(covering: Running) -> None:
    for path in ("align", "attention"):
        found = await covering.error(f"/v1/{path}", {"inputs": SOURCE, "parameters": CONFIRMS})
        assert found == (422, "unsupported_parameter", "parameters.confirm_omissions")
    for parameters, stream, message in (
        ({"return_coverage": True}, True, "A stream has no parameters.return_coverage; leave it out, or do not"),
        ({"repair": True}, True, "A stream has no parameters.repair; leave it out, or do not stream."),
        (CONFIRMS, False, "parameters.confirm_omissions needs parameters.return_coverage or parameters.repair; set"),
        ({"repair": True, "stop": "x"}, False, "parameters.repair cannot be combined with parameters.stop; leave"),
        ({"repair": True, "do_sample": True}, False, "parameters.repair cannot be combined with parameters.do_sample"),
    ):
        body = {"inputs": SOURCE, "parameters": parameters, "stream": stream}
        response = await covering.post("/v1/generate", body)
        assert response.status_code == 422 and message in response.json()["error"]["message"]


async def test_texts_with_omissions_are_counted(covering: Running) -> None:
    output = await score(covering)
    label = '{model_name="fake"}'
    assert await covering.metric(f"sightline_texts_checked_total{label}") == 1
    omits = output["coverage"]["source_words"][0]["omitted"]
    assert await covering.metric(f"sightline_texts_with_omissions_total{label}") == omits


async def test_only_flagged_texts_are_repaired(start: Start, make_backend: MakeBackend) -> None:
    parameters = {"max_new_tokens": 6, "repair": True}
    body = {"inputs": [SOURCE, "a dog"], "parameters": parameters}
    for threshold, is_flagged in ((0.0, False), (1.1, True)):
        chosen = RELIABLE.model_copy(update={"threshold": threshold})
        async with start(with_coverage(make_backend(), chosen)) as running:
            plain = await running.result("/v1/generate", {**body, "parameters": {"max_new_tokens": 6}})
            found = await running.result("/v1/generate", body)
            for one, other in zip(plain["outputs"], found["outputs"], strict=True):
                assert other["index"] == one["index"] and other["rank"] == 0
                assert (other["repair"] is not None) == is_flagged
                if is_flagged:
                    assert other["repair"]["text"] == one["text"] and other["repair"]["num_omitted"] > 0
                else:
                    assert {**other, "coverage": None} == one
            more = found["usage"]["output_tokens"] > plain["usage"]["output_tokens"]
            assert more == is_flagged
            # The attempts to repair a text are no texts.
            assert await running.metric('sightline_texts_checked_total{model_name="fake"}') == 2
            assert await running.metric('sightline_texts_with_omissions_total{model_name="fake"}') == 2 * is_flagged


@pytest.mark.parametrize("own", [(), (0,)])
async def test_marks_are_confirmed_if_the_target_is_more_probable_without_the_word(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, own: tuple[int, ...]
) -> None:
    chosen, source = RELIABLE.model_copy(update={"threshold": 1.1, "untranslated": ()}), "Hund x a dog."
    async with start(with_coverage(make_backend(), chosen)) as running:
        pair: dict[str, Any] = {"inputs": source, "targets": TARGET}
        (whole,) = (await running.result("/v1/score", {**pair, "hidden_source_tokens": own}))["outputs"]
        (maps,) = (await running.result("/v1/attention", {**pair, "kinds": ["cross"]}))["outputs"]
        spans = [None if span is None else (span[0], span[1]) for span in maps["source_offsets"]]
        gains = []
        for word in words_of(source, spans):
            body = {**pair, "hidden_source_tokens": sorted({*own, *word.tokens})}
            (hidden,) = (await running.result("/v1/score", body))["outputs"]
            gains.append(hidden["score"] - whole["score"])
        least = float(np.median(gains[:4])) - 1e-4  # of words that are no marks
        monkeypatch.setattr(confirmation, "MIN_GAIN", least)
        expected = [gain >= least for gain in gains[:4]] + [False]
        coverages = []
        for confirms in (False, True):
            body = {**pair, "return_coverage": True, "confirm_omissions": confirms, "hidden_source_tokens": own}
            coverages.append((await running.result("/v1/score", body))["outputs"][0]["coverage"])
        first, second = ([word.pop("omitted") for word in each["source_words"]] for each in coverages)
        assert first == [True] * 4 + [False] and second == expected and {*expected[:4]} == {True, False}
        assert coverages[0] == coverages[1]


async def test_generated_texts_and_their_repairs_are_confirmed(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_coverage(make_backend(), STRICT)) as running:
        for parameters in ({"return_coverage": True}, {"repair": True}):
            body: dict[str, Any] = {"inputs": [SOURCE, "a dog"], "parameters": {**parameters, "max_new_tokens": 6}}
            plain = await running.result("/v1/generate", body)
            found = await running.result("/v1/generate", {**body, "parameters": {**body["parameters"], **CONFIRMS}})
            for one, other in zip(plain["outputs"], found["outputs"], strict=True):
                marks = [[word["omitted"] for word in each["coverage"]["source_words"]] for each in (one, other)]
                assert all(mark >= later for mark, later in zip(*marks, strict=True)) or parameters == {"repair": True}
            more = found["usage"]["input_tokens"] - plain["usage"]["input_tokens"]
            # A second look at the first text and the best other one: with each word, and without.
            assert 0 < more <= 2 * sum((1 + len(text.split())) * len(text) for text in body["inputs"])


async def test_align_returns_the_weights_behind_the_links(covering: Running) -> None:
    body = {"inputs": SOURCE, "targets": TARGET, "layer": 0, "head": 1, "step": "reads"}
    (plain,) = (await covering.result("/v1/align", body))["outputs"]
    (output,) = (await covering.result("/v1/align", {**body, "return_weights": True}))["outputs"]
    weights = output["weights"]
    assert plain["weights"] is None and {**output, "weights": None} == plain
    assert np.shape(weights) == (len(output["target_words"]), len(output["source_words"]))
    assert all(weights[target][source] == weight for source, target, weight in output["links"])


async def test_whole_texts_have_the_coverage_of_their_sentences(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_languages(with_coverage(make_backend(), RELIABLE), fake="en-de")) as running:
        text = "# a dog\n\n\t12 {name}"
        body = {"inputs": text, "parameters": {"return_coverage": True}}
        (output,) = (await running.result("/v1/translate", body))["outputs"]
        words = output["coverage"]["source_words"]
        assert [(word["text"], word["start"], word["end"]) for word in words] == [("a", 2, 3), ("dog", 4, 7)]
        for word in output["coverage"]["target_words"]:
            assert output["text"][word["start"] : word["end"]] == word["text"]
        libre = {"q": [text], "source": "en", "target": "de", "return_coverage": True}
        assert (await running.result("/translate", libre))["coverage"] == [output["coverage"]]
        body = {**body, "markup": "html"}
        assert await running.error("/v1/translate", body) == (
            422,
            "unsupported_parameter",
            "parameters.return_coverage",
        )


async def test_words_that_the_model_does_not_read_are_in_the_coverage(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_languages(with_coverage(make_backend(), RELIABLE), fake="en-de")) as running:
        text = "a dog. \n\nHund {name} “x” a."
        body = {"inputs": text, "parameters": {"return_coverage": True}}
        (output,) = (await running.result("/v1/translate", body))["outputs"]
        for side, whole in (("source", text), ("target", output["text"])):
            words = output["coverage"][f"{side}_words"]
            assert all(whole[word["start"] : word["end"]] == word["text"] for word in words)
            assert [word["text"] for word in words].count("{name}") == 1
            assert words == sorted(words, key=lambda word: word["start"])
        sources = [word["text"] for word in output["coverage"]["source_words"]]
        assert sources == ["a", "dog", ".", "Hund", "{name}", "“", "x", "”", "a", "."]


async def test_every_service_of_translation_repairs_only_flagged_sentences(
    start: Start, make_backend: MakeBackend
) -> None:
    text, html = "# a dog\n\n\tHund {name}", "<p>a <b>dog</b> {name}</p>"
    for threshold, is_flagged in ((0.0, False), (1.1, True)):
        chosen = RELIABLE.model_copy(update={"threshold": threshold})
        async with start(with_languages(with_coverage(make_backend(), chosen), fake="en-de")) as running:
            for body in ({"inputs": text}, {"inputs": html, "markup": "html"}):
                (plain,) = (await running.result("/v1/translate", body))["outputs"]
                result = await running.result("/v1/translate", {**body, "parameters": {"repair": True}})
                (found,) = result["outputs"]
                assert all(
                    found["text"].count(part) == body["inputs"].count(part) for part in ("{name}", "<b>", "</b>")
                )
                assert found["coverage"] is None and bool(found["repairs"]) == is_flagged
                assert all(repair["num_omitted"] and repair["text"] for repair in found["repairs"])
                assert is_flagged or found == plain
                libre = {"q": [body["inputs"]], **PAIR, "format": body.get("markup", "text"), "repair": True}
                translated = await running.result("/translate", libre)
                assert translated == {"translatedText": [found["text"]], "repairs": [found["repairs"]]}
            sources = [repair["source"] for repair in found["repairs"]]
            assert sources == ["a dog Peter"] * is_flagged
            fields = {"source_language": "en", "target_language": "de", "repair": "true"}
            file = {"file": ("a.html", html.encode())}
            response = await running.client.post("/v1/translate", data=fields, files=file)
            assert response.content.decode().strip() == found["text"]
            assert response.headers["x-sightline-repaired"] == str(int(is_flagged))


async def test_repairs_of_two_models_are_those_of_both(start: Start, make_backend: MakeBackend) -> None:
    backend = with_languages(make_backend("a", "b"), a="de-en", b="en-fr")
    backend.manifests = tuple(one.model_copy(update={"coverage": STRICT}) for one in backend.manifests)
    async with start(backend) as running:
        languages = {"source_language": "de", "target_language": "fr", "repair": True}
        (output,) = (await running.result("/v1/translate", {"inputs": "Hund x.", "parameters": languages}))["outputs"]
        first, *others = [repair["source"] for repair in output["repairs"]]
        assert first == "Hund x." and others
        both = {"inputs": "Hund x.", "parameters": {**languages, "return_coverage": True}}
        assert await running.error("/v1/translate", both) == (
            422,
            "unsupported_parameter",
            "parameters.return_coverage",
        )


async def test_a_repair_that_is_impossible_names_its_field(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_languages(with_coverage(make_backend(), None), fake="en-de")) as running:
        body = {"inputs": "a dog", "parameters": {"repair": True}}
        assert await running.error("/v1/translate", body) == (422, "unsupported_parameter", "parameters.repair")
        libre = {"q": "a dog", **PAIR, "repair": True, "alternatives": 1}
        message = (await running.post("/translate", libre)).json()["error"]
        assert message.startswith("repair cannot be combined with alternatives; leave out one of them.")


async def test_the_sentences_of_an_input_share_a_coverage_of_the_whole(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_languages(with_coverage(make_backend(), RELIABLE), fake="en-de")) as running:
        parameters = {"return_coverage": True, "split_sentences": True, "max_new_tokens": 6}
        text = "a dog. 12\nHund x."
        (output,) = (await running.result("/v1/generate", {"inputs": text, "parameters": parameters}))["outputs"]
        assert len(output["sentences"]) == 2
        for side, whole in (("source", text), ("target", output["text"])):
            words = output["coverage"][f"{side}_words"]
            assert all(whole[word["start"] : word["end"]] == word["text"] for word in words)
        judged = [word["coverage"] for word in output["coverage"]["source_words"] if word["text"].isalpha()]
        assert output["coverage"]["coverage"] <= min(judged[:-1])


@pytest.mark.parametrize("hidden", [[], [-1, -2]])  # or all but the word
async def test_texts_up_to_the_limit_can_be_confirmed(start: Start, make_backend: MakeBackend, hidden: Any) -> None:
    async with start(with_coverage(make_backend(), STRICT)) as running:
        parameters = {"return_coverage": True, **CONFIRMS, "min_new_tokens": 64, "max_new_tokens": 64}
        body = {"inputs": "Hund.", "parameters": {**parameters, "hidden_source_tokens": hidden}}
        (output,) = (await running.result("/v1/generate", body))["outputs"]
        assert output["finish_reason"] == "length"


async def test_a_continued_text_has_all_its_tokens(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_value", lambda output: len(output.tokens))
    backend = with_coverage(make_backend(), STRICT)
    tokenizer, found = backend.tokenizer, []
    others = [id_ for id_ in range(len(tokenizer)) if tokenizer.name(id_) not in (" dog", " Hun", " a", "</s>")]
    async with start(backend, max_rows=1) as running:
        for text in ("dog dog", "a dog", "dog Hund a", "dog x a dog"):
            parameters = {"max_new_tokens": 12, "repair": True, "suppress_tokens": others}
            (output,) = (await running.result("/v1/generate", {"inputs": text, "parameters": parameters}))["outputs"]
            words = "".join(token["text"] for token in output["tokens"] if token["text"] != "</s>")
            assert words.strip() == output["text"]
            assert output["score"] == pytest.approx(sum(token["logprob"] for token in output["tokens"]), abs=1e-4)
            found.append(output["repair"]["method"])
    assert {*found} >= {"continuation"}


async def test_a_text_that_was_split_has_no_warning(start: Start, make_backend: MakeBackend) -> None:
    backend = with_coverage(make_backend(), STRICT)
    async with start(changed(with_languages(backend, fake="en-de"), training_unit="sentence")) as running:
        for repairs in (False, True):
            parameters = {"max_new_tokens": 6, "top_logprobs": 1, "repair": repairs}
            result = await running.result("/v1/generate", {"inputs": "a dog. Hund a.", "parameters": parameters})
            assert ("warnings" in result, "sentences" in result["outputs"][0]) == (not repairs, repairs)


async def test_a_text_that_nothing_can_repair_says_so(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_coverage(make_backend(), STRICT), max_rows=1) as one:
        body = {"inputs": "Hund", "parameters": {"max_new_tokens": 1, "repair": True}}
        (output,) = (await one.result("/v1/generate", body))["outputs"]
        assert output["repair"] == {"method": "none", "text": output["text"], "num_omitted": 1}


async def test_attempts_to_repair_a_text_need_no_place_in_the_response(
    start: Start, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters: dict[str, Any] = {"max_new_tokens": 6, "return_attention": True}
    body = {"inputs": "a dog", "parameters": parameters}
    async with start(with_coverage(make_backend(), STRICT)) as running:
        (plain,) = (await running.result("/v1/generate", body))["outputs"]
        for module in (maps, results):
            monkeypatch.setattr(module, "MAX_NUMBERS", 2 * sum(len(one["data"]) for one in plain["attention"]["maps"]))
        parameters |= {"repair": True}
        (output,) = (await running.result("/v1/generate", body))["outputs"]
        assert output["repair"] and output["attention"]["target_tokens"] == [one["text"] for one in output["tokens"]]


async def test_the_support_of_a_word_leaves_out_the_stop_string_after_it(covering: Running) -> None:
    parameters = {"max_new_tokens": 4, "return_coverage": True, "logit_bias": {"261": 60}, "target_prefix": "a"}
    body: dict[str, Any] = {"inputs": "a dog", "parameters": {**parameters, "return_attention": ONE_HEAD}}
    (whole,) = (await covering.result("/v1/generate", body))["outputs"]
    body["parameters"]["stop"] = "dog"
    (output,) = (await covering.result("/v1/generate", body))["outputs"]
    assert (whole["text"], output["text"]) == ("a dog dog dog dog", "a ")
    assert output["coverage"]["target_words"] == whole["coverage"]["target_words"][:1]
    stopped, unstopped = (found["attention"]["maps"][0]["data"] for found in (output, whole))
    assert stopped == unstopped[: len(stopped)] and len(stopped) * 5 == len(unstopped)


async def test_what_is_copied_is_neither_omitted_nor_doubtful(start: Start, make_backend: MakeBackend) -> None:
    async with start(with_languages(with_coverage(make_backend(), STRICT), fake="en-de")) as running:
        for text in ("12", "🙂", "a {name} dog", "a {abc} dog"):  # as long as a stand-in, or not
            for path in ("generate", "translate"):
                body: dict[str, Any] = {"inputs": text, "parameters": {"return_coverage": True}}
                coverage = (await running.result(f"/v1/{path}", body))["outputs"][0]["coverage"]
                marks = {word["text"]: word["omitted"] for word in coverage["source_words"]}
                if path == "translate" or "{" not in text:
                    assert marks == ({"a": True, text[2:-4]: False, "dog": True} if "{" in text else {})
                    assert not any(word["doubtful"] for word in coverage["target_words"] if "{" in word["text"])
        body = {"on_empty": "pass", "inputs": [" "], "parameters": {"repair": True}}
        coverage = (await running.result("/v1/generate", body))["outputs"][0]["coverage"]
        assert coverage == {"coverage": 1.0, "source_words": [], "target_words": []}
