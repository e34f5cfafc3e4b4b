"""The models under test in each format that a contender needs, created once per run in a scratch
folder.
"""

import functools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.ctranslate2_model import write_ctranslate2_model
from bench.growth import grow
from bench.weights import read_model
from export.convert.bundles import quantize_bundle
from export.options import BundleMetadata, ExportOptions, Recipe
from export.pipeline import export_checkpoint
from model.architectures.transformer import Transformer
from model.checkpoint import save_checkpoint
from model.config import TransformerConfig
from model.data.tokenizer import read_tokenizer
from model.parts import TOKENIZER
from service.bundle import read_bundle

SEED = 6
RECIPES = {  # int8 is fast for many rows, int4 for few
    "int8": Recipe(8, encoder="per-tensor", layers="per-tensor", projection="per-tensor"),
    "int4": Recipe(4, encoder="per-tensor"),
}
CALIBRATION_SENTENCES = 50
BASE_VOCABULARY = 58_101  # as in the Marian models, the most used ones of this size


@dataclass(frozen=True)
class Subject:
    """One model."""

    name: str
    bundles: dict[str, Path]  # by data type; each is alone in its parent folder, which can be served
    ctranslate2: Path

    @property
    def tokenizer_file(self) -> Path:
        return self.bundles["float32"] / TOKENIZER

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.tokenizer_file)

    def sources(self, sentences: Sequence[str]) -> list[list[int]]:
        return [self.tokenizer.encode(sentence).ids for sentence in sentences]


class Models:
    """Create each subject when it is first needed."""

    def __init__(self, scratch: Path, shipped: Path, sentences: Sequence[str]) -> None:
        """Set up without creating any model.

        Args:
            scratch: An empty folder.
            shipped: The bundle in the repository.
            sentences: Exports are verified on the shortest ones; static scales are calibrated on
                the first ones.
        """
        self._scratch = scratch
        self.shipped = shipped
        self._sentences = sentences[:CALIBRATION_SENTENCES]
        self._few = [min(sentences, key=len)]

    @functools.cached_property
    def tiny(self) -> Subject:
        """The shipped model, with its dequantized weights."""
        subject = self._make("tiny", read_model(self.shipped), self.shipped / TOKENIZER)
        served = subject.bundles[self.shipped_dtype]
        shutil.rmtree(served)
        shutil.copytree(self.shipped, served)
        return subject

    @property
    def shipped_dtype(self) -> str:
        return read_bundle(self.shipped).dtype

    @functools.cached_property
    def shipped_alone(self) -> Path:
        """A folder that contains only a copy of the shipped bundle."""
        folder = self._scratch / "shipped"
        shutil.copytree(self.shipped, folder / self.shipped.name)
        return folder

    @functools.cached_property
    def random_base(self) -> Subject:
        """A model of 6 + 6 layers of width 512 with random weights, which measures speed but
        outputs no sense.
        """
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = Transformer(TransformerConfig(BASE_VOCABULARY)).eval()
        return self._make("base-random", model, self.shipped / TOKENIZER)

    @functools.cached_property
    def grown_base(self) -> Subject:
        """A model of 6 + 6 layers of width 512 that translates like the shipped model; see
        `bench.growth`.
        """
        small = read_model(self.shipped)
        sizes = {name: getattr(small.config, name) for name in ("max_positions", "pad_id", "bos_id", "eos_id")}
        large = grow(small, TransformerConfig(small.config.vocab_size, **sizes))
        return self._make("base", large, self.shipped / TOKENIZER)

    def _make(self, name: str, model: Transformer, tokenizer: Path) -> Subject:
        checkpoint = self._scratch / name / "checkpoint"
        save_checkpoint(checkpoint, model.config, model.state_dict(), tokenizer, {})
        bundles = {dtype: self._folder(name, dtype) for dtype in ("float32", *RECIPES)}
        metadata, options = BundleMetadata(name, "for measuring time"), ExportOptions(sentences=tuple(self._few))
        export_checkpoint(checkpoint, bundles["float32"], metadata, options, kind="training")
        for dtype, recipe in RECIPES.items():
            quantize_bundle(bundles["float32"], bundles[dtype], recipe, text=None, calibration=self._sentences)
        ctranslate2 = self._scratch / name / "ctranslate2"
        write_ctranslate2_model(ctranslate2, model, read_tokenizer(tokenizer))
        return Subject(name, bundles, ctranslate2)

    def _folder(self, name: str, dtype: str) -> Path:
        return self._scratch / name / dtype / name
