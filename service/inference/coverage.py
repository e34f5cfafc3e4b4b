"""Coverage of source words by a translation, and support of its target words."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from typing_extensions import TypedDict

from sightline.base.bundle import MIN_COVERAGE_AUROC, Manifest
from sightline.base.text.tokenizer import Offsets, TextTokenizer
from sightline.base.text.words import Span, Word, coverage_of, is_name, words_of
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.engine.request import GenerateRequest, MapPart, Target
from sightline.service.inference.call import INLINE_CHARACTERS, AnyInputs, Call, Ids
from sightline.service.inference.maps import read_source, within
from sightline.service.inference.results import FLOAT_BYTES
from sightline.service.inference.service import ServedModel
from sightline.translation.alignment import Characters

DOUBTFUL_LOGPROB = math.log(0.1)  # of all tokens of a target word
BYTES_PER_WORD = 600  # memory of a word of a response


class CoveredWord(TypedDict):
    """A source word."""

    text: Annotated[str, Field(description="Text of the word.")]
    start: Annotated[int, Field(description="Index of its first character in the input.")]
    end: Annotated[int, Field(description="Index after its last character in the input.")]
    coverage: Annotated[
        float, Field(description="Largest attention weight of the word in any decoder step, 0 to 1; 1 if it is copied.")
    ]
    omitted: Annotated[
        bool,
        Field(
            description="True if the coverage is below the threshold of the model, and the word is neither a "
            "punctuation mark nor one that often has no translation of its own."
        ),
    ]


class SupportedWord(TypedDict):
    """A target word."""

    text: Annotated[str, Field(description="Text of the word.")]
    start: Annotated[int, Field(description="Index of its first character in `text`.")]
    end: Annotated[int, Field(description="Index after its last character in `text`.")]
    logprob: Annotated[float, Field(description="Sum of the log-probabilities of its tokens; 0 if it is copied.")]
    doubtful: Annotated[bool, Field(description="True if its probability is below 0.1.")]


TextWord = TypeVar("TextWord", CoveredWord, SupportedWord)


@dataclass(frozen=True)
class TextCoverage:
    """The coverage of an input by its translation."""

    coverage: Annotated[
        float, Field(description="Smallest coverage of a word that can be omitted; 1 if there is none.")
    ]
    source_words: Annotated[Sequence[CoveredWord], Field(description="Words of the input, in order.")]
    target_words: Annotated[Sequence[SupportedWord], Field(description="Words of the text, in order.")]

    @property
    def omitted(self) -> list[CoveredWord]:
        return [word for word in self.source_words if word["omitted"]]

    @property
    def doubtful(self) -> list[SupportedWord]:
        return [word for word in self.target_words if word["doubtful"]]

    def moved(self, source: int, target: int) -> "TextCoverage":
        """Return the coverage with ranges in longer texts, where its own texts start there."""
        return TextCoverage(
            self.coverage,
            [{**word, "start": word["start"] + source, "end": word["end"] + source} for word in self.source_words],
            [{**word, "start": word["start"] + target, "end": word["end"] + target} for word in self.target_words],
        )

    def placed(self, source: Characters, target: Characters) -> "TextCoverage":
        """Return the coverage with words and ranges of texts of which a model had another form."""
        sources = _placed(self.source_words, source, {"coverage": 1.0, "omitted": False})
        targets = _placed(self.target_words, target, {"logprob": 0.0, "doubtful": False})
        values = [word["coverage"] for word in sources if word["coverage"] >= self.coverage and is_name(word["text"])]
        return TextCoverage(min(values, default=1.0), sources, targets)


def _placed(words: Sequence[TextWord], sentence: Characters, copied: Mapping[str, Any]) -> list[TextWord]:
    """Return words in their order in a text; those that stand for the same part are one.

    Words whose characters all stand for the same part are copied, and have the values `copied`.
    """
    placed: dict[Span, Any] = {}
    for word in words:
        first, last = sentence.spans[word["start"]], sentence.spans[word["end"] - 1]
        start, end = first[0], last[1]
        values = copied if first == last and max(end - start, word["end"] - word["start"]) > 1 else {}
        if start < end:
            begin, stop, text = sentence.start + start, sentence.start + end, sentence.text[start:end]
            placed.setdefault((start, end), {**word, "text": text, "start": begin, "end": stop, **values})
    return list(placed.values())


RepairMethod = Literal["none", "beams", "continuation", "split"]


@dataclass(frozen=True)
class Repair:
    """The repair of an output that omitted words."""

    method: Annotated[
        RepairMethod,
        Field(
            description="Origin of the text: a beam search, a continuation of the first text, a translation of each "
            "sentence, or none, if nothing better was found."
        ),
    ]
    text: Annotated[str, Field(description="The first text.")]
    num_omitted: Annotated[int, Field(description="Number of words that it omits.")]


@dataclass(frozen=True)
class SentenceRepair(Repair):
    """The repair of a sentence, which has names in place of what is not translated."""

    source: Annotated[str, Field(description="The sentence as the model read it.")]


def joined_coverage(parts: Sequence[TextCoverage]) -> TextCoverage:
    """Return the coverage of a text from those of its sentences, whose ranges are in the text."""
    return TextCoverage(
        min([part.coverage for part in parts], default=1.0),
        [word for part in parts for word in part.source_words],
        [word for part in parts for word in part.target_words],
    )


class CoverageReader:
    """Computes the coverage of the outputs of one call, from the recorded weights of one head."""

    def __init__(self, call: Call, model: ServedModel, field: str = "return_coverage") -> None:
        """Find the head of a model for a field of a request.

        Raises `ApiError` if it has none that shows omissions.
        """
        chosen = model.manifest.coverage
        if chosen is None or chosen.threshold is None:
            message = f"{{{field}}} is not supported by {model.name}: {_reason_against(model.manifest)}."
            raise ApiError("unsupported_parameter", message, field=field)
        self._model, self._threshold = model, chosen.threshold
        self._count = call.service.metrics.for_model(model.name).on_coverage if call.counts_texts else None
        self._layer, self._head, self._untranslated = chosen.layer, chosen.head, frozenset(chosen.untranslated)
        self.parts = {"cross": MapPart((chosen.layer,), (chosen.head,))}
        self.texts: Sequence[str] = ()  # that were read
        self.words: Callable[[int], Sequence[Word]]  # of each of them, once they were read

    async def read_words(
        self, call: Call, inputs: AnyInputs, sources: Sequence[Ids], num_added: tuple[int, int]
    ) -> None:
        """Prepare the words of the sources, see `MapWriter.read_offsets`."""
        assert isinstance(inputs, Texts), "models that translate read texts"
        tokenizer, texts = self._model.source_tokenizer, inputs.texts
        call.response_memory.reserve(BYTES_PER_WORD * sum(map(len, sources)))

        @cache
        def words(index: int) -> Sequence[Word]:
            text = texts[index]
            return words_of(text, _offsets(tokenizer, sources[index], text, num_added))

        self.texts, self.words = texts, words
        # Those of short texts are found beside those of their targets, by code that has just run.
        if sum(map(len, texts)) > INLINE_CHARACTERS:
            await call.tokenize(lambda: list(map(words, range(len(texts)))), texts)

    def bytes_per_token(self, sources: Sequence[Ids]) -> int:
        """Return the memory of a target token: its weights, and its word in the response."""
        return BYTES_PER_WORD + FLOAT_BYTES * max(map(len, sources), default=0)

    def write(self, index: int, request: GenerateRequest, target: Target, text: str) -> TextCoverage:
        """Return the coverage by one target, which has no forced tokens of the language.

        The text is that of the target, or the one that was given for it.
        """
        maps, words = target.attention["cross"], self.words(index)
        weights = maps[0, 0] if "cross" in request.map_parts else maps[self._layer, self._head]
        values = coverage_of(weights, [word.tokens for word in words]).tolist()
        sources = list[CoveredWord]()
        smallest, threshold = 1.0, self._threshold
        for (name, start, end, _), value in zip(words, values, strict=True):
            is_omitted = False
            if value < max(smallest, threshold) and is_name(name) and name.lower() not in self._untranslated:
                smallest, is_omitted = min(smallest, value), value < threshold
            sources.append({"text": name, "start": start, "end": end, "coverage": value, "omitted": is_omitted})
        if self._count is not None:
            self._count(has_omissions=smallest < threshold)
        return TextCoverage(smallest, sources, list(self._supported(target, text)))

    def _supported(self, target: Target, text: str) -> Iterator[SupportedWord]:
        tokenizer, ids = self._model.target_tokenizer, [token.id for token in target.tokens]
        logprobs = [token.logprob for token in target.tokens]
        is_forced = target.finish_reason == "forced"
        offsets = _offsets(tokenizer, ids, text) if is_forced else tokenizer.decoded_offsets(ids)
        if target.finish_reason == "stop":  # the text ends before the stop string
            offsets = [within(span, text) for span in offsets]
        for name, start, end, tokens in words_of(text, offsets):
            logprob = sum([logprobs[token] for token in tokens])
            yield {"text": name, "start": start, "end": end, "logprob": logprob, "doubtful": logprob < DOUBTFUL_LOGPROB}


def _offsets(tokenizer: TextTokenizer, ids: Sequence[int], text: str, num_added: tuple[int, int] = (0, 0)) -> Offsets:
    """Return the range of each token of a text, which is not tokenized again if they spell it."""
    if tokenizer.decode(ids) == text:
        return tokenizer.decoded_offsets(ids)
    return read_source(tokenizer, ids, num_added, text, False).offsets


def _reason_against(manifest: Manifest) -> str:
    """Return the reason why a model cannot show omissions."""
    if manifest.cross_attention is None:
        return "it has no cross-attention"
    if manifest.coverage is None:
        return "no head was chosen for it; its operator can run `sightline coverage` on its bundle"
    return (
        f"its best head tells omitted words from others with an AUROC of {manifest.coverage.auroc:g}, and "
        f"{MIN_COVERAGE_AUROC} is needed"
    )
