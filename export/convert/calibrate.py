"""Calibration: measure the range of the activations of a bundle on sentences that it translates."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from sightline.base.bundle import Graph, Manifest
from sightline.export.check.sessions import Array, Sessions, encode, open_sessions, read_sources, run_step
from sightline.export.convert.quantize import product_inputs, projection_input

MAX_NEW_TOKENS = 64
LARGEST = "largest."  # prefix of the names of the added outputs


def measure_ranges(folder: Path, manifest: Manifest, sources: Sequence[Sequence[int]]) -> dict[str, dict[str, float]]:
    """Measure the largest magnitude of each activation that is multiplied by a constant matrix.

    The float32 bundle encodes one source at a time, and greedily decodes it if it generates text.

    Returns:
        The largest magnitudes, by graph ("encoder" or "step") and name of the activation, for each
        of the two graphs that the bundle has.
    """
    encoder, step = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as scratch:
        sessions = _measuring(folder, manifest, Path(scratch))
        if manifest.decoder is None:
            for source in sources:
                _update_ranges(encoder, encode(sessions, [source]))
            return {"encoder": encoder}
        decoder = onnx.load_model(folder / manifest.decoder.file, load_external_data=False)
        for source in sources:
            _translate(sessions, source, encoder, step, projection_input(decoder.graph))
    return {"step": step} if manifest.encoder is None else {"encoder": encoder, "step": step}


def _measuring(folder: Path, manifest: Manifest, scratch: Path) -> Sessions:
    """Load the bundle with an additional output for each measured activation."""
    for name in manifest.files:
        shutil.copyfile(folder / name, scratch / name)
    graphs = {"encoder": manifest.encoder, "decoder": manifest.decoder}
    measuring = {
        part: _with_outputs(scratch / graph.file, graph) for part, graph in graphs.items() if graph is not None
    }
    return open_sessions(scratch, manifest.model_copy(update=measuring))


def _with_outputs(path: Path, described: Graph) -> Graph:
    model = onnx.load_model(path, load_external_data=False)
    values = product_inputs(model.graph)
    for value in values:
        name = LARGEST + value
        model.graph.node.append(helper.make_node("Abs", [value], [f"{name}.magnitudes"]))
        model.graph.node.append(helper.make_node("ReduceMax", [f"{name}.magnitudes"], [name], keepdims=0))
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ()))
    onnx.save_model(model, path)
    return described.model_copy(update={"outputs": (*described.outputs, *(LARGEST + value for value in values))})


def _translate(
    sessions: Sessions, source: Sequence[int], encoder: dict[str, float], step: dict[str, float], projected: str
) -> None:
    """Generate from one source and update the ranges.

    `projected` is the input of the projection to the vocabulary.
    """
    manifest = sessions.manifest
    *filled, token_id = manifest.decoder_prompt_ids(source)
    positions = len(filled) + min(MAX_NEW_TOKENS, manifest.max_new_tokens_for(len(source)))
    measured = [name for name in manifest.decoder_graph.outputs if name.startswith(LARGEST)]
    # The service does not project prompts to the vocabulary.
    of_layers = [name for name in measured if name != LARGEST + projected]
    encoded, states = read_sources(sessions, [source], positions, of_layers)
    _update_ranges(step if manifest.is_decoder_only else encoder, encoded)
    outputs_to_fetch = ["top_ids", *measured]
    for length in range(len(filled), positions):
        outputs = run_step(sessions, states, [token_id], [length], [len(source)], outputs_to_fetch)
        _update_ranges(step, outputs)
        token_id = int(outputs["top_ids"][0, 0])
        if token_id in manifest.tokens.end_ids:
            break


def _update_ranges(ranges: dict[str, float], outputs: Mapping[str, Array]) -> None:
    for name, value in outputs.items():
        if name.startswith(LARGEST):
            measured = name.removeprefix(LARGEST)
            ranges[measured] = max(ranges.get(measured, 0.0), float(value))
