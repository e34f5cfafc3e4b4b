"""Command line for bundles: `python -m sightline.export CHECKPOINT --out BUNDLE`.

The commands `zoo`, `verify`, `align`, `quantize`, `half` and `pack` take the place of CHECKPOINT.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from sightline.base.bundle import BundleError, LayerGroup, QuantScheme, Task, TrainingUnit
from sightline.base.errors import EXIT_FAILED, exit_status
from sightline.export.errors import VerificationError, one_line
from sightline.export.limits import needs_limits, out_of_memory, run_limited
from sightline.export.options import (
    BLOCK_SIZE,
    BLOCK_SIZES,
    DEFAULT_SENTENCES,
    FLOAT32_BITS,
    MAX_LOSS,
    MIN_PAIRS,
    StateType,
)
from sightline.export.sources.checkpoint import Kind

Action = Callable[[argparse.Namespace], BaseModel]


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = "Export a checkpoint as a verified bundle: a training run, or a checkpoint of others."
    parser.epilog = "example: %(prog)s runs/multi30k-en-de --out bundles/multi30k-en-de"
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="folder of a training run or of one of its checkpoints, a Hugging Face model or a Firefox translation "
        "model, or a GGUF file; a run has the averaged checkpoint exported, or, before its end, the mean of its last "
        "epochs",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="folder to write or replace")
    parser.add_argument(
        "--kind", choices=get_args(Kind), help="kind of the checkpoint (default: recognised by its files)"
    )
    add_metadata(parser)
    parser.add_argument(
        "--shortlist",
        action="store_true",
        help="restrict each translation of a Firefox model to frequent tokens and likely translations of its source, "
        "as Firefox does (default: all tokens are possible)",
    )
    _add_run(parser)


def add_metadata(parser: argparse.ArgumentParser) -> None:
    """Add the options of exports and imports that describe a model or limit it."""
    parser.add_argument("--name", help="model name in requests (default: the folder name of BUNDLE)")
    parser.add_argument("--description", help="description of the model (default: that of the existing bundle)")
    parser.add_argument(
        "--license", help="license of the weights (default: that given to the training, or of the existing bundle)"
    )
    parser.add_argument(
        "--languages",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="BCP 47 tags of source and target language, such as en and de-CH (default: those of the training, or of "
        "the existing bundle)",
    )
    parser.add_argument(
        "--unit",
        choices=get_args(TrainingUnit),
        help="unit of the texts that an encoder-decoder model was trained on; texts for a model of sentences are split "
        "(default: sentence for translation models, text for others, by the family or the task of the training)",
    )
    parser.add_argument(
        "--max-tokens",
        type=_positive,
        metavar="TOKENS",
        help="longest sequence of an imported model, which limits its memory (default: that of the checkpoint; a T5 "
        "can have more)",
    )
    parser.add_argument(
        "--task",
        choices=get_args(Task),
        help="fail unless the imported model can do this task; with rerank, a Qwen3 that generates text is imported as "
        "Qwen3-Reranker",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=(*BLOCK_SIZES, FLOAT32_BITS),
        help="bits per weight: 8 and 4 quantize the verified model and measure the loss, as `sightline quantize` does; "
        "32 keeps float32 (default: 8 for Firefox models and GGUF files whose weights have 8 bits, unless too much is "
        "lost; otherwise 32)",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, got {value}")
    return value


def _add_zoo(parser: argparse.ArgumentParser) -> None:
    from sightline.model.systems import SYSTEMS

    parser.description = "Export all finished runs of `python -m sightline.model zoo`."
    parser.add_argument("runs", type=Path, help="parent folder of the runs")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLES", help="parent folder of the bundles")
    parser.add_argument(
        "--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME", help="export only these"
    )
    parser.add_argument("--lazy", action="store_true", help="let the service load these models on their first use")
    _add_run(parser)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compare a bundle in ONNX Runtime with the checkpoint from which it was exported."
    parser.epilog = "example: %(prog)s bundles/multi30k-en-de --checkpoint runs/multi30k-en-de"
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint from which the bundle was exported")
    parser.add_argument("--kind", choices=get_args(Kind), help="kind of the checkpoint (default: that of the manifest)")
    _add_verification(parser)


def _add_align(parser: argparse.ArgumentParser) -> None:
    parser.description = "Choose the heads that align words in an existing bundle, and record them in its manifest."
    parser.epilog = "example: %(prog)s bundles/multi30k-en-de"
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument(
        "--sentences",
        type=Path,
        metavar="FILE",
        help="file with one source sentence per line (default: the 300 sentences of the load test for English "
        "models that were trained with it, otherwise sentences in the source language that belong to this command)",
    )


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.description = "Quantize a float32 bundle to 8-bit or 4-bit weights, and measure the loss."
    parser.epilog = "example: %(prog)s bundles/minilm --out bundles/minilm-int8 --bits 8"
    _add_rewriting(parser)
    parser.add_argument("--bits", type=int, choices=BLOCK_SIZES, required=True, help="bits per weight")
    parser.add_argument(
        "--block-size",
        type=int,
        default=0,
        help="weights that share a scale with the scheme group-wise ("
        + ", ".join(f"default with {bits} bits: {size}" for bits, size in BLOCK_SIZE.items())
        + ")",
    )
    for layer_group in get_args(LayerGroup):
        parser.add_argument(
            f"--{layer_group}",
            choices=get_args(QuantScheme),
            default=None if layer_group == "encoder" else "group-wise",
            help="quantization scheme; per-token scales are dynamic, a per-tensor scale is static (default: "
            + ("per-token with 8 bits, group-wise with 4)" if layer_group == "encoder" else "group-wise)"),
        )
    parser.add_argument(
        "--states",
        choices=get_args(StateType),
        default="int8",
        help="type of the keys and values that the decoder of an encoder-decoder keeps (default: int8)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        default=DEFAULT_SENTENCES,
        help="file with one sentence per line for the scheme per-tensor, independent of the other texts (default: "
        "the 300 English sentences of the load test, without those that are too long)",
    )


def _add_half(parser: argparse.ArgumentParser) -> None:
    parser.description = "Convert a float32 bundle to float16 for CUDA, and measure the loss."
    _add_rewriting(parser)


def _add_pack(parser: argparse.ArgumentParser) -> None:
    parser.description = "Store the matrices of a float32 bundle in 8 bits; computation stays float32."
    _add_rewriting(parser)


def _add_rewriting(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the commands that convert a float32 bundle."""
    parser.add_argument("bundle", type=Path, help="float32 bundle folder")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="folder to write or replace")
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder of parallel text for measuring BLEU; needs the extra train",
    )
    measured.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="file with one text per line for comparing embeddings, predictions or outputs with float32 (default "
        "without --data: the 300 sentences of the load test, if the model reads English)",
    )
    measured.add_argument("--unverified", action="store_true", help="do not measure the loss; the manifest records it")
    parser.add_argument("--split", default="val", help="first part of the file names (default: val)")
    parser.add_argument("--source", default="en", help="language of the sentences (default: en)")
    parser.add_argument("--target", default="de", help="language of the translations (default: de)")
    parser.add_argument(
        "--limit",
        type=int,
        help=f"use only the first LIMIT pairs; fewer than {MIN_PAIRS} cannot show a loss of {MAX_LOSS} BLEU",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help=f"write the bundle even if it loses more than {MAX_LOSS} BLEU or exceeds the limit of another measure",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of exports of a training run."""
    parser.add_argument(
        "--half-weights",
        action="store_true",
        help="store matrices of a training run as float16, which halves the files; computation stays float32",
    )
    _add_verification(parser)


def _add_verification(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sentences",
        type=Path,
        default=DEFAULT_SENTENCES,
        help="file with one source sentence per line for the verification of a training run",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest allowed difference from PyTorch in float64 (default: derived from float32 rounding)",
    )


# Functions that add the options of a command to its parser. `sightline.export.commands` runs the
# commands.
OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "export": _add_export,
    "zoo": _add_zoo,
    "verify": _add_verify,
    "align": _add_align,
    "quantize": _add_quantize,
    "half": _add_half,
    "pack": _add_pack,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `python -m sightline.export` and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and needs_limits(words):
        return run_limited("sightline.export", words)
    if words and words[0] in OPTIONS.keys() - {"export"}:
        return run(words[0], argparse.ArgumentParser(prog=f"python -m sightline.export {words[0]}"), words[1:])
    parser = argparse.ArgumentParser(
        prog="python -m sightline.export",
        usage="%(prog)s [zoo | verify | align | quantize | half | pack] ...\n"
        "       %(prog)s [options] --out BUNDLE checkpoint",
    )
    return run("export", parser, words)


def run(command: str, parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Add the options of a command to a parser, run the command and return the exit code.

    The code is 0 on success, 1 if the work failed, such as a bundle that differs by more than the
    tolerance, and 2 if the arguments can never work.
    """
    OPTIONS[command](parser)

    def action(arguments: argparse.Namespace) -> BaseModel:
        # Imported here, so that `--help` and wrong options do not need its libraries.
        from sightline.export import commands

        record: BaseModel = getattr(commands, command)(arguments)
        return record

    return run_action(action, parser.parse_args(arguments))


def run_action(action: Action, arguments: argparse.Namespace) -> int:
    """Run an action, print its result or error, and return the exit code, see `run`."""
    try:
        record = action(arguments)
    except (OSError, ValueError, BundleError, VerificationError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return exit_status(error)
    except MemoryError:
        print(f"error: {out_of_memory()}", file=sys.stderr)
        return EXIT_FAILED
    print(record.model_dump_json(indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
