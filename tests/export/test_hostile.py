"""Checkpoints that were made to crash an import, or to make it work without end."""

import base64
import contextlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from sightline.base.errors import UsageError
from sightline.base.machine import bounded_memory
from sightline.base.text.tokenizer_parts import checked_names
from sightline.export.import_errors import ImportFailedError, VerificationError
from sightline.export.limits import folder_bytes
from sightline.export.options import BundleMetadata, ExportOptions
from sightline.export.pipeline import Export, Exported, export_checkpoint
from sightline.export.tokenizers.sentencepiece import SentencePieceModel
from tests.export.hostile import CHECKPOINTS, TASKS, Change, changes_of, tokenizer_of, write_checkpoint, write_json
from tests.export.tokenizers.writing import special_pieces, unigram_pieces, write_sentencepiece
from tests.support.export import main
from tests.support.tables import read_table
from tests.zoo.folders import modules

pytestmark = pytest.mark.usefixtures("few_sentences")
SECONDS = 30  # of the processor for an import of a tiny checkpoint
MEMORY = 2 << 30
SAMPLE = 3  # changes of each family in the fast test
GENERATION = "generation_config.json"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the checkpoint of a family, which is written once."""
    folder = tmp_path_factory.mktemp("originals")

    def find(family: str) -> Path:
        path = folder / family
        return path if path.exists() else write_checkpoint(family, path)

    return find


@pytest.fixture
def copy_of(originals: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(family: str) -> Path:
        folder = tmp_path / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        return Path(shutil.copytree(originals(family), folder))

    return copy


def import_folder(folder: Path, family: str = "") -> Exported:
    """Import a checkpoint of a family with limits of time and memory."""
    options = ExportOptions(task=TASKS.get(family))
    started = time.process_time()
    try:
        with bounded_memory(MEMORY):
            return export_checkpoint(Export(folder, folder.parent / "bundle", BundleMetadata("hostile"), options))
    finally:
        assert time.process_time() - started < SECONDS


def refusal_of(folder: Path) -> str:
    with pytest.raises((ImportFailedError, UsageError)) as raised:
        import_folder(folder)
    assert not list(folder.parent.glob("bundle*"))
    return str(raised.value)


def try_changes(folder: Path, changes: Iterator[Change], copy_of: Callable[[str], Path]) -> tuple[int, int]:
    """Import a checkpoint with each change; return the numbers of accepted and refused ones."""
    accepted = refused = 0
    for change in changes:
        changed = copy_of(folder.name)
        change.apply(changed)
        try:
            import_folder(changed, folder.name)
            accepted += 1
        except (ImportFailedError, UsageError, VerificationError):
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{folder.name}: {change} is {type(error).__name__}: {error}") from error
    return accepted, refused


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_changed_value_is_imported_or_refused_with_a_sentence(
    family: str, originals: Callable[[str], Path], copy_of: Callable[[str], Path]
) -> None:
    folder = originals(family)
    import_folder(copy_of(family), family)  # the checkpoint itself is right
    sample = random.Random(family).sample(list(changes_of(folder)), SAMPLE)
    assert sum(try_changes(folder, iter(sample), copy_of)) == SAMPLE


@pytest.mark.parametrize(
    ("family", "keys", "value"),
    [
        ("gemma2", ("final_logit_softcapping",), 1e300),
        ("granite", ("embedding_multiplier",), 1e300),
        ("modernbert", ("layer_types", 0), []),
    ],
)
def test_changed_values_that_were_tracebacks_are_refused(
    family: str, keys: tuple[str | int, ...], value: Any, originals: Callable[[str], Path], copy_of: Callable[..., Path]
) -> None:
    change = Change("config.json", keys, value)
    assert try_changes(originals(family), iter([change]), copy_of) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_each_changed_value_is_imported_or_refused_with_a_sentence(
    family: str, originals: Callable[[str], Path], copy_of: Callable[[str], Path]
) -> None:
    folder = originals(family)
    accepted, refused = try_changes(folder, changes_of(folder), copy_of)
    assert accepted > 50
    assert refused > 200


# Sizes of configurations


@pytest.mark.parametrize("value", [0, -1, 10**9, int("9" * 400)], ids=["zero", "negative", "10^9", "400 digits"])
@pytest.mark.parametrize(
    ("family", "key"),
    read_table(__file__, "sizes"),
)
def test_a_size_that_the_tensors_do_not_have_is_refused(
    family: str, key: str, value: int, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(family)
    Change("config.json", (key,), value).apply(folder)
    assert "config.json" in refusal_of(folder)


def test_a_table_of_positions_has_a_limit(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("m2m_100")  # its sinusoids are not stored, so that no tensor has their number
    Change("config.json", ("max_position_embeddings",), 1000).apply(folder)
    assert import_folder(folder).manifest.limits.max_source_tokens == 1000
    shutil.rmtree(folder)
    write_checkpoint("m2m_100", folder, d_model=128)
    Change("config.json", ("max_position_embeddings",), 1 << 20).apply(folder)
    shutil.rmtree(folder.parent / "bundle")
    assert "whose tables would have 134,217,728 numbers; at most 67,108,864" in refusal_of(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [5, [], "text"])
def test_a_file_that_is_no_object_is_refused(file: str, content: Any, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    write_json(folder / file, content)
    assert file in refusal_of(folder)


# Ids that the model does not have


@pytest.mark.parametrize(
    ("family", "file", "key", "value", "message"),
    [
        ("llama", GENERATION, "eos_token_id", 99999999, "eos_token_id is 99999999, but the model has onl"),
        ("bart", GENERATION, "forced_bos_token_id", 10**9, "forced_bos_token_id is 1000000000, but the"),
        ("gpt2", GENERATION, "suppress_tokens", [30], "suppress_tokens or bad_words_ids is 30, but the mo"),
        ("gpt2", GENERATION, "bad_words_ids", [[3, 30]], "suppress_tokens or bad_words_ids is 30, but the mo"),
        ("bert", "config.json", "pad_token_id", 30, "pad_token_id is 30, but the model has only 30 tokens; correct it"),
    ],
)
def test_an_id_beyond_the_vocabulary_is_refused(
    family: str, file: str, key: str, value: Any, message: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(family)
    Change(file, (key,), value).apply(folder)
    assert message in refusal_of(folder)


def test_a_map_of_special_tokens_that_is_no_object_is_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("masked bert")
    write_json(folder / "special_tokens_map.json", 5)
    assert "special_tokens_map.json must be a JSON object" in refusal_of(folder)


# Tokenizers


def tokenizer_with(**parts: Any) -> Tokenizer:
    tokenizer = tokenizer_of()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_template_id(id_: int) -> Tokenizer:
    document = json.loads(tokenizer_of().to_str())
    document["post_processor"]["special_tokens"]["[SEP]"]["ids"] = [id_]
    return Tokenizer.from_str(json.dumps(document))


TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "doubling": (
        lambda: tokenizer_with(normalizer=normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)),
        r"its normalizer can make a text 1.1e\+12 times longer",
    ),
    "decoder for speech": (
        lambda: tokenizer_with(decoder=decoders.CTC()),
        "its decoder has the step CTC, which is not supported here",
    ),
    "slow expression": (
        lambda: tokenizer_with(normalizer=normalizers.Replace(Regex("(a+)+b"), "c")),
        "the tokenizer fails for a text of 5001 characters, which starts with 'aaaaaaaaaaaaaaaa",
    ),
    "id of a template": (
        lambda: with_template_id(99),
        "the tokenizer gives the token id 99, but the model has only 30 tokens",
    ),
    "empty": (lambda: Tokenizer(models.WordLevel({}, unk_token="<unk>")), "it has no tokens"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("family", ["mpnet", "gpt2"])
def test_a_tokenizer_that_the_service_cannot_use_is_refused(
    name: str, family: str, copy_of: Callable[[str], Path]
) -> None:
    folder, (make, message) = copy_of(family), TOKENIZERS[name]
    (folder / "tokenizer.json").write_text(make().to_str(), encoding="utf-8")
    with pytest.raises(ImportFailedError, match=message):
        import_folder(folder)


def test_a_large_id_is_refused_before_a_table_of_tokens_is_made(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("mpnet")
    Change("tokenizer.json", ("model", "vocab", "z"), 10**9).apply(folder)
    assert "it has the token id 1000000000; ids must be less than 4194304" in refusal_of(folder)


TOO_SHORT, WRONG_INDICES, HUGE = b"\1", struct.pack("<I", 100) + bytes(range(100)) * 2, b"\xff" * 200


def write_rules(folder: Path, charsmap: bytes) -> None:
    """Write normalization rules of SentencePiece into the tokenizer of a checkpoint."""
    if (folder / "source.spm").exists():
        pieces = (*special_pieces("<unk>", "</s>"), *unigram_pieces("▁", *"abcdefghijklmnop"))
        model = SentencePieceModel(pieces, charsmap=charsmap)
        (folder / "source.spm").write_bytes(write_sentencepiece(model))
    else:
        rules = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
        Change("tokenizer.json", ("normalizer",), rules).apply(folder)


@pytest.mark.parametrize("family", ["marian", "mpnet"])
@pytest.mark.parametrize("charsmap", [TOO_SHORT, WRONG_INDICES])
def test_damaged_rules_of_sentencepiece_are_refused(
    charsmap: bytes, family: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(family)
    write_rules(folder, charsmap)
    assert "the tokenizer" in refusal_of(folder)


def test_rules_with_a_long_text_are_refused() -> None:
    rules = normalizers.Precompiled(struct.pack("<I", 4) + bytes(4) + b"a" * 2000 + b"\0")
    with pytest.raises(ValueError, match="its normalizer can make a text 2e\\+03 times longer"):
        checked_names(tokenizer_with(normalizer=rules))


def test_a_model_that_reads_only_special_tokens_is_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("mpnet")
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 2})
    write_json(folder / "modules.json", modules("Transformer", "Pooling"))
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    assert "a text of one token has 3 tokens with the special tokens and the prompt of the model" in refusal_of(folder)


# Files and folders


FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "modules.json"),
    *("special_tokens_map.json", "chat_template.jinja", "model.safetensors", "model.safetensors.index.json"),
)
REPLACEMENTS: dict[str, Callable[[Path], Any]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link outside": lambda path: path.symlink_to("/etc/hostname"),
    "empty": Path.touch,
    "zeros": lambda path: path.write_bytes(bytes(1000)),
    "deep": lambda path: path.write_text("[" * 100_000, encoding="utf-8"),
    "UTF-16": lambda path: path.write_text("{}", encoding="utf-16"),
    "lone surrogate": lambda path: path.write_text('{"a": "\\ud800"}', encoding="utf-8"),
    "NaN": lambda path: path.write_text('{"a": NaN, "a": Infinity}', encoding="utf-8"),
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_a_file_of_another_kind_is_ignored_or_refused_with_a_sentence(
    kind: str, copy_of: Callable[[str], Path]
) -> None:
    for name in FILES:
        folder = copy_of("llama")
        (folder / name).unlink(missing_ok=True)
        REPLACEMENTS[kind](folder / name)
        with contextlib.suppress(ImportFailedError, UsageError):  # another error is a defect
            import_folder(folder)


def test_an_error_is_one_line_whatever_names_the_files_have(
    copy_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of("mpnet")
    (folder / "model.safetensors").unlink()
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "b\nerror: \x1b[31mc"}})
    capsys.readouterr()  # of transformers, which has written the checkpoint
    assert main(["--out", str(folder.parent / "bundle"), str(folder)]) == 1
    message = "b\\nerror: \\x1b[31mc is missing, but the index of weights names it; download it\n"
    assert capsys.readouterr().err == f"error: {folder}/{message}"


def test_files_that_are_never_read_do_not_raise_the_limits(tmp_path: Path) -> None:
    folder, cache = tmp_path / "folder", tmp_path / "cache"
    for one in (folder, cache):
        one.mkdir()
        (one / "file").write_bytes(bytes(100))
    (folder / "link").symlink_to(cache / "file")
    (folder / "loop").symlink_to(folder)
    (folder / "missing").symlink_to("nothing")
    assert folder_bytes(folder) == 100
    assert folder_bytes(folder, [cache]) == 200
    assert folder_bytes(cache / "file") == 100


# The process with limits. `tests.export.limited` is a command that needs them.


@pytest.mark.parametrize(
    ("work", "message"),
    read_table(__file__, "processes"),
)
def test_a_process_that_exceeds_a_limit_is_one_error(work: str, message: str) -> None:
    done = run_limited(work)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(message)


def test_a_limited_process_returns_the_status_of_its_command() -> None:
    done = run_limited("7")
    assert (done.returncode, done.stderr) == (7, "")


def run_limited(work: str) -> subprocess.CompletedProcess[str]:
    code = f"sys.exit(run_limited('tests.export.limited', ['{work}']))"
    command = [sys.executable, "-c", f"import sys; from sightline.export.limits import run_limited; {code}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=4 * SECONDS)


def export_in_process(folder: Path) -> str:
    """Export a checkpoint by the command line, and return its only line of output, an error."""
    command = [sys.executable, "-m", "sightline", "export", str(folder), "--out", str(folder.parent / "bundle")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=4 * SECONDS)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: ")
    return done.stderr


def test_the_command_line_exports_in_a_limited_process(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("mpnet")
    Change("config.json", ("hidden_size",), 10**9).apply(folder)
    assert "implies [30, 1000000000]" in export_in_process(folder)


@pytest.mark.parametrize(
    ("family", "charsmap", "message"),
    [
        ("mpnet", TOO_SHORT, "Cannot parse precompiled_charsmap"),  # a panic while the file is parsed
        ("marian", WRONG_INDICES, "index out of bounds"),  # a panic while a text is encoded
        ("mpnet", HUGE, "ended with the signal SIGABRT: a library failed on a third-party file"),
        ("marian", HUGE, "memory allocation of"),
    ],
)
def test_a_panic_of_a_library_is_one_line(
    family: str, charsmap: bytes, message: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(family)
    write_rules(folder, charsmap)
    assert message in export_in_process(folder)
