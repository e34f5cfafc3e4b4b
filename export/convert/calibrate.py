"""Calibration: measure the ranges of the activations of a bundle on sentences that it reads."""

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sightline.base.bundle import Graph, Manifest
from sightline.export.check.sessions import Array, Sessions, encode, open_sessions, read_sources, run_step
from sightline.export.convert.products import product_inputs, projection_input
from sightline.export.convert.smoothing import Floats

MAX_NEW_TOKENS = 64
LARGEST = "largest."  # prefix of the names of the added outputs


def measure_ranges(
    folder: Path, manifest: Manifest, sources: Iterable[Sequence[int]], max_new_tokens: int = MAX_NEW_TOKENS
) -> dict[str, dict[str, Floats]]:
    """Measure the largest magnitudes of each activation that is multiplied by a constant matrix.

    The float32 bundle encodes one source at a time, and greedily decodes it if it generates text.

    Returns:
        The largest magnitude of each channel, by graph ("encoder" or "step") and name of the
        activation, for each of the two graphs that the bundle has.
    """
    ranges: dict[str, dict[str, Floats]] = {"encoder": {}, "step": {}}
    with tempfile.TemporaryDirectory() as scratch:
        sessions = _measuring(folder, manifest, Path(scratch))
        if manifest.decoder is None:
            for source in sources:
                _update_ranges(ranges["encoder"], encode(sessions, [source]))
            return {"encoder": ranges["encoder"]}
        decoder = onnx.load_model(folder / manifest.decoder.file, load_external_data=False)
        for source in sources:
            _translate(sessions, source, ranges, projection_input(decoder.graph), max_new_tokens)
    return {"step": ranges["step"]} if manifest.encoder is None else ranges


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
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), f"{LARGEST}axis"))
    for value in values:
        name = LARGEST + value
        rows = helper.make_node("Flatten", [value], [f"{name}.rows"], axis=-1)  # (tokens, channels)
        magnitudes = helper.make_node("Abs", [f"{name}.rows"], [f"{name}.magnitudes"])
        largest = helper.make_node("ReduceMax", [f"{name}.magnitudes", f"{LARGEST}axis"], [name], keepdims=0)
        model.graph.node.extend((rows, magnitudes, largest))
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, (None,)))
    onnx.save_model(model, path)
    return described.model_copy(update={"outputs": (*described.outputs, *(LARGEST + value for value in values))})


def _translate(
    sessions: Sessions, source: Sequence[int], ranges: dict[str, dict[str, Floats]], projected: str, max_new_tokens: int
) -> None:
    """Generate from one source and update the ranges.

    `projected` is the input of the projection to the vocabulary.
    """
    manifest = sessions.manifest
    *filled, token_id = manifest.decoder_prompt_ids(source)
    positions = len(filled) + min(max_new_tokens, manifest.max_new_tokens_for(len(source)))
    measured = [name for name in manifest.decoder_graph.outputs if name.startswith(LARGEST)]
    # The service does not project prompts to the vocabulary.
    of_layers = [name for name in measured if name != LARGEST + projected]
    encoded, states = read_sources(sessions, [source], positions, of_layers)
    _update_ranges(ranges["step" if manifest.is_decoder_only else "encoder"], encoded)
    outputs_to_fetch = ["top_ids", *measured]
    for length in range(len(filled), positions):
        outputs = run_step(sessions, states, [token_id], [length], [len(source)], outputs_to_fetch)
        _update_ranges(ranges["step"], outputs)
        token_id = int(outputs["top_ids"][0, 0])
        if token_id in manifest.tokens.end_ids:
            break


def _update_ranges(ranges: dict[str, Floats], outputs: Mapping[str, Array]) -> None:
    for name, value in outputs.items():
        if name.startswith(LARGEST):
            measured = name.removeprefix(LARGEST)
            ranges[measured] = np.maximum(ranges.get(measured, np.float32(0)), value)
