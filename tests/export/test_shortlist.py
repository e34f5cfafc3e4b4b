"""Bundles with a shortlist: candidates score as in the whole vocabulary, alone and in any batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sightline.base.bundle import TOP_TOKENS, BundleError, Manifest
from sightline.base.bundle_files import read_bundle
from sightline.export import commands
from sightline.export.check.sessions import encode, open_sessions
from sightline.export.convert import shortlist
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.convert.shortlist import learn_candidates, shortlist_bundle
from sightline.export.convert.text_quality import PlainText, greedy_outputs
from sightline.export.import_errors import VerificationError
from sightline.export.options import QuantizationRecipe
from sightline.export.sources.firefox.shortlist import Candidates
from sightline.service.runtime.ort import OnnxRunner
from tests.support.export import main

Outputs = Mapping[str, NDArray[Any]]
TOP = ("top_ids", "top_logprobs")
ALL = (*TOP, "logits", "logprobs")
SIZE = 64
STEPS = 3


def candidates_of(manifest: Manifest, per_token: int = 3) -> Candidates:
    size = manifest.limits.vocabulary
    draw = np.random.default_rng(0).integers(size, size=(size, per_token))
    frequent = dict.fromkeys([*manifest.tokens.end_ids, *range(TOP_TOKENS)])
    return Candidates(np.array(list(frequent)), draw)


@dataclass(frozen=True)
class Bundles:
    whole: OnnxRunner
    short: OnnxRunner
    candidates: Candidates
    folder: Path

    def expected(self, source: Sequence[int]) -> NDArray[np.int64]:
        return np.unique([*self.candidates.frequent, *self.candidates.by_source[list(source)].flat])


@pytest.fixture(scope="module", params=["per-token", "float32"])
def bundles(request: pytest.FixtureRequest, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    folder = tmp_path_factory.mktemp("shortlists")
    recipe = QuantizationRecipe(8, projection=request.param)
    quantize_bundle(bundle, folder / "whole", recipe, None)
    candidates = candidates_of(read_bundle(folder / "whole"))
    shortlist_bundle(folder / "whole", folder / "short", lambda: candidates, None, SIZE)
    whole, short = (OnnxRunner(folder / name, read_bundle(folder / name), num_threads=1) for name in ("whole", "short"))
    return Bundles(whole, short, candidates, folder)


def run(
    runner: OnnxRunner, sources: Sequence[Sequence[int]], whole: Sequence[bool] | None, outputs: Sequence[str]
) -> list[Outputs]:
    """Read sources and run steps; return the outputs of each."""
    lengths = np.array([len(source) for source in sources], np.int32)
    ids = np.full((len(sources), lengths.max()), runner.manifest.tokens.pad_id, np.int64)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    names = [state.encoder_output for state in runner.manifest.states if state.encoder_output is not None]
    runner.init_rows(0, runner.run_encoder(ids, lengths, names), range(len(sources)))
    marked = None if whole is None else np.array(whole)
    found: list[Outputs] = []
    for step in range(STEPS):
        tokens, ages = np.full(len(sources), 5 + step), np.full(len(sources), step, np.int32)
        given = runner.step(tokens, ages, lengths, outputs, whole=marked)
        found.append({name: array.copy() for name, array in given.items()})
    return found


def test_candidates_have_the_scores_of_the_whole_vocabulary(bundles: Bundles, sources: list[list[int]]) -> None:
    few = [source for source in sources if len(bundles.expected(source)) <= SIZE][:4]
    assert len(few) > 1
    exact, found = run(bundles.whole, few, None, ALL), run(bundles.short, few, None, TOP)
    for before, after in zip(exact, found, strict=True):
        for row, source in enumerate(few):
            ids = bundles.expected(source)
            logits = before["logits"][row, ids]
            best = np.argsort(-logits, kind="stable")[:TOP_TOKENS]
            assert after["top_ids"][row].tolist() == ids[best].tolist()
            logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            np.testing.assert_allclose(after["top_logprobs"][row], logprobs[best], rtol=0, atol=1e-5)


def test_rows_that_are_marked_or_have_too_many_candidates_score_the_whole_vocabulary(
    bundles: Bundles, sources: list[list[int]]
) -> None:
    """The rows of a batch that are neither keep the bits that they have alone."""
    few = next(source for source in sources if len(bundles.expected(source)) <= SIZE)
    many = [*range(3, 3 + SIZE)]
    assert len(bundles.expected(many)) > SIZE
    rows, marked = [few, many, few], [True, False, False]
    exact, found = run(bundles.whole, rows, None, ALL), run(bundles.short, rows, marked, ALL)
    alone = [run(bundles.short, [few], [False], TOP), run(bundles.short, [many], [False], TOP)]
    for step in range(STEPS):
        for name in ALL:
            np.testing.assert_array_equal(found[step][name][0], exact[step][name][0], name)
        for name in TOP:
            np.testing.assert_array_equal(found[step][name][1], exact[step][name][1], name)
            np.testing.assert_array_equal(found[step][name][2], alone[0][step][name][0], name)
            np.testing.assert_array_equal(found[step][name][1], alone[1][step][name][0], name)


def test_a_source_has_as_many_candidates_as_fit_or_none(
    bundles: Bundles, sources: list[list[int]], tmp_path: Path
) -> None:
    """The source and a longer one share the batch, so that the lists do not depend on padding."""
    expected = bundles.expected(sources[0])
    for size, ids in ((len(expected), expected.tolist()), (len(expected) - 1, [-1] * (len(expected) - 1))):
        shortlist_bundle(bundles.folder / "whole", tmp_path / "short", lambda: bundles.candidates, None, size)
        sessions = open_sessions(tmp_path / "short", read_bundle(tmp_path / "short"))
        assert encode(sessions, [sources[0], 2 * sources[0]])[shortlist.IDS][0].tolist() == ids


def test_a_shortlist_of_all_tokens_changes_no_bit(bundle: Path, sources: list[list[int]], tmp_path: Path) -> None:
    quantize_bundle(bundle, tmp_path / "whole", QuantizationRecipe(8, projection="per-token"), None)
    size = read_bundle(tmp_path / "whole").limits.vocabulary
    every = Candidates(np.arange(size), np.zeros((size, 1), np.int64))
    shortlist_bundle(tmp_path / "whole", tmp_path / "short", lambda: every, None)
    runners = [OnnxRunner(tmp_path / name, read_bundle(tmp_path / name), num_threads=1) for name in ("whole", "short")]
    for before, after in zip(*(run(runner, sources[:3], None, TOP) for runner in runners), strict=True):
        for name in TOP:
            np.testing.assert_array_equal(after[name], before[name])


def test_a_bundle_that_loses_too_much_is_not_written(bundles: Bundles, toy_sentences: list[str]) -> None:
    short = bundles.folder / "lossy"
    with pytest.raises(VerificationError, match="the outputs with the shortlist have a chrF of"):
        shortlist_bundle(bundles.folder / "whole", short, lambda: bundles.candidates, PlainText(toy_sentences), SIZE)
    assert not short.exists()


def test_the_command_learns_a_shortlist_and_records_its_loss_on_other_texts(
    bundle: Path, sources: list[list[int]], toy_sentences: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortlist, "MIN_CHRF", 0.0)
    monkeypatch.setattr(shortlist, "NUM_FREQUENT", TOP_TOKENS)
    monkeypatch.setattr(commands, "HELD_OUT", 3)
    texts, out = tmp_path / "texts", tmp_path / "short"
    texts.write_text("\n".join(toy_sentences), encoding="utf-8")
    assert main(["shortlist", str(bundle), "--out", str(out), "--texts", str(texts)]) == 0
    record = read_bundle(out).shortlist
    assert record is not None and record.quality is not None
    assert record.quality.texts == len(toy_sentences[::3])
    sessions = open_sessions(bundle, read_bundle(bundle))
    learned = [source for number, source in enumerate(sources) if number % 3]
    candidates = learn_candidates(sessions, learned)
    for source, target in zip(learned, greedy_outputs(sessions, learned), strict=True):
        found = {*candidates.frequent.tolist(), *candidates.by_source[source].flat}
        assert set(target) <= found  # the model can write what it wrote
    assert candidates.by_source[learned[0], -1].tolist() == learned[0]  # one vocabulary: tokens can be copied


def test_bundles_that_cannot_have_a_shortlist(bundles: Bundles, bundle: Path, classifier_bundle: Path) -> None:
    group_wise, out = bundles.folder / "group-wise", bundles.folder / "out"
    quantize_bundle(bundle, group_wise, QuantizationRecipe(8), None)
    for folder, reason in (
        (bundles.folder / "short", "has a shortlist already"),
        (classifier_bundle, "only encoder-decoder models"),
        (group_wise, "imports write with --bits 32.* --projection per-token"),
    ):
        with pytest.raises(BundleError, match=reason):
            shortlist_bundle(folder, out, lambda: pytest.fail("the bundle is checked first"), None)
    shortlist_bundle(bundle, bundles.folder / "float32", lambda: bundles.candidates, None)
    with pytest.raises(BundleError, match="has a shortlist; convert the bundle that it was made from"):
        quantize_bundle(bundles.folder / "float32", out, QuantizationRecipe(8), None)
