"""Valid values and combinations of the generation parameters."""

from typing import Any

import orjson
import pytest

from sightline.base.bundle import MAX_BEAMS
from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api.attention import AttentionBody
from sightline.service.api.generate import GenerateBody
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import MAX_INPUTS, Texts, paths_of
from sightline.service.http.http_call import parse_body
from sightline.service.inference.generate import check_parameters
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import AttentionSelection, GenerateParameters
from tests.support.fake_runner import HIDDEN, fake_manifest

# Each alone, without beams.
WRONG: list[tuple[str, Any, str]] = [
    *(("length_penalty", 2.0, ""), ("early_stopping", True, ""), ("early_stopping", "never", "")),
    *(("temperature", 0.5, ""), ("top_k", 3, ""), ("top_p", 0.5, ""), ("seed", 0, "")),
    ("num_return_sequences", 2, ""),
    *(("repetition_penalty", value, "") for value in (0, 1e-40, -1, 10.5, True, "1", None)),
    *(("no_repeat_ngram_size", value, "") for value in (-1, 2.0, True, 65_537, None)),
    *(("suppress_tokens", value, "") for value in (3, None, "3", [3] * 1025)),
    *(("suppress_tokens", value, "[1]") for value in ([3, -1], [3, True], [3, 3.0], [3, "3"])),
    *(("logit_bias", value, "") for value in (3, "5", [[5, 1]], {"x": 1}, {"05": 1}, {"-1": 1}, {"": 1})),
    ("logit_bias", {str(token_id): 1 for token_id in range(1025)}, ""),
    *(("logit_bias", {"5": value}, "[5]") for value in (100.1, -101, True, None, "1")),
    *(("target_prefix", value, "") for value in (3, {"a": 1}, ["a", "b"], ["a"] * 257)),
    ("target_prefix", [3], "[0]"),
    *(("top_logprobs", value, "") for value in (-1, 6, True, 1.0, None)),
    *(("return_attention", value, "") for value in (1, None, "cross", ["cross"])),
    *(("return_attention", {"kinds": value}, ".kinds") for value in ([], "cross", ["cross", "cross"])),
    *(("return_attention", {"kinds": ["self"]}, ".kinds[0]"), ("return_attention", {"maps": True}, ".maps")),
    *(("return_attention", {"layers": value}, ".layers") for value in ([], [0, 0])),
    *(("return_attention", {"heads": [0, value]}, ".heads[1]") for value in (-1025, True, 1024)),
    *(("return_attention", {"reduce": "sum"}, ".reduce"), ("return_attention", {"encoding": "hex"}, ".encoding")),
]
WRONG_WITH_BEAMS: list[tuple[str, Any]] = [
    *(("num_return_sequences", value) for value in (0, 3, 9, 1.0, True, None)),
    *(("length_penalty", value) for value in (10.5, -10.5, "1", True, None)),
    *(("early_stopping", value) for value in ("always", 1, None, ["never"])),
    *(("temperature", 0.5), ("top_k", 3), ("top_p", 0.5), ("seed", 0)),
    ("do_sample", 1),
]
WRONG_WITH_SAMPLING: list[tuple[str, Any]] = [
    *(("num_return_sequences", value) for value in (0, MAX_INPUTS + 1, 2.0, True, None)),
    *(("length_penalty", 2.0), ("early_stopping", True)),
]
NEUTRAL: list[tuple[str, Any]] = [
    *(("temperature", 1.0), ("temperature", 1), ("top_k", 0), ("top_p", 1.0), ("seed", None)),
    *(("length_penalty", 1.0), ("length_penalty", 1), ("early_stopping", False)),
    *(("num_return_sequences", 1), ("max_new_tokens", None), ("target_prefix", None)),
]


@pytest.fixture(scope="module")
def model(tokenizer: TextTokenizer) -> ServedModel:
    """Return a model whose limits are wider than those of any request."""
    manifest = fake_manifest(vocabulary=len(tokenizer), max_source_tokens=64, max_target_tokens=65_536)
    return ServedModel("fake", manifest, tokenizer, tokenizer, "cpu", HIDDEN, MAX_BEAMS, threads={})


def parse(**parameters: Any) -> GenerateParameters:
    return parse_body(orjson.dumps({"inputs": "x", "parameters": parameters}), GenerateBody).parameters


def checked(model: ServedModel, body: Any) -> GenerateParameters:
    """Return the parameters of a body after the checks of the use case."""
    parsed = parse_body(orjson.dumps(body), GenerateBody)
    check_parameters(model, parsed.parameters, len(parsed.inputs), stream=parsed.stream)
    return parsed.parameters


def error_of(model: ServedModel, parameters: Any, **body: Any) -> tuple[str, str | None, str]:
    """Return the code, parameter and message of an error as in the API."""
    with pytest.raises(ApiError) as caught:
        checked(model, {"inputs": "x", "parameters": parameters, **body})
    error = caught.value
    names = paths_of(GenerateBody)
    assert error.message(names).endswith(".")
    return error.code, error.param(names), error.message(names)


@pytest.mark.parametrize(("name", "value", "at"), WRONG, ids=str)
def test_invalid_parameters_are_rejected_with_their_path(model: ServedModel, name: str, value: Any, at: str) -> None:
    assert error_of(model, {name: value})[:2] == ("invalid_parameter", f"parameters.{name}{at}")


@pytest.mark.parametrize(("name", "value"), WRONG_WITH_BEAMS, ids=str)
def test_parameters_that_exclude_beams_are_rejected_with_their_path(model: ServedModel, name: str, value: Any) -> None:
    assert error_of(model, {"num_beams": 2, name: value})[:2] == ("invalid_parameter", f"parameters.{name}")


@pytest.mark.parametrize(("name", "value"), WRONG_WITH_SAMPLING, ids=str)
def test_parameters_that_exclude_sampling_are_rejected_with_their_path(
    model: ServedModel, name: str, value: Any
) -> None:
    assert error_of(model, {"do_sample": True, name: value})[:2] == ("invalid_parameter", f"parameters.{name}")


@pytest.mark.parametrize("method", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize(("name", "value"), NEUTRAL, ids=str)
def test_neutral_values_are_allowed_with_every_method(
    model: ServedModel, name: str, value: Any, method: dict[str, Any]
) -> None:
    parameters = checked(model, {"inputs": "x", "parameters": {name: value, **method, "seed": None}})
    without = checked(model, {"inputs": "x", "parameters": method})
    assert vars(parameters) | {"seed": 0} == vars(without) | {"seed": 0}


def test_errors_of_parameters_without_effect_name_the_missing_parameter(model: ServedModel) -> None:
    for name, value, needed in (
        *(("length_penalty", 2.0, "num_beams above 1"), ("early_stopping", True, "num_beams above 1")),
        *(("temperature", 0.5, "do_sample: true"), ("seed", 3, "do_sample: true")),
    ):
        *_, message = error_of(model, {name: value})
        assert message == f"parameters.{name} has no effect without parameters.{needed}."
    *_, message = error_of(model, {"num_return_sequences": 2})
    assert message == (
        "parameters.num_return_sequences must be at most parameters.num_beams (1) without parameters.do_sample: true, "
        "got 2."
    )
    *_, message = error_of(model, {"num_return_sequences": 3, "num_beams": 2})
    assert message == (
        "parameters.num_return_sequences must be at most parameters.num_beams (2) without parameters.do_sample: true, "
        "got 3."
    )
    _, param, message = error_of(model, {"num_beams": 2, "do_sample": True})
    assert param == "parameters.num_beams"
    assert message == "parameters.num_beams above 1 cannot be combined with parameters.do_sample: true."
    _, param, message = error_of(model, {"min_new_tokens": 4, "max_new_tokens": 3})
    assert param == "parameters.min_new_tokens"
    assert message == "parameters.min_new_tokens must be at most parameters.max_new_tokens (3), got 4."


def test_a_stream_has_no_beams(model: ServedModel) -> None:
    code, param, message = error_of(model, {"num_beams": 2}, stream=True)
    assert (code, param) == ("unsupported_parameter", "parameters.num_beams")
    assert "cannot be streamed: set parameters.num_beams to 1" in message


@pytest.mark.parametrize(
    ("value", "at"), [([], ""), ("", ""), (" \n", ""), (["a", " "], "[1]")], ids=["none", "empty", "blank", "one blank"]
)
def test_a_prefix_is_not_blank(model: ServedModel, value: Any, at: str) -> None:
    code, param, _ = error_of(model, {"target_prefix": value}, inputs=["x", "y"])
    assert (code, param) == ("empty_input", f"parameters.target_prefix{at}")


def test_the_largest_and_the_smallest_values_are_accepted(model: ServedModel) -> None:
    wide = {"num_beams": 8, "num_return_sequences": 8, "length_penalty": -10, "early_stopping": "never"}
    parameters = checked(model, {"inputs": "x", "parameters": {**wide, "top_logprobs": 5, "max_new_tokens": 65_536}})
    assert (parameters.num_beams, parameters.length_penalty, parameters.early_stopping) == (8, -10.0, "never")
    narrow = {"repetition_penalty": 0.01, "no_repeat_ngram_size": 65_536, "suppress_tokens": [0] * 1024}
    parameters = checked(model, {"inputs": "x", "parameters": narrow})
    assert (parameters.repetition_penalty, parameters.no_repeat_ngram_size) == (0.01, 65_536)


def test_a_prefix_is_one_text_or_a_list() -> None:
    assert parse(target_prefix=["a"]).target_prefix == Texts(("a",), is_list=True)
    assert parse(target_prefix="a").target_prefix == Texts(("a",), is_list=False)
    assert parse(target_prefix=None).target_prefix is None


def test_biases_are_pairs_of_token_ids_and_numbers() -> None:
    assert parse(logit_bias={"5": 1, "0": -100}).logit_bias == ((5, 1.0), (0, -100.0))
    assert parse(logit_bias={}).logit_bias == ()
    assert parse(logit_bias=None).logit_bias is None


def test_return_attention_is_true_false_or_a_selection() -> None:
    assert parse(return_attention=True).return_attention == AttentionSelection()
    assert parse(return_attention=False).return_attention is None
    requested = {"kinds": ["cross"], "layers": [1, 0], "heads": [2], "reduce": "max", "encoding": "base64"}
    assert parse(return_attention=requested).return_attention == AttentionSelection.model_validate(requested)


def test_parameters_are_an_object_or_absent_on_every_route() -> None:
    for body, kind in (({"inputs": "x"}, GenerateBody), ({"inputs": "x"}, AttentionBody)):
        with pytest.raises(ApiError) as caught:
            parse_body(orjson.dumps({**body, "parameters": None}), kind)
        assert (caught.value.code, caught.value.param({})) == ("invalid_parameter", "parameters")
