"""Generation from texts that are split into sentences, such as the translation of a paragraph."""

from collections.abc import Sequence
from dataclasses import replace

from service.errors import ApiError, complete_message
from service.fields import Texts
from service.inference.call import INLINE_CHARACTERS, Call
from service.inference.generate import (
    FinishReason,
    GenerateInput,
    GenerateOutput,
    GenerateResult,
    check_parameters,
    expected_work,
    generate,
    generate_without_blanks,
)
from service.inference.languages import choose_languages
from service.text.sentences import SplitText, split_sentences

# A call generates at most this many sequences from sentences for each input that it may have.
SENTENCES_PER_INPUT = 32


async def generate_by_sentence(call: Call, request: GenerateInput) -> GenerateResult:
    """Generate from each sentence of the inputs, and join the outputs of each input.

    The sentences run at the same time, but never more of them than a call may have inputs. The
    whitespace between the sentences is kept. The text of rank r joins the texts of rank r of all
    sentences. Requires `split_sentences`.

    Raises:
        ApiError: the request is invalid, is rejected, or fails.
        ClientGoneError: the client closed the connection.
    """
    assert request.parameters.split_sentences
    if request.on_empty == "pass":
        return await generate_without_blanks(call, request, generate_by_sentence)
    model, parameters, inputs = await call.model(request.model, "generate"), request.parameters, request.inputs
    check_parameters(model, parameters, len(inputs))
    assert isinstance(inputs, Texts)  # models that translate have no prompts
    languages = choose_languages(model, parameters.source_language, parameters.target_language)
    num_samples = parameters.num_return_sequences if parameters.do_sample else 1
    _, units = expected_work(call.service.admissions[model.name].throughput, parameters)
    count = len(inputs) * num_samples  # each input has a sentence or more; `generate` counts them all
    call.reserve(model, count, units * count, "inputs" if num_samples == 1 else "num_return_sequences")
    split_texts = await _split(call, inputs, languages.source, num_samples)
    sentences = Texts(tuple([sentence for split_text in split_texts for sentence in split_text.sentences]))
    parameters = parameters.model_copy(update={"split_sentences": False})
    of_sentences = replace(request, model=model.name, inputs=sentences, parameters=parameters)
    try:
        result = await generate(call, of_sentences, in_batches=True)
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
    is_short = sum(map(len, inputs.texts)) <= INLINE_CHARACTERS
    limit = SENTENCES_PER_INPUT * call.service.settings.max_inputs

    def run() -> list[SplitText]:
        split_texts: list[SplitText] = []
        num_sentences = 0
        for text in inputs.texts:
            if not is_short and not call.seconds_left:  # the call has already failed
                raise ApiError("deadline_exceeded")
            split_text = split_sentences(text, language, limit - num_sentences)
            if split_text is None:
                raise _too_many(f"more than {limit}", num_samples, limit)
            split_texts.append(split_text)
            num_sentences += len(split_text.sentences)
        if num_sentences * num_samples > limit:
            raise _too_many(str(num_sentences), num_samples, limit)
        return split_texts

    return call.tokenize_now(run) if is_short else await call.tokenize(run)


def _too_many(num_sentences: str, num_samples: int, limit: int) -> ApiError:
    each = f", each with {{num_return_sequences}} {num_samples}" if num_samples > 1 else ""
    message = (
        f"A call generates at most {limit} sequences from sentences ({SENTENCES_PER_INPUT} times "
        f"SIGHTLINE_MAX_INPUTS), got {num_sentences} sentences{each}. Send the text in several calls."
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


def _joined(index: int, split_text: SplitText, parts: Sequence[GenerateOutput], language: str) -> GenerateOutput:
    """Join the outputs of the sentences of one input."""
    return replace(
        parts[0],
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
