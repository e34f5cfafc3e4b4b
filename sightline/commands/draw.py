"""`sightline draw`: draw the attention of one text as SVG, without HTTP."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator

from sightline.base.bundle import Manifest, MapKind
from sightline.base.errors import EXIT_FAILED, EXIT_USAGE, UsageError, fail
from sightline.base.options import Options, Shown, parse_with
from sightline.base.parser import Parser
from sightline.commands.bundles import choose_bundle
from sightline.service.api_errors import ApiError, complete_message
from sightline.service.body_fields import Texts
from sightline.service.drawing import View
from sightline.service.inference.attention import AttentionOutput, attention
from sightline.service.inference.call import Call
from sightline.service.inference.picture import draw, selection_to_draw
from sightline.service.parameters import AttentionSelection
from sightline.service.settings import Settings, make_settings

# Flags of fields in errors.
SELECTED = {f"{name}s{index}": f"--{name}" for name in ("kind", "layer", "head") for index in ("", "[0]")}
FLAGS = {"targets": "--target", "inputs": "TEXT", **SELECTED}


def _picture_file(path: Path) -> Path:
    if path.suffix != ".svg":
        raise ValueError(f"must have a name that ends with .svg, got {path}; browsers and other programs convert it")
    return path


Index = Annotated[int, Ge(-999), Le(999)]


class DrawOptions(Options):
    """Draw the attention of a model for one text.

    A model that generates text writes an output first, and the command prints it.
    """

    example = '"A dog runs on the beach." --bundle bundles/multi30k-en-de --out attention.svg'

    text: Annotated[str, Shown(is_positional=True)]
    """Text that the model reads."""
    out: Annotated[Path, AfterValidator(_picture_file), Shown("FILE")]
    """File to write: .svg"""
    bundle: Annotated[Path | None, Shown("FOLDER")] = None
    """Bundle to use. Default: the default model of --bundles, or its only bundle with attention"""
    view: View = "heatmap"
    """heatmap, alignment (lines between tokens) or heads (all layers and heads)."""
    target: Annotated[str | None, Shown("TEXT")] = None
    """Output that the model reads instead of generating one."""
    kind: MapKind | None = None
    """Kind of attention. Default: cross-attention if the model has it"""
    layer: Index | None = None
    """Index of the layer. Default: the one that aligns words, or the last"""
    head: Index | None = None
    """Index of the head. Default: the mean of the heads that align words, or of all"""
    units: Literal["words", "tokens"] = "words"
    """Labels of the picture."""


def run(parser: Parser, words: Sequence[str]) -> int:
    options, texts = parse_with(parser, words, DrawOptions, Settings, ("bundles", "provider"))
    import_module("onnxruntime")  # if it is missing, this is the first error; `--help` does not need it
    if not options.text.strip():
        raise UsageError("TEXT is blank; give the text that the model reads")
    if options.target is not None and not options.target.strip():
        raise UsageError("--target is blank; give the text that the model reads as its output, or leave it out")
    settings = make_settings(texts)
    folder, manifest = choose_bundle(
        options.bundle, settings, lambda bundle: bool(bundle.attention), "has no attention maps"
    )
    try:
        output, svg = asyncio.run(make_picture(folder, manifest, settings, options))
    except ApiError as error:
        return fail(
            complete_message(error.message(FLAGS), error.param(FLAGS)),
            EXIT_FAILED if error.kind.status >= 500 else EXIT_USAGE,
        )
    options.out.write_text(svg, encoding="utf-8")
    if output.text:
        print(output.text)
    return 0


async def make_picture(
    folder: Path, manifest: Manifest, settings: Settings, options: DrawOptions
) -> tuple[AttentionOutput, str]:
    """Run the model, and return its attention and the picture as SVG.

    Raises `BundleError`, or `ApiError` if the text, the selection or the target does not fit.
    """
    from sightline.service.loading import open_service  # imports ONNX Runtime

    service = open_service(settings, folder)
    chosen = options.model_dump(include={"kind", "layer", "head"}, exclude_none=True)
    selected: dict[str, Any] = {f"{name}s": [value] for name, value in chosen.items()}
    selection = AttentionSelection(units=options.units, **selected)
    service.worker.start()
    try:
        with closing(Call(service, "draw")) as call:
            model = await call.model(manifest.name)
            selection = selection_to_draw(manifest, selection, options.view)
            targets = None if options.target is None else Texts.one(options.target)
            result = await attention(call, model, Texts.one(options.text), selection, targets=targets)
            return result.outputs[0], draw(model.name, result.outputs[0], selection, options.view)
    finally:
        await service.worker.stop(0.0)
