"""Compare greedy decoding on a GPU by Sightline, PyTorch and CTranslate2, with outputs of a fixed
length.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lab.bench.ctranslate2_model import vocabulary_of, write_ctranslate2_model
from lab.bench.gpu.equality import generate
from lab.bench.gpu.torch_decoder import MODES, Mode, TorchDecoder
from lab.bench.record import Figure, Result
from sightline.model.architectures.transformer import Transformer
from sightline.service.parameters import GenerateParameters
from sightline.service.runtime.runner import Runner

ROWS = (1, 8, 32, 64)
NEW_TOKENS = 24
ROUNDS = 5
OURS = "sightline"

Sources = Sequence[Sequence[int]]
Decode = Callable[[], object]


def measure(contenders: Mapping[str, Callable[[Sources], Decode]], sources: Sequence[Sequence[int]]) -> Result:
    """Measure every contender at every number of rows, in turns. Contenders that fail are listed
    with their error.

    Args:
        contenders: Functions by name. Each takes the sources of a batch and returns the function
            that is timed.
        sources: Token ids. Each batch has the first ones.
    """
    rows: list[dict[str, Any]] = []
    figures: dict[str, Figure] = {}
    for count in ROWS:
        batch, ready, missing = sources[:count], {}, {}
        for name, prepare in contenders.items():
            try:
                ready[name] = prepare(batch)
                ready[name]()
            except (RuntimeError, ValueError) as error:  # the other contenders are still measured
                missing[name] = str(error).splitlines()[0]
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(ROUNDS):
            for name, decode in ready.items():
                started = time.perf_counter()
                decode()
                times[name].append(time.perf_counter() - started)
        for name, seconds in times.items():
            speed = Figure.of([count * NEW_TOKENS / each for each in seconds], "tokens/s")
            rows.append({"decoder": name, "rows": count, "tokens_per_s": speed.value})
        rows += [{"decoder": name, "rows": count, "failed": why} for name, why in missing.items()]
        figures |= _ratios(times, count)
    return Result(figures, rows)


def _ratios(times: Mapping[str, Sequence[float]], count: int) -> dict[str, Figure]:
    """Return Sightline's speed relative to the fastest PyTorch mode and to CTranslate2, round by
    round.
    """
    ours, ratios = times.get(OURS), {}
    if ours is None:
        return {}
    for peer in ("pytorch", "ctranslate2"):
        theirs = [seconds for name, seconds in times.items() if name.startswith(peer)]
        if theirs:
            best = [min(each) for each in zip(*theirs, strict=True)]
            ratios[f"gpu.{peer}.{count}"] = Figure.of([b / a for a, b in zip(ours, best, strict=True)])
    return ratios


def sightline(runner: Runner) -> Callable[[Sources], Decode]:
    """Decode with Sightline's engine in this process."""
    parameters = GenerateParameters(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    return lambda sources: lambda: generate(runner, sources, parameters)


def pytorch(model: Transformer, device: str) -> Iterator[tuple[str, Callable[[Sources], Decode]]]:
    """Yield a contender for each mode of `TorchDecoder`, in float16."""
    halved = copy.deepcopy(model).half().to(device)

    def preparing(mode: Mode) -> Callable[[Sources], Decode]:
        def prepare(sources: Sources) -> Decode:
            longest = max(len(source) for source in sources)
            decoder = TorchDecoder(halved, len(sources), longest, NEW_TOKENS, mode)
            return lambda: decoder.decode(sources)

        return prepare

    for mode in MODES:
        yield f"pytorch {mode}", preparing(mode)


def ctranslate2(folder: Path, model: Transformer, tokenizer: Tokenizer, device: str) -> Callable[[Sources], Decode]:
    """Decode with CTranslate2, in float16 on a GPU.

    Raises:
        RuntimeError: CTranslate2 cannot use the device, for example because it is built for another
            version of CUDA.
    """
    import ctranslate2

    write_ctranslate2_model(folder, model, tokenizer)
    options: dict[str, Any] = {"beam_size": 1, "max_decoding_length": NEW_TOKENS, "min_decoding_length": NEW_TOKENS}
    compute_type = "float16" if device == "cuda" else "default"  # CTranslate2 has no float16 on the CPU
    translator = ctranslate2.Translator(str(folder), device=device, compute_type=compute_type)
    names = vocabulary_of(tokenizer, model.config.vocab_size)

    def prepare(sources: Sources) -> Decode:
        tokens = [[names[id_] for id_ in source] for source in sources]
        return lambda: translator.translate_batch(tokens, **options)

    return prepare
