"""Compare the results of CUDA with those of the CPU, and their speeds.

Usage: `python -m lab.bench.gpu`. It needs a GPU, onnxruntime-gpu and PyTorch with CUDA. A model
runs in float16 on CUDA and in float32 on the CPU. The result is written to
`lab/bench/results/gpu-<device>.json`. Exit status: 0 if CUDA and CPU agree, 1 if they differ, 2 if
there is no usable GPU.
"""

import argparse
import math
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lab.bench import machine
from lab.bench.record import RESULTS, Figure, Recorded, Result, Row, write_result
from lab.bench.weights import read_model
from sightline.base.bundle import Graph
from sightline.base.bundle_files import read_bundle, read_manifest
from sightline.export.convert.conversions import half_bundle
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.export.pipeline import Export, export_checkpoint
from sightline.model.checkpoint import save_checkpoint
from sightline.model.data.text import numbered_sentences
from sightline.model.data.tokenizer_training import encode_lines, read_tokenizer
from sightline.service.engine.engine import Engine
from sightline.service.engine.request import Event, Generated, GenerateRequest, Target
from sightline.service.parameters import FORCED, GenerateParameters
from sightline.service.runtime.device import DeviceRunner
from sightline.service.runtime.ort import OnnxRunner
from sightline.service.runtime.provider import Provider, choose_provider, load_session, session_options
from sightline.service.runtime.runner import Runner, RuntimeUnavailableError

TOLERANCE = 0.05  # for log-probabilities and attention weights; float16 on a CPU differs by at most 0.012
CLOSE = 0.02  # rounding may swap the two best candidates if they are closer than this
MAX_DIFFERENT_BEAMS = 0.02  # fraction of sentences: a near tie early in a search changes which beams are pruned
GREEDY, BEAMS = (GenerateParameters(max_new_tokens=80, num_beams=number) for number in (1, 5))
TOP = {"top_logprobs": 2}
ROWS = (1, 8, 32, 64)
NEW_TOKENS, ROUNDS = 24, 5  # of the measurement of the speed
NUM_VERIFIED = 3  # sentences of the export's own verification; the tests verify exports in full
EXIT_DIFFERENT, EXIT_NO_GPU = 1, 2
Sources = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Equality:
    """The differences between two runners."""

    sentences: int
    tokens: int
    max_logprob_difference: float
    max_map_difference: float
    different_tokens: int  # most likely tokens that differ although no two candidates were close
    close_tokens: int  # most likely tokens that differ where two candidates were close
    different_beams: int  # sentences whose best beam differs, with a different score
    close_beams: int  # sentences whose best beam differs, with nearly the same score

    def failures(self) -> list[str]:
        """Return a message for each difference above its tolerance."""
        messages = []
        for name, difference in (("log-probabilities", self.max_logprob_difference), ("maps", self.max_map_difference)):
            if not difference <= TOLERANCE:  # also true for NaN
                messages.append(f"{name} differ by {difference:.3g}, at most {TOLERANCE} is allowed")
        if self.different_tokens:
            messages.append(f"{self.different_tokens} of {self.tokens} greedy tokens differ")
        if self.different_beams > MAX_DIFFERENT_BEAMS * self.sentences:
            messages.append(f"{self.different_beams} of {self.sentences} beam searches differ")
        return messages


def compare(expected: Runner, actual: Runner, sources: Sources) -> Equality:
    """Compare the scores and maps of the greedy targets of `expected`, and whole beam searches."""
    targets = [_ids(target) for target in generate(expected, sources)]
    scored = [generate(runner, sources, FORCED.model_copy(update=TOP), targets) for runner in (expected, actual)]
    pairs = [pair for best, other in zip(*scored, strict=True) for pair in zip(best.tokens, other.tokens, strict=True)]
    gaps = [  # between the two most likely tokens, where the other runner prefers another one
        token.alternatives[0][1] - token.alternatives[1][1]
        for token, other in pairs
        if token.alternatives[0][0] != other.alternatives[0][0]
    ]
    maps = [
        np.abs(weights - other.attention[kind]).max()
        for best, other in zip(*scored, strict=True)
        for kind, weights in best.attention.items()
    ]
    searches = zip(generate(expected, sources, BEAMS), generate(actual, sources, BEAMS), strict=True)
    apart = [abs(best.score - other.score) for best, other in searches if _ids(best) != _ids(other)]
    return Equality(
        sentences=len(sources),
        tokens=len(pairs),
        # NumPy's maximum keeps NaN; Python's may drop it.
        max_logprob_difference=float(np.max([abs(token.logprob - other.logprob) for token, other in pairs])),
        max_map_difference=float(np.max(maps)),
        different_tokens=sum(not gap <= CLOSE for gap in gaps),
        close_tokens=sum(gap <= CLOSE for gap in gaps),
        different_beams=sum(not difference <= CLOSE for difference in apart),
        close_beams=sum(difference <= CLOSE for difference in apart),
    )


def generate(
    runner: Runner, sources: Sources, parameters: GenerateParameters = GREEDY, targets: Sources = ()
) -> list[Target]:
    """Return the best output of each source from the engine, which gets all sources at once. With
    given targets, these are scored and their attention maps are recorded.
    """
    engine = Engine(runner)
    results: list[list[Event]] = [[] for _ in sources]
    kinds = frozenset(maps.kind for maps in runner.manifest.attention) if targets else frozenset()
    for number, (source, events) in enumerate(zip(sources, results, strict=True)):
        request = GenerateRequest("gpu", tuple(source), math.inf, parameters, attention=kinds)
        engine.submit(replace(request, target_prefix=tuple(targets[number])) if targets else request, events.append)
    while engine.has_work:
        engine.step()
    return [_best(events[-1]) for events in results]


def _best(result: Event) -> Target:
    assert isinstance(result, Generated), result
    return result.targets[0]


def _ids(target: Target) -> list[int]:
    return [token.id for token in target.tokens]


def measure(runners: Mapping[str, Runner], sources: Sources) -> Result:
    """Measure greedy decoding of the first sources in turns; outputs have the same length. Figures
    are the speed of the first runner, relative to that of the second one.
    """
    parameters = GenerateParameters(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    rows, figures = list[Row](), dict[str, Figure]()
    for count in ROWS:
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(1 + ROUNDS):  # the first round is a warm-up
            for name, runner in runners.items():
                started = time.perf_counter()
                generate(runner, sources[:count], parameters)
                seconds[name].append(time.perf_counter() - started)
        speeds = {name: [count * NEW_TOKENS / duration for duration in values[1:]] for name, values in seconds.items()}
        rows += [{"device": name, "rows": count, "tokens/s": each} for name, each in speeds.items()]
        figures[f"gpu.{count}"] = Figure.of_ratios(*speeds.values())
    return Result(figures, rows)


def make_bundles(shipped: Path, folder: Path, sentences: Sequence[str]) -> tuple[Path, Path]:
    """Export the model of a bundle, which may be quantized, in float32 and in float16."""
    model, tokenizer = read_model(shipped), shipped / read_manifest(shipped).source_tokenizer
    save_checkpoint(folder / "checkpoint", model.config, model.state_dict(), tokenizer, facts={})
    options = ExportOptions(sentences=tuple(sentences[:NUM_VERIFIED]))
    metadata = BundleMetadata("float32")
    export_checkpoint(Export(folder / "checkpoint", folder / "float32", metadata, options, "training"))
    half_bundle(folder / "float32", folder / "float16", text=None)
    return folder / "float32", folder / "float16"


def open_runners(float32: Path, float16: Path, provider: Provider) -> dict[str, Runner]:
    """Return the runner of a device, and that of the CPU."""
    rows = max(ROWS)
    device = DeviceRunner(float16, read_bundle(float16), provider=provider, max_rows=rows)
    return {"device": device, "cpu": OnnxRunner(float32, read_bundle(float32), max_rows=rows)}


def operators_on_other_providers(folder: Path, graph: Graph, provider: Provider) -> list[str]:
    """Return the operators that another provider runs, which needs copies between devices."""
    options = session_options(0)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = load_session(folder, graph, options, provider)
    own = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[provider]
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name != own]
    return sorted({node.op_type for part in parts for node in part.get_nodes()})


def run(arguments: argparse.Namespace, command: str) -> int:
    described = machine.describe_or_exit(arguments.allow_dirty)
    sentences = list(numbered_sentences(arguments.sentences).values())
    with tempfile.TemporaryDirectory() as scratch:
        float32, float16 = make_bundles(arguments.bundle, Path(scratch), sentences)
        manifest, runners = read_bundle(float16), open_runners(float32, float16, "cuda")
        sources = encode_lines(read_tokenizer(float16 / manifest.source_tokenizer), sentences)
        equality = compare(runners["cpu"], runners["device"], sources)
        left = operators_on_other_providers(float16, manifest.decoder_graph, "cuda")
        print(f"{equality}\ndecoder operators that run on the CPU: {', '.join(left) or 'none'}", flush=True)
        if failures := equality.failures():
            print(f"error: CUDA and CPU differ: {'; '.join(failures)}", file=sys.stderr)
            return EXIT_DIFFERENT
        result = measure(runners, sources)
    print(*result.rows, sep="\n", flush=True)
    name = str(torch.cuda.get_device_name())
    facts = {**described, "device": name, "operators_on_cpu": left, "equality": asdict(equality)}
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    write_result(arguments.results, f"gpu-{slug}", Recorded(facts, command, result))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and the measurement; return the exit status that the module describes."""
    words = sys.argv[1:] if arguments is None else arguments
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m lab.bench.gpu", description=__doc__, formatter_class=formatter)
    parser.add_argument("--bundle", type=Path, default=Path("bundles/multi30k-en-de"), help="bundle of the model")
    parser.add_argument("--sentences", type=Path, default=Path("loadtest/sentences.txt"))
    machine.add_allow_dirty(parser)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parsed = parser.parse_args(words)
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
