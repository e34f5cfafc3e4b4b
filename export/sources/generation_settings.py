"""Special tokens and generation defaults of checkpoints in the layout of Hugging Face."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from sightline.base.bundle import MAX_BEAMS, GenerationDefaults
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, first_of

# Keys of config.json that `read_generation` reads, or that only control the library.
GENERATION_KEYS = (
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "force_bos_token_to_be_generated", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "pad_token_id",
    "remove_invalid_values", "repetition_penalty", "sep_token_id", "suppress_tokens", "temperature", "top_k",
    "top_p", "typical_p",
)  # fmt: skip

# Settings that would change the generated tokens, with the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "begin_suppress_tokens": (None, []),
    "constraints": (None,),
    "diversity_penalty": (None, 0.0),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None,),
    "forced_decoder_ids": (None, []),
    "guidance_scale": (None, 1.0),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0.0),
    "renormalize_logits": (None, False),
    "sequence_bias": (None,),
    "stop_strings": (None, []),
    "token_healing": (None, False),
    "top_h": (None,),
    "watermarking_config": (None,),
}
# Keys of generation_config.json that do not change the generated tokens.
_HARMLESS = (
    "_*", "transformers_version", "use_cache", "cache_*", "max_cache_len", "output_*", "return_*", "max_time",
    "prefill_chunk_size", "compile_config", "disable_compile", "low_memory", "trust_remote_code", "tokenizer_class",
    "chat_format", "max_window_size", "is_assistant", "num_assistant_tokens*", "assistant_*", "target_lookbehind",
    "assistant_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size", "unk_token_id", "cls_token_id",
)  # fmt: skip
# Settings that have no effect unless tokens are sampled, or unless there are several beams.
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_OF_BEAMS = ("length_penalty", "early_stopping")
# `generate` samples among this many tokens if a configuration has no other number.
_TRANSFORMERS_TOP_K = 50


@dataclass(frozen=True)
class GenerationSettings:
    """Special tokens of a decoder, and settings of its generation."""

    pad_id: int
    start_ids: tuple[int, ...]  # first inputs of the decoder; the last ones may be forced tokens
    end_ids: tuple[int, ...]
    defaults: GenerationDefaults
    notes: tuple[str, ...] = ()  # facts that the user should read


def read_generation(config: Config, generation: Config | None, is_decoder_only: bool = False) -> GenerationSettings:
    """Read the special tokens and generation settings that `generate` of Transformers would use.

    Transformers counts the first inputs of the decoder in `max_length` and `min_length`, while this
    project counts new tokens only. A forced first token becomes one of the first inputs, so that it
    does not count as a new token; the length penalty of beam search counts it.

    Raises `ImportFailedError`, also for a value that no request may have.

    Args:
        config: config.json, which holds the settings of checkpoints without the other file.
        generation: generation_config.json.
        is_decoder_only: the prompt replaces the first inputs; lengths that include it are unused.
    """
    source = config if generation is None else generation
    for key, values in _NEUTRAL.items():
        source.neutral(key, *values)
    notes = list[str]()
    if generation is not None:
        generation.ignore(*GENERATION_KEYS, *_HARMLESS)
        if unread := [key for key, value in generation.unread().items() if value is not None]:
            notes.append(
                f"generation_config.json has keys that do not change the model and are ignored: {first_of(unread)}"
            )
    end_ids = _ids(source, "eos_token_id") or _ids(config, "eos_token_id")
    if not end_ids:
        raise ImportFailedError("neither generation_config.json nor config.json has eos_token_id; add it")
    start_ids = _start_ids(config, source, end_ids, is_decoder_only)
    pad_ids = _ids(source, "pad_token_id") or _ids(config, "pad_token_id") or end_ids
    forced = _ids(source, "forced_eos_token_id")
    if forced and forced[0] != end_ids[0]:
        raise ImportFailedError(
            f"forced_eos_token_id is {forced[0]}, but eos_token_id is {end_ids[0]}; only the first end token can be "
            "forced: remove forced_eos_token_id"
        )
    suppressed, bad_words = _suppressed(source, end_ids)
    num_beams = _integer(source, "num_beams")
    if num_beams is not None and num_beams > MAX_BEAMS:
        notes.append(
            f"num_beams is {num_beams}, but the service searches with at most {MAX_BEAMS} beams: it uses these"
        )
        num_beams = MAX_BEAMS
    if (num_beams or 1) > 1 and source.get("do_sample", None):
        notes.append(
            "do_sample is true and num_beams is above 1, but the service does not sample in beam search: its default "
            "is beam search without sampling, and results differ from those of Transformers"
        )
    settings: dict[str, Any] = {
        "suppress_tokens": suppressed,
        "bad_words": bad_words,
        "force_end": bool(forced),
        "num_beams": num_beams,
        "early_stopping": _early_stopping(source),
        "min_new_tokens": _new_tokens(source, "min", start_ids, is_decoder_only),
        "max_new_tokens": _new_tokens(source, "max", start_ids, is_decoder_only),
        "no_repeat_ngram_size": _integer(source, "no_repeat_ngram_size"),
        "do_sample": source.get("do_sample", None),
        "top_k": _top_k(source),
    }
    for key in ("length_penalty", "repetition_penalty", "temperature", "top_p", "min_p", "typical_p"):
        settings[key] = _number(source, key)
    defaults, ignored = _checked(settings)
    return GenerationSettings(pad_ids[0], start_ids, end_ids, defaults, (*notes, *ignored))


def _checked(values: dict[str, Any]) -> tuple[GenerationDefaults, list[str]]:
    """Check the settings by the limits of requests; also return a note for each one left out.

    A setting with a wrong value that `generate` does not use, because nothing is sampled or there
    is one beam, is left out. Others raise `ImportFailedError`.
    """
    has_beams = (values["num_beams"] or 1) > 1
    unused = (() if values["do_sample"] is True else _OF_SAMPLING) + (() if has_beams else _OF_BEAMS)
    try:
        return GenerationDefaults(**values), []
    except ValidationError as error:
        notes = []
        for problem in error.errors():
            name = str(problem["loc"][0])
            reason = f"{name} is {values[name]!r}, but {problem['msg'].replace('Input', 'it', 1)}"
            if name not in unused:
                raise ImportFailedError(f"{reason}; every request would fail: correct or remove {name}") from None
            notes.append(f"the default of {reason}: it is not used")
            values = values | {name: None}
        return GenerationDefaults(**values), notes


def after_forced_token(generation: GenerationSettings) -> GenerationSettings:
    """Return the settings of a model that is forced to begin with the token of a language.

    Lengths of Transformers count it, and those of this project do not.
    """
    defaults = generation.defaults
    least, most = defaults.min_new_tokens, defaults.max_new_tokens
    lengths = {
        "min_new_tokens": None if least is None else max(least - 1, 0),
        "max_new_tokens": None if most is None else max(most - 1, 1),
    }
    return replace(generation, defaults=defaults.model_copy(update=lengths))


def _start_ids(config: Config, source: Config, end_ids: Sequence[int], is_decoder_only: bool) -> tuple[int, ...]:
    keys = ("bos_token_id",) if is_decoder_only else ("decoder_start_token_id", "bos_token_id")
    for key in keys:
        ids = _ids(source, key) or _ids(config, key)
        if ids:
            break
    else:
        if not is_decoder_only:
            raise ImportFailedError("config.json has no decoder_start_token_id; add the first token of the decoder")
        ids = tuple(end_ids[:1])
    return (*ids[:1], *(() if is_decoder_only else _ids(source, "forced_bos_token_id")))


def _ids(config: Config, key: str) -> tuple[int, ...]:
    """Return the token ids of a key, which has one id, a list, or nothing."""
    value = config.get(key, None)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ImportFailedError(f"{key} must be a token id or a list of token ids, got {value!r}")
    return tuple(ids)


def _suppressed(source: Config, end_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the tokens and the sequences of tokens that are never generated.

    As in Transformers, an end token is no bad word.
    """
    words = source.get("bad_words_ids", None) or []
    for word in words if isinstance(words, list) else [words]:
        if not isinstance(word, list) or not word or not all(type(token) is int and token >= 0 for token in word):
            raise ImportFailedError(f"bad_words_ids must be a list of lists of token ids, got {word!r} in it")
    single = {word[0] for word in words if len(word) == 1} - set(end_ids)
    return (
        tuple(sorted({*_ids(source, "suppress_tokens"), *single})),
        tuple(sorted({tuple(word) for word in words if len(word) > 1})),
    )


def _integer(source: Config, key: str) -> int | None:
    return source.integer(key) if key in source else None


def _number(source: Config, key: str) -> float | None:
    return source.number(key) if key in source else None


def _top_k(source: Config) -> int | None:
    value = _integer(source, "top_k")
    if value is None and source.get("do_sample", None):
        return _TRANSFORMERS_TOP_K
    return value or None  # 0: all tokens


def _early_stopping(source: Config) -> bool | Literal["never"] | None:
    value: Any = source.get("early_stopping", None)
    if value not in (None, True, False, "never"):
        raise ImportFailedError(f"early_stopping must be true, false or 'never', got {value!r}")
    return None if value is None else "never" if value == "never" else bool(value)


def _new_tokens(source: Config, bound: str, start_ids: Sequence[int], is_decoder_only: bool) -> int | None:
    """Return the smallest or largest number of new tokens; `bound` is "min" or "max"."""
    new = _integer(source, f"{bound}_new_tokens")
    total = _integer(source, f"{bound}_length")
    if is_decoder_only:
        return new
    if new is not None:
        total = 1 + new  # Transformers counts a forced first token as new
    return None if total is None else max(total - len(start_ids), 0 if bound == "min" else 1)
