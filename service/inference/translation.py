"""Translation of texts with marks: the engine that `sightline.translation` asks for sentences."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from sightline.base.bundle import MAX_BEAMS
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.inference.call import Call, UsageRecord
from sightline.service.inference.confirmation import finish_confirmed
from sightline.service.inference.coverage import SentenceRepair, TextCoverage, joined_coverage
from sightline.service.inference.generate import GenerateOutput, begin, check_parameters
from sightline.service.inference.language_choice import choose_languages
from sightline.service.inference.repair import repaired
from sightline.service.inference.results import MAX_NUMBERS
from sightline.service.inference.sentence_splitting import check_number
from sightline.service.inference.service import ServedModel
from sightline.service.parameters import DEFAULT_NEW_TOKENS, AttentionSelection, GenerateParameters
from sightline.translation.alignment import Characters, Translated
from sightline.translation.glossary import Glossary
from sightline.translation.marks import MarkedText, TranslatedText, as_source, chained
from sightline.translation.markup import Markup, MarkupError, Tags
from sightline.translation.routes import Step
from sightline.translation.translator import translate_texts

MAX_TOKENS = DEFAULT_NEW_TOKENS - 16  # of a sentence that is not divided; its translation may be longer
NO_TERMS: Mapping[str, str] = {}
CHARACTERS_PER_TOKEN = 2  # fewer than almost all sentences have, to estimate the size of their maps


@dataclass(frozen=True)
class PlacedTag:
    """An element inside of a sentence, whose place in the translation alignment decides."""

    name: Annotated[str, Field(description="Name of the element.")]
    confidence: Annotated[
        float,
        Field(description="From 0 to 1, for the place of its tags; 0 if the words inside have no translation."),
    ]


@dataclass(frozen=True)
class DetectedLanguage:
    """A language that a text probably has."""

    language: Annotated[str, Field(description="BCP 47 tag, as the models name it.")]
    confidence: Annotated[float, Field(description="Probability, from 0 to 1, among all languages.")]


@dataclass(frozen=True)
class TranslateOutput:
    """The translation of an input."""

    index: Annotated[int, Field(description="Index of the input.")]
    text: Annotated[str, Field(description="The translation.")]
    tags: Annotated[
        Sequence[PlacedTag], Field(description="Elements inside of sentences, in their order in the input.")
    ]
    sentences: Annotated[
        Sequence[tuple[int, int, int, int]],
        Field(
            description="Start and end of each sentence in the input, and in `text`; empty with `markup`, or if two "
            "models translate."
        ),
    ]
    detected: Annotated[
        DetectedLanguage | None,
        Field(description="Language of the input, if the call has `auto` and several are possible."),
    ]
    route: Annotated[
        Sequence[Step], Field(description="Models that translated one after the other, with their languages.")
    ]
    coverage: Annotated[TextCoverage | None, Field(description="Only with return_coverage.")]
    repairs: Annotated[
        Sequence[SentenceRepair],
        Field(description="Sentences that were translated again; only with repair, and also with `markup`."),
    ]


class TranslationStep(NamedTuple):
    """A translation by one model, whose parameters have the languages."""

    model: ServedModel
    parameters: GenerateParameters


async def translate_marked(
    call: Call,
    steps: Sequence[TranslationStep],
    texts: Sequence[MarkedText],
    record: UsageRecord,
    glossary: Mapping[str, str] = NO_TERMS,
) -> list[list[TranslatedText]]:
    """Translate texts with their marks, by one model after the other.

    Return `num_return_sequences` translations of each, as the last model has them, best first. The
    `glossary` has translations of terms.
    """
    for model, _ in steps if glossary else ():
        if model.manifest.cross_attention is None:
            message = f"{model.name} cannot place terms, because it has no cross-attention; leave {{glossary}} out."
            raise ApiError("unsupported_parameter", message, field="glossary")
    if glossary:
        texts = await asyncio.to_thread(lambda: list(map(Glossary(glossary).mark, texts)))
    ranks, before = list[list[TranslatedText]](), list[TranslatedText]()
    for number, (model, parameters) in enumerate(steps, 1):
        check_parameters(model, parameters, len(texts))
        sources = list(map(as_source, texts, before)) if before else texts
        engine = SentenceTranslator(call, model, sources, parameters, record)
        found = await translate_texts(sources, engine, writes_terms=number == len(steps))
        if before:
            found = [[chained(first, one) for one in ones] for first, ones in zip(before, found, strict=True)]
        ranks, before = found, [best for best, *_ in found]
    return ranks


async def translate_documents(
    call: Call,
    steps: Sequence[TranslationStep],
    inputs: Texts,
    markup: Tags | None,
    record: UsageRecord,
    glossary: Mapping[str, str] = NO_TERMS,
) -> list[list[TranslateOutput]]:
    """Translate texts with or without markup.

    Return `num_return_sequences` translations of each, the best first.
    """
    model, parameters = steps[-1]
    if markup is None:
        texts = [MarkedText(text) for text in inputs.texts]
        translated = await translate_marked(call, steps, texts, record, glossary)
        return [
            [_output(index, rank.text, [rank], parameters, sentences=rank.sentences) for rank in ranks]
            for index, ranks in enumerate(translated)
        ]
    language = choose_languages(model, parameters.source_language, parameters.target_language).target
    try:
        documents = await call.tokenize(lambda: list(_read(inputs, markup)), inputs.texts)
    except ModuleNotFoundError as error:
        raise missing_library(error, "markup", "markup") from None
    texts = [text for each in documents for text in each.texts]
    results = iter(await translate_marked(call, steps, texts, record, glossary))

    def write(index: int, document: Markup) -> list[TranslateOutput]:
        ranks = list(zip(*[next(results) for _ in document.texts], strict=False)) or [()]
        tags = list(document.tags)  # `write` can be called once
        return [
            _output(
                index, Markup(inputs.texts[index], markup).write(rank, language), rank, parameters, _placed(tags, rank)
            )
            for rank in ranks
        ]

    return await call.tokenize(lambda: [write(*document) for document in enumerate(documents)], inputs.texts)


def _output(
    index: int,
    text: str,
    translations: Sequence[TranslatedText],
    parameters: GenerateParameters,
    tags: Sequence[PlacedTag] = (),
    sentences: Sequence[tuple[int, int, int, int]] = (),
) -> TranslateOutput:
    found: list[SentenceFindings] = [each for translation in translations for each in translation.findings]
    coverage = joined_coverage([one.coverage for one in found if one.coverage]) if parameters.return_coverage else None
    repairs = [each.repair for each in found if each.repair]
    return TranslateOutput(index, text, tags, sentences, None, (), coverage, repairs)


def num_repaired(translations: Iterable[TranslatedText]) -> int:
    return sum(each.repair is not None for translation in translations for each in translation.findings)


def missing_library(error: ModuleNotFoundError, form: str, field: str) -> ApiError:
    message = f"This service cannot read {form}, because {error.name} is missing; "
    return ApiError("unsupported_parameter", f"{message}its operator can install the extra documents.", field=field)


def _read(inputs: Texts, markup: Tags) -> Iterator[Markup]:
    for position, text in enumerate(inputs.texts):
        try:
            yield Markup(text, markup)
        except MarkupError as error:
            raise ApiError("invalid_parameter", str(error), field="inputs", index=inputs.index(position)) from None


def _placed(tags: Sequence[tuple[int, int, str]], translations: Sequence[TranslatedText]) -> list[PlacedTag]:
    confidences = [{mark.index: mark.confidence for mark in translation.marks} for translation in translations]
    return [PlacedTag(name, confidences[text][mark]) for text, mark, name in tags]


class SentenceFindings(NamedTuple):
    """Findings about a sentence; the `Findings` of `sightline.translation`."""

    coverage: TextCoverage | None
    repair: SentenceRepair | None

    def placed(self, source: Characters, target: Characters) -> "SentenceFindings":
        return SentenceFindings(self.coverage and self.coverage.placed(source, target), self.repair)


class SentenceTranslator:
    """Translates the sentences of a call; the `Engine` of `sightline.translation`."""

    def __init__(
        self,
        call: Call,
        model: ServedModel,
        texts: Sequence[MarkedText],
        parameters: GenerateParameters,
        record: UsageRecord,
    ) -> None:
        call.parameters = parameters
        self._call, self._model, self._parameters = call, model, parameters
        self._inputs = Texts(tuple(text.text for text in texts))
        self._languages = choose_languages(model, parameters.source_language, parameters.target_language)
        self.source_language, self.target_language = self._languages.source, self._languages.target
        num_added = len(self._languages.source_prefix) + len(self._languages.source_suffix)
        # A stand-in may have more tokens than what it stands for.
        self._max_tokens = min(MAX_TOKENS, (model.manifest.limits.max_source_tokens - num_added) * 7 // 8)
        self._record = record

    def fits(self, text: str) -> bool:
        tokenizer, limit = self._model.source_tokenizer, self._max_tokens
        return len(text) < limit // 4 or (
            tokenizer.min_num_tokens(text, limit) <= limit and len(tokenizer.encode(text)) <= limit
        )

    def unknown(self, text: str) -> Sequence[int]:
        """Return the characters that are unknown tokens, or several tokens of bytes."""
        tokenizer = self._model.source_tokenizer
        spans = tokenizer.encode_spans(text, add_special_tokens=False)
        found = [(span.start, span.end) for span in spans if span.id in tokenizer.special_ids and span.start < span.end]
        parts = [(after.start, after.end) for span, after in pairwise(spans) if after.start < span.end]
        return sorted({index for start, end in found + parts for index in range(start, end)})

    async def translate(self, sentences: Sequence[str], are_aligned: Sequence[bool]) -> Sequence[list[Translated]]:
        """Return `num_return_sequences` translations of each sentence, the best first."""
        check_number(len(sentences), 1)
        results: dict[int, list[Translated]] = {}
        num_ranks = MAX_BEAMS if self._parameters.repair else self._parameters.num_return_sequences
        aligns = self._model.manifest.cross_attention is not None
        plain = [index for index, is_aligned in enumerate(are_aligned) if not (is_aligned and aligns)]
        aligned = [index for index, is_aligned in enumerate(are_aligned) if is_aligned and aligns]
        for indices in filter(None, [plain, *_groups(aligned, sentences, num_ranks)]):
            chosen = await self._run([sentences[index] for index in indices], has_maps=indices is not plain)
            results |= dict(zip(indices, chosen, strict=True))
        return [results[index] for index in range(len(sentences))]

    async def _run(self, sentences: Sequence[str], *, has_maps: bool) -> list[list[Translated]]:
        again, parameters = partial(begin, self._call, self._model), self._parameters
        if has_maps:
            step, layer, heads = self._model.manifest.alignment_heads
            selection = AttentionSelection(
                kinds=["cross"], layers=[layer], heads=list(heads), reduce="mean", units="words"
            )
            again = partial(again, step=step)
            parameters = parameters.model_copy(update={"return_attention": selection})
        decoding = again(parameters)
        await decoding.read(self._inputs, split=lambda: sentences)
        result = await finish_confirmed(decoding)
        if parameters.repair:
            result = await repaired(decoding, result, again)
        self._record.add(result.usage, result.timings_ms, [output.finish_reason for output in result.outputs])
        translations: list[list[Translated]] = [[] for _ in sentences]
        for output in result.outputs:
            translations[output.index].append(self._translated(sentences[output.index], output))
        return translations

    def _translated(self, source: str, output: GenerateOutput) -> Translated:
        coverage = output.coverage if self._parameters.return_coverage else None
        repair = None if output.repair is None else SentenceRepair(**vars(output.repair), source=source)
        findings = SentenceFindings(coverage, repair) if coverage or repair else None
        is_complete = output.finish_reason != "length"
        if output.attention is None:
            return Translated(output.text, is_complete=is_complete, findings=findings)
        (weights,) = output.attention.maps
        sources, targets = (
            [word for word in words if word is not None]
            for words in (output.attention.source_offsets, output.attention.target_offsets)
        )
        shape = weights.rows, weights.columns
        return Translated(output.text, sources, targets, np.reshape(weights.data, shape), is_complete, findings)


def _groups(indices: Sequence[int], sentences: Sequence[str], ranks: int) -> Iterator[list[int]]:
    """Yield groups of sentences whose maps a call may have at the same time."""
    group, count = list[int](), 0
    for index in indices:
        count += ranks * (len(sentences[index]) // CHARACTERS_PER_TOKEN + 4) ** 2
        if group and count > MAX_NUMBERS // 2:
            yield group
            group, count = [], ranks * (len(sentences[index]) // CHARACTERS_PER_TOKEN + 4) ** 2
        group.append(index)
    yield group
