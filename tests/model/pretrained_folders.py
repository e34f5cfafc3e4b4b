"""Small checkpoints of transformers with random weights and a tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sightline.export import training_check
from sightline.export.training_check import write_parts
from sightline.model.architectures.factory import build_model
from sightline.model.config import PretrainedConfig
from sightline.model.data.records import TaskName
from sightline.model.training.start import Start, start_from
from tests.e2e.test_imported_models import write_marian_folder
from tests.export.folders_of_others import word_tokenizer
from tests.export.test_seq2seq_families import write_tokenizer
from tests.zoo.models import MODELS

TRANSLATORS = ("marian", "m2m100", "mbart", "t5", "mt5", "bart")
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
LINES = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
TEMPLATE = LINES + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


LABELS = [f"LABEL_{index}" for index in range(5)]  # of the classifiers


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of special tokens and of the bytes of ASCII."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]  # the last two are a space and a line break
    vocabulary = {name: id_ for id_, name in enumerate((*SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def write_encoder(folder: Path, family: str, architecture: str = "Model", scale: float = 0.3, **options: Any) -> Any:
    """Write an encoder, and return the model of transformers."""
    model = MODELS[family].save(folder, f"{MODELS[family].start}{architecture}", scale, **options)
    word_tokenizer(211).save(str(folder / "tokenizer.json"))
    return model


def write_decoder(folder: Path, name: str = "llama", template: str | None = None, **options: Any) -> Any:
    """Write a decoder, and return the model of transformers."""
    model = MODELS[name].save(folder, **options)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return model


def write_translator(folder: Path, name: str) -> Any:
    """Write a model of `TRANSLATORS`, and return the model of transformers."""
    if name == "marian":
        return write_marian_folder(folder)[0]
    model = MODELS[name].save(folder)
    write_tokenizer(folder, name)
    return model


def check_here(_: str, words: Sequence[str], *__: object) -> int:
    """Read third-party files in this process, which has imported PyTorch."""
    return training_check.main(Path(words[0]), *words[1:])


def begin_checked(
    folder: Path,
    task: TaskName,
    labels: Sequence[str] = (),
    *,
    template: str | None = None,
    pair: tuple[str, str] | None = None,
) -> Start:
    """Return the start of a run, without its model."""
    parts = folder.with_name(f"{folder.name} for {task}")
    parts.mkdir(exist_ok=True)
    write_parts(folder, parts, task, template, pair)
    start = start_from(folder, task, labels, parts)
    assert isinstance(start.config, PretrainedConfig)
    return start


def begin(folder: Path, task: TaskName, labels: Sequence[str] = (), **options: Any) -> tuple[Start, Any]:
    """Return the start of a run, and its model in evaluation mode."""
    start = begin_checked(folder, task, labels, **options)
    torch.manual_seed(1)
    model = build_model(start.config)
    start.initialise(model)
    return start, model.eval()
