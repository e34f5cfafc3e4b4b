"""Generation from texts: some are split into sentences, and those without a letter are copied."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from sightline.base.text.sentences import ONE_SENTENCE, SplitText, split_sentences
from sightline.service.api_errors import ApiError, complete_message
from sightline.service.body_fields import OnEmpty, Texts
from sightline.service.inference.call import AnyInputs, Call, too_many_sequences
from sightline.service.inference.confirmation import finish_confirmed
from sightline.service.inference.coverage import joined_coverage
from sightline.service.inference.generate import (
    Decoding,
    DoubtfulResult,
    FinishReason,
    GenerateOutput,
    GenerateResult,
    GenerateWarning,
    SentenceOutput,
    SplitOutput,
    begin,
    check_parameters,
    usage_for,
)
from sightline.service.inference.repair import repaired
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import GenerateParameters

MAX_SENTENCES = 8192  # sequences that a call generates from sentences
WHOLE = SplitText([""], ["", ""])  # an input that is neither split nor copied


async def generate_texts(
    call: Call,
    model: ServedModel,
    inputs: AnyInputs,
    parameters: GenerateParameters,
    *,
    on_empty: OnEmpty = "error",
    is_whole: bool = False,
) -> GenerateResult:
    """Generate from each input, or from each of its sentences, and join the outputs of each input.

    The sentences run at the same time, but never more of them than `Call.reserve` reserves. The
    whitespace between the sentences is kept. The text of rank r joins the texts of rank r of all
    sentences. With `is_whole`, the response describes each output as a whole, such as the positions
    of its tokens: texts are then split only by `split_sentences`, and none are copied. With
    `on_empty` "pass", blank texts get an empty output.
    """
    if on_empty == "pass" and len(inputs) > call.service.settings.max_inputs:  # blank ones are not reserved
        raise too_many_sequences(len(inputs), call.service.settings.max_inputs, "inputs")
    check_parameters(model, parameters, len(inputs))
    blank: list[GenerateOutput] = []
    if on_empty == "pass":
        assert isinstance(inputs, Texts)  # prompts are not blank
        coverage = joined_coverage([]) if parameters.return_coverage or parameters.repair else None
        blank = [
            GenerateOutput(index, 0, "", [], "empty", 0.0, None, None, coverage, None)
            for index, text in enumerate(inputs.texts)
            if not text.strip()
        ]
        if len(blank) == len(inputs):
            timings = call.timings([])
            call.record_usage(model, timings, 0, 0, ["empty"] * len(blank))
            return GenerateResult(model.name, blank, usage_for(model, 0, 0, 0), timings)
        indices = [index for index, text in enumerate(inputs.texts) if text.strip()]
        inputs, prefix = inputs.select(indices), parameters.target_prefix
        if prefix is not None and prefix.is_list:
            parameters = parameters.model_copy(update={"target_prefix": prefix.select(indices)})
    decoding = begin(call, model, parameters)
    split_texts = await read_by_sentence(decoding, inputs, is_whole=is_whole)
    result = await finish_confirmed(decoding)
    if parameters.repair:
        result = await repaired(decoding, result, partial(begin, call, model), partial(generate_texts, call, model))
    if call.warnings:
        result = DoubtfulResult(**vars(result), warnings=list(call.warnings.values()))
    if split_texts[0] is not WHOLE:
        assert isinstance(inputs, Texts)
        result = replace(result, outputs=_joined_outputs(decoding, inputs.texts, split_texts, result.outputs))
    if blank:
        generated = [replace(output, index=indices[output.index]) for output in result.outputs]
        result = replace(result, outputs=sorted(blank + generated, key=lambda output: (output.index, output.rank)))
    return result


async def read_by_sentence(
    decoding: Decoding, inputs: AnyInputs, *, is_whole: bool, stream: bool = False
) -> list[SplitText]:
    """Split the inputs of a decoding where that is due, and read their sentences.

    Return each input as the sentences that the decoding has read, in order, and the text around
    them. That of a model that translates includes the sentences without a letter, which are copied.
    The call gets warnings about inputs of several sentences that a model of sentences reads as a
    whole, unless the request sets `split_sentences`: its client knows what the model needs.
    """
    call, model, parameters = decoding.call, decoding.model, decoding.parameters
    is_plain = not isinstance(inputs, Texts) or all(map(ONE_SENTENCE.fullmatch, inputs.texts))
    if is_plain or not model.translates:
        await decoding.read(inputs, stream=stream)
        return [WHOLE] * len(inputs)
    assert isinstance(inputs, Texts)
    languages, split_texts = decoding.languages, list[SplitText]()
    is_split, copies = splits(model, parameters, is_whole), not _is_about_tokens(parameters, is_whole)
    needs_warning = not is_split and parameters.split_sentences is None and model.manifest.training_unit == "sentence"

    def split() -> list[str]:
        for index, text in enumerate(inputs.texts if needs_warning else ()):
            if split_sentences(text, languages.source, max_sentences=1) is None:
                call.warnings[index] = _warning(call, model, inputs.index(index))
        texts: Iterable[SplitText] = (SplitText([text], ["", ""]) for text in inputs.texts)
        if is_split:
            texts = _split(call, inputs, languages.source, decoding.num_samples)
        split_texts.extend([text.copying(languages.target) for text in texts] if copies else texts)
        return [sentence for split_text in split_texts for sentence in split_text.sentences]

    try:
        await decoding.read(inputs, stream=stream, split=split)
    except ApiError as error:
        raise _error_of_input(error, inputs, split_texts) from None
    return split_texts


def splits(model: ServedModel, parameters: GenerateParameters, is_whole: bool) -> bool:
    """Return True if texts of a call are split: on request, or by default.

    By default, those of models that were trained on sentences are, unless the call needs each text
    as a whole or returns several beams of it.
    """
    if parameters.split_sentences is not None:
        return parameters.split_sentences
    has_ranks = parameters.num_beams > 1 and parameters.num_return_sequences > 1
    return model.manifest.training_unit == "sentence" and not has_ranks and not _is_about_tokens(parameters, is_whole)


def _is_about_tokens(parameters: GenerateParameters, is_whole: bool) -> bool:
    """Return True if a call asks for values of tokens beside the text, or sets some of them."""
    asks = parameters.top_logprobs, parameters.return_attention, parameters.hidden_source_tokens, parameters.constraint
    return is_whole or any(asks) or parameters.target_prefix is not None


def _split(call: Call, inputs: Texts, language: str, num_samples: int) -> Iterator[SplitText]:
    """Split all inputs; a sentence is generated `num_samples` times."""
    num_sentences = 0
    for text in inputs.texts:
        if not call.seconds_left:  # the call has already failed
            raise ApiError("deadline_exceeded")
        split_text = split_sentences(text, language, MAX_SENTENCES - num_sentences)
        if split_text is None:
            raise _too_many(f"more than {MAX_SENTENCES}", num_samples)
        num_sentences += len(split_text.sentences)
        yield split_text
    check_number(num_sentences, num_samples)


def check_number(num_sentences: int, num_samples: int) -> None:
    """Reject a call that generates from too many sentences."""
    if num_sentences * num_samples > MAX_SENTENCES:
        raise _too_many(str(num_sentences), num_samples)


def _too_many(num_sentences: str, num_samples: int) -> ApiError:
    each = f", each with {{num_return_sequences}} {num_samples}" if num_samples > 1 else ""
    message = (
        f"A call generates at most {MAX_SENTENCES} sequences from sentences, got {num_sentences} sentences{each}. "
        "Send the text in several calls."
    )
    return ApiError("invalid_parameter", message, field="inputs")


def _error_of_input(error: ApiError, inputs: Texts, split_texts: Sequence[SplitText]) -> ApiError:
    """Convert an error about a sentence to one about its input; return other errors unchanged."""
    if error.field != "inputs" or error.index is None:
        return error
    input_index, index = 0, error.index  # of the input; of the sentence in it
    while index >= len(split_texts[input_index].sentences):
        index -= len(split_texts[input_index].sentences)
        input_index += 1
    message = error.message({})
    if len(split_texts[input_index].sentences) > 1:
        message = f"{complete_message(message, f'Sentence {index + 1}')} Line breaks split a sentence further."
    return ApiError(error.code, message, field=error.field, index=inputs.index(input_index))


def _warning(call: Call, model: ServedModel, index: int | None) -> GenerateWarning:
    """Return the warning about the input with this index in a list."""
    field = call.field_names.get("inputs", "inputs")
    param = field if index is None else f"{field}[{index}]"
    message = (
        f"{param} has several sentences, but {model.name} was trained on single sentences and may leave out some "
        "of them. Set split_sentences of POST /v1/generate to true, or send each sentence as an input of its own."
    )
    return GenerateWarning("several_sentences", message, param)


def _joined_outputs(
    decoding: Decoding,
    texts: Sequence[str],
    split_texts: Sequence[SplitText],
    of_sentences: Sequence[GenerateOutput],
) -> list[GenerateOutput]:
    """Join the outputs of all sentences to those of the inputs."""
    sentences = (list(ranks) for _, ranks in groupby(of_sentences, key=lambda output: output.index))
    outputs, parameters = list[GenerateOutput](), decoding.parameters
    for index, split_text in enumerate(split_texts):
        if not split_text.sentences:
            text, seed = split_text.join([], ""), parameters.seed  # an input that is copied as a whole
            ranks, coverage = range(parameters.num_return_sequences), joined_coverage([]) if decoding.coverage else None
            outputs += [GenerateOutput(index, rank, text, [], "eos", 0.0, seed, None, coverage, None) for rank in ranks]
            continue
        # `strict=False`: a beam search may return fewer texts for one sentence than for another.
        of_ranks = zip(*[next(sentences) for _ in split_text.sentences], strict=False)
        outputs += [_joined(index, texts[index], split_text, parts, decoding.languages.target) for parts in of_ranks]
    return outputs


def _joined(
    index: int, source: str, split_text: SplitText, parts: Sequence[GenerateOutput], language: str
) -> GenerateOutput:
    """Join the outputs of the sentences of one input."""
    if len(parts) == 1 and not any(split_text.gaps):  # as without splitting
        return replace(parts[0], index=index)
    sentences = [
        SentenceOutput(source, part.text, len(part.tokens), part.score, part.attention, part.repair)
        for source, part in zip(split_text.sentences, parts, strict=True)
    ]
    texts = [part.text for part in parts]
    text, coverages = split_text.join(texts, language), [part.coverage for part in parts if part.coverage]
    starts = (_starts(*each, split_text.gaps) for each in ((source, split_text.sentences), (text, texts)))
    places = zip(coverages, *starts, strict=False)
    return SplitOutput(
        rank=parts[0].rank,
        seed=parts[0].seed,
        attention=None,
        sentences=sentences,
        index=index,
        text=text,
        tokens=[token for part in parts for token in part.tokens],
        finish_reason=joined_reason([part.finish_reason for part in parts]),
        score=sum(part.score for part in parts),
        coverage=joined_coverage([part.moved(*starts) for part, *starts in places]) if coverages else None,
        repair=None,
    )


def _starts(text: str, parts: Sequence[str], gaps: Iterable[str]) -> Iterator[int]:
    """Yield the index at which each part of a text starts.

    The gaps before the parts can have copies of them, and more or fewer spaces than in the text.
    """
    position = 0
    for part, gap in zip(parts, gaps, strict=False):
        is_exact = text.startswith(gap + part, position)
        position = position + len(gap) if is_exact else text.index(part, position + len(gap.replace(" ", "")))
        yield position
        position += len(part)


def joined_reason(reasons: Sequence[str]) -> FinishReason:
    if "length" in reasons:
        return "length"
    return "stop" if "stop" in reasons else "eos"
