"""Convert Sightline's Transformer to a CTranslate2 model, as the MarianMTModel with its weights."""

from pathlib import Path

from ctranslate2.converters.transformers import BartLoader
from tokenizers import Tokenizer

from lab.bench.marian import to_marian
from sightline.model.architectures.transformer import Transformer


def write_ctranslate2_model(folder: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    """Write a float32 model to a new folder; CTranslate2 quantizes while it loads. If the model's
    vocabulary is larger than the tokenizer's, the missing names are made up.
    """
    config, marian = model.config, to_marian(model)
    marian.config.normalize_before = marian.config.normalize_embedding = False
    spec = BartLoader().get_model_spec(marian)  # that for Marian removes the last token
    vocabulary = [tokenizer.id_to_token(id_) or f"<{id_}>" for id_ in range(config.vocab_size)]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.bos_token = spec.config.decoder_start_token = vocabulary[config.bos_id]
    spec.config.eos_token = vocabulary[config.eos_id]
    spec.config.unk_token = vocabulary[config.pad_id]  # a byte-level vocabulary has no unknown token
    spec.validate()
    spec.optimize(quantization=None)
    folder.mkdir(parents=True)
    spec.save(str(folder))
