"""A second look at words that look omitted.

The same target is forced again while the decoder cannot see such a word. If the target omits the
word, it is then more probable; if the word has a part in it, as one of two that it translates with
one, it is not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.inference.call import UsageRecord
from sightline.service.inference.coverage import CoveredWord, TextCoverage
from sightline.service.inference.generate import Decoding, GenerateResult, finish, reason_against_hiding
from sightline.service.inference.results import TimingsMs, Usage
from sightline.service.parameters import NEUTRAL

MIN_GAIN = 0.45  # of the log-probability of a target, if a word that it omits is hidden


async def finish_confirmed(decoding: Decoding, value: Callable[[Any], float] | None = None) -> GenerateResult:
    """Generate the texts of a decoding, and confirm their marks if that is requested.

    With `value`, only the best text of each input by it is kept.
    """
    result = await finish(decoding)
    if value is not None:
        of_inputs = groupby(result.outputs, key=lambda output: output.index)
        result = replace(result, outputs=[max(outputs, key=value) for _, outputs in of_inputs])
    if not decoding.parameters.confirm_omissions:
        return result
    targets = [output.text for output in result.outputs]
    outputs, usage, timings = await confirmed(decoding, targets, result.outputs, result.usage, result.timings_ms)
    return replace(result, outputs=outputs, usage=usage, timings_ms=timings)


async def confirmed(
    decoding: Decoding, targets: Sequence[str], outputs: Sequence[Any], usage: Usage, timings: TimingsMs
) -> tuple[list[Any], Usage, TimingsMs]:
    """Return the outputs of a decoding, whose `coverage` has only marks that are confirmed.

    Each has a target. The tokens and durations of the second look are added to those of the first.
    """
    call, model, reader = decoding.call, decoding.model, decoding.coverage
    assert reader is not None, "it has computed the coverage"
    if reason := reason_against_hiding(model.manifest):
        message = f"{{confirm_omissions}} is not supported by {model.name}: {reason}."
        raise ApiError("unsupported_parameter", message, field="confirm_omissions")
    rows = list[tuple[str, str, tuple[int, ...]]]()  # texts and hidden tokens; the first row of a pair has none
    for target, output in zip(targets, outputs, strict=True):
        request = decoding.requests[output.index * decoding.num_samples]
        own, text, size = request.hidden_source_tokens, reader.texts[output.index], len(request.source_ids)
        words = zip(output.coverage.source_words, reader.words(output.index), strict=True)
        hidden = [tuple(sorted({*own, *word.tokens})) for covered, word in words if covered["omitted"]]
        rows += [(text, target, tokens if len(tokens) < size else own) for tokens in (own, *hidden) if hidden]
    if not rows:
        return list(outputs), usage, timings
    record, again = UsageRecord(call), Decoding(call, model, NEUTRAL, decoding.languages)
    record.add(usage, timings, call.details["finish_reasons"])
    sources, repeated, tokens_of = zip(*rows, strict=True)
    await again.read(Texts(sources[:1]), Texts(repeated), split=lambda: sources)  # they are no inputs of the call
    again.requests = [
        replace(request, hidden_source_tokens=tokens) for tokens, request in zip(tokens_of, again.requests, strict=True)
    ]
    scores, usage, timings = await again.run(lambda _, result: sum(token.logprob for token in result.targets[0].tokens))
    record.add(usage, timings, ())
    remaining = iter(scores)
    marked = [replace(output, coverage=_with_marks(output.coverage, remaining)) for output in outputs]
    return marked, *record.write(model)


def _with_marks(coverage: TextCoverage, scores: Iterator[float]) -> TextCoverage:
    """Return a coverage with the marks that the next scores confirm."""
    if not coverage.omitted:
        return coverage
    least = next(scores) + MIN_GAIN
    words: list[CoveredWord] = [
        {**word, "omitted": word["omitted"] and next(scores) >= least} for word in coverage.source_words
    ]
    return replace(coverage, source_words=words)
