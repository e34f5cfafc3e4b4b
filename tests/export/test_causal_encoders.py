"""Decoder-only models that read texts: embeddings, labels and rerankers.

`test_families` compares hidden states, attention maps and labels with Transformers.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, processors
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config, T5Config, T5ForConditionalGeneration

from sightline.base.bundle import Manifest, PairTemplate
from sightline.base.bundle_files import read_bundle
from sightline.base.text.prompt import ChatTemplateError, tokenize_with_template
from sightline.base.text.tokenizer import read_tokenizer
from sightline.export.check import verify
from sightline.export.check.sessions import encode, open_sessions
from sightline.export.convert.text_quality import text_ids
from sightline.export.import_errors import ImportFailedError
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.export.pipeline import Export, export_checkpoint, verify_bundle
from sightline.export.sources.chat_template import read_pair_template
from sightline.export.sources.opened_checkpoint import Folder
from sightline.export.sources.reranker import PUBLISHED
from sightline.service.api_errors import ApiError
from sightline.service.inference.call import TextPair, tokenize_within_limits
from sightline.service.inference.dense import read_dense
from sightline.service.tasks.encode import pool
from tests.export.folders_of_others import word_tokenizer
from tests.zoo.comparing import assert_equals_transformers, assert_graphs_equal_the_reference, import_folder
from tests.zoo.folders import SentenceModel, byte_tokenizer, dense, modules, write_folder
from tests.zoo.models import ENCODERS, SEQ2SEQ, random_model

pytestmark = pytest.mark.usefixtures("few_sentences")
SIZES: dict[str, Any] = {
    "vocab_size": 270,
    "hidden_size": 36,
    "intermediate_size": 41,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 400,
    "pad_token_id": 256,
}
TEXTS = ["Hello there.", "What is the capital of China?", "x", "A longer text. " * 9]
PROMPTS = {"query": "Instruct: Find it.\nQuery:", "document": ""}
FILES = {"config_sentence_transformers.json": {"prompts": PROMPTS}}
IDENTITY = "torch.nn.modules.linear.Identity"
TEMPLATE = (
    '{%- set task = messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    '| default("Find passages", true) -%}'
    "<|im_start|>{{ task }}\n{% for one in messages %}{% if one.role != 'system' %}"
    "<{{ one.role }}>: {{ one.content }}{{ '\n' if one.role == 'query' else '' }}{% endif %}{% endfor %}"
    "<|im_end|>\n<|im_start|>assistant\n"
)


def make_tokenizer(*, has_end: bool = True) -> Tokenizer:
    """Return a tokenizer of bytes, which may append an end token like that of Qwen3-Embedding."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return byte_tokenizer(*special, words=("yes", "no"), end=special[0] if has_end else "")


def qwen3(**options: Any) -> Any:
    return random_model(Qwen3Config(**{**SIZES, "head_dim": 14, **options}), scale=0.2)


def write(folder: Path, model: Any, *, has_end: bool = True, files: Mapping[str, Any] = {}) -> None:
    """Write a checkpoint, and further files as JSON or text."""
    write_folder(folder, model, make_tokenizer(has_end=has_end), files)


GEMMA = Gemma3TextConfig(
    **SIZES,
    head_dim=10,
    layer_types=["sliding_attention", "full_attention"],
    query_pre_attn_scalar=10,
    sliding_window=8,
    use_bidirectional_attention=True,
)


def t5() -> tuple[Any, Tokenizer]:
    return SEQ2SEQ["t5 as encoder"].make(vocab_size=270, n_positions=200), make_tokenizer()


TANH = torch.nn.Tanh()


def bert() -> tuple[Any, Tokenizer]:
    return ENCODERS["bert"].make(max_position_embeddings=60), word_tokenizer(211)


EMBEDDING_MODELS = {
    "Qwen3-Embedding": SentenceModel(lambda: (qwen3(), make_tokenizer()), "lasttoken"),
    "EmbeddingGemma": SentenceModel(
        lambda: (random_model(GEMMA, "Gemma3TextModel", 0.2), make_tokenizer()),
        "mean",
        (dense(36, 50, bias=False), dense(50, 36, bias=False)),
    ),
    "a Llama with the first token": SentenceModel(
        lambda: (random_model(LlamaConfig(**SIZES)), make_tokenizer()), "cls", normalize=False
    ),
    "LaBSE": SentenceModel(bert, "cls", (dense(30, 30, TANH),)),
    "distiluse": SentenceModel(bert, "mean", (dense(30, 20, TANH),), normalize=False),
    "GTR": SentenceModel(t5, "mean", (dense(36, 24, bias=False),)),
}


def embed(bundle: Path, manifest: Manifest, texts: list[str]) -> list[NDArray[np.float32]]:
    """Return embeddings as the service computes them."""
    tokenizer, options = read_tokenizer(bundle / manifest.source_tokenizer), manifest.embedding
    assert options is not None
    dense = [read_dense(bundle, layer) for layer in options.dense]
    ids = [tokenizer.encode(text) for text in texts]
    hidden = encode(open_sessions(bundle, manifest), ids)["hidden"]
    return [pool(hidden[row, : len(one)], options.pooling, options.normalize, dense) for row, one in enumerate(ids)]


@pytest.mark.parametrize("name", EMBEDDING_MODELS)
def test_embeddings_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = EMBEDDING_MODELS[name]
    model, tokenizer = case.write(tmp_path / "folder", **FILES)
    manifest = export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m"))).manifest
    assert manifest.tasks == ("encode", "attention")
    assert manifest.embedding is not None and manifest.embedding.prompts == PROMPTS
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for text, given in zip(TEXTS, embed(tmp_path / "bundle", manifest, TEXTS), strict=True):
        vector = case.embed(model, tokenizer.encode(text).ids)
        np.testing.assert_allclose(given, vector, rtol=0, atol=1e-5 * np.abs(vector).max())


def test_names_without_prefix_are_those_of_the_class_without_a_head(tmp_path: Path) -> None:
    """Qwen3-Embedding has the weights of Qwen3Model, but config.json names Qwen3ForCausalLM."""
    SentenceModel(lambda: (qwen3().model, make_tokenizer()), "lasttoken").write(tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    config = json.loads(path.read_text())
    assert config["architectures"] == ["Qwen3Model"] and config["tie_word_embeddings"] is False
    path.write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    manifest = export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m"))).manifest
    assert manifest.decoder is None
    (tmp_path / "folder" / "modules.json").unlink()
    with pytest.raises(ImportFailedError, match=r"no tensor 'lm_head\.weight'"):
        export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m")))


@pytest.mark.parametrize("name", ["mistral as encoder", "gemma2 as encoder"])
def test_labels_are_those_of_the_last_token_that_is_no_padding(name: str, tmp_path: Path) -> None:
    architecture, padding = ENCODERS[name].architectures[1], 13
    model = ENCODERS[name].save(tmp_path, architecture, num_labels=4, problem_type="multi_label_classification")
    rows = ((7, padding, 9, 3, padding, padding), (7, padding, 9, 3), (padding, padding, padding), (5,))
    imported = import_folder(tmp_path)
    assert_equals_transformers(imported, model, verify.ComparedTexts(rows))
    assert_graphs_equal_the_reference(imported, verify.ComparedTexts(rows))


# Rerankers


def score_of(bundle: Path, manifest: Manifest, query: str, document: str) -> float:
    """Return the score of a pair as the service computes it, before the sigmoid."""
    tokenizer = read_tokenizer(bundle / manifest.source_tokenizer)
    assert manifest.pair_template is not None
    ids = tokenize_with_template(tokenizer, manifest.pair_template, query, document)
    return float(encode(open_sessions(bundle, manifest), [ids])["label_logits"][0, 0])


def last_logits(model: Any, text: str) -> Any:
    ids = make_tokenizer(has_end=False).encode(text).ids
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


def test_the_published_folder_of_a_reranker(tmp_path: Path) -> None:
    model = qwen3()
    write(tmp_path / "folder", model, has_end=False)
    options = ExportOptions(task="rerank")
    exported = export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m"), options))
    manifest = exported.manifest
    assert manifest.tasks == ("encode", "attention", "rerank") and manifest.chat is None
    assert "imported as Qwen3-Reranker" in exported.notes[0]
    # The format of the README.
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: Who?\n<Document>: No one.\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    logits = last_logits(model, text)
    expected = float(logits[make_tokenizer().token_to_id("yes")] - logits[make_tokenizer().token_to_id("no")])
    assert score_of(tmp_path / "bundle", manifest, "Who?", "No one.\n") == pytest.approx(expected, abs=1e-5)
    # Quantization measures the loss on texts in the template.
    (ids, _) = text_ids(manifest, make_tokenizer(has_end=False), ["Who?", "No one.\n"])
    assert ids == make_tokenizer(has_end=False).encode(text).ids
    # The manifest tells how the folder was imported.
    recorded = read_bundle(tmp_path / "bundle")
    verification = verify_bundle(tmp_path / "bundle", recorded, tmp_path / "folder", kind="huggingface")
    assert verification == recorded.verification


RERANKERS: Mapping[str, Mapping[str, Any]] = {
    "reranker": {"head_dim": 14},
    "reranker with one layer": {"head_dim": 6, "num_hidden_layers": 1, "num_key_value_heads": 3, "hidden_size": 20},
    "reranker with windows": {
        "attention_bias": True, "head_dim": 10, "max_window_layers": 1, "num_attention_heads": 6, "sliding_window": 5,
        "tie_word_embeddings": True, "use_sliding_window": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RERANKERS)
@pytest.mark.parametrize("answers", [(259, 260), (11, None)])
def test_scores_of_a_reranker_are_those_of_transformers(
    name: str, answers: tuple[int, int | None], tmp_path: Path
) -> None:
    model = qwen3(**RERANKERS[name])
    model.save_pretrained(tmp_path)
    imported, (yes, no) = import_folder(tmp_path, answers=answers), answers
    texts = verify.ComparedTexts(
        tuple(tuple(token % 256 for token in range(start, 8 * start + 1)) for start in (5, 3, 0))
    )
    assert_graphs_equal_the_reference(imported, texts)
    outputs = imported.outputs(texts)
    for row, ids in enumerate(texts.sources):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        expected = logits[yes] - (0 if no is None else logits[no])
        assert outputs[f"labels.{row}"] == pytest.approx([expected], abs=1e-5 * np.abs(logits).max())


@pytest.mark.parametrize("false_id", [260, None])
@pytest.mark.parametrize("instruction", ["", "Do this"])
def test_a_folder_with_logit_score(false_id: int | None, instruction: str, tmp_path: Path) -> None:
    model = qwen3()
    names = {"prompts": {"web": instruction}, "default_prompt_name": "web" if instruction else None}
    messages = {"method": "forward", "method_output_name": "logits", "format": "flat"}
    files = {
        "modules.json": modules("Transformer", "LogitScore"),
        "1_LogitScore/config.json": {"true_token_id": 259, "false_token_id": false_id},
        "config_sentence_transformers.json": names | {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "module_output_name": "causal_logits",
            "modality_config": {"text": messages, "message": messages},
        },
        "chat_template.jinja": TEMPLATE,
    }
    write(tmp_path / "folder", model, has_end=False, files=files)
    manifest = export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m"))).manifest
    assert manifest.pair_template is not None
    assert manifest.pair_template.instruction == (instruction or "Find passages")
    text = f"<|im_start|>{instruction or 'Find passages'}\n<query>: Who?\n<document>:  No one.\n<|im_end|>\n"
    logits = last_logits(model, f"{text}<|im_start|>assistant")  # Jinja removes the last line break
    expected = float(logits[259] - (0 if false_id is None else logits[false_id]))
    assert score_of(tmp_path / "bundle", manifest, "Who?", " No one.\n") == pytest.approx(expected, abs=1e-5)


def test_a_classifier_with_modules(tmp_path: Path) -> None:
    """A CrossEncoder that sentence-transformers saved has only the module Transformer."""
    model = random_model(Qwen3Config(**SIZES, head_dim=14, num_labels=1), "Qwen3ForSequenceClassification")
    options = {"transformer_task": "sequence-classification", "module_output_name": "scores", "max_seq_length": 99}
    files = {"modules.json": modules("Transformer"), "sentence_bert_config.json": options}
    write(tmp_path / "folder", model, files=files)
    manifest = export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m"))).manifest
    assert "rerank" in manifest.tasks and manifest.limits.max_source_tokens == 99
    assert manifest.pair_template is None


LOGIT_SCORE = {"modules.json": modules("Transformer", "LogitScore"), "1_LogitScore/config.json": {"true_token_id": 259}}
MESSAGES = {"method": "forward", "method_output_name": "logits"}
LANGUAGE_MODEL = {"transformer_task": "text-generation", "module_output_name": "causal_logits"}


@pytest.mark.parametrize(
    ("make", "files", "task", "message"),
    [
        (lambda: random_model(LlamaConfig(**SIZES)), {}, "rerank", "needs to know the text around a query"),
        (
            qwen3,
            LOGIT_SCORE | {"1_LogitScore/config.json": {"true_token_id": 270}},
            None,
            "LogitScore names the token id 270, but the model has 270 tokens",
        ),
        (
            qwen3,
            LOGIT_SCORE | {"sentence_bert_config.json": LANGUAGE_MODEL | {"modality_config": {"message": MESSAGES}}},
            None,
            "chat template must have messages of the roles query and document: there is no chat template",
        ),
        (
            qwen3,
            LOGIT_SCORE | {"config_sentence_transformers.json": {"prompts": {"a": "b"}}},
            None,
            "prompts of a CrossEncoder are supported only if a chat template",
        ),
        (qwen3, {"modules.json": modules("Transformer")}, None, "a model that scores pairs of texts, but the arch"),
        (
            lambda: qwen3().model,
            {
                "modules.json": modules("Transformer", "Pooling"),
                "1_Pooling/config.json": {"pooling_mode": "mean"},
                "sentence_bert_config.json": {"modality_config": {"message": MESSAGES}},
            },
            None,
            "puts each text into the chat template; this is supported only for pairs of texts",
        ),
        (
            lambda: T5ForConditionalGeneration(T5Config(vocab_size=270, d_model=12, d_kv=4, d_ff=9, num_layers=1)),
            {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": {"pooling_mode": "mean"}},
            None,
            "a model that computes embeddings, but the architecture in config.json does not",
        ),
    ],
)
def test_folders_that_are_refused(
    make: Any, files: dict[str, Any], task: str | None, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "folder", make(), files=files)
    with pytest.raises(ImportFailedError, match=message):
        export_checkpoint(
            Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m"), ExportOptions(task=task))
        )


def test_the_answers_must_be_tokens(tmp_path: Path) -> None:
    write(tmp_path / "folder", qwen3())
    tokenizer = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())
    for removed, message in (("yes", "needs the tokens 'yes' and 'no'"), ("<|im_end|>", "no special token <.im_end.>")):
        kept = [token for token in tokenizer["added_tokens"] if token["content"] != removed]
        for id_, token in enumerate(kept, 256):
            token["id"] = id_
        (tmp_path / "folder" / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": kept}))
        options = ExportOptions(task="rerank")
        with pytest.raises(ImportFailedError, match=message):
            export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m"), options))


def test_special_tokens_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """The tokenizer of google/gemma-3-1b-it has <image_soft_token> beyond the vocabulary."""
    config = Gemma3TextConfig(**SIZES | {"vocab_size": 261}, head_dim=8)
    write(tmp_path / "folder", random_model(config))
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<image_soft_token>", special=True, normalized=False)])
    tokenizer.save(str(tmp_path / "folder" / "tokenizer.json"))
    exported = export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m")))
    assert exported.notes[0].endswith("are left out: <image_soft_token>")
    written = read_tokenizer(tmp_path / "bundle" / exported.manifest.source_tokenizer)
    assert len(written) == 261
    given = written.encode("a <image_soft_token>", add_special_tokens=False)
    assert given == [written.encode(one, add_special_tokens=False)[0] for one in "a <image_soft_token>"]
    tokenizer.post_processor = processors.TemplateProcessing(
        "$A <image_soft_token>", special_tokens=[("<image_soft_token>", 261)]
    )
    tokenizer.save(str(tmp_path / "folder" / "tokenizer.json"))
    with pytest.raises(ImportFailedError, match="token ids up to 261, but the model has only 261 tokens"):
        export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m")))


def test_gemma_that_sees_later_tokens_cannot_generate(tmp_path: Path) -> None:
    write(tmp_path / "folder", random_model(GEMMA, "Gemma3TextModel"))
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma3ForCausalLM"]}))
    with pytest.raises(ImportFailedError, match="use_bidirectional_attention is true, but the architecture generates"):
        export_checkpoint(Export(tmp_path / "folder", tmp_path / "bundle", BundleMetadata("m")))


ROLES = "{% for one in messages %}<|im_start|>{{ one.role }}:{{ one.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ROLES.replace("one.content", "one.content | trim"), "changes the query, the document or the instruction"),
        (ROLES.replace("{{ one.content }}", "{{ one.content }}{{ one.content }}"), "omits or repeats the message"),
        ("{{ messages[0].content }}<|im_end|>", "omits or repeats the message of the role 'document'"),
        (ROLES.replace("<|im_end|>", " end"), "no special token follows the document"),
        ("{% if %}", "not valid Jinja"),
    ],
)
def test_templates_of_pairs_that_are_refused(template: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, qwen3(), files={"chat_template.jinja": template})
    folder = Folder(tmp_path)
    with pytest.raises(ChatTemplateError, match=message):
        read_pair_template(folder, "", ["<|im_start|>", "<|im_end|>"])


def test_a_template_without_an_instruction(tmp_path: Path) -> None:
    template = "{% for one in messages if one.role != 'system' %}<|im_start|>{{ one.content }}<|im_end|>{% endfor %}"
    write(tmp_path, qwen3(), files={"chat_template.jinja": template})
    folder = Folder(tmp_path)
    found = read_pair_template(folder, "", ["<|im_start|>", "<|im_end|>"])
    assert found == PairTemplate(text="<|im_start|>{query}<|im_end|><|im_start|>{document}<|im_end|>")
    with pytest.raises(ChatTemplateError, match="omits or repeats the message of the role 'system'"):
        read_pair_template(folder, "Find it.", ["<|im_start|>", "<|im_end|>"])


def test_long_pairs_are_cut_at_the_end_of_the_document(tmp_path: Path) -> None:
    make_tokenizer(has_end=False).save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    whole = tokenize_with_template(tokenizer, PUBLISHED, "Who?", "Some words. " * 50, instruction="Be it")
    after = tokenizer.encode("\n")  # and what follows it
    suffix = [258, *after, 257, *tokenizer.encode("assistant\n<think>\n\n</think>\n\n")]
    assert whole[-len(suffix) :] == suffix
    for limit in (len(whole), len(whole) - 1, 300):
        cut = tokenize_with_template(tokenizer, PUBLISHED, "Who?", "Some words. " * 50, limit, "Be it")
        assert cut == [*whole[: limit - len(suffix)], *suffix]
    fewest = whole.index(257, 1) + 1 + len(suffix)  # with no token of the text of the user
    with pytest.raises(ValueError, match=f"max_tokens must be greater than the {fewest} tokens around the document"):
        tokenize_with_template(tokenizer, PUBLISHED, "Who?", "Some words.", fewest, "Be it")
    separate = PairTemplate(text="<|im_start|>{query}<|im_end|>{document}")
    with pytest.raises(ApiError) as raised:
        tokenize_within_limits(
            tokenizer, [TextPair("Who? " * 9, "x", "the query", "longest", separate)], int, "documents", [20], math.inf,
        )  # fmt: skip
    assert raised.value.code == "input_too_long"
    # Names of special tokens in the query and the document are plain text.
    ids = tokenize_with_template(tokenizer, PUBLISHED, "<|im_end|>", "yes <|im_start|>")
    assert (ids.count(257), ids.count(258)) == (3, 2)
