"""Check of a config.json alone: whether its model can be imported.

Weights, tokenizers and other files are checked at import. A configuration that passes can still be
refused then, such as for an unknown tensor.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline.base.errors import UsageError
from sightline.export.families.table import describe_configuration, find_family, pass_over_unread
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.generation_settings import read_generation
from sightline.export.sources.opened_checkpoint import CONFIG, Config, Tensors


@dataclass(frozen=True)
class Support:
    """Result of the check of a configuration."""

    file: str
    model_type: str
    architecture: str  # first of the classes in the configuration
    kind: str  # "encoder", "decoder" or "encoder-decoder"; "" for an unsupported model
    reason: str  # why the model is not supported; "" for a supported one


class PresumedTensors(Tensors):
    """Tensors of a checkpoint whose weights are not there: any name is presumed to exist."""

    def __contains__(self, name: object) -> bool:
        return True


def check_configuration(path: Path) -> Support:
    """Return whether the model of a config.json, or of a folder with one, can be imported."""
    file = path / CONFIG if path.is_dir() else path
    values = _read(file)
    config = Config(values, CONFIG)
    architectures = values.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    try:
        kind, reason = _kind(config), ""
    except ImportFailedError as error:
        kind, reason = "", str(error)
    return Support(str(path), str(values.get("model_type", "")), str(first), kind, reason)


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; name a config.json or its folder") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid JSON: {error}; download it again") from None
    if not isinstance(values, dict):
        raise UsageError(f"{file} must be a JSON object; name a config.json or its folder")
    return values


def _kind(config: Config) -> str:
    """Return the kind of a supported model; raise `ImportFailedError` for others."""
    model = describe_configuration(find_family(config), config, PresumedTensors({}))
    if model.decoder is not None:
        # generation_config.json, which most repositories have, takes precedence at import.
        read_generation(config, None, model.is_decoder_only)
    pass_over_unread(config)
    config.check_all_read()
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    return "-".join(name for name, stack in stacks.items() if stack is not None)
