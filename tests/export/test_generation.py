"""Special tokens and generation settings are those that `generate` of Transformers uses."""

from typing import Any

import pytest

from sightline.base.bundle import GenerationDefaults
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.generation_settings import GenerationSettings, read_generation
from sightline.export.sources.opened_checkpoint import Config
from tests.support.tables import read_table

CONFIG: dict[str, Any] = {"decoder_start_token_id": 2, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}


def read(generation: dict[str, Any] | None = None, is_decoder_only: bool = False, **changes: Any) -> GenerationSettings:
    """Read the settings of a configuration without the keys that are None."""
    values = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    settings = None if generation is None else Config(generation, "generation_config.json")
    return read_generation(Config(values, "config.json"), settings, is_decoder_only)


def test_tokens_of_a_configuration() -> None:
    assert read() == GenerationSettings(1, (2,), (2,), GenerationDefaults())


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
    read_table(__file__),
)
def test_other_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportFailedError, match=message):
        read(settings)


def test_settings_that_have_no_effect_may_have_any_value() -> None:
    """`generate` of Transformers reads them only if it samples, or with several beams."""
    generation = read({"temperature": 0, "top_p": 1.5, "length_penalty": -20.0, "no_repeat_ngram_size": 2})
    assert generation.defaults == GenerationDefaults(no_repeat_ngram_size=2)
    assert len(generation.notes) == 3
    assert "the default of temperature is 0.0, but it should be greater than 0: it is not used" in generation.notes
    (note,) = read({"num_beams": 1, "length_penalty": 1e9}).notes
    assert note.startswith("the default of length_penalty is 1000000000.0, but")


def test_keys_that_transformers_does_not_read_are_a_note() -> None:
    assert (
        read({"nothing": None, "renormalize_logits": False, "token_healing": False, "stop_strings": None}).notes == ()
    )
    (note,) = read({"my_note": "fine-tuned 2026"}).notes
    assert note == "generation_config.json has keys that do not change the model and are ignored: my_note"


def test_all_filters_of_samples_are_defaults() -> None:
    filters: dict[str, Any] = {"do_sample": True, "top_k": 7, "min_p": 0.1, "typical_p": 0.9}
    assert read(filters).defaults == GenerationDefaults(**filters)


def test_more_beams_than_the_service_has_are_its_maximum() -> None:
    generation = read({"num_beams": 20})
    assert generation.defaults.num_beams == 8
    assert generation.notes == ("num_beams is 20, but the service searches with at most 8 beams: it uses these",)


def test_sampling_in_beam_search_is_a_note() -> None:
    (note,) = read({"num_beams": 4, "do_sample": True}).notes
    assert note.startswith("do_sample is true and num_beams is above 1, but the service does not sample")
    assert read({"num_beams": 4}).notes == read({"do_sample": True}).notes == ()


def test_bad_words_may_have_several_tokens_and_are_never_an_end_token() -> None:
    defaults = read({"bad_words_ids": [[9], [3, 4], [2], [2, 5]]}).defaults  # 2 is the end token
    assert (defaults.suppress_tokens, defaults.bad_words) == ((9,), ((2, 5), (3, 4)))


@pytest.mark.parametrize("key", ["eos_token_id", "decoder_start_token_id"])
def test_missing_tokens_are_named(key: str) -> None:
    with pytest.raises(ImportFailedError, match=key):
        read(**{key: None}, bos_token_id=None)  # type: ignore[arg-type]
