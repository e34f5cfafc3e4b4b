"""Valid values and combinations of the generation parameters."""

from typing import Any

import orjson
import pytest

from sightline.base.bundle import MAX_BEAMS
from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.http.http_call import parse_body
from sightline.service.inference.generate import check_parameters
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import AttentionSelection, GenerateParameters
from sightline.service.tasks.generate import GenerateBody
from tests.support.fake_runner import HIDDEN, fake_manifest

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


@pytest.mark.parametrize("method", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize(("name", "value"), NEUTRAL, ids=str)
def test_neutral_values_are_allowed_with_every_method(
    model: ServedModel, name: str, value: Any, method: dict[str, Any]
) -> None:
    parameters = checked(model, {"inputs": "x", "parameters": {name: value, **method, "seed": None}})
    without = checked(model, {"inputs": "x", "parameters": method})
    assert vars(parameters) | {"seed": 0} == vars(without) | {"seed": 0}


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
    with pytest.raises(ApiError, match="It must have at most 1024 token ids") as caught:
        parse(logit_bias={str(token_id): 1 for token_id in range(1025)})
    assert caught.value.param({}) == "parameters.logit_bias"


def test_return_attention_is_true_false_or_a_selection() -> None:
    assert parse(return_attention=True).return_attention == AttentionSelection()
    assert parse(return_attention=False).return_attention is None
    requested = {"kinds": ["cross"], "layers": [1, 0], "heads": [2], "reduce": "max", "encoding": "base64"}
    assert parse(return_attention=requested).return_attention == AttentionSelection.model_validate(requested)
