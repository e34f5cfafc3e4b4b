"""PyTorch, ONNX Runtime, the engine and HTTP agree for every Transformer variant."""

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from sightline.base.bundle_files import read_bundle
from sightline.export.check.sessions import encode, open_sessions
from sightline.export.convert.conversions import half_bundle, quantize_bundle
from sightline.export.import_errors import VerificationError
from sightline.export.options import QuantizationRecipe
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import load_model, save_checkpoint
from sightline.model.config import TransformerConfig
from sightline.model.data.tokenizer_training import read_tokenizer
from sightline.model.rounding import Reference
from sightline.service.runtime.ort import OnnxRunner
from tests.equality.comparing import assert_decoding_equals_pytorch, assert_searches_equal_pytorch
from tests.equality.neighbours import assert_bits_do_not_depend_on_batch
from tests.equality.running import GREEDY, make_request
from tests.equality.serving import client_of, load_reference, load_system
from tests.equality.systems import MakeConfig, small, small_systems
from tests.rounding import assert_within_rounding, rows_sum_to_one
from tests.support.training_runs import verify_bundle

# Fewer projected keys than tokens; the system of the zoo has more.
FEW_SLOTS: dict[str, Any] = {"linformer_size": 5, "max_positions": 48}
SYSTEMS: dict[str, MakeConfig] = {
    # Combinations that the zoo does not have.
    "linformer-headwise": small("linformer", **FEW_SLOTS, linformer_sharing="headwise"),
    "linformer-key-value": small("linformer", **FEW_SLOTS, linformer_sharing="key-value"),
    "linformer-pre-norm": small("linformer", **FEW_SLOTS, pre_norm=True),
    **small_systems(TransformerConfig),
}
# Encoders with operators of third-party encoders, which are converted in the slow tests.
SLOW = ("key-value", "single-head", "positions-none", "unscaled", "no-residual")  # parts of their names
NOISE = 0.1  # of the weights of the fixture `folder`
System = tuple[Transformer, OnnxRunner, list[tuple[int, ...]]]


@pytest.fixture(scope="module", params=SYSTEMS)
def system(request: pytest.FixtureRequest, folder: Path, toy_sentences: list[str]) -> System:
    model, runner, sources = load_system(folder, request.param, toy_sentences[:3])
    assert isinstance(model, Transformer)
    return model, runner, sources


def expected_maps(model: Transformer, source: tuple[int, ...], written: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Return attention weights (L, H, rows, columns) of one source and target, by kind."""
    read = torch.tensor([[model.config.bos_id, *written[:-1]]])
    with torch.inference_mode():
        maps = model.attention_maps(torch.tensor([source]), torch.tensor([len(source)]), read)
    return {kind: layers[:, 0].numpy() for kind, layers in maps.items()}


@lru_cache(maxsize=500)
def forced(model: Transformer, source: tuple[int, ...], written: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Return log-probabilities (T,) and attention weights of one source and target in PyTorch."""
    read = torch.tensor([[model.config.bos_id, *written[:-1]]])
    with torch.inference_mode():
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), read)[0]
    logprobs = logits.log_softmax(dim=-1)[range(len(written)), written].numpy()
    return {"logprobs": logprobs, **expected_maps(model, source, written)}


def test_served_outputs_equal_pytorch(system: System) -> None:
    assert_searches_equal_pytorch(*system)


def test_served_log_probabilities_and_maps_equal_pytorch_in_any_batch(system: System, folder: Path) -> None:
    model, runner, sources = system
    kinds = frozenset(one.kind for one in runner.manifest.attention)
    assert ("encoder_slots" in kinds) == (model.config.encoder_attention == "linformer")
    requests = [
        make_request(source, parameters=GREEDY, attention=requested)
        for source in sources
        for requested in (kinds, frozenset({"encoder"}), frozenset[str]())
    ]
    assert_decoding_equals_pytorch(runner, requests, load_reference(folder, runner.manifest.name), forced)


def test_every_output_has_the_same_bits_alone_and_in_any_batch(system: System) -> None:
    _, runner, _ = system
    assert_bits_do_not_depend_on_batch(runner)


@pytest.mark.parametrize(
    ("name", "count"), [("linformer-headwise", 4), ("linformer-key-value", 2), ("linformer-pre-norm", 1)]
)
def test_a_projection_that_is_shared_is_stored_once(folder: Path, name: str, count: int) -> None:
    graph = onnx.load_model(folder / "bundles" / name / "encoder.onnx", load_external_data=False)
    shape = [FEW_SLOTS["linformer_size"], FEW_SLOTS["max_positions"]]
    projections = [one for one in graph.graph.initializer if list(one.dims) == shape]
    assert len(projections) == count


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("linformer-headwise", "projections.matrices"),
        ("pre-norm", "encoder_norm.bias"),
        ("pre-norm", "decoder_norm.bias"),
    ],
)
def test_a_changed_weight_is_found(
    folder: Path, toy_sentences: list[str], tmp_path: Path, name: str, parameter: str
) -> None:
    model, _ = load_model(folder / "checkpoints" / name)
    weights = model.state_dict()
    weights[parameter][-1] += 0.3
    save_checkpoint(tmp_path, model.config, weights, folder / "checkpoints" / name / "tokenizer.json", {})
    with pytest.raises(VerificationError, match="differ"):
        verify_bundle(folder / "bundles" / name, tmp_path, toy_sentences[:2])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if any(map(name.count, SLOW)) else []) for name in SYSTEMS]
)
@pytest.mark.parametrize(("form", "largest"), [("half", 0.02), ("int8", 0.2)])
def test_encoders_in_float16_and_in_8_bits_stay_near_float32(
    folder: Path, toy_sentences: list[str], tmp_path: Path, name: str, form: str, largest: float
) -> None:
    bundle = folder / "bundles" / name
    if form == "half" and any(kind in name for kind in ("relative", "alibi", "rotary", "causal")):
        with pytest.raises(ValueError, match="float16 bundles do not support relative positions, rotary"):
            half_bundle(bundle, tmp_path / form, None)
        return
    if form == "half":
        half_bundle(bundle, tmp_path / form, None)
    else:
        quantize_bundle(bundle, tmp_path / form, QuantizationRecipe(8, states="float32"), None)
    tokenizer = read_tokenizer(bundle / "tokenizer.json")
    sources = [encoding.ids for encoding in tokenizer.encode_batch(toy_sentences)]
    expected, given = (encode(open_sessions(one, read_bundle(one)), sources) for one in (bundle, tmp_path / form))
    for output in [one for one in expected if one.startswith(("hidden", "encoder"))]:
        for row, source in enumerate(sources):
            own = np.s_[row, ..., : len(source), :]  # rows of padding mean nothing
            difference = np.abs(given[output][own].astype(np.float32) - expected[output][own])
            assert 0 < difference.max() < largest


TARGET = "A man sleeps at the corner."


@pytest.mark.anyio
async def test_http_gives_every_variants_maps(folder: Path, toy_sentences: list[str]) -> None:
    """Run all models in one service, with the sentences of each model in one batch."""
    loaded = {name: load_model(folder / "checkpoints" / name) for name in SYSTEMS}
    async with client_of(folder / "bundles") as client:
        sentences = toy_sentences[:3]
        asked = [{"model": name, "inputs": sentence, "targets": TARGET} for name in SYSTEMS for sentence in sentences]
        responses = await asyncio.gather(*(client.post("/v1/attention", json=body) for body in asked))
        for body, response in zip(asked, responses, strict=True):
            assert response.status_code == 200, response.text
            name, (_, tokenizer) = body["model"], loaded[body["model"]]
            source, written = (tuple(tokenizer.encode(text).ids) for text in (body["inputs"], TARGET))
            assert_maps_are_pytorchs(load_reference(folder, name), source, list(written), response.json()["outputs"][0])
        name = "linformer"
        given = {"model": name, "inputs": sentences, "parameters": {"return_attention": True}}
        outputs = (await client.post("/v1/generate", json=given)).json()["outputs"]
        for sentence, output in zip(sentences, outputs, strict=True):
            alone = (await client.post("/v1/attention", json={"model": name, "inputs": sentence})).json()
            assert output["attention"]["maps"] == alone["outputs"][0]["maps"]


def assert_maps_are_pytorchs(
    models: Reference[Any], source: tuple[int, ...], written: list[int], response: Any
) -> None:
    config = models.exact.config
    is_linformer = config.encoder_attention == "linformer"
    found = {one["kind"]: np.reshape(one["data"], one["shape"]) for one in response["maps"]}
    assert_within_rounding(models, lambda model: expected_maps(model, source, written), found)
    assert [one["kind"] for one in response["maps"]] == [
        "encoder",
        *(["encoder_slots"] if is_linformer else []),
        "cross",
        "decoder",
    ]
    for one in response["maps"]:
        assert one["normalized"] == (one["kind"] != "encoder" or not is_linformer)
        assert one["normalized"] == rows_sum_to_one(found[one["kind"]])
        assert one.get("columns_are") == ("slots" if one["kind"] == "encoder_slots" else None)
        if one["kind"].startswith("encoder"):
            assert one["rows"] == len(response["source_tokens"])
            assert one["columns"] == (config.linformer_size if one["kind"] == "encoder_slots" else one["rows"])
