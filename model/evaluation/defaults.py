"""Options of `sightline evaluate`, and the files that translations are evaluated on by default."""

from pathlib import Path
from typing import Annotated, Self

from annotated_types import Ge
from pydantic import AfterValidator, Field, model_validator

from sightline.base.options import Options, Shown
from sightline.model.data.files import known_encoding

TEST_SPLIT = "test_2016_flickr"  # the test set of Multi30k that the literature reports
VALIDATION_SPLIT = "val"


class EvaluateOptions(Options):
    """Compute the metrics of a trained model.

    They are BLEU and chrF of translations, accuracy and F1 of labels, F1 of entities, perplexity of
    texts, recall of similar texts.
    """

    example = "runs/messages"

    checkpoint: Annotated[Path, Shown("RUN", is_positional=True)]
    """folder of a run, or of one of its checkpoints such as RUN/best"""
    data: Annotated[Path | None, Shown(is_positional=True)] = None
    """file, or folder of which the part test, or else dev, is used (default: the data of the
    training)"""
    split: str | None = Field(
        default=None,
        description="only for translation: first part of the names of two files in DATA, such as val for val.en and "
        f"val.de (default: {TEST_SPLIT} if DATA has its files)",
    )
    source: Annotated[str | None, Shown("TAG")] = None
    """language of the sources, which is the ending of their file (default: that of the training)"""
    target: Annotated[str | None, Shown("TAG")] = None
    """language of the targets, which is the ending of their file (default: that of the training)"""
    text: Annotated[str | None, Shown("COLUMN")] = None
    """column or field of the texts (default: that of the training)"""
    label: Annotated[str | None, Shown("COLUMN")] = None
    """column or field of the labels (default: that of the training)"""
    encoding: Annotated[str, AfterValidator(known_encoding), Shown("NAME")] = ""
    """encoding of the files of DATA (default: that of the training)"""
    num_beams: Annotated[int, Ge(1)] = 5
    """number of beams of translation"""
    length_penalty: float = 1.0
    """exponent of the length that divides a score"""
    limit: Annotated[int | None, Ge(1)] = None
    """evaluate only the first N examples (default: all)"""
    json_: Annotated[Path | None, Shown("FILE")] = None
    """also write the metrics and outputs here"""
    predictions: Annotated[Path | None, Shown("FILE")] = None
    """also write each example here, with the output of the model, as one line of JSON"""

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        for flag, path in (("--json", self.json_), ("--predictions", self.predictions)):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{flag}: the folder {path.parent} does not exist; create it")
        return self
