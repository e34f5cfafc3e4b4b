"""Choice of the heads that align words: the criterion, the reference links and the record."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.base.bundle import ALIGNMENT_STEPS, Alignment, AlignmentStep, BundleError, Languages, Manifest
from sightline.base.bundle_files import read_bundle, read_manifest, write_manifest
from sightline.base.text.tokenizer import read_tokenizer
from sightline.base.text.words import word_spans, words_of
from sightline.export.check.alignment import (
    MAX_SENTENCES,
    SENTENCES,
    AlignedSentence,
    Translator,
    agreement,
    align_sentence,
    best_heads,
    choose_alignment,
    record_heads,
    sentences_of,
)
from sightline.export.check.sessions import onnx_steps, open_sessions, read_sources, run_step
from tests.support.export import main

SHIPPED = Path("bundles/multi30k-en-de")


def sentence(links: list[int], writes: Any, reads: Any = None) -> AlignedSentence:
    """Return a sentence with reference links and weights (L, H, target words, source words)."""
    maps = np.array(writes, np.float32)
    of_next = np.zeros_like(maps) if reads is None else np.array(reads, np.float32)
    return AlignedSentence(np.array(links), {"writes": maps, "reads": of_next})


def pointing(*columns: int, weight: float = 1.0) -> Any:
    """Return a map of four source words whose rows attend to the given columns."""
    return [[weight if column == own else (1 - weight) / 3 for column in range(4)] for own in columns]


def test_the_head_that_agrees_most_often_is_chosen() -> None:
    sentences = [
        sentence([0, 1, 2], [[pointing(0, 0, 0), pointing(0, 1, 3)], [pointing(3, 3, 3), pointing(0, 1, 2)]]),
        sentence([3, 1], [[pointing(3, 1), pointing(0, 0)], [pointing(3, 1), pointing(3, 0)]]),
    ]
    # Agreement in the first and in the second sentence, of 5 words: (0, 0): 1 + 2, (0, 1): 2 + 0,
    # (1, 0): 0 + 2, (1, 1): 3 + 1.
    assert best_heads(sentences) == Alignment(
        layer=1, heads=(1,), criterion="prediction_difference", agreement=0.8, baseline=0.8, sentences=2
    )
    assert agreement(sentences, "writes", 0, [0]) == pytest.approx(3 / 5)


def test_the_step_that_reads_is_chosen_if_it_agrees_more_often() -> None:
    better, worse = [[pointing(0, 1)], [pointing(2, 3)]], [[pointing(2, 3)], [pointing(0, 3)]]
    chosen = best_heads([sentence([0, 1], worse, better)])
    assert (chosen.step, chosen.layer, chosen.heads) == ("reads", 0, (0,))
    assert (chosen.agreement, chosen.baseline) == (1.0, 0.5)  # the baseline is that of the step that writes
    assert best_heads([sentence([0, 1], better, worse)]).step == "writes"
    assert best_heads([sentence([0, 1], better, better)]).step == "writes"
    guided = best_heads([sentence([0, 1], worse, better)], guided=("writes", 0, 0))
    assert (guided.step, guided.agreement) == ("writes", 0.0)


def test_a_mean_of_heads_is_chosen_if_it_agrees_more_often_than_each_of_them() -> None:
    sure, unsure = 0.9, 0.4
    first = [pointing(0, weight=sure)[0], pointing(3, weight=unsure)[0]]
    second = [pointing(3, weight=unsure)[0], pointing(1, weight=sure)[0]]
    noise = pointing(2, 2)
    chosen = best_heads([sentence([0, 1], [[noise, first, second]])])
    assert (chosen.layer, chosen.heads, chosen.agreement) == (0, (1, 2), 1.0)
    assert chosen.baseline < 1


def test_with_equal_results_fewer_heads_and_the_first_layer_are_preferred() -> None:
    maps = [[pointing(0, 1), pointing(0, 1)], [pointing(0, 1), pointing(0, 1)]]
    assert best_heads([sentence([0, 1], maps)]).heads == (0,)
    assert best_heads([sentence([0, 1], maps)]).layer == 0


def test_a_guided_head_is_kept_and_measured() -> None:
    found = best_heads([sentence([0, 1], [[pointing(0, 1), pointing(0, 3)]])], guided=("writes", 0, 1))
    assert found == Alignment(layer=0, heads=(1,), criterion="guided", agreement=0.5, baseline=1.0, sentences=1)


def test_the_command_keeps_a_guided_head(copied: Path) -> None:
    guided = Alignment(layer=0, heads=(3,), criterion="guided", agreement=0.0, baseline=0.0, sentences=1)
    record_heads(copied, alignment=guided)
    assert main(["align", str(copied)]) == 0
    found = read_manifest(copied).alignment
    assert found is not None and (found.layer, found.heads, found.criterion) == (0, (3,), "guided")
    assert found.sentences > 1


# Reference links


def slow_links(folder: Path, sentence: str) -> tuple[list[int], list[int]]:
    """Return a greedy translation and its links, with one forced pass for each source."""
    manifest = read_manifest(folder)
    sessions, tokenizer = open_sessions(folder, manifest), read_tokenizer(folder / manifest.source_tokenizer)
    source = tokenizer.encode(sentence)
    max_new_tokens = min(2 * len(source) + 8, manifest.max_new_tokens_for(len(source)))

    def logprobs_of(ids: list[int], target: list[int]) -> list[float]:
        steps, found = onnx_steps(sessions, ids), []
        for index, token in enumerate(target):
            (logits,) = steps([[manifest.tokens.start_ids[0], *target[:index]]])
            wide = logits.astype(np.float64)
            found.append(float(wide[token] - wide.max() - np.log(np.exp(wide - wide.max()).sum())))
        return found

    target: list[int] = []
    steps = onnx_steps(sessions, source)
    while len(target) < max_new_tokens and (not target or target[-1] not in manifest.tokens.end_ids):
        (logits,) = steps([[manifest.tokens.start_ids[0], *target]])
        target.append(int(logits.argmax()))
    source_words = words_of(sentence, tokenizer.offsets(sentence, len(source)))
    target_words = words_of(tokenizer.decode(target), tokenizer.decoded_offsets(target))
    whole = logprobs_of(source, target)
    losses = []
    for word in source_words:
        rest = [id_ for index, id_ in enumerate(source) if index not in word.tokens]
        without = logprobs_of(rest, target)
        losses.append([sum(whole[t] - without[t] for t in own.tokens) for own in target_words])
    return target, [int(np.argmax(column)) for column in np.array(losses).T]


@pytest.mark.parametrize("number", [0, 1])
def test_links_equal_those_of_one_pass_for_each_source(bundle: Path, toy_sentences: list[str], number: int) -> None:
    aligned = align_sentence(Translator(open_sessions(bundle, read_manifest(bundle)), bundle), toy_sentences[number])
    assert aligned is not None
    _, expected = slow_links(bundle, toy_sentences[number])
    assert aligned.links.tolist() == expected
    num_words = len(word_spans(toy_sentences[number]))
    for maps in aligned.maps.values():
        assert maps.shape == (2, 4, len(expected), num_words)
        assert (maps >= 0).all() and (maps.sum(axis=-1) <= 1 + 1e-5).all()


def test_a_source_has_the_tokens_of_the_default_languages(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: dict[str, Any] = {"source_prefix": {"en": (5,)}, "source_suffix": {"en": (6, 7)}}
    languages = Languages(sources=("en",), targets=("de",), source_prefix_of_target={"de": (4,)}, **tokens)
    manifest = read_manifest(bundle).model_copy(update={"languages": languages})
    translator = Translator(open_sessions(bundle, manifest), bundle)
    translate, sources = translator.translate, list[Sequence[int]]()

    def record(ids: Sequence[Sequence[int]], max_new_tokens: int, num_maps: int) -> Any:
        sources.extend(ids)
        return translate(ids, max_new_tokens, num_maps)

    monkeypatch.setattr(translator, "translate", record)
    aligned = align_sentence(translator, "A man sleeps.")
    assert {(*ids[:2], *ids[-2:]) for ids in sources} == {(4, 5, 6, 7)}
    assert aligned is not None and aligned.maps["writes"].shape[-1] == len(word_spans("A man sleeps."))


def slow_maps(folder: Path, sentence: str, step: str) -> NDArray[np.float64]:
    """Return maps (L, H, target words, source words), with one decoder run for each target token.

    The last step of the run for token t reads token t - 1 and writes token t, or it reads token t.
    """
    manifest = read_manifest(folder)
    sessions, tokenizer = open_sessions(folder, manifest), read_tokenizer(folder / manifest.source_tokenizer)
    source, (target, _) = tokenizer.encode(sentence), slow_links(folder, sentence)
    names = manifest.attention_of("cross").outputs
    rows = []
    for index in range(len(target)):
        inputs = [*manifest.tokens.start_ids, *target[: index + (step == "reads")]]
        _, states = read_sources(sessions, [source], len(inputs))
        for position, token in enumerate(inputs):
            outputs = run_step(sessions, states, [token], [position], [len(source)], names)
        rows.append(np.concatenate([outputs[name][0] for name in names], axis=1))  # (H, L, S)
    source_words = words_of(sentence, tokenizer.offsets(sentence, len(source)))
    target_words = words_of(tokenizer.decode(target), tokenizer.decoded_offsets(target))
    found = np.zeros((*rows[0].shape[1::-1], len(target_words), len(source_words)))
    for layer, head, t, s in np.ndindex(found.shape):
        tokens = target_words[t].tokens
        found[layer, head, t, s] = sum(
            rows[token][head, layer, column] for token in tokens for column in source_words[s].tokens
        ) / len(tokens)
    return found


@pytest.mark.parametrize("step", ALIGNMENT_STEPS)
def test_maps_of_each_step_equal_those_of_one_run_for_each_token(
    bundle: Path, toy_sentences: list[str], step: AlignmentStep
) -> None:
    aligned = align_sentence(Translator(open_sessions(bundle, read_manifest(bundle)), bundle), toy_sentences[0])
    assert aligned is not None
    np.testing.assert_allclose(aligned.maps[step], slow_maps(bundle, toy_sentences[0], step), atol=1e-5)


def test_the_shipped_model_links_words_that_translate_each_other() -> None:
    manifest = read_manifest(SHIPPED)
    translator = Translator(open_sessions(SHIPPED, manifest), SHIPPED)
    aligned = align_sentence(translator, "Two girls are playing.")  # Zwei Mädchen spielen.
    assert aligned is not None
    assert aligned.links[:3].tolist() == [0, 1, 3]
    step, layer, heads = manifest.alignment_heads
    best = aligned.maps[step][layer, list(heads)].mean(axis=0).argmax(axis=-1)
    assert best[:3].tolist() == [0, 1, 3]


def test_maps_shifted_by_one_row_agree_less(sentences: list[str]) -> None:
    """The rows must be those of the step in the manifest, not of the step before or after it."""
    manifest = read_manifest(SHIPPED)
    translator = Translator(open_sessions(SHIPPED, manifest), SHIPPED)
    found = [one for text in sentences[:10] if (one := align_sentence(translator, text)) is not None]
    step, layer, heads = manifest.alignment_heads
    own = agreement(found, step, layer, heads)
    for shift in (-1, 1):
        shifted = [AlignedSentence(one.links, {step: np.roll(one.maps[step], shift, axis=2)}) for one in found]
        assert agreement(shifted, step, layer, heads) < own - 0.3


def test_the_manifests_of_shipped_bundles_have_the_alignment_that_the_command_finds(sentences: list[str]) -> None:
    folders = [path.parent for path in sorted(Path("bundles").glob("*/manifest.json"))]
    manifests = {folder: read_manifest(folder) for folder in folders}
    with_cross = [folder for folder, one in manifests.items() if any(part.kind == "cross" for part in one.attention)]
    assert SHIPPED in with_cross
    for folder in with_cross:
        alignment = manifests[folder].alignment
        assert alignment is not None and alignment.sentences == MAX_SENTENCES
        assert alignment.agreement >= alignment.baseline
    # The head of few sentences is that of many, or agrees almost as often.
    manifest = manifests[SHIPPED]
    translator = Translator(open_sessions(SHIPPED, manifest), SHIPPED)
    found = [one for text in sentences[:10] if (one := align_sentence(translator, text)) is not None]
    assert agreement(found, *manifest.alignment_heads) >= best_heads(found).agreement - 0.1


# Sentences, limits and the record


def test_the_sentences_are_in_the_source_language_of_the_model(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    for source, expected in (("de", "de"), ("zh-Hant", "zh"), ("xx", "en")):
        languages = Languages(sources=(source,), targets=("en",))
        assert sentences_of(manifest.model_copy(update={"languages": languages})) == SENTENCES[expected]
    assert sentences_of(manifest.model_copy(update={"languages": None})) == SENTENCES["en"]


def test_every_language_has_as_many_different_sentences() -> None:
    for language, texts in SENTENCES.items():
        assert len(set(texts)) == 10, language
        assert all(len(word_spans(text)) >= 5 and text == text.strip() for text in texts), language


def test_sentences_of_one_word_or_beyond_the_limits_are_skipped(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    limits = manifest.limits.model_copy(update={"max_source_tokens": 8})
    sessions = open_sessions(bundle, manifest.model_copy(update={"limits": limits}))
    assert choose_alignment(sessions, bundle, ["Wait", "“Wait!” shouts Zoë, running after the bus."]) is None
    found = choose_alignment(sessions, bundle, ["Wait", "A man sleeps."])
    assert found is not None and found.sentences == 1


def test_a_model_without_cross_attention_has_no_alignment(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    kept = tuple(one for one in manifest.attention if one.kind != "cross")
    sessions = open_sessions(
        bundle, manifest.model_copy(update={"attention": kept, "alignment": None, "coverage": None})
    )
    assert choose_alignment(sessions, bundle) is None


def test_an_export_records_the_alignment(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.alignment is not None
    assert manifest.alignment.sentences == 3  # of the verification
    assert 0 <= manifest.alignment.baseline <= manifest.alignment.agreement <= 1


def test_the_command_changes_only_the_alignment_of_a_manifest(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_bundle(copied)
    write_manifest(copied, before.model_copy(update={"alignment": None}))
    text = (copied / "sentences.txt").resolve()
    text.write_text("A man sleeps.\nSeveral people wait in the rain.\n", encoding="utf-8")
    assert main(["align", str(copied), "--sentences", str(text)]) == 0
    after = read_bundle(copied)
    assert after.alignment == Alignment.model_validate_json(capsys.readouterr().out)
    assert after.alignment is not None and after.alignment.sentences == 2
    assert after.model_copy(update={"alignment": None}) == before.model_copy(update={"alignment": None})
    assert after.digest == before.digest


def test_a_bundle_that_cannot_align_is_an_error(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(copied)
    kept = tuple(one for one in manifest.attention if one.kind != "cross")
    write_manifest(copied, manifest.model_copy(update={"attention": kept, "alignment": None, "coverage": None}))
    assert main(["align", str(copied)]) == 1
    assert capsys.readouterr().err == (
        f"error: {copied} cannot align words: it has no cross-attention, or no sentence has two words and fits its "
        "limits\n"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "next"}, "alignment.step: Input should be 'writes' or 'reads'"),
        ({"layer": 2}, "alignment must name a layer below 2 and heads below 4, got layer 2 and heads"),
        ({"heads": [1, 4]}, r"alignment must name a layer below 2 and heads below 4, got layer \d and heads \[1, 4\]"),
        ({"heads": []}, "alignment.heads: Tuple should have at least 1 item"),
    ],
)
def test_an_alignment_that_does_not_fit_the_model_is_rejected(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    path = copied / "manifest.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["alignment"] |= changes
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(BundleError, match=message):
        read_manifest(copied)


def test_an_existing_record_is_replaced(copied: Path) -> None:
    alignment = Alignment(
        step="reads", layer=1, heads=(0, 2), criterion="test", agreement=0.5, baseline=0.25, sentences=7
    )
    for one in (alignment, alignment.model_copy(update={"layer": 0})):
        record_heads(copied, alignment=one)
        assert read_manifest(copied).alignment == one
    document = json.loads((copied / "manifest.json").read_text(encoding="utf-8"))
    names = list(document)
    assert names[names.index("attention") + 1] == "alignment"
    assert Manifest.model_validate_json(json.dumps(document)).alignment_heads == ("reads", 0, (0, 2))
    del document["alignment"]["step"]  # as in bundles of earlier versions
    assert Manifest.model_validate_json(json.dumps(document)).alignment_heads == ("writes", 0, (0, 2))
