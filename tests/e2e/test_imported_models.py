"""Checkpoints of Hugging Face, imported and served over HTTP, give the results of transformers.

The models are small and have random weights. The service runs in a process of its own.
"""

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from huggingface_hub import InferenceClient, close_session
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BertConfig,
    FillMaskPipeline,
    LlamaConfig,
    M2M100Config,
    MarianConfig,
    MBartConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    T5Config,
    ZeroShotClassificationPipeline,
)

from lab.bench.server import RunningServer, serving
from sightline.base.bundle import PREFILL_TOKENS
from sightline.export import pipeline
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.firefox.marian_binary import MarianModel
from sightline.export.tokenizers.sentencepiece import SentencePieceModel
from tests.e2e.asking import post
from tests.export.firefox.models import OPTIONS, random_tensors, write_marian
from tests.export.firefox.reference import FirefoxReference
from tests.export.folders_of_others import word_tokenizer
from tests.export.tokenizers.writing import special_pieces, unigram_pieces, write_sentencepiece
from tests.support.training_runs import UNCHECKED
from tests.zoo.folders import SentenceModel, byte_tokenizer, dense, modules, write_folder
from tests.zoo.models import random_model

Array = NDArray[Any]
WORDS = [f"word{number}" for number in range(50)]
TEXTS = ["word1 word2 word3", "word40", "word7 word7 word9 word30 word31 word32 word33 word34", "word5 word6"]
NEW_TOKENS = 9
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"vocab_size": 64, "max_position_embeddings": 48}
SCALE = 0.4  # of the weights: large enough that scores differ clearly
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
# Hidden states and maps of these models differ from those of transformers by less than 1e-5. The
# limit of the issue is 1e-4.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Served:
    """A running service, and the models of transformers by the names of the bundles."""

    server: RunningServer
    models: dict[str, Any]
    tokenizers: dict[str, Tokenizer]

    def generate(self, model: str, inputs: Any, **parameters: Any) -> Any:
        body = {"model": model, "inputs": inputs, "parameters": {"max_new_tokens": NEW_TOKENS, **parameters}}
        return post(self.server, "/v1/generate", body)["outputs"]

    def expected(self, model: str, ids: list[int], **options: Any) -> list[int]:
        """Return the new tokens of `generate` in transformers."""
        hf = self.models[model]
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
        given = torch.tensor([ids])
        mask = torch.ones_like(given)
        found: list[int] = hf.generate(given, attention_mask=mask, **options)[0].tolist()
        return found[len(ids) if model == "chat" else 1 :]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve all models. Meanwhile, PyTorch records no gradients."""
    checkpoints, bundles = tmp_path_factory.mktemp("checkpoints"), tmp_path_factory.mktemp("bundles")
    made = {name: (make(), word_tokenizer(64), "") for name, make in NLI_MODELS.items()}
    made |= {
        "ranker": (_bert("ForSequenceClassification", 1, num_labels=1), word_tokenizer(64), ""),
        "reader": (_bert("ForQuestionAnswering", 1), word_tokenizer(64), ""),
        "masked": _masked(),
        "chat": _chat(),
        "t5": random_t5(),
        "m2m": _m2m(),
        "mbart": _mbart(),
    }
    with pytest.MonkeyPatch.context() as patch:
        # Comparing with transformers is stricter, and the verification has tests of its own.
        patch.setattr(pipeline, "compare", lambda *_: UNCHECKED)
        for name, (model, tokenizer, template) in made.items():
            model.save_pretrained(checkpoints / name)
            config = {"chat_template": template} if template else {}
            tokenizer.save(str(checkpoints / name / "tokenizer.json"))
            (checkpoints / name / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
            export_checkpoint(Export(checkpoints / name, bundles / name, BundleMetadata(name)))
        made["marian"] = write_marian_folder(checkpoints / "marian")
        export_checkpoint(Export(checkpoints / "marian", bundles / "marian", BundleMetadata("marian")))
        _write_firefox(checkpoints / "firefox")
        metadata = BundleMetadata("firefox")
        export_checkpoint(Export(checkpoints / "firefox", bundles / "firefox", metadata, kind="firefox"))
        made |= write_language_models(checkpoints, bundles)
        made["sentences"] = (*SENTENCES.write(checkpoints / "sentences"), "")
        export_checkpoint(Export(checkpoints / "sentences", bundles / "sentences", BundleMetadata("sentences")))
    for _, tokenizer, _ in made.values():
        tokenizer.no_truncation()
        tokenizer.no_padding()
    with serving(bundles, threads=1, workers=1) as server, torch.no_grad():
        yield Served(
            server,
            {name: model for name, (model, _, _) in made.items()},
            {name: tokenizer for name, (_, tokenizer, _) in made.items()},
        )


def _bert(task: str, seed: int, **options: Any) -> Any:
    config = BertConfig(
        hidden_size=28, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, **options, **SIZES
    )  # fmt: skip
    return random_model(config, f"Bert{task}", SCALE, seed)


def _masked() -> tuple[Any, Tokenizer, str]:
    tokenizer = word_tokenizer(63)
    tokenizer.add_special_tokens(["[MASK]"])
    return _bert("ForMaskedLM", 15), tokenizer, ""


def _labels(*names: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def _bart_nli() -> Any:
    config = BartConfig(
        d_model=28, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=4,
        encoder_ffn_dim=37, decoder_ffn_dim=31, pad_token_id=0, bos_token_id=2, eos_token_id=3,
        decoder_start_token_id=3, **_labels("contradiction", "neutral", "entailment"), **SIZES,
    )  # fmt: skip
    return random_model(config, "BartForSequenceClassification", SCALE, 14)


def _bert_nli() -> Any:
    """Return a model whose first label is entailment; its contradiction is the last one."""
    return _bert("ForSequenceClassification", 15, **_labels("ENTAILMENT", "not_entailment"))


NLI_MODELS: dict[str, Callable[[], Any]] = {"bart-mnli": _bart_nli, "bert-nli": _bert_nli}


def _words(*special: str) -> Tokenizer:
    """Return a tokenizer of words separated by spaces, with special tokens before them."""
    vocabulary = [*special, *(f"▁{word}" for word in WORDS)]
    tokenizer = Tokenizer(models.WordLevel({token: id_ for id_, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def random_t5() -> tuple[Any, Tokenizer, str]:
    config = T5Config(
        vocab_size=64, d_model=28, d_kv=8, num_heads=3, d_ff=37, num_layers=2, num_decoder_layers=1,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    tokenizer = _words("<pad>", "</s>", "<unk>")
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return random_model(config, "T5ForConditionalGeneration", SCALE, 19), tokenizer, ""


def _m2m() -> tuple[Any, Tokenizer, str]:
    config = M2M100Config(
        d_model=28, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=37, decoder_ffn_dim=31, scale_embedding=True, **SIZES,
    )  # fmt: skip
    tokenizer = _words("<s>", "<pad>", "</s>", "<unk>", "__en__", "__de__", "__fr__")
    model = random_model(config, "M2M100ForConditionalGeneration", SCALE, 3)
    model.generation_config.max_length = 7  # with the start token and that of the language
    return model, tokenizer, ""


def _mbart() -> tuple[Any, Tokenizer, str]:
    """Return a model like mBART of 25 languages, fine-tuned to translate to German."""
    tokenizer = _words("<s>", "<pad>", "</s>", "<unk>", "de_DE", "en_XX", "fr_XX")
    tokenizer.post_processor = processors.TemplateProcessing(
        "$A </s> en_XX", special_tokens=[("</s>", 2), ("en_XX", _id_of(tokenizer, "en_XX"))]
    )
    config = MBartConfig(
        d_model=28, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=37, decoder_ffn_dim=31, scale_embedding=True,
        decoder_start_token_id=_id_of(tokenizer, "de_DE"), **SIZES,
    )  # fmt: skip
    return random_model(config, "MBartForConditionalGeneration", SCALE, 7), tokenizer, ""


# Like distiluse.
SENTENCES = SentenceModel(
    lambda: (_bert("Model", 8), word_tokenizer(64)), "mean", (dense(28, 20, torch.nn.Tanh()),), normalize=False
)


def _pieces(*texts: str) -> list[str]:
    return [f"▁{word}" for word in texts]


def _sentencepiece(*special: str) -> bytes:
    pieces = special_pieces(*special) + unigram_pieces("▁", *_pieces(*WORDS))
    return write_sentencepiece(SentencePieceModel(pieces))


def write_marian_folder(folder: Path) -> tuple[Any, Tokenizer, str]:
    """Write a model with two SentencePiece models and vocab.json, as Marian has them."""
    vocabulary = ["</s>", "<unk>", *_pieces(*WORDS), "▁", "<pad>"]
    pad_id = len(vocabulary) - 1
    config = MarianConfig(
        vocab_size=len(vocabulary), max_position_embeddings=48, d_model=28, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=37, decoder_ffn_dim=31,
        activation_function="swish", scale_embedding=True, pad_token_id=pad_id, decoder_start_token_id=pad_id,
        eos_token_id=0, forced_eos_token_id=0, bad_words_ids=[[pad_id]],
    )  # fmt: skip
    model = random_model(config, "MarianMTModel", SCALE, 5)
    model.save_pretrained(folder)
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(_sentencepiece("<unk>", "<s>", "</s>"))
    ids = {token: id_ for id_, token in enumerate(vocabulary)}
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    languages = {"source_lang": "eng", "target_lang": "deu"}
    (folder / "tokenizer_config.json").write_text(json.dumps(languages), encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 0)])
    return model, tokenizer, ""


FIREFOX_VOCABULARY = 3 + 1 + len(WORDS)


def _firefox_model() -> bytes:
    tensors = random_tensors()
    size = FIREFOX_VOCABULARY
    rng = np.random.default_rng(6)
    tensors["Wemb"] = rng.normal(0, 0.5, (size, tensors["Wemb"].shape[1])).astype(np.float32)
    tensors["decoder_ff_logit_out_b"] = rng.normal(0, 0.5, (1, size)).astype(np.float32)
    sizes = {"dim-vocabs": f"\n  - {size}\n  - {size}"}
    return write_marian(tensors, OPTIONS | sizes, quantized=["Wemb"])


def _write_firefox(folder: Path) -> None:
    """Write a model as Mozilla publishes it, with the ids of `</s>` and `<unk>` as there."""
    folder.mkdir()
    (folder / "model.ende.intgemm8.bin").write_bytes(_firefox_model())
    (folder / "vocab.ende.spm").write_bytes(_sentencepiece("</s>", "<unk>", "<s>"))


def _chat() -> tuple[Any, Tokenizer, str]:
    config = LlamaConfig(
        vocab_size=300, max_position_embeddings=256, hidden_size=30, intermediate_size=41, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=12, bos_token_id=257, eos_token_id=258,
        pad_token_id=None,
    )  # fmt: skip
    return random_model(config, scale=SCALE, seed=4), byte_tokenizer("</s>", *CHAT_TOKENS), CHATML


def write_language_models(checkpoints: Path, bundles: Path) -> dict[str, tuple[Any, Tokenizer, str]]:
    """Import a Qwen3-Embedding and a Qwen3-Reranker with random weights; return them by name."""
    config = Qwen3Config(
        vocab_size=300, max_position_embeddings=400, hidden_size=30, intermediate_size=41, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, head_dim=12, pad_token_id=256,
    )  # fmt: skip
    embedding = {
        "modules.json": modules("Transformer", "Pooling", "Normalize"),
        "config_sentence_transformers.json": {"prompts": {"query": "Instruct: Find it.\nQuery:"}},
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
    }
    made = {}
    for name, seed, end, files, options in (
        ("qwen3-embedding", 13, "</s>", embedding, ExportOptions()),
        ("qwen3-reranker", 21, "", {}, ExportOptions(task="rerank")),
    ):
        model = random_model(config, scale=SCALE, seed=seed)
        tokenizer = byte_tokenizer("</s>", *CHAT_TOKENS, words=("yes", "no"), end=end)
        write_folder(checkpoints / name, model, tokenizer, files)
        export_checkpoint(Export(checkpoints / name, bundles / name, BundleMetadata(name), options))
        made[name] = (model, tokenizer, "")
    return made


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    id_ = tokenizer.token_to_id(token)
    assert id_ is not None, token
    return int(id_)


def _ids(outputs: Any) -> list[list[int]]:
    return [[token["id"] for token in output["tokens"]] for output in outputs]


def test_a_model_that_generates_gives_the_tokens_of_transformers(served: Served) -> None:
    sources = [served.tokenizers["t5"].encode(text).ids for text in TEXTS]
    expected = [served.expected("t5", ids) for ids in sources]
    assert _ids(served.generate("t5", TEXTS)) == expected
    # Alone, and in any batch.
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        assert list(pool.map(lambda text: _ids(served.generate("t5", text))[0], TEXTS)) == expected
    beams = [served.expected("t5", ids, num_beams=3) for ids in sources]
    assert _ids(served.generate("t5", TEXTS, num_beams=3)) == beams


def test_marian_translates_as_transformers_does(served: Served) -> None:
    for text, found in zip(TEXTS, _ids(served.generate("marian", TEXTS)), strict=True):
        # Transformers counts the start token in the length.
        options = {"max_new_tokens": NEW_TOKENS, "num_beams": 1}
        expected = served.expected("marian", served.tokenizers["marian"].encode(text).ids, **options)
        assert found == expected


def test_a_firefox_model_translates_as_its_reference_does(served: Served) -> None:
    reference = FirefoxReference(MarianModel(_firefox_model(), "model.bin"))
    outputs = served.generate("firefox", TEXTS, return_attention={"kinds": ["cross"]})
    for text, output in zip(TEXTS, outputs, strict=True):
        source = [4 + WORDS.index(word) for word in text.split()]
        # The reference drops the last token if the length ends the text.
        expected = reference.translate([*source, 0], NEW_TOKENS + 1, [id_ for id_ in range(4 + len(WORDS)) if id_ != 1])
        assert [token["id"] for token in output["tokens"] if token["id"]] == expected.ids
        (cross,) = output["attention"]["maps"]
        maps = np.array(cross["data"]).reshape(cross["shape"])
        found = expected.cross_attention[:NEW_TOKENS].transpose(1, 2, 0, 3)  # (layers, heads, T, S)
        np.testing.assert_allclose(maps, found, rtol=0, atol=TOLERANCE)


def test_translate_uses_the_first_model_by_name_that_has_the_languages(served: Served) -> None:
    text = "word1 word2"
    for pair, model in ((("en", "de"), "firefox"), (("fr", "en"), "m2m")):
        languages = {"source_language": pair[0], "target_language": pair[1]}
        body = {"model": model, "inputs": text, "parameters": languages}
        expected = post(served.server, "/v1/translate", body)["outputs"][0]["text"]
        response = post(served.server, "/translate", {"q": text, "source": pair[0], "target": pair[1]})
        assert expected and response["translatedText"] == expected


def test_languages_select_the_first_tokens(served: Served) -> None:
    tokenizer = served.tokenizers["m2m"]
    for source, target in (("en", "de"), ("fr", "en")):
        forced = _id_of(tokenizer, f"__{target}__")
        languages = {"source_language": source, "target_language": target}
        given = _ids(served.generate("m2m", TEXTS, **languages))
        for text, found in zip(TEXTS, given, strict=True):
            ids = [_id_of(tokenizer, f"__{source}__"), *tokenizer.encode(text).ids, 2]
            expected = served.expected("m2m", ids, forced_bos_token_id=forced, max_new_tokens=NEW_TOKENS + 1)
            assert expected[0] == forced
            assert found == expected[1:]


def test_the_longest_output_has_as_many_tokens_as_in_transformers(served: Served) -> None:
    tokenizer = served.tokenizers["m2m"]
    body = {"model": "m2m", "inputs": TEXTS, "parameters": {"source_language": "en", "target_language": "de"}}
    outputs = post(served.server, "/v1/generate", body)["outputs"]
    for text, found in zip(TEXTS, _ids(outputs), strict=True):
        ids = torch.tensor([[_id_of(tokenizer, "__en__"), *tokenizer.encode(text).ids, 2]])
        expected = served.models["m2m"].generate(ids, forced_bos_token_id=_id_of(tokenizer, "__de__"))
        assert found == expected[0, 2:].tolist()
    assert max(len(one) for one in _ids(outputs)) == 5, "an output must reach the limit"


@pytest.mark.parametrize("model", ["m2m", "mbart"])
def test_encode_reads_the_token_of_the_default_language(served: Served, model: str) -> None:
    tokenizer = served.tokenizers[model]
    given = post(served.server, "/v1/encode", {"model": model, "inputs": TEXTS, "pooling": "none"})
    for text, vectors in zip(TEXTS, given["embeddings"], strict=True):
        words = tokenizer.encode(text, add_special_tokens=False).ids
        ids = [*words, 2, _id_of(tokenizer, "en_XX")] if model == "mbart" else [_id_of(tokenizer, "__en__"), *words, 2]
        hidden = served.models[model].get_encoder()(torch.tensor([ids])).last_hidden_state[0]
        expected = hidden.numpy().ravel()
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beam_search_counts_the_token_of_the_language_as_transformers_does(
    served: Served, length_penalty: float
) -> None:
    tokenizer = served.tokenizers["m2m"]
    forced = _id_of(tokenizer, "__de__")
    settings = {"num_beams": 4, "length_penalty": length_penalty}
    outputs = served.generate("m2m", TEXTS, source_language="en", target_language="de", **settings)
    for text, output, found in zip(TEXTS, outputs, _ids(outputs), strict=True):
        ids = torch.tensor([[_id_of(tokenizer, "__en__"), *tokenizer.encode(text).ids, 2]])
        options = {"forced_bos_token_id": forced, "max_new_tokens": NEW_TOKENS + 1, "return_dict_in_generate": True}
        expected = served.models["m2m"].generate(ids, output_scores=True, **options, **settings)
        assert expected.sequences[0].tolist()[1:] == [forced, *found]
        # Counting changes a score by at least 5 % unless the penalty is 0.
        assert output["score"] == pytest.approx(expected.sequences_scores[0].item(), rel=10 * TOLERANCE)


def test_mbart_reads_the_source_language_after_the_text(served: Served) -> None:
    tokenizer = served.tokenizers["mbart"]
    for source in ("en", "fr"):
        (token,) = [name for name in ("en_XX", "fr_XX") if name.startswith(source)]
        given = _ids(served.generate("mbart", TEXTS, source_language=source))
        for text, found in zip(TEXTS, given, strict=True):
            ids = [*tokenizer.encode(text, add_special_tokens=False).ids, 2, _id_of(tokenizer, token)]
            assert found == served.expected("mbart", ids)
    with urlopen(served.server.url + "/v1/models", timeout=30) as response:
        languages = {model["id"]: model["languages"] for model in json.load(response)["data"]}
    assert languages["mbart"]["targets"] == ["de"]


def test_layers_after_pooling_give_the_vectors_of_sentence_transformers(served: Served) -> None:
    name, tokenizer = "sentences", served.tokenizers["sentences"]
    expected = [SENTENCES.embed(served.models[name], tokenizer.encode(text).ids) for text in TEXTS]
    data = post(served.server, "/v1/embeddings", {"model": name, "input": TEXTS})["data"]
    native = post(served.server, "/v1/encode", {"model": name, "inputs": TEXTS})
    assert native["dimensions"] == 20
    for vector, one, given in zip(expected, data, native["embeddings"], strict=True):
        np.testing.assert_allclose(given, vector, rtol=0, atol=TOLERANCE * np.abs(vector).max())
        for found in (given, one["embedding"]):  # OpenAI's vectors are normalized
            cosine = vector @ np.array(found) / (np.linalg.norm(vector) * np.linalg.norm(found))
            assert cosine >= 0.9999
    # The vectors of tokens have no layer.
    tokens = post(served.server, "/v1/encode", {"model": name, "inputs": TEXTS, "pooling": "none"})
    assert tokens["dimensions"] == 28


def test_cross_attention_equals_that_of_transformers(served: Served) -> None:
    (output,) = served.generate("t5", TEXTS[2], return_attention={"kinds": ["cross", "encoder", "decoder"]})
    ids, hf = served.tokenizers["t5"].encode(TEXTS[2]).ids, served.models["t5"]
    target = [0, *[token["id"] for token in output["tokens"]][:-1]]
    given = hf(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([target]), output_attentions=True)
    maps = {one["kind"]: np.array(one["data"]).reshape(one["shape"]) for one in output["attention"]["maps"]}
    for kind, expected in (
        ("cross", given.cross_attentions),
        ("encoder", given.encoder_attentions),
        ("decoder", given.decoder_attentions),
    ):
        np.testing.assert_allclose(maps[kind], np.stack([one[0] for one in expected]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("model", ["t5", "m2m", "marian", "firefox"])
def test_words_are_aligned_by_the_heads_of_the_import(served: Served, model: str) -> None:
    with urlopen(f"{served.server.url}/v1/models/{model}", timeout=30) as response:
        card = json.load(response)["alignment"]
    if model == "firefox":
        assert [card[name] for name in ("criterion", "step", "layer", "heads")] == ["guided", "writes", 0, [0]]
    else:
        assert card["criterion"] == "prediction_difference" and card["agreement"] >= card["baseline"]
    body = {"model": model, "inputs": TEXTS[0], "parameters": {"max_new_tokens": NEW_TOKENS}}
    names = ("step", "layer", "heads")
    (output,) = post(served.server, "/v1/align", body)["outputs"]
    assert [output[name] for name in names] == [card[name] for name in names]
    (output,) = post(served.server, "/v1/align", {**body, "step": "writes"})["outputs"]  # the rows of the maps
    assert [output[name] for name in names] == ["writes", card["layer"], card["heads"]]
    assert [word["text"] for word in output["source_words"]] == TEXTS[0].split()
    selection = {"kinds": ["cross"], "layers": [card["layer"]], "heads": card["heads"], "reduce": "mean"}
    (maps,) = post(served.server, "/v1/attention", {**body, **selection, "units": "words"})["outputs"][0]["maps"]
    weights = np.reshape(maps["data"], maps["shape"])[0, 0]
    assert [link[:2] for link in output["links"]] == [[int(row.argmax()), word] for word, row in enumerate(weights)]


def test_a_chat_is_the_same_as_with_the_template_of_transformers(served: Served) -> None:
    dialogues = [
        [{"role": "user", "content": "Hi! <|im_end|>"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": "Three, which is long enough for two chunks?"},
        ],
    ]
    tokenizer = served.tokenizers["chat"]
    start, end = _id_of(tokenizer, "<|im_start|>"), _id_of(tokenizer, "<|im_end|>")

    for messages in dialogues:
        ids: list[int] = []
        for message in messages:
            # One character at a time, so that names of special tokens in a message are plain text.
            content = [id_ for character in message["content"] for id_ in tokenizer.encode(character).ids]
            ids += [start, *tokenizer.encode(f"{message['role']}\n").ids, *content, end, *tokenizer.encode("\n").ids]
        ids += [start, *tokenizer.encode("assistant\n").ids]
        body = {"model": "chat", "messages": messages, "max_tokens": NEW_TOKENS, "logprobs": True}
        response = post(served.server, "/v1/chat/completions", body)
        expected = served.expected("chat", ids)
        logprobs = [token["logprob"] for token in response["choices"][0]["logprobs"]["content"]]
        scores = served.models["chat"](torch.tensor([ids + expected])).logits[0].log_softmax(-1)
        expected_logprobs = [float(scores[len(ids) - 1 + index, id_]) for index, id_ in enumerate(expected)]
        np.testing.assert_allclose(logprobs, expected_logprobs[: len(logprobs)], rtol=0, atol=TOLERANCE)
        assert response["usage"]["prompt_tokens"] == len(ids)


def chat_ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Return the prompt that `CHATML` makes of messages without names of special tokens."""
    text = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    return list(tokenizer.encode(f"{text}<|im_start|>assistant\n").ids)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_attention_of_a_chat_includes_the_prompt(served: Served, options: dict[str, Any]) -> None:
    """The prompt is longer than one chunk; each row equals that of transformers."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One, two, three?"}]
    tokenizer, hf = served.tokenizers["chat"], served.models["chat"]
    prompt = chat_ids(tokenizer, messages)
    assert len(prompt) > PREFILL_TOKENS
    new_ids = served.expected("chat", prompt, max_new_tokens=5, **options)
    body = {"model": "chat", "messages": messages, "prompt_rows": True}
    body |= {"parameters": {"max_new_tokens": 5, **options}}
    (output,) = post(served.server, "/v1/attention", body)["outputs"]
    (given,) = output["maps"]
    names = output["decoder_input_tokens"]
    assert len(names) == given["rows"] == given["columns"] == len(output["target_tokens"])
    assert names[1:] == output["target_tokens"][:-1]
    assert output["source_tokens"] == names[: len(prompt)]
    ids = torch.tensor([prompt + new_ids[:-1]])
    expected = hf(ids, output_attentions=True, use_cache=False).attentions
    maps = np.array(given["data"]).reshape(given["shape"])
    np.testing.assert_allclose(maps, np.stack([one[0] for one in expected]), rtol=0, atol=TOLERANCE)
    body |= {"layers": [-1], "heads": [4, 1]}
    (some,) = post(served.server, "/v1/attention", body)["outputs"][0]["maps"]
    np.testing.assert_array_equal(np.array(some["data"]).reshape(some["shape"]), maps[[1]][:, [4, 1]])


def test_attention_to_a_forced_reply(served: Served) -> None:
    messages = [{"role": "user", "content": "One?"}]
    tokenizer, hf = served.tokenizers["chat"], served.models["chat"]
    prompt, target = chat_ids(tokenizer, messages), tokenizer.encode("Two.").ids
    body = {"model": "chat", "messages": messages, "targets": "Two.", "prompt_rows": True}
    (output,) = post(served.server, "/v1/attention", body)["outputs"]
    (given,) = output["maps"]
    assert (output["text"], output["finish_reason"]) == ("Two.", "forced")
    ids = torch.tensor([[*prompt, *target][: given["rows"]]])
    expected = hf(ids, output_attentions=True, use_cache=False).attentions
    maps = np.array(given["data"]).reshape(given["shape"])
    np.testing.assert_allclose(maps, np.stack([one[0] for one in expected]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_hidden_source_tokens_are_masked_as_in_transformers(served: Served, name: str) -> None:
    """The encoder reads the hidden tokens, so its outputs are computed without the mask."""
    tokenizer, hf = served.tokenizers[name], served.models[name]
    ids = tokenizer.encode(TEXTS[2]).ids
    hidden = [1, 4, -1]
    options = {"hidden_source_tokens": hidden, "return_attention": {"kinds": ["cross"]}, "num_beams": 1}
    (output,) = served.generate(name, TEXTS[2], **options)
    new_ids = [token["id"] for token in output["tokens"]]
    mask = torch.ones(1, len(ids), dtype=torch.long)
    encoded = hf.get_encoder()(torch.tensor([ids]))
    mask[0, hidden] = 0
    start = hf.config.decoder_start_token_id
    given = hf(
        encoder_outputs=encoded,
        attention_mask=mask,
        decoder_input_ids=torch.tensor([[start, *new_ids[:-1]]]),
        output_attentions=True,
    )
    scores = given.logits[0].log_softmax(-1)[range(len(new_ids)), new_ids]
    np.testing.assert_allclose([one["logprob"] for one in output["tokens"]], scores, rtol=0, atol=TOLERANCE)
    (cross,) = output["attention"]["maps"]
    maps = np.array(cross["data"]).reshape(cross["shape"])
    assert not maps[..., hidden].any()
    expected = np.stack([one[0] for one in given.cross_attentions])
    np.testing.assert_allclose(maps, expected, rtol=0, atol=TOLERANCE)
    body = {"model": name, "inputs": TEXTS[2], "targets": output["text"], "hidden_source_tokens": hidden}
    scored = post(served.server, "/v1/score", body)["outputs"][0]["tokens"]
    np.testing.assert_allclose(
        [one["logprob"] for one in scored[: len(new_ids) - 1]], scores[: len(new_ids) - 1], rtol=0, atol=TOLERANCE
    )


def test_documents_are_ranked_by_the_scores_of_transformers(served: Served) -> None:
    tokenizer, hf = served.tokenizers["ranker"], served.models["ranker"]
    scores = []
    for text in TEXTS:
        pair = tokenizer.encode("word3 word40", text)
        logits = hf(input_ids=torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits
        scores.append(1 / (1 + math.exp(-float(logits))))
    body = {"model": "ranker", "query": "word3 word40", "documents": TEXTS}
    results = post(served.server, "/v1/rerank", body)["results"]
    assert [one["index"] for one in results] == sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    for one in results:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=TOLERANCE)


def test_an_answer_is_that_of_the_logits_of_transformers(served: Served) -> None:
    question, context = "word3 word40", " ".join(WORDS[5:25])
    tokenizer, hf = served.tokenizers["reader"], served.models["reader"]
    pair = tokenizer.encode(question, context)
    output = hf(input_ids=torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids]))
    places = [0, *(index for index, sequence in enumerate(pair.sequence_ids) if sequence == 1)]
    first, last = (logits[0, places].double().softmax(0) for logits in (output.start_logits, output.end_logits))
    products = torch.outer(first[1:], last[1:]).triu()
    products -= products.triu(3)
    begin, end = divmod(int(products.argmax()), len(places) - 1)
    start, stop = pair.offsets[places[1 + begin]][0], pair.offsets[places[1 + end]][1]
    client = InferenceClient(f"{served.server.url}/?model=reader")
    answer: Any = client.question_answering(question=question, context=context, max_answer_len=3)
    assert (answer.answer, answer.start, answer.end) == (context[start:stop], start, stop)
    assert answer.score == pytest.approx(float(products.max()), abs=TOLERANCE)
    several: Any = client.question_answering(question=question, context=context, max_answer_len=3, top_k=3)
    assert [one.score for one in several] == pytest.approx(products.flatten().topk(3).values.tolist(), abs=TOLERANCE)
    close_session()


def test_masks_are_filled_as_by_the_pipeline_of_transformers(served: Served) -> None:
    hf, tokenizer = served.models["masked"], served.tokenizers["masked"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", pad_token="[PAD]", model_input_names=["input_ids"]
    )
    pipeline = FillMaskPipeline(model=hf, tokenizer=fast)
    client = InferenceClient(f"{served.server.url}/?model=masked")
    one, two = "word1 [MASK] word3", "[MASK] word40 [MASK]word5"
    options: dict[str, Any]
    for text, options in (
        (one, {}),
        (one, {"top_k": 2}),
        (two, {"top_k": 3}),
        (one, {"targets": ["word9", "word3", "word9"], "top_k": 3}),
    ):
        expected = pipeline(text, **options)
        given = post(served.server, "/?model=masked", {"inputs": text, **({"parameters": options} if options else {})})
        native = post(served.server, "/v1/fill-mask", {"model": "masked", "inputs": [text], **options})
        masks = native["outputs"][0]["masks"]
        nested = [expected] if text == one else expected
        for found, wanted in zip([given] if text == one else given, nested, strict=True):
            assert [{**item, "score": 0} for item in found] == [{**item, "score": 0} for item in wanted]
            assert [item["score"] for item in found] == pytest.approx([item["score"] for item in wanted], abs=1e-5)
        names = {"token": "id", "token_str": "text", "score": "score", "sequence": "sequence"}
        assert masks == [
            [{names[key]: value for key, value in item.items()} for item in found]
            for found in ([given] if text == one else given)
        ]
        if text == one:
            elements = client.fill_mask(text, **options)
            assert [(item.token, item.sequence) for item in elements] == [
                (item["token"], item["sequence"]) for item in expected
            ]
    close_session()


def test_sparse_vectors_are_largest_logits_of_transformers(served: Served) -> None:
    tokenizer, hf = served.tokenizers["masked"], served.models["masked"]
    given = post(served.server, "/embed_sparse?model=masked", {"inputs": TEXTS})
    for text, vector in zip(TEXTS, given, strict=True):
        logits = hf(torch.tensor([tokenizer.encode(text).ids])).logits[0]
        weights = torch.log1p(torch.relu(logits)).max(dim=0).values.numpy()
        assert {item["index"] for item in vector} == set(weights.nonzero()[0].tolist())
        np.testing.assert_allclose([item["value"] for item in vector], weights[weights > 0], rtol=0, atol=TOLERANCE)
        assert [item["index"] for item in vector] == sorted(item["index"] for item in vector)
    # A text without masks is encoded, as by other encoders.
    assert post(served.server, "/?model=masked", {"inputs": TEXTS[0]}) == post(
        served.server, "/embed?model=masked", {"inputs": TEXTS[0]}
    )


def test_a_language_model_embeds_texts_by_its_last_token(served: Served) -> None:
    tokenizer, hf = served.tokenizers["qwen3-embedding"], served.models["qwen3-embedding"]
    for options, prompt in (({}, ""), ({"prompt_name": "query"}, "Instruct: Find it.\nQuery:")):
        body = {"model": "qwen3-embedding", "inputs": TEXTS, **options}
        given = post(served.server, "/v1/encode", body)["embeddings"]
        for text, vector in zip(TEXTS, given, strict=True):
            hidden = hf.model(torch.tensor([tokenizer.encode(prompt + text).ids])).last_hidden_state[0, -1]
            expected = torch.nn.functional.normalize(hidden, dim=0).numpy()
            np.testing.assert_allclose(vector, expected, rtol=0, atol=TOLERANCE)
        if not prompt:
            data = post(served.server, "/v1/embeddings", {"model": "qwen3-embedding", "input": TEXTS})["data"]
            np.testing.assert_allclose([one["embedding"] for one in data], given, rtol=0, atol=1e-6)


def test_attention_of_a_language_model_that_embeds_texts(served: Served) -> None:
    tokenizer, hf = served.tokenizers["qwen3-embedding"], served.models["qwen3-embedding"]
    (output,) = post(served.server, "/v1/attention", {"model": "qwen3-embedding", "inputs": TEXTS[:1]})["outputs"]
    (found,) = output["maps"]
    expected = hf(torch.tensor([tokenizer.encode(TEXTS[0]).ids]), output_attentions=True).attentions
    maps = np.array(found["data"]).reshape(found["shape"])
    np.testing.assert_allclose(maps, np.stack([one[0] for one in expected]), rtol=0, atol=TOLERANCE)


INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def yes_of(served: Served, instruction: str, query: str, document: str, max_tokens: int = 10_000) -> float:
    """Return the probability of yes as the README of Qwen3-Reranker computes it."""
    tokenizer, hf = served.tokenizers["qwen3-reranker"], served.models["qwen3-reranker"]
    before, after = tokenizer.encode(BEFORE).ids, tokenizer.encode(AFTER).ids
    pair = tokenizer.encode(f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}").ids
    ids = [*before, *pair[: max_tokens - len(before) - len(after)], *after]
    logits = hf(torch.tensor([ids])).logits[0, -1]
    return float(logits[[_id_of(tokenizer, "no"), _id_of(tokenizer, "yes")]].softmax(0)[1])


@pytest.mark.parametrize("instruction", [None, "Find the words."])
def test_a_language_model_ranks_documents_by_the_probability_of_yes(served: Served, instruction: str | None) -> None:
    body = {"query": "word3 word40", "documents": TEXTS}
    expected = [yes_of(served, instruction or INSTRUCTION, "word3 word40", text) for text in TEXTS]
    assert max(expected) - min(expected) > 100 * TOLERANCE
    options = {} if instruction is None else {"instruction": instruction}
    results = post(served.server, "/v1/rerank", {**body, **options, "model": "qwen3-reranker"})["results"]
    assert [one["index"] for one in results] == sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    for one in results:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=TOLERANCE)
    if instruction is None:  # the API of TEI has no instruction
        ranks = post(served.server, "/rerank?model=qwen3-reranker", {"query": "word3 word40", "texts": TEXTS})
        assert {one["index"]: one["score"] for one in ranks} == {
            one["index"]: one["relevance_score"] for one in results
        }


def test_long_documents_are_cut_as_in_the_readme(served: Served) -> None:
    document = "word7 word9 " * 50
    body = {"model": "qwen3-reranker", "query": "word3", "documents": [document], "truncate": True}
    response = post(served.server, "/v1/rerank", body)
    assert response["usage"]["prompt_tokens"] == 400
    expected = yes_of(served, INSTRUCTION, "word3", document, 400)
    assert response["results"][0]["relevance_score"] == pytest.approx(expected, abs=TOLERANCE)


MASKS = "must have 1 to 16 masks, the token [MASK] of masked, got"
TWO_TOKENS = {"inputs": "[MASK]", "targets": ["word1 word2"]}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/fill-mask", {"model": "masked", "inputs": "word1"}, f"inputs {MASKS} 0."),
        ("/v1/fill-mask", {"model": "masked", "inputs": ["[MASK]", "[MASK]" * 17]}, f"inputs[1] {MASKS} 17."),
        ("/v1/fill-mask", {"model": "masked", **TWO_TOKENS}, "targets[0] is 2 tokens of this model, and must be one."),
        ("/v1/rerank", {"model": "ranker", "instruction": "Find."}, "ranker has no instruction; leave"),
        (
            "/v1/rerank",
            {"model": "qwen3-reranker", "instruction": "x" * 10**6},
            "instruction must have at most 400 tokens",
        ),
        ("/predict?model=qwen3-reranker", {"inputs": "one text"}, "inputs must have pairs of texts for"),
    ],
)
def test_a_request_that_the_model_cannot_read_is_refused(
    served: Served, path: str, body: dict[str, Any], message: str
) -> None:
    if path == "/v1/rerank":
        body = {"query": "word3", "documents": TEXTS, **body}
    with pytest.raises(HTTPError) as raised:
        post(served.server, path, body)
    assert message in raised.value.read().decode()
    assert raised.value.code == 422


@pytest.mark.parametrize("name", NLI_MODELS)
def test_zero_shot_classification_is_that_of_transformers(served: Served, name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(64), pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=SIZES["max_position_embeddings"],
    )  # fmt: skip
    types = ["token_type_ids"] if name == "bert-nli" else []
    tokenizer.model_input_names = ["input_ids", "attention_mask", *types]
    classify = ZeroShotClassificationPipeline(model=served.models[name], tokenizer=tokenizer, framework="pt")
    labels = ["word11", "word3 word40", "word12", "word5"]
    client = InferenceClient(f"{served.server.url}?model={name}")
    long = " ".join(WORDS)  # only the text is cut, not the hypothesis
    for text in (*TEXTS, long):
        for options in ({}, {"multi_label": True}, {"hypothesis_template": "word8 {} word9"}):
            for some in (labels, labels[:1]):
                expected = classify(text, candidate_labels=some, **options)
                body = {"model": name, "inputs": [text], "candidate_labels": some, "truncate": text == long, **options}
                (output,) = post(served.server, "/v1/classify", body)["outputs"]
                assert [one["label"] for one in output["labels"]] == expected["labels"]
                assert [one["score"] for one in output["labels"]] == pytest.approx(expected["scores"], abs=TOLERANCE)
                if text != long:
                    found = client.zero_shot_classification(text, some, **options)
                    assert [(one.label, one.score) for one in found] == [
                        (one["label"], one["score"]) for one in output["labels"]
                    ]
