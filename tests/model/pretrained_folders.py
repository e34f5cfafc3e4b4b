"""Small checkpoints of transformers with random weights and a tokenizer."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.export.folders_of_others import word_tokenizer
from tests.zoo.models import MODELS

ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet")
DECODERS = ("llama", "llama-biases", "llama-one-layer", "mistral", "mistral-no-window", "qwen2", "qwen3", "smollm3")
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
    """Write an encoder of `ENCODERS`, and return the model of transformers."""
    model = MODELS[family].save(folder, f"{MODELS[family].start}{architecture}", scale, **options)
    word_tokenizer(211).save(str(folder / "tokenizer.json"))
    return model


def write_decoder(folder: Path, name: str = "llama", template: str | None = None, **options: Any) -> Any:
    """Write a decoder of `DECODERS`, and return the model of transformers."""
    model = MODELS[name].save(folder, **options)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return model
