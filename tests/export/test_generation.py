"""Special tokens and generation settings are those that `generate` of Transformers uses."""

from typing import Any

import pytest

from export.errors import ImportFailedError
from export.sources.checkpoint import Config
from export.sources.generation import Generation, read_generation
from service.bundle import GenerationDefaults

CONFIG: dict[str, Any] = {"decoder_start_token_id": 2, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}


def read(generation: dict[str, Any] | None = None, is_decoder_only: bool = False, **changes: Any) -> Generation:
    """Read the settings of a configuration without the keys that are None."""
    values = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    settings = None if generation is None else Config(generation, "generation_config.json")
    return read_generation(Config(values, "config.json"), settings, is_decoder_only)


def test_tokens_of_a_configuration() -> None:
    assert read() == Generation(1, (2,), (2,), GenerationDefaults())


def test_the_file_of_settings_replaces_those_of_the_configuration() -> None:
    generation = read({"eos_token_id": [5, 6], "num_beams": 3}, num_beams=4, length_penalty=0.5)
    assert generation.end_ids == (5, 6)
    assert generation.start_ids == (2,)  # not in that file
    assert generation.defaults == GenerationDefaults(num_beams=3)


def test_forced_first_token_is_an_input_of_the_decoder() -> None:
    """Lengths of Transformers count all inputs of the decoder."""
    generation = read({"forced_bos_token_id": 7, "max_length": 20, "min_length": 5})
    assert generation.start_ids == (2, 7)
    assert (generation.defaults.max_new_tokens, generation.defaults.min_new_tokens) == (18, 3)


def test_new_tokens_take_precedence_over_lengths() -> None:
    assert read({"max_length": 20, "max_new_tokens": 30}).defaults.max_new_tokens == 30
    forced = read({"forced_bos_token_id": 7, "max_new_tokens": 30, "min_new_tokens": 4}).defaults
    assert (forced.max_new_tokens, forced.min_new_tokens) == (29, 3)


def test_lengths_with_a_prompt_are_not_used() -> None:
    assert read({"max_length": 20, "min_length": 5}, is_decoder_only=True).defaults == GenerationDefaults()


def test_bad_words_are_suppressed_tokens() -> None:
    generation = read({"bad_words_ids": [[9], [4]], "suppress_tokens": [8], "forced_eos_token_id": 2})
    assert generation.defaults.suppress_tokens == (4, 8, 9)
    assert generation.defaults.force_end


@pytest.mark.parametrize(("given", "expected"), [({}, 50), ({"top_k": 0}, None), ({"top_k": 7}, 7)])
def test_sampling_is_limited_to_fifty_tokens_by_default(given: dict[str, Any], expected: int | None) -> None:
    assert read({"do_sample": True} | given).defaults.top_k == expected


def test_a_decoder_only_model_without_a_start_token_starts_with_its_end_token() -> None:
    assert read({}, is_decoder_only=True, bos_token_id=None).start_ids == (2,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bad_words_ids": [[3, 4]]}, r"bad_words_ids has the sequence \[3, 4\]; only single tokens"),
        ({"num_beams": 9}, "num_beams must be from 1 to 8, got 9"),
        ({"num_beam_groups": 2}, "num_beam_groups is 2, which is not supported"),
        ({"begin_suppress_tokens": [4]}, r"begin_suppress_tokens is \[4\], which is not supported"),
        ({"forced_eos_token_id": 4}, "forced_eos_token_id is 4, but eos_token_id is 2"),
        ({"early_stopping": "soon"}, "early_stopping must be true, false or 'never', got 'soon'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of token ids, got '</s>'"),
        ({"length_penalty": "long"}, "length_penalty must be a finite number"),
    ],
)
def test_other_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportFailedError, match=message):
        read(settings)


@pytest.mark.parametrize("key", ["eos_token_id", "decoder_start_token_id"])
def test_missing_tokens_are_named(key: str) -> None:
    with pytest.raises(ImportFailedError, match=key):
        read(**{key: None}, bos_token_id=None)  # type: ignore[arg-type]
