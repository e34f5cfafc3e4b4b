"""`generate` of Hugging Face transformers for the engine's requests."""

from collections.abc import Sequence
from typing import Any

import torch

from sightline.service.engine.request import GenerateRequest
from sightline.service.parameters import GenerateParameters
from tests.equality.comparing import Targets

MAX_ROWS = 50  # of a batch, in which each beam has a row; the last sequence that ends decides the time of all


def generate(
    marian: Any, requests: Sequence[GenerateRequest], stop_ids: Sequence[int] = (), **settings: Any
) -> list[Targets]:
    """Run `generate` for requests with the same parameters and prefix lengths.

    Args:
        marian: the model.
        requests: the requests.
        stop_ids: tokens that end a sequence beside the end token, by a stopping criterion.
        settings: fields of the `GenerationConfig` to replace.
    """
    (parameters,) = {request.parameters for request in requests}
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].source_ids))  # little padding
    targets: dict[int, Targets] = {}
    size = MAX_ROWS // parameters.num_beams
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        found = _generate_batch(marian, [requests[index] for index in batch], parameters, stop_ids, settings)
        targets.update(zip(batch, found, strict=True))
    return [targets[index] for index in range(len(requests))]


def _generate_batch(
    marian: Any,
    requests: Sequence[GenerateRequest],
    parameters: GenerateParameters,
    stop_ids: Sequence[int],
    settings: dict[str, Any],
) -> list[Targets]:
    config = marian.config
    sources = [torch.tensor(request.source_ids) for request in requests]
    input_ids = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=config.pad_token_id)
    lengths = torch.tensor([len(source) for source in sources])
    prompts = torch.tensor([[config.decoder_start_token_id, *request.target_prefix] for request in requests])
    output = marian.generate(
        input_ids=input_ids,
        attention_mask=(torch.arange(input_ids.size(1)) < lengths[:, None]).long(),
        decoder_input_ids=prompts,
        generation_config=_generation_config(config, parameters, settings),
        stopping_criteria=[lambda ids, scores: torch.isin(ids[:, -1], torch.tensor(stop_ids))] if stop_ids else None,
    )
    rows = [
        _until_end(row, (config.eos_token_id, *settings.get("eos_token_id", ()), *stop_ids))
        for row in output[:, prompts.size(1) :].tolist()
    ]
    count = parameters.num_return_sequences
    return [rows[first : first + count] for first in range(0, len(rows), count)]


def _generation_config(config: Any, parameters: GenerateParameters, settings: dict[str, Any]) -> Any:
    from transformers import GenerationConfig

    search: dict[str, Any] = {}
    if parameters.num_beams > 1:  # the library warns where they are given and not read
        search = {"length_penalty": parameters.length_penalty, "early_stopping": parameters.early_stopping}
    fields = dict(
        max_new_tokens=parameters.max_new_tokens,
        min_new_tokens=parameters.min_new_tokens,
        do_sample=False,
        num_beams=parameters.num_beams,
        num_return_sequences=parameters.num_return_sequences,
        repetition_penalty=parameters.repetition_penalty,
        no_repeat_ngram_size=parameters.no_repeat_ngram_size,
        sequence_bias={(token_id,): bias for token_id, bias in parameters.logit_bias or ()} or None,
        suppress_tokens=list(parameters.suppress_tokens),
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        forced_eos_token_id=None,
        **search,
    )
    return GenerationConfig(**{**fields, **settings})


def _until_end(ids: Sequence[int], end_ids: Sequence[int]) -> tuple[int, ...]:
    """Truncate after the first of `end_ids`; the rest is padding."""
    ends = (index for index, token in enumerate(ids, start=1) if token in end_ids)
    return tuple(ids[: next(ends, len(ids))])
