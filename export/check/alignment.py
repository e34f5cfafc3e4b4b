"""Choice of the cross-attention heads that align words, for `Manifest.alignment`.

No aligned text is needed. The reference is the prediction difference (Li et al. 2019, "On the Word
Alignment from Neural Machine Translation", section 3.2): the model translates sentences, and each
translation is scored again with each source word left out. The reference link of a target word is
the source word whose absence lowers its log-probability most. Each head, the mean of all heads of
each layer, and means of a few heads are compared with these links by the words with the largest
weights, both at the step that writes a target token and at the next one, which reads it. A head
trained to align words (`guided`) needs no comparison, at the step at which it was trained.

Row 0 of a cross-attention map is that of the step that reads the start token and writes the first
token of the target.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import ALIGNMENT_STEPS, MANIFEST, Alignment, AlignmentStep, Coverage, Manifest
from sightline.base.bundle_files import read_manifest
from sightline.base.text.tokenizer import TextTokenizer, read_tokenizer
from sightline.base.text.words import Word, merge_weights, rows_that_read, words_of
from sightline.export.check.sessions import Sessions, default_language_ids, read_sources, run_step
from sightline.export.families.description import Guided

CRITERION = "prediction_difference"
GUIDED = "guided"  # criterion of a head that was trained to align words
MAX_SENTENCES = 100  # a few seconds of work for a small model
MAX_HEADS = 4  # largest number of heads in a mean, except for all heads of a layer
# Sentences by language, which were written for this project and say the same in all languages. Each
# paragraph begins with the language.
_PARAGRAPHS = Path(__file__).with_name("alignment_sentences.txt").read_text(encoding="utf-8").split("\n\n")
SENTENCES = {language: tuple(texts) for language, *texts in map(str.splitlines, _PARAGRAPHS)}


@dataclass(frozen=True)
class AlignedSentence:
    """Reference links of a translated sentence, and its attention maps between words."""

    links: NDArray[np.intp]  # (target words,) index of the source word
    maps: Mapping[AlignmentStep, NDArray[np.float32]]  # each (L, H, target words, source words)


def sentences_of(manifest: Manifest) -> tuple[str, ...]:
    """Return sentences in the source language of a model, English if the language is unknown."""
    language = "en" if manifest.languages is None else manifest.languages.source
    return SENTENCES.get(language.partition("-")[0], SENTENCES["en"])


def choose_alignment(
    sessions: Sessions, folder: Path, sentences: Sequence[str] = (), guided: Guided | None = None
) -> Alignment | None:
    """Choose the heads that align words, None without cross-attention or a usable sentence.

    A usable sentence has two words and fits the limits of the model.

    Args:
        sentences: source sentences, at most the first `MAX_SENTENCES`; by default `sentences_of`.
        guided: the head that was trained to align words. It is chosen without a comparison, and its
            agreement is measured.
    """
    manifest = sessions.manifest
    if manifest.cross_attention is None:
        return None
    translator = Translator(sessions, folder)
    aligned_sentences = [
        aligned
        for sentence in (sentences or sentences_of(manifest))[:MAX_SENTENCES]
        if (aligned := align_sentence(translator, sentence)) is not None
    ]
    return best_heads(aligned_sentences, guided) if aligned_sentences else None


def record_heads(bundle: Path, **heads: Alignment | Coverage) -> None:
    """Write `alignment` or `coverage` to the manifest of a bundle; its other fields stay."""
    new = bundle / f".{MANIFEST}.new"
    manifest = read_manifest(bundle).model_copy(update=heads)
    new.write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    new.replace(bundle / MANIFEST)


def best_heads(sentences: Sequence[AlignedSentence], guided: Guided | None = None) -> Alignment:
    """Return the heads whose mean weights agree most often with the reference links.

    Of equal results, fewer heads, then the first layer, then the step that writes count. A guided
    head is always returned.
    """
    num_layers, num_heads = sentences[0].maps["writes"].shape[:2]
    scores = {
        (step, layer, heads): agreement(sentences, step, layer, heads)
        for step in ALIGNMENT_STEPS
        for layer in range(num_layers)
        for heads in _candidates(sentences, step, layer)
    }
    step, layer, heads = max(scores, key=lambda candidate: (scores[candidate], -len(candidate[2]), -candidate[1]))
    if guided is not None:
        (step, layer), heads = guided[:2], guided[2:]
    return Alignment(
        step=step,
        layer=layer,
        heads=heads,
        criterion=CRITERION if guided is None else GUIDED,
        agreement=round(scores[step, layer, heads], 4),
        baseline=round(scores["writes", num_layers - 1, tuple(range(num_heads))], 4),
        sentences=len(sentences),
    )


def _candidates(sentences: Sequence[AlignedSentence], step: AlignmentStep, layer: int) -> Iterator[tuple[int, ...]]:
    """Yield each head of a layer, all heads, and means that grow by the best further head."""
    num_heads = sentences[0].maps[step].shape[1]
    yield tuple(range(num_heads))
    chosen: tuple[int, ...] = ()
    while len(chosen) < min(MAX_HEADS, num_heads):
        larger = [tuple(sorted((*chosen, head))) for head in range(num_heads) if head not in chosen]
        yield from larger
        chosen = max(larger, key=lambda heads: agreement(sentences, step, layer, heads))


def agreement(sentences: Sequence[AlignedSentence], step: AlignmentStep, layer: int, heads: Sequence[int]) -> float:
    """Return the share of target words whose largest mean weight is on the reference link."""
    same = num_words = 0
    for sentence in sentences:
        best = sentence.maps[step][layer, list(heads)].mean(axis=0).argmax(axis=-1)
        same += int((best == sentence.links).sum())
        num_words += len(best)
    return same / num_words


class Translator:
    """Translates sentences greedily, and forces the translations on changed sources."""

    def __init__(self, sessions: Sessions, folder: Path) -> None:
        manifest = sessions.manifest
        self._sessions = sessions
        self._source_tokenizer = read_tokenizer(folder / manifest.source_tokenizer)
        self._target_tokenizer: TextTokenizer = (
            self._source_tokenizer
            if manifest.target_tokenizer == manifest.source_tokenizer
            else read_tokenizer(folder / manifest.target_tokenizer)
        )
        self._before_source, self._after_source, self._target_prefix = default_language_ids(manifest)

    def encode(self, sentence: str) -> tuple[list[int], list[Word]]:
        """Return the ids and the words of a sentence, with the ids of its language around it."""
        before, encoded, after = self._before_source, self._source_tokenizer.encode(sentence), self._after_source
        offsets = self._source_tokenizer.offsets(sentence, len(encoded))
        words = words_of(sentence, [*[None] * len(before), *offsets, *[None] * len(after)])
        return [*before, *encoded, *after], words

    def max_new_tokens(self, ids: Sequence[int]) -> int:
        """Return the number of tokens that a translation may have; 0 if the source is too long."""
        manifest = self._sessions.manifest
        if len(ids) > manifest.limits.max_source_tokens:
            return 0
        return max(0, min(2 * len(ids) + 8, manifest.max_new_tokens_for(len(ids)) - len(self._target_prefix)))

    def target_words(self, ids: Sequence[int]) -> list[Word]:
        """Return the words of a translation."""
        return words_of(self._target_tokenizer.decode(ids), self._target_tokenizer.decoded_offsets(ids))

    def translate(
        self, sources: Sequence[Sequence[int]], max_new_tokens: int, num_maps: int
    ) -> tuple[list[int], NDArray[np.float64], list[NDArray[np.float32]]]:
        """Translate the first source greedily, and force the same target on the other sources.

        Returns:
            The T ids of the target, their log-probabilities (sources, T), and the cross-attention
            maps (L, H, T, S) of the first `num_maps` sources.
        """
        sessions, manifest = self._sessions, self._sessions.manifest
        names = manifest.attention_of("cross").outputs
        source_lengths = [len(source) for source in sources]
        prompt = (*manifest.tokens.start_ids, *self._target_prefix)
        _, states = read_sources(sessions, sources, len(prompt) + max_new_tokens)
        ids: list[int] = []
        logprobs: list[NDArray[Any]] = []
        rows: list[NDArray[np.float32]] = []
        for position in range(len(prompt) - 1 + max_new_tokens):
            token = prompt[position] if position < len(prompt) else ids[-1]
            read = [token] * len(sources), [position] * len(sources), source_lengths
            outputs = run_step(sessions, states, *read, ["logprobs", *names])
            if position < len(prompt) - 1:
                continue
            scores = outputs["logprobs"].astype(np.float64)
            candidates = scores[0].copy()
            candidates[list(manifest.generation.suppress_tokens)] = -np.inf
            ids.append(int(candidates.argmax()))
            logprobs.append(scores[:, ids[-1]])
            row = np.concatenate([outputs[name][:num_maps] for name in names], axis=2)  # (sources, H, L, S)
            rows.append(row.astype(np.float32))
            if ids[-1] in manifest.tokens.end_ids:
                break
        maps = np.stack(rows, axis=3).swapaxes(1, 2)  # (sources, L, H, T, S)
        of_sources = [of_source[..., :length] for of_source, length in zip(maps, source_lengths, strict=False)]
        return ids, np.stack(logprobs, axis=1), of_sources


def align_sentence(translator: Translator, sentence: str) -> AlignedSentence | None:
    """Return the reference links and maps; None if the sentence is too short or too long."""
    ids, source_words = translator.encode(sentence)
    max_new_tokens = translator.max_new_tokens(ids)
    if len(source_words) < 2 or not max_new_tokens:
        return None
    without = ([id_ for index, id_ in enumerate(ids) if index not in word.tokens] for word in source_words)
    sources = [ids, *without]
    target_ids, logprobs, (maps,) = translator.translate(sources, max_new_tokens, num_maps=1)
    target_words = translator.target_words(target_ids)
    if not target_words:
        return None
    # Log-probability of each target word with each source, (sources, target words).
    of_words = np.stack([logprobs[:, list(word.tokens)].sum(axis=1) for word in target_words], axis=1)
    rows, columns = ([word.tokens for word in words] for words in (target_words, source_words))
    links = (of_words[0] - of_words[1:]).argmax(axis=0)
    of_steps: dict[AlignmentStep, NDArray[np.float32]] = {"writes": maps, "reads": rows_that_read(maps)}
    merged = {step: merge_weights(of_step, rows, columns) for step, of_step in of_steps.items()}
    return AlignedSentence(links, merged)
