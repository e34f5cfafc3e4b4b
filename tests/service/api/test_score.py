from typing import Any

import pytest

from sightline.service.inference.call import AdmittedCall
from tests.service.conftest import MakeBackend, Running, Start, until

pytestmark = pytest.mark.anyio


async def score(running: Running, inputs: Any, targets: Any, **fields: Any) -> Any:
    return await running.result("/v1/score", {"inputs": inputs, "targets": targets, **fields})


async def test_a_score_is_the_sum_over_the_targets_tokens_and_its_end_token(running: Running) -> None:
    response = await score(running, "a dog", "a Hund")
    (output,) = response["outputs"]
    assert set(output) == {"index", "score", "tokens", "coverage"}
    assert [token["text"] for token in output["tokens"]] == [" a", " H", "un", "d", "</s>"]
    assert output["score"] == pytest.approx(sum(token["logprob"] for token in output["tokens"]))
    assert all(token["logprob"] < 0 and "alternatives" not in token for token in output["tokens"])
    assert response["usage"] == {"input_tokens": 3, "output_tokens": 5}
    assert set(response["timings_ms"]) == {"tokenize", "queue", "encode", "decode", "total"}


async def test_scores_equal_the_log_probabilities_of_generation(running: Running) -> None:
    (scored,) = (await score(running, "two men", "a Hund", top_logprobs=5))["outputs"]
    for prefix, token in (("a", scored["tokens"][1]), ("a Hund", scored["tokens"][4])):
        body = {"inputs": "two men", "parameters": {"target_prefix": prefix, "max_new_tokens": 1, "top_logprobs": 5}}
        generated = (await running.post("/v1/generate", body)).json()["outputs"][0]["tokens"][0]
        assert token["alternatives"] == generated["alternatives"]
        assert len(token["alternatives"]) == 5
        assert token["logprob"] <= token["alternatives"][0]["logprob"]


async def test_targets_keep_their_order_and_have_the_scores_that_they_have_alone(running: Running) -> None:
    inputs, targets = [f"sentence {index}" for index in range(32)], ["x" * (index + 1) for index in range(32)]
    outputs = (await score(running, inputs, targets))["outputs"]
    assert [output["index"] for output in outputs] == list(range(32))
    for index in (0, 7, 31):
        alone = (await score(running, inputs[index], targets[index]))["outputs"][0]
        assert alone["tokens"] == outputs[index]["tokens"]


async def test_a_target_may_be_as_long_as_the_model_writes(running: Running) -> None:
    assert len((await score(running, "x", "x" * 62))["outputs"][0]["tokens"]) == 64


async def test_scoring_has_the_deadlines_and_the_admission_of_generation(
    start: Start, make_backend: MakeBackend
) -> None:
    async with start(make_backend(step_s=0.02)) as running:
        body = {"inputs": "x", "targets": "y" * 60}
        response = await running.post("/v1/score", body, **{"X-Request-Timeout-Ms": "50"})
        assert response.json()["error"]["code"] == "deadline_exceeded"
        await until(lambda: running.backend.num_busy == 0)
        service = running.app.state.service
        assert service.models["fake"].admission.num_sequences == 0


@pytest.mark.parametrize("path", ["/v1/score", "/v1/align", "/v1/attention"])
async def test_the_work_of_a_call_with_targets_is_their_tokens_and_the_runs_of_the_encoder(
    running: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    submit, estimates = AdmittedCall.submit, list[float]()

    def note(call: AdmittedCall, *arguments: Any) -> Any:
        estimates.append(call.reservation.units)
        return submit(call, *arguments)

    monkeypatch.setattr(AdmittedCall, "submit", note)
    await running.result(path, {"inputs": ["x", "y"], "targets": ["a dog", "Hund"]})
    assert estimates == [2 + 3 + 4]


async def test_scored_tokens_are_reported_but_not_counted_as_generated(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await score(running, ["x", "y"], ["a dog", "Hund"])
    model = '{model_name="fake"}'
    assert await running.metric(f"sightline_generation_tokens_total{model}") == 0
    assert await running.metric('sightline_request_success_total{finished_reason="forced",model_name="fake"}') == 2
    (fields,) = [record.fields for record in caplog.records if record.message == "request"][:1]  # type: ignore[attr-defined]
    assert (fields["output_tokens"], fields["finish_reasons"]) == (3 + 4, ["forced"] * 2)
