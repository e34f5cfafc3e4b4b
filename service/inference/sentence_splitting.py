"""Generation from texts that are split into sentences, such as the translation of a paragraph."""

from collections.abc import Sequence
from dataclasses import replace

from sightline.base.text.sentences import SplitText, split_sentences
from sightline.service.api_errors import ApiError, complete_message
from sightline.service.body_fields import OnEmpty, Texts
from sightline.service.inference.call import AnyInputs, Call
from sightline.service.inference.generate import (
    FinishReason,
    GenerateOutput,
    GenerateResult,
    GenerateWarning,
    SentenceOutput,
    SplitOutput,
    begin,
    expected_work,
    finish,
    generate_without_blanks,
)
from sightline.service.inference.language_choice import choose_languages
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import GenerateParameters

MAX_SENTENCES = 8192  # sequences that a call generates from sentences


async def generate_by_sentence(
    call: Call,
    model: ServedModel,
    inputs: AnyInputs,
    parameters: GenerateParameters,
    *,
    on_empty: OnEmpty = "error",
) -> GenerateResult:
    """Generate from each sentence of the inputs, and join the outputs of each input.

    The sentences run at the same time, but never more of them than `Call.reserve` reserves. The
    whitespace between the sentences is kept. The text of rank r joins the texts of rank r of all
    sentences. Requires `split_sentences`. For the arguments, see `generate`.

    Raises:
        ApiError: the request is invalid, is rejected, or fails.
        ClientGoneError: the client closed the connection.
    """
    assert parameters.split_sentences
    if on_empty == "pass":
        return await generate_without_blanks(call, model, inputs, parameters, generate_by_sentence)
    decoding = begin(call, model, inputs, parameters)
    assert isinstance(inputs, Texts)  # models that translate have no prompts
    _, units = expected_work(call.service.models[model.name].admission.throughput, parameters)
    num_samples, languages = decoding.num_samples, decoding.languages
    count = len(inputs) * num_samples  # each input has a sentence or more; `Decoding.read` counts them all
    await call.reserve(model, count, units * count, "inputs" if num_samples == 1 else "num_return_sequences")
    split_texts = await _split(call, inputs, languages.source, num_samples)
    sentences = Texts(tuple([sentence for split_text in split_texts for sentence in split_text.sentences]))
    try:
        await decoding.read(sentences, is_counted=False)
        result = await finish(decoding)
    except ApiError as error:
        raise _error_of_input(error, inputs, split_texts) from None
    ranked: list[list[GenerateOutput]] = [[] for _ in sentences.texts]
    for output in result.outputs:
        ranked[output.index].append(output)
    outputs: list[GenerateOutput] = []
    for index, split_text in enumerate(split_texts):
        of_input, ranked = ranked[: len(split_text.sentences)], ranked[len(split_text.sentences) :]
        # `strict=False`: a beam search may return fewer texts for one sentence than for another.
        of_ranks = zip(*of_input, strict=False)
        outputs += [_joined(index, split_text, parts, languages.target) for parts in of_ranks]
    return replace(result, outputs=outputs)


async def _split(call: Call, inputs: Texts, language: str, num_samples: int) -> list[SplitText]:
    """Split all inputs; a sentence is generated `num_samples` times.

    Raises:
        ApiError: `invalid_parameter` if there are too many sentences; `deadline_exceeded`.
    """
    limit = MAX_SENTENCES

    def run() -> list[SplitText]:
        split_texts: list[SplitText] = []
        num_sentences = 0
        for text in inputs.texts:
            if not call.seconds_left:  # the call has already failed
                raise ApiError("deadline_exceeded")
            split_text = split_sentences(text, language, limit - num_sentences)
            if split_text is None:
                raise _too_many(f"more than {limit}", num_samples, limit)
            split_texts.append(split_text)
            num_sentences += len(split_text.sentences)
        if num_sentences * num_samples > limit:
            raise _too_many(str(num_sentences), num_samples, limit)
        return split_texts

    return await call.tokenize(run, inputs.texts)


def _too_many(num_sentences: str, num_samples: int, limit: int) -> ApiError:
    each = f", each with {{num_return_sequences}} {num_samples}" if num_samples > 1 else ""
    message = (
        f"A call generates at most {limit} sequences from sentences, got {num_sentences} sentences{each}. Send the "
        "text in several calls."
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


async def sentence_warnings(
    call: Call, model: ServedModel, inputs: AnyInputs, parameters: GenerateParameters
) -> dict[int, GenerateWarning]:
    """Return warnings about inputs of several sentences that a model of sentences read as a whole.

    There are none if the request sets `split_sentences`: its client knows what the model needs.

    Returns:
        The warnings by the index of the input.

    Raises:
        ApiError: `deadline_exceeded`.
    """
    is_decided = "split_sentences" in parameters.model_fields_set
    if model.manifest.training_unit != "sentence" or is_decided or not isinstance(inputs, Texts):
        return {}
    language = choose_languages(model, parameters.source_language, parameters.target_language).source
    texts, field, warnings = inputs.texts, call.field_names.get("inputs", "inputs"), {}

    def run() -> list[int]:
        return [index for index, text in enumerate(texts) if split_sentences(text, language, max_sentences=1) is None]

    for index in await call.tokenize(run, texts):
        param = f"{field}[{index}]" if inputs.is_list else field
        message = (
            f"{param} has several sentences, but {model.name} was trained on single sentences and may leave out some "
            "of them. Set split_sentences of POST /v1/generate to true, or send each sentence as an input of its own."
        )
        warnings[index] = GenerateWarning("several_sentences", message, param)
    return warnings


def _joined(index: int, split_text: SplitText, parts: Sequence[GenerateOutput], language: str) -> GenerateOutput:
    """Join the outputs of the sentences of one input."""
    if len(parts) == 1 and not any(split_text.gaps):  # as without splitting
        return replace(parts[0], index=index)
    sentences = [
        SentenceOutput(source, part.text, len(part.tokens), part.score, part.attention)
        for source, part in zip(split_text.sentences, parts, strict=True)
    ]
    return SplitOutput(
        rank=parts[0].rank,
        seed=parts[0].seed,
        attention=None,
        sentences=sentences,
        index=index,
        text=split_text.join([part.text for part in parts], language),
        tokens=[token for part in parts for token in part.tokens],
        finish_reason=_joined_reason([part.finish_reason for part in parts]),
        score=sum(part.score for part in parts),
    )


def _joined_reason(reasons: Sequence[str]) -> FinishReason:
    if "length" in reasons:
        return "length"
    return "stop" if "stop" in reasons else "eos"
