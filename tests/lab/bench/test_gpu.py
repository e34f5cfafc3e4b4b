"""Tests of the GPU check with the CPU as its device, which runs everything but CUDA itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.bench import gpu
from lab.bench.gpu import Equality, compare, main, make_bundles, measure, open_runners, operators_on_other_providers
from sightline.base.bundle_files import read_bundle
from sightline.model.data.tokenizer_training import encode_lines, read_tokenizer
from sightline.service.runtime.runner import Int32, Int64
from tests.support.fake_runner import FakeRunner, fake_manifest


def test_without_a_gpu_the_command_fails_and_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: no GPU: the installed onnxruntime has no CUDA provider")
    assert not any(tmp_path.iterdir())


def test_the_float16_path_agrees_with_float32_and_is_measured(
    bundle: Path, toy_sentences: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROWS", (1, 8)), ("NEW_TOKENS", 6), ("ROUNDS", 2)):
        monkeypatch.setattr(gpu, name, value)
    float32, float16 = make_bundles(bundle, tmp_path, toy_sentences)
    runners = open_runners(float32, float16, "cpu")
    sources = encode_lines(read_tokenizer(float16 / "tokenizer.json"), toy_sentences)
    equality = compare(runners["cpu"], runners["device"], sources)
    assert equality.failures() == []
    assert equality.tokens >= equality.sentences == 6
    assert 0 < equality.max_logprob_difference < 0.03 and 0 < equality.max_map_difference < 0.03
    result = measure(runners, sources)
    assert result.figures.keys() == {"gpu.1", "gpu.8"}
    assert [(row["device"], row["rows"], len(row["tokens/s"])) for row in result.rows] == [
        (name, count, 2) for count in (1, 8) for name in ("device", "cpu")
    ]
    assert operators_on_other_providers(float16, read_bundle(float16).decoder_graph, "cpu") == []


class Skewed(FakeRunner):
    """A runner whose second row gets a wrong token in each step."""

    def step(self, token_ids: Int64, lengths: Int32, source_lengths: Int32, outputs: Any, **rest: Any) -> Any:
        return super().step(np.where(np.arange(len(token_ids)) == 1, 7, token_ids), lengths, source_lengths, outputs)


def test_differences_between_runners_are_found() -> None:
    sources = [[5, 6, 2], [7, 8, 9, 2], [9, 2]]
    fakes = [kind(fake_manifest(), max_rows=8) for kind in (FakeRunner, FakeRunner, Skewed)]
    same, other = (compare(fakes[0], fake, sources) for fake in fakes[1:])
    assert same.failures() == [] and same.max_logprob_difference == 0
    assert len(other.failures()) == 3  # scores, maps, greedy tokens


def test_nan_and_other_beams_count_as_a_difference() -> None:
    equality = Equality(10, 1, float("nan"), 0.0, 0, 0, 1, 0)
    assert equality.failures() == [
        "log-probabilities differ by nan, at most 0.05 is allowed",
        "1 of 10 beam searches differ",
    ]
