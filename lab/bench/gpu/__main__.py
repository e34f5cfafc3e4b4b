"""Check that CUDA computes the same as the CPU, and compare its speed with PyTorch and CTranslate2.

Usage: `python -m lab.bench.gpu`. It needs a GPU, onnxruntime-gpu and PyTorch with CUDA. The result
    is
written to `lab/bench/results/gpu-<device>.json`. Exit status: 0 if CUDA and CPU agree, 1 if they
differ, 2 if there is no usable GPU.
"""

import argparse
import dataclasses
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from lab.bench import machine
from lab.bench.gpu import speed
from lab.bench.gpu.equality import Equality, compare
from lab.bench.record import RESULTS, Recorded, Result, write_result
from lab.bench.weights import read_model
from sightline.base.bundle import Graph, read_bundle, read_manifest
from sightline.export.convert.conversions import half_bundle
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.export.pipeline import Export, export_checkpoint
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import save_checkpoint
from sightline.model.data.text import numbered_sentences
from sightline.model.data.tokenizer_training import encode_lines, read_tokenizer
from sightline.service.runtime.device import DeviceRunner
from sightline.service.runtime.ort import OnnxRunner
from sightline.service.runtime.provider import Provider, choose_provider, load_session, session_options
from sightline.service.runtime.runner import RuntimeUnavailableError

NUM_VERIFIED = 3  # sentences of the export's own verification; the tests verify exports in full
EXIT_DIFFERENT, EXIT_NO_GPU = 1, 2


@dataclasses.dataclass(frozen=True)
class Bundles:
    """A model as a float32 bundle and as a float16 bundle."""

    model: Transformer
    tokenizer: Tokenizer
    float32: Path
    float16: Path


def make_bundles(shipped: Path, folder: Path, sentences: Sequence[str]) -> Bundles:
    """Export the model of a bundle, which may be quantized, in float32 and float16."""
    model, tokenizer = read_model(shipped), shipped / read_manifest(shipped).source_tokenizer
    save_checkpoint(folder / "checkpoint", model.config, model.state_dict(), tokenizer, facts={})
    options = ExportOptions(sentences=tuple(sentences[:NUM_VERIFIED]))
    export_checkpoint(Export(folder / "checkpoint", folder / "float32", BundleMetadata("float32"), options, "training"))
    half_bundle(folder / "float32", folder / "float16", text=None)
    return Bundles(model, read_tokenizer(tokenizer), folder / "float32", folder / "float16")


def open_device(bundles: Bundles, provider: Provider) -> DeviceRunner:
    manifest = read_bundle(bundles.float16)
    return DeviceRunner(bundles.float16, manifest, provider=provider, max_rows=max(speed.ROWS))


def check(bundles: Bundles, runner: DeviceRunner, sentences: Sequence[str]) -> Equality:
    """Compare the device with float32 on the CPU, on all sentences."""
    expected = OnnxRunner(bundles.float32, read_bundle(bundles.float32), max_rows=runner.max_rows)
    return compare(expected, runner, encode_lines(bundles.tokenizer, sentences))


def operators_on_other_providers(folder: Path, graph: Graph, provider: Provider) -> list[str]:
    """Return the operators of a graph that another provider runs, which requires copies between
    devices.
    """
    options = session_options(0)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = load_session(folder, graph, options, provider)
    own = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[provider]
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name != own]
    return sorted({node.op_type for part in parts for node in part.get_nodes()})


def bench(bundles: Bundles, runner: DeviceRunner, sentences: Sequence[str], device: str, scratch: Path) -> Result:
    contenders: dict[str, Callable[[speed.Sources], speed.Decode]] = {speed.OURS: speed.sightline(runner)}
    contenders |= speed.pytorch(bundles.model, device)
    try:
        folder = scratch / "ctranslate2"
        contenders["ctranslate2"] = speed.ctranslate2(folder, bundles.model, bundles.tokenizer, device)
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"CTranslate2 is not measured: {error}")
    return speed.measure(contenders, encode_lines(bundles.tokenizer, sentences))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.gpu", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=Path("bundles/multi30k-en-de"), help="bundle of the model")
    parser.add_argument("--sentences", type=Path, default=Path("loadtest/sentences.txt"))
    machine.add_allow_dirty(parser)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace, command: str) -> int:
    described = machine.describe_or_exit(arguments.allow_dirty)
    sentences = list(numbered_sentences(arguments.sentences).values())
    with tempfile.TemporaryDirectory() as scratch:
        bundles = make_bundles(arguments.bundle, Path(scratch), sentences)
        runner = open_device(bundles, "cuda")
        equality = check(bundles, runner, sentences)
        print(json.dumps(dataclasses.asdict(equality), indent=1), flush=True)
        left = operators_on_other_providers(bundles.float16, runner.manifest.decoder_graph, "cuda")
        print(f"decoder operators that run on the CPU: {', '.join(left) or 'none'}", flush=True)
        if failures := equality.failures():
            print(f"error: CUDA and CPU differ: {'; '.join(failures)}", file=sys.stderr)
            return EXIT_DIFFERENT
        result = bench(bundles, runner, sentences, "cuda", Path(scratch))
    for row in result.rows:
        print(row, flush=True)
    name = str(torch.cuda.get_device_name())
    facts = {**described, "device": name, "cuda_of_torch": torch.version.cuda, "operators_on_cpu": left}
    facts["equality"] = dataclasses.asdict(equality)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    write_result(arguments.results, f"gpu-{slug}", Recorded(facts, command, result))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and the measurement; return the exit status that the module describes."""
    words = sys.argv[1:] if arguments is None else arguments
    parsed = parse_arguments(words)
    try:
        choose_provider("cuda")
    except RuntimeUnavailableError as error:
        print(f"error: no GPU: {error}", file=sys.stderr)
        return EXIT_NO_GPU
    if not torch.cuda.is_available():
        print(f"error: PyTorch finds no GPU; torch {torch.__version__} must be built with CUDA", file=sys.stderr)
        return EXIT_NO_GPU
    return run(parsed, shlex.join(["python", "-m", "lab.bench.gpu", *words]))


if __name__ == "__main__":
    sys.exit(main())
