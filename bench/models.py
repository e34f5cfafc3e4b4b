"""The models under test, each in every form that some contender takes. Made once a run, in a scratch folder."""

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
from export.bundle import Label, export_bundle, quantize_bundle
from export.quantize import Recipe
from model.architectures.transformer import Transformer
from model.checkpoint import TOKENIZER, save_checkpoint
from model.config import TransformerConfig
from model.data.tokenizer import read_tokenizer
from service.bundle import read_bundle

SEED = 6
RECIPES = {  # int8 for many rows, int4 for few
    "int8": Recipe(8, encoder="static", layers="static", projection="static"),
    "int4": Recipe(4, encoder="static"),
}
CALIBRATION_SENTENCES = 50
BASE_VOCABULARY = 58_101  # that of the Marian models, the most used of this size


@dataclass(frozen=True)
class Subject:
    """One model."""

    name: str
    bundles: dict[str, Path]  # by type of numbers; each alone in its parent folder, to be served from there
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
    """Makes each subject when it is first asked for."""

    def __init__(self, scratch: Path, shipped: Path, sentences: Sequence[str]) -> None:
        """Nothing is made yet.

        Args:
            scratch: an empty folder.
            shipped: the bundle in the repository.
            sentences: exports are verified on the shortest of them, and static scales measured on the first.
        """
        self._scratch = scratch
        self.shipped = shipped
        self._sentences = sentences[:CALIBRATION_SENTENCES]
        self._few = [min(sentences, key=len)]

    @functools.cached_property
    def tiny(self) -> Subject:
        """The shipped model, with the weights that its products multiply by."""
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
        """A folder to serve with a copy of the shipped bundle and nothing else."""
        folder = self._scratch / "shipped"
        shutil.copytree(self.shipped, folder / self.shipped.name)
        return folder

    @functools.cached_property
    def random_base(self) -> Subject:
        """6 + 6 layers of width 512 with random weights: for time, not for sense."""
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = Transformer(TransformerConfig(BASE_VOCABULARY)).eval()
        return self._make("base-random", model, self.shipped / TOKENIZER)

    @functools.cached_property
    def grown_base(self) -> Subject:
        """6 + 6 layers of width 512 that translate as the shipped model does; see `bench.growth`."""
        small = read_model(self.shipped)
        sizes = {name: getattr(small.config, name) for name in ("max_positions", "pad_id", "bos_id", "eos_id")}
        large = grow(small, TransformerConfig(small.config.vocab_size, **sizes))
        return self._make("base", large, self.shipped / TOKENIZER)

    def _make(self, name: str, model: Transformer, tokenizer: Path) -> Subject:
        checkpoint = self._scratch / name / "checkpoint"
        save_checkpoint(checkpoint, model.config, model.state_dict(), tokenizer, {})
        bundles = {dtype: self._folder(name, dtype) for dtype in ("float32", *RECIPES)}
        export_bundle(checkpoint, bundles["float32"], Label(name, "for measuring time"), self._few)
        for dtype, recipe in RECIPES.items():
            quantize_bundle(bundles["float32"], bundles[dtype], recipe, text=None, calibration=self._sentences)
        ctranslate2 = self._scratch / name / "ctranslate2"
        write_ctranslate2_model(ctranslate2, model, read_tokenizer(tokenizer))
        return Subject(name, bundles, ctranslate2)

    def _folder(self, name: str, dtype: str) -> Path:
        return self._scratch / name / dtype / name
