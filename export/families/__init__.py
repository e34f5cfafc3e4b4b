"""Table of the supported families of checkpoints.

A family converts a configuration to a description, and names the tensors of each module.
Supporting another model means adding an entry.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sightline.base.bundle import TrainingUnit
from sightline.export.families.description import Description
from sightline.export.families.weights import Source
from sightline.export.sources.opened_checkpoint import Config, Tensors


@dataclass(frozen=True)
class Family:
    """One family of checkpoints: of Hugging Face Transformers, or of the training of `model`."""

    name: str  # `model_type` of config.json; `architecture` of a training run
    architectures: tuple[str, ...]  # supported values of `architectures` in config.json
    describe: Callable[[Config, Tensors], Description]
    # Modules of the checkpoint by those of `sightline.export.families.weights`, given the tensors:
    # the prefix of names depends on the class that saved the checkpoint.
    modules: Callable[[Description, Tensors], Mapping[str, Source]]
    ignored: tuple[str, ...] = ()  # patterns of tensors that do not change the output
    training_unit: TrainingUnit = "text"  # see `Manifest.training_unit`
    base: str = ""  # class of decoder-only models that sentence-transformers loads
