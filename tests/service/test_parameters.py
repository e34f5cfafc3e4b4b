"""What the parameters of generation may be, and which go together."""

from typing import Any

import orjson
import pytest

from service.bodies import parse_body
from service.errors import ApiError
from service.fields import Texts
from service.parameters import MapSelection, Parameters
from service.schemas import AttentionBody, GenerateBody

# Each alone, without beams.
WRONG: list[tuple[str, Any, str]] = [
    *(("length_penalty", 1.0, ""), ("early_stopping", False, ""), ("num_return_sequences", 2, "")),
    *(("repetition_penalty", value, "") for value in (0, 1e-40, -1, 10.5, True, "1", None)),
    *(("no_repeat_ngram_size", value, "") for value in (-1, 2.0, True, 65_537, None)),
    *(("suppress_tokens", value, "") for value in (3, None, "3", [3] * 1025)),
    *(("suppress_tokens", value, "[1]") for value in ([3, -1], [3, True], [3, 3.0], [3, "3"])),
    *(("target_prefix", value, "") for value in (3, {"a": 1}, ["a", "b"], ["a"] * 33)),
    ("target_prefix", [3], "[0]"),
    *(("top_logprobs", value, "") for value in (-1, 6, True, 1.0, None)),
    *(("return_attention", value, "") for value in (1, None, "cross", ["cross"])),
    *(("return_attention", {"kinds": value}, ".kinds") for value in ([], "cross", ["cross", "cross"])),
    *(("return_attention", {"kinds": ["self"]}, ".kinds[0]"), ("return_attention", {"maps": True}, ".maps")),
    *(("return_attention", {"layers": value}, ".layers") for value in ([], [0, 0])),
    *(("return_attention", {"heads": [0, value]}, ".heads[1]") for value in (-1, True, 1024)),
    *(("return_attention", {"reduce": "sum"}, ".reduce"), ("return_attention", {"encoding": "hex"}, ".encoding")),
]
WRONG_WITH_BEAMS: list[tuple[str, Any]] = [
    *(("num_return_sequences", value) for value in (0, 3, 9, 1.0, True, None)),
    *(("length_penalty", value) for value in (10.5, -10.5, "1", True, None)),
    *(("early_stopping", value) for value in ("always", 1, None, ["never"])),
    ("do_sample", 1),
]


def parse(**parameters: Any) -> Parameters:
    return parse_body(orjson.dumps({"inputs": "x", "parameters": parameters}), GenerateBody).parameters


@pytest.mark.parametrize(("name", "value", "at"), WRONG, ids=str)
def test_what_is_not_allowed_is_refused_by_its_path(name: str, value: Any, at: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(**{name: value})
    assert (refused.value.code, refused.value.param) == ("invalid_parameter", f"parameters.{name}{at}")
    assert refused.value.message.endswith(".")


@pytest.mark.parametrize(("name", "value"), WRONG_WITH_BEAMS, ids=str)
def test_what_is_not_allowed_with_beams_is_refused_by_its_path(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        parse(num_beams=2, **{name: value})
    assert (refused.value.code, refused.value.param) == ("invalid_parameter", f"parameters.{name}")


def test_what_has_no_effect_says_what_it_needs() -> None:
    for name, value in (("length_penalty", 2.0), ("early_stopping", True)):
        with pytest.raises(ApiError, match="needs num_beams above 1"):
            parse(**{name: value})
    with pytest.raises(ApiError, match=r"num_return_sequences \(2\) exceeds num_beams \(1\)"):
        parse(num_return_sequences=2)
    with pytest.raises(ApiError, match="does not go with do_sample") as refused:
        parse(num_beams=2, do_sample=True)
    assert refused.value.param == "parameters.num_beams"


def test_a_stream_has_no_beams() -> None:
    body = {"inputs": "x", "stream": True, "parameters": {"num_beams": 2}}
    with pytest.raises(ApiError, match="at its end only") as refused:
        parse_body(orjson.dumps(body), GenerateBody)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "parameters.num_beams")


@pytest.mark.parametrize(
    ("value", "at"), [([], ""), ("", ""), (" \n", ""), (["a", " "], "[1]")], ids=["none", "empty", "blank", "one blank"]
)
def test_a_prefix_is_not_blank(value: Any, at: str) -> None:
    body = {"inputs": ["x", "y"], "parameters": {"target_prefix": value}}
    with pytest.raises(ApiError) as refused:
        parse_body(orjson.dumps(body), GenerateBody)
    assert (refused.value.code, refused.value.param) == ("empty_input", f"parameters.target_prefix{at}")


def test_the_largest_and_the_smallest_values_are_taken() -> None:
    wide = parse(num_beams=8, num_return_sequences=8, length_penalty=-10, early_stopping="never", top_logprobs=5)
    assert (wide.num_beams, wide.length_penalty, wide.early_stopping) == (8, -10.0, "never")
    narrow = parse(repetition_penalty=0.01, no_repeat_ngram_size=65_536, suppress_tokens=[0] * 1024)
    assert (narrow.repetition_penalty, narrow.no_repeat_ngram_size) == (0.01, 65_536)


def test_a_prefix_knows_its_place_in_an_error() -> None:
    prefix = parse(target_prefix=["a"]).target_prefix
    assert prefix == Texts(("a",), "parameters.target_prefix", is_list=True)
    assert parse(target_prefix=None).target_prefix is None


def test_return_attention_is_true_false_or_a_selection() -> None:
    assert parse(return_attention=True).return_attention == MapSelection()
    assert parse(return_attention=False).return_attention is None
    wanted = {"kinds": ["cross"], "layers": [1, 0], "heads": [2], "reduce": "max", "encoding": "base64"}
    assert parse(return_attention=wanted).return_attention == MapSelection.model_validate(wanted)


def test_parameters_are_an_object_or_absent_on_every_route() -> None:
    for body, kind in (({"inputs": "x"}, GenerateBody), ({"input": "x"}, AttentionBody)):
        with pytest.raises(ApiError) as refused:
            parse_body(orjson.dumps({**body, "parameters": None}), kind)
        assert (refused.value.code, refused.value.param) == ("invalid_parameter", "parameters")
