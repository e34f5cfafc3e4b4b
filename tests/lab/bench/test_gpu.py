"""Tests of the GPU check with the CPU as its device, which runs everything but CUDA itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.bench.gpu import speed
from lab.bench.gpu.__main__ import Bundles, bench, check, main, make_bundles, open_device, operators_on_other_providers
from lab.bench.gpu.equality import Equality, compare
from lab.bench.gpu.torch_decoder import TorchDecoder
from sightline.model.data.tokenizer_training import encode_lines
from sightline.model.decoding.reference import greedy, pytorch_steps
from sightline.service.runtime.runner import Int32, Int64
from tests.support.fake_runner import FakeRunner, fake_manifest


@pytest.fixture(scope="module")
def bundles(bundle: Path, toy_sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return make_bundles(bundle, tmp_path_factory.mktemp("gpu"), toy_sentences)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROWS", (1, 8))
    monkeypatch.setattr(speed, "NEW_TOKENS", 6)
    monkeypatch.setattr(speed, "ROUNDS", 2)


def test_without_a_gpu_the_command_fails_and_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: no GPU: the installed onnxruntime has no CUDA provider")
    assert not any(tmp_path.iterdir())


def test_the_float16_path_agrees_with_float32(bundles: Bundles, toy_sentences: list[str]) -> None:
    equality = check(bundles, open_device(bundles, "cpu"), toy_sentences[:6])
    assert equality.failures() == []
    assert equality.sentences == 6
    assert equality.tokens >= 6
    assert 0 < equality.max_logprob_difference < 0.03


class Skewed(FakeRunner):
    """A runner whose second row gets a wrong token in each step."""

    def step(self, token_ids: Int64, lengths: Int32, source_lengths: Int32, outputs: Any, *, first: int = 0) -> Any:
        return super().step(np.where(np.arange(len(token_ids)) == 1, 7, token_ids), lengths, source_lengths, outputs)


def test_differences_between_runners_are_found() -> None:
    sources = [[5, 6, 2], [7, 8, 9, 2], [9, 2]]
    fakes = [kind(fake_manifest(), max_rows=8) for kind in (FakeRunner, FakeRunner, Skewed)]
    same, other = (compare(fakes[0], fake, sources) for fake in fakes[1:])
    assert same.failures() == [] and same.max_logprob_difference == 0
    assert len(other.failures()) == 3  # scores, greedy tokens, beams


def test_nan_counts_as_a_difference() -> None:
    equality = Equality(1, 1, float("nan"), 0.0, 0, 0, 0, 0)
    assert equality.failures() == ["log-probabilities differ by nan, at most 0.05 is allowed"]


def test_pytorch_with_static_caches_decodes_the_same_as_the_reference(
    bundles: Bundles, toy_sentences: list[str]
) -> None:
    sources = encode_lines(bundles.tokenizer, toy_sentences[:4])
    decoder = TorchDecoder(bundles.model, 4, max(len(source) for source in sources), 8, "eager")
    config = bundles.model.config
    for _ in range(2):  # the second call must not depend on the first one
        for source, given in zip(sources, decoder.decode(sources), strict=True):
            expected = greedy(pytorch_steps(bundles.model, source), config.bos_id, config.eos_id, 8).ids
            assert given[: len(expected)] == [*expected]


def test_every_contender_is_measured_and_failures_are_listed(
    bundles: Bundles, toy_sentences: list[str], tmp_path: Path
) -> None:
    result = bench(bundles, open_device(bundles, "cpu"), toy_sentences, "cpu", tmp_path)
    measured = {(row["decoder"], row["rows"]) for row in result.rows if "tokens_per_s" in row}
    failed = {(row["decoder"], row["rows"]) for row in result.rows if "failed" in row}
    assert measured == {(name, rows) for name in ("sightline", "pytorch eager", "ctranslate2") for rows in (1, 8)}
    assert {name for name, _ in failed} == {"pytorch CUDA graph", "pytorch compiled CUDA graph"}
    assert set(result.figures) == {f"gpu.{peer}.{rows}" for peer in ("pytorch", "ctranslate2") for rows in (1, 8)}


def test_all_operators_run_on_the_cpu_provider(bundles: Bundles) -> None:
    runner = open_device(bundles, "cpu")
    assert operators_on_other_providers(bundles.float16, runner.manifest.decoder_graph, "cpu") == []
