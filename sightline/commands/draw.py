"""`sightline draw`: draw the attention of one text as SVG or PNG, without HTTP."""

import argparse
import asyncio
import math
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from sightline.base.bundle import BundleError, Manifest
from sightline.commands.bundles import add_bundle_option, choose_bundle, load_service
from sightline.commands.errors import UsageError, exit_status
from sightline.commands.extras import install_command
from sightline.commands.parser import EXIT_FAILED, EXIT_USAGE, Parser
from sightline.service.errors import ApiError, complete_message
from sightline.service.fields import Texts
from sightline.service.inference.attention import AttentionOutput, attention
from sightline.service.inference.call import Call
from sightline.service.inference.picture import View, draw, selection_to_draw
from sightline.service.parameters import AttentionSelection
from sightline.service.runtime.protocol import RuntimeUnavailableError
from sightline.service.settings import Settings, SettingsError, add_flags, make_settings

VIEWS: tuple[View, ...] = ("heatmap", "alignment", "heads")
MAX_PIXELS = 50_000_000  # of a PNG; drawing takes four bytes for each, several times
SUFFIXES = (".svg", ".png")
DEFAULT_SCALE = 2.0
# Flags of fields in errors.
FLAGS = {
    "kinds": "--kind",
    "kinds[0]": "--kind",
    "layers": "--layer",
    "layers[0]": "--layer",
    "heads": "--head",
    "heads[0]": "--head",
    "targets": "--target",
    "inputs": "TEXT",
}


def run(parser: Parser, arguments: Sequence[str]) -> int:
    """Draw a picture and return the exit code."""
    parser.description = (
        "Draw the attention of a model for one text. A model that generates text writes an output first, and the "
        "command prints it."
    )
    parser.epilog = 'example: %(prog)s "A dog runs on the beach." --bundle bundles/multi30k-en-de --out attention.svg'
    parser.add_argument("text", metavar="TEXT", help="Text that the model reads.")
    parser.add_argument("--out", type=_picture_file, required=True, metavar="FILE", help="File to write: .svg or .png")
    add_bundle_option(parser, "with attention")
    parser.add_argument(
        "--view",
        choices=VIEWS,
        default="heatmap",
        help="heatmap, alignment (lines between tokens) or heads (all layers and heads). Default: %(default)s",
    )
    parser.add_argument("--target", metavar="TEXT", help="Output that the model reads instead of generating one.")
    parser.add_argument(
        "--kind",
        choices=("cross", "encoder", "decoder", "encoder_slots"),
        help="Kind of attention. Default: cross-attention if the model has it",
    )
    parser.add_argument(
        "--layer", type=_index, metavar="N", help="Index of the layer. Default: the one that aligns words, or the last"
    )
    parser.add_argument(
        "--head",
        type=_index,
        metavar="N",
        help="Index of the head. Default: the mean of the heads that align words, or of all",
    )
    parser.add_argument(
        "--units", choices=("words", "tokens"), default="words", help="Labels of the picture. Default: %(default)s"
    )
    parser.add_argument(
        "--scale",
        type=_scale,
        default=DEFAULT_SCALE,
        metavar="N",
        help="Pixels of a PNG for each pixel of the SVG. Default: %(default)g",
    )
    flags = ("bundles", "provider")
    add_flags(parser, flags)
    parsed = parser.parse_args(arguments)
    import_module("onnxruntime")  # if it is missing, this is the first error; `--help` does not need it
    for text in (parsed.text, parsed.target or ""):
        text.encode()  # fails for bytes that are not UTF-8, which Python has escaped
    try:
        if not parsed.text.strip():
            raise UsageError("TEXT is blank; give the text that the model reads")
        if parsed.target is not None and not parsed.target.strip():
            raise UsageError("--target is blank; give the text that the model reads as its output, or leave it out")
        settings = make_settings({name: getattr(parsed, name) for name in flags})
        folder, manifest = choose_bundle(
            parsed.bundle, settings, lambda one: bool(one.attention), "has no attention maps"
        )
        output, svg = asyncio.run(make_picture(folder, manifest, settings, parsed))
        write_picture(parsed.out, svg, parsed.scale)
    except (BundleError, RuntimeUnavailableError, SettingsError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_status(error)
    except ApiError as error:
        print(f"error: {complete_message(error.message(FLAGS), error.param(FLAGS))}", file=sys.stderr)
        return EXIT_FAILED if error.kind.status >= 500 else EXIT_USAGE
    except OSError as error:
        print(f"error: {error.filename or parsed.out}: {error.strerror}", file=sys.stderr)
        return exit_status(error)
    if output.text:
        print(output.text)
    return 0


def _picture_file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"its name must end with {' or '.join(SUFFIXES)}, got {text}")
    return path


def _index(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,3}", text):
        raise argparse.ArgumentTypeError(f"it must be a whole number from -999 to 999, got {text}")
    return int(text)


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise argparse.ArgumentTypeError(f"it must be a number greater than 0, got {text}")
    return scale


async def make_picture(
    folder: Path, manifest: Manifest, settings: Settings, options: argparse.Namespace
) -> tuple[AttentionOutput, str]:
    """Run the model, and return its attention and the picture as SVG.

    Raises:
        ApiError: the text, the selection or the target does not fit the model.
        BundleError: the bundle cannot be loaded.
    """
    service, model = load_service(folder, manifest, settings)
    selection = AttentionSelection(
        kinds=None if options.kind is None else [options.kind],
        layers=None if options.layer is None else [options.layer],
        heads=None if options.head is None else [options.head],
        units=options.units,
    )
    service.worker.start()
    call = Call(service, "draw")
    try:
        selection = selection_to_draw(manifest, selection, options.view)
        targets = None if options.target is None else Texts.one(options.target)
        result = await attention(call, model, Texts.one(options.text), selection, targets=targets)
        return result.outputs[0], draw(model.name, result.outputs[0], selection, options.view)
    finally:
        call.close()
        await service.worker.stop(0.0)


def write_picture(path: Path, svg: str, scale: float) -> None:
    """Write a picture in the format of the file's name.

    Raises:
        UsageError: a PNG needs a library that is not installed.
        OSError: the file cannot be written.
    """
    if path.suffix == ".svg":
        path.write_text(svg, encoding="utf-8")
        return
    try:
        import resvg_py
    except ModuleNotFoundError:
        raise UsageError(f"a PNG needs resvg_py, an .svg file does not: {install_command('draw')}") from None
    width, height = (float(re.search(rf'{side}="([0-9.]+)"', svg)[1]) for side in ("width", "height"))  # type: ignore[index]
    if width * height * scale**2 > MAX_PIXELS:
        most = math.floor(10 * math.sqrt(MAX_PIXELS / (width * height))) / 10
        raise UsageError(
            f"--scale {scale:g} would make a picture of {width * scale:.0f} x {height * scale:.0f} pixels, but at most "
            f"{MAX_PIXELS} pixels are drawn; use a scale of at most {most:g}, or write an .svg file"
        )
    path.write_bytes(bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=scale)))
