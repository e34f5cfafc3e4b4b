"""Repair of outputs that omit words of their input.

Each kind of omission has a remedy: several sentences in one input are translated one by one; a text
that ends too early is continued; all else is translated again with beam search, whose hypotheses
omit different words. Outputs without an omission stay as they are.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from sightline.base.bundle import MAX_BEAMS
from sightline.base.text.sentences import split_sentences
from sightline.base.text.words import is_name
from sightline.service.body_fields import Texts
from sightline.service.inference.call import UsageRecord
from sightline.service.inference.confirmation import finish_confirmed
from sightline.service.inference.coverage import Repair, RepairMethod
from sightline.service.inference.generate import Decoding, GenerateOutput, GenerateResult
from sightline.service.parameters import GenerateParameters

OMISSION_COST = 0.4  # of one word, in the mean log-probability of a token
MIN_TAIL = 2  # omitted words at the end of an input, from which on its text is continued
Begin = Callable[[GenerateParameters], Decoding]
Generate = Callable[[Texts, GenerateParameters], Awaitable[GenerateResult]]


async def repaired(
    decoding: Decoding, result: GenerateResult, begin: Begin, split: Generate | None = None
) -> GenerateResult:
    """Return the result with better outputs in place of those that omit words.

    Each text that the decoding has read has one output. `begin` makes decodings with other
    parameters. `split` generates from texts of several sentences, if some may have several. Of
    several outputs of a text, that with the best mean log-probability, less a cost for each omitted
    word, is returned.
    """
    call, parameters = decoding.call, decoding.parameters
    assert decoding.coverage is not None, "it has computed the coverage"
    texts = decoding.coverage.texts
    candidates: dict[int, list[tuple[RepairMethod, GenerateOutput]]] = {
        output.index: [("none", output)]
        for output in result.outputs
        if output.coverage is not None and output.coverage.omitted
    }
    if not candidates:
        return result
    language = decoding.languages.source
    several = [one for one in candidates if split and split_sentences(texts[one], language, max_sentences=1) is None]
    whole = [index for index in candidates if index not in several]
    ended = [index for index in whole if _beginning(result.outputs[index])]
    results, num_beams = [result], min(MAX_BEAMS, decoding.model.max_rows)
    counts_texts, call.counts_texts = call.counts_texts, False

    async def add(method: RepairMethod, indices: Sequence[int], **changes: Any) -> None:
        changed = parameters.model_copy(update=changes)
        inputs = Texts(tuple(texts[index] for index in indices))
        if method == "split" and split:
            found = await split(inputs, changed)
        else:
            again = begin(changed)
            await again.read(Texts(inputs.texts[:1]), split=lambda: inputs.texts)  # they are no inputs of the call
            found = await finish_confirmed(again, _value)
        results.append(found)
        for output in found.outputs:
            candidates[indices[output.index]].append((method, replace(output, rank=0, index=indices[output.index])))

    if several:  # nobody needs to send their sentences one by one
        call.warnings = {index: warning for index, warning in call.warnings.items() if index not in several}
        await add("split", several, split_sentences=True)
    if whole and num_beams > 1:
        await add("beams", whole, num_beams=num_beams, num_return_sequences=num_beams)
    if ended:
        prefixes = Texts(tuple(_beginning(result.outputs[index]) for index in ended))
        await add("continuation", ended, target_prefix=prefixes, min_new_tokens=MIN_TAIL, split_sentences=None)
    call.parameters, call.counts_texts = parameters, counts_texts
    outputs = [_chosen(candidates[output.index]) if output.index in candidates else output for output in result.outputs]
    record, reasons = UsageRecord(call), [output.finish_reason for output in outputs]
    for found in results:
        record.add(found.usage, found.timings_ms, reasons if found is result else ())
    usage, timings = record.write(decoding.model)
    return replace(result, outputs=outputs, usage=usage, timings_ms=timings)


def _chosen(candidates: Sequence[tuple[RepairMethod, GenerateOutput]]) -> GenerateOutput:
    """Return the best output of a text, the first of which has omissions."""
    (_, first), *_ = candidates
    assert first.coverage is not None
    method, best = max(candidates, key=lambda one: (one[0] == "split", _value(one[1])))
    return replace(best, repair=Repair(method, first.text, len(first.coverage.omitted)))


def _value(output: GenerateOutput) -> float:
    assert output.coverage is not None
    mean = sum([token.logprob for token in output.tokens]) / max(1, len(output.tokens))
    return mean - OMISSION_COST * len(output.coverage.omitted)


def _beginning(output: GenerateOutput) -> str:
    """Return a text without its final mark if it ends too early, else an empty one."""
    assert output.coverage is not None
    words = [word for word in output.coverage.source_words if is_name(word["text"])]
    tail = words[len(words) - MIN_TAIL :]
    if output.finish_reason != "eos" or not all(word["omitted"] for word in tail):
        return ""
    end = next((word["end"] for word in reversed(output.coverage.target_words) if is_name(word["text"])), 0)
    return output.text[:end]
