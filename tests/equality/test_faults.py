"""Failures in the graphs of a real model for one row do not affect other rows."""

import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sightline.base.bundle_files import read_bundle, read_manifest, record_files, write_manifest
from sightline.base.text.tokenizer import read_tokenizer
from sightline.export.convert.conversions import half_bundle
from sightline.service.engine.checks import checked_outputs, run_test_input
from sightline.service.engine.request import Failed, Generated
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.device import DeviceRunner
from sightline.service.runtime.ort import OnnxRunner
from sightline.service.runtime.runner import Runner
from tests.equality.running import final, make_request, run, run_events
from tests.equality.serving import write_bundles
from tests.equality.systems import random_models, small

BREAKING = 270  # a step that reads this token raises
PREFIX = (268, 301)
LONG = GenerateParameters(max_new_tokens=12, min_new_tokens=12, suppress_tokens=(BREAKING,))
RECURRENT = {
    "bahdanau": small("bahdanau"),
    "luong-general-lstm": small("luong-general", cell="lstm"),  # with input feeding: all kinds of fixed states
}


@pytest.fixture(scope="module")
def folder(bundle: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of every kind of state."""
    made = tmp_path_factory.mktemp("failing")
    tokenizer = checkpoint / "tokenizer.json"
    write_bundles(made, random_models(RECURRENT, tokenizer, noise=0.2), tokenizer)
    shutil.copytree(bundle, made / "bundles" / "transformer")
    half_bundle(bundle, made / "bundles" / "transformer-half", None)
    return made / "bundles"


def open_runner(folder: Path) -> OnnxRunner | DeviceRunner:
    manifest = read_bundle(folder)
    if manifest.rows is not None:
        return DeviceRunner(folder, manifest, provider="cpu", num_threads=1, max_rows=8)
    return OnnxRunner(folder, manifest, num_threads=1, max_rows=8)


def break_step(folder: Path) -> None:
    """Make the decoder graph fail at its end if a row reads the token BREAKING."""
    manifest = read_bundle(folder)
    path = folder / manifest.decoder_graph.file
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    (maker,) = (node for node in graph.node if "top_logprobs" in node.output)
    maker.output[list(maker.output).index("top_logprobs")] = "whole_top_logprobs"
    graph.initializer.extend(
        [
            helper.make_tensor("breaking_token", TensorProto.INT64, [1], [BREAKING]),
            helper.make_tensor("far_outside", TensorProto.INT64, [1], [10**6]),
            helper.make_tensor("nothing", TensorProto.FLOAT, [1], [0.0]),
        ]
    )
    graph.node.extend(
        [
            helper.make_node("Equal", ["token_ids", "breaking_token"], ["is_breaking"]),
            helper.make_node("Cast", ["is_breaking"], ["breaking_number"], to=TensorProto.INT64),
            helper.make_node("ReduceMax", ["breaking_number"], ["any_breaking"], keepdims=1),
            helper.make_node("Mul", ["any_breaking", "far_outside"], ["row_to_gather"]),
            # The index is out of range for that token; it depends on the output of all layers.
            helper.make_node("Gather", ["whole_top_logprobs", "row_to_gather"], ["gathered"], axis=0),
            helper.make_node("Mul", ["gathered", "nothing"], ["zeros"]),
            helper.make_node("Add", ["whole_top_logprobs", "zeros"], ["top_logprobs"]),
        ]
    )
    onnx.save(model, path)
    files = {**manifest.files, **record_files(folder, [path.name])}
    write_manifest(folder, manifest.model_copy(update={"files": files}))


def assert_same_results(given: Generated, expected: Generated) -> None:
    for target, right in zip(given.targets, expected.targets, strict=True):
        assert [token.id for token in target.tokens] == [token.id for token in right.tokens]
        given_logprobs, expected_logprobs = ([token.logprob for token in one.tokens] for one in (target, right))
        np.testing.assert_allclose(given_logprobs, expected_logprobs, atol=1e-5)
        assert target.attention.keys() == right.attention.keys()
        for kind, maps in right.attention.items():
            np.testing.assert_allclose(target.attention[kind], maps, atol=1e-5)


class NanForOne:
    """Runner whose encoder returns one NaN in an output for the second example."""

    def __init__(self, inner: OnnxRunner, output: str) -> None:
        self.inner = inner
        self.output = output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run_encoder(self, *arguments: Any) -> Any:
        encoded = dict(self.inner.run_encoder(*arguments))
        encoded[self.output] = encoded[self.output].copy()
        encoded[self.output][1].flat[0] = np.nan
        return encoded


def has_encoder_and_decoder(name: str) -> bool:
    manifest = read_manifest(Path("bundles") / name)
    return manifest.encoder is not None and manifest.decoder is not None


SHIPPED = [path.parent.name for path in sorted(Path("bundles").glob("*/manifest.json"))]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_model_runs_the_known_input(name: str) -> None:
    runner = open_runner(Path("bundles") / name)
    run_test_input(runner, "prefill" if runner.manifest.is_decoder_only else "encoder")
    if runner.manifest.decoder is not None:
        run_test_input(runner, "decoder")


def test_a_model_on_a_device_runs_the_known_input(folder: Path) -> None:
    run_test_input(open_runner(folder / "transformer-half"), "decoder")


@pytest.mark.parametrize("name", [name for name in SHIPPED if has_encoder_and_decoder(name)])
def test_nan_of_a_shipped_encoder_fails_its_own_sequence_alone(name: str) -> None:
    """Quantized decoders, and recurrent ones on some processors, generated text despite the NaN."""
    manifest = read_bundle(Path("bundles") / name)
    runner = OnnxRunner(Path("bundles") / name, manifest, num_threads=1, max_rows=4)
    parameters = GenerateParameters(max_new_tokens=8)
    requests = [make_request((50, 60 + index, 70, 2), parameters=parameters) for index in range(3)]
    expected = run(runner, requests)
    outputs = checked_outputs(manifest.states)
    assert "hidden" in outputs or len(outputs) == sum(state.init == "encoder" for state in manifest.states)
    for output in outputs:
        events = run_events(cast(Runner, NanForOne(runner, output)), requests)
        assert events[1] == [Failed("internal")], output
        for index in (0, 2):
            assert_same_results(final(events[index]), expected[index])


@pytest.mark.parametrize("name", [*RECURRENT, "transformer", "transformer-half"])
@pytest.mark.parametrize("num_read", [0, 2])
def test_rows_that_run_alone_after_a_failed_step_have_the_results_of_the_batch(
    folder: Path, toy_sentences: list[str], tmp_path: Path, name: str, num_read: int
) -> None:
    tokenizer = read_tokenizer(folder / name / "tokenizer.json")
    sources = [tuple(tokenizer.encode(sentence)) for sentence in toy_sentences]
    kinds = frozenset(one.kind for one in read_bundle(folder / name).attention)
    mates = [
        make_request(sources[0], parameters=LONG, attention=kinds),
        make_request(sources[1], parameters=LONG, target_prefix=PREFIX),
        make_request(sources[2], parameters=LONG.model_copy(update={"num_beams": 3}), attention=kinds),
        make_request(sources[3], parameters=LONG.model_copy(update={"do_sample": True, "seed": 5})),
    ]
    victim = make_request(sources[4], parameters=LONG, target_prefix=(*PREFIX[:num_read], BREAKING, *PREFIX))
    expected = run(open_runner(folder / name), [*mates, victim])
    broken = Path(shutil.copytree(folder / name, tmp_path / name))
    break_step(broken)
    events = run_events(open_runner(broken), [*mates, victim])
    assert events[-1] == [Failed("internal")]
    for one, right in zip(events[:-1], expected, strict=False):
        assert_same_results(final(one), right)
