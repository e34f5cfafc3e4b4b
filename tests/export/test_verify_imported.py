"""The verification of imported bundles accepts correct graphs, and finds damaged ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from export.builder import WeightFile
from export.checkpoint import Folder, open_folder
from export.description import Description
from export.errors import VerificationError
from export.families.table import describe, find_family
from export.graphs.decoder import decoder_graph, states
from export.graphs.encoder import encoder_graph
from export.graphs.model import attention_maps
from export.verify_imported import PerturbedWeights, differences_of, rounding_error, verify
from export.weights import Weights
from service.bundle import Graph, Limits, Manifest, Tokens
from tests.export.decoder_models import MODELS, hf_model

NAMES = ("gpt2-scales", "llama-biases", "qwen3-windows", "smollm3", "bert", "t5")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_model(name: str) -> Any:
    if name in MODELS:
        return hf_model(MODELS[name])
    torch.manual_seed(0)
    if name == "bert":
        sizes = {"hidden_size": 60, "num_attention_heads": 5, "num_hidden_layers": 2, "intermediate_size": 71}
        model: Any = BertForSequenceClassification(
            BertConfig(**sizes, vocab_size=211, max_position_embeddings=40, num_labels=3)
        )
    else:
        sizes = {"d_model": 60, "d_kv": 12, "d_ff": 71, "num_heads": 5, "num_layers": 2}
        model = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=211, decoder_start_token_id=0))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


class Bundle:
    """A bundle without tokenizer, whose checkpoint stays open."""

    def __init__(self, folder: Path, opened: Folder) -> None:
        family = find_family(opened.config)
        self.folder = folder
        self.model: Description = describe(family, opened.config, opened.tensors, input_names=())
        self.weights = Weights(opened.tensors, family.modules(self.model, opened.tensors))
        graphs: dict[str, Any] = {"encoder": None, "decoder": None}
        with WeightFile(folder / "weights.bin") as file:
            for name, stack, build in (
                ("encoder", self.model.encoder, encoder_graph),
                ("decoder", self.model.decoder, decoder_graph),
            ):
                if stack is not None:
                    proto = build(self.model, self.weights, file)
                    onnx.save_model(proto, folder / f"{name}.onnx")
                    inputs, outputs = (
                        tuple(one.name for one in ends) for ends in (proto.graph.input, proto.graph.output)
                    )
                    graphs[name] = Graph(file=f"{name}.onnx", inputs=inputs, outputs=outputs)
        positions = min(self.model.max_positions, 40)
        self.manifest = Manifest.model_construct(
            tokens=Tokens(pad_id=0, start_ids=(0,), end_ids=(1,)),
            decoder_start="source" if self.model.is_decoder_only else "start_token",
            limits=Limits(max_source_tokens=positions, max_target_tokens=positions, vocabulary=211),
            states=states(self.model),
            attention=attention_maps(self.model),
            **graphs,
        )


@pytest.fixture
def bundle_of(tmp_path: Path) -> Iterator[Callable[[str], Bundle]]:
    opened: list[Folder] = []

    def create(name: str) -> Bundle:
        random_model(name).save_pretrained(tmp_path)
        opened.append(open_folder(tmp_path))
        return Bundle(tmp_path, opened[-1])

    yield create
    for folder in opened:
        folder.close()


@pytest.mark.parametrize("name", NAMES)
def test_correct_graphs_are_accepted(bundle_of: Callable[[str], Bundle], name: str) -> None:
    bundle = bundle_of(name)
    record = verify(bundle.folder, bundle.manifest, bundle.model, bundle.weights)
    assert record.sentences == 3
    assert 0 < record.max_logit_difference < record.tolerance
    assert 0 < record.max_attention_difference < 1e-3
    assert record.different_generations == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1e-2, np.nan])
def test_a_changed_weight_is_found(bundle_of: Callable[[str], Bundle], name: str, value: float) -> None:
    bundle = bundle_of(name)
    path, module = bundle.folder / "weights.bin", "decoder" if bundle.model.decoder else "encoder"
    stored = np.fromfile(path, np.float32)
    row = bundle.weights.read(f"{module}.0.feed_forward.outer.weight").T.ravel()[:8]
    (start,) = np.flatnonzero((np.lib.stride_tricks.sliding_window_view(stored, len(row)) == row).all(axis=1))
    stored[start] += value
    stored.tofile(path)
    with pytest.raises(VerificationError, match=r"differ by .* from the reference; float32 rounding explains at most"):
        verify(bundle.folder, bundle.manifest, bundle.model, bundle.weights)


def test_a_missing_scale_is_found(bundle_of: Callable[[str], Bundle]) -> None:
    bundle = bundle_of("gpt2-scales")
    path = bundle.folder / "decoder.onnx"
    graph = onnx.load(path, load_external_data=False)
    node = [one for one in graph.graph.node if one.op_type == "GroupQueryAttention"][1]
    (scale,) = (one for one in node.attribute if one.name == "scale")
    scale.f *= 2
    onnx.save_model(graph, path)
    with pytest.raises(VerificationError, match="differ by"):
        verify(bundle.folder, bundle.manifest, bundle.model, bundle.weights)


def test_missing_outputs_and_other_shapes_are_errors() -> None:
    array = np.zeros((2, 3))
    assert differences_of({"logits.0": np.full((2, 3), np.nan)}, {"logits.0": array}) == {"logits.0": 0}
    assert np.isnan(differences_of({"hidden.0": array * np.nan}, {"hidden.0": array})["hidden.0"])
    with pytest.raises(ValueError, match="the graphs return"):
        differences_of({"logits.0": array}, {"logits.0": array, "hidden.0": array})
    with pytest.raises(ValueError, match="has the shape"):
        differences_of({"logits.0": array[:1]}, {"logits.0": array})


def test_perturbed_weights_have_the_stated_relative_error(bundle_of: Callable[[str], Bundle]) -> None:
    weights = bundle_of("llama-biases").weights
    name = "decoder.0.feed_forward.inner.weight"
    exact, plus, minus = (
        view.read(name).astype(np.float64) for view in (weights, *(PerturbedWeights(weights, 0, s) for s in (1, -1)))
    )
    errors = (plus - exact) / exact
    # The products are rounded to float32 themselves.
    np.testing.assert_allclose(np.abs(errors), rounding_error(exact.shape[1]), rtol=0.2)
    np.testing.assert_allclose(plus + minus, 2 * exact, rtol=2**-22)
    assert abs(np.sign(errors).mean()) < 0.05
    assert "decoder.9.feed_forward.inner.weight" not in PerturbedWeights(weights, 0, 1)
