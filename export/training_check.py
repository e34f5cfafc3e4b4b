"""Reading of the third-party files that a training starts from, in a process with limits.

`sightline train` begins with a checkpoint (`--from`) or a tokenizer (`--tokenizer`) that others may
have written. Before the training reads them, a child process with the limits of an import does. It
describes a checkpoint as an import does, and writes what the training needs besides the weights
(`sightline.model.parts`). The training itself has no limits.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, processors

from sightline.base.bundle import Languages
from sightline.base.errors import EXIT_INTERRUPTED, EXIT_USAGE, UsageError, fail
from sightline.base.text.chat import find_template
from sightline.export.import_errors import ImportFailedError, one_line
from sightline.export.limits import GGUF_GROWTH, begin_step, folder_bytes, out_of_memory, run_limited
from sightline.export.sources.catalogue import located
from sightline.export.sources.run_folder import TASKS
from sightline.model.config import RELEVANCE, PretrainedConfig, model_config_to_json
from sightline.model.data.records import TaskName
from sightline.model.parts import CONFIG, PRETRAINED, TOKENIZER, checkpoint_of, is_pretrained

_GENERATION, _TOKENIZER_CONFIG, _TEMPLATE = "generation_config.json", "tokenizer_config.json", "chat_template.jinja"
_POOLING_MODES = {"mean": "mean", "first": "cls", "last": "lasttoken", "max": "max"}


def check_tokenizer(path: Path) -> None:
    """Read a `tokenizer.json` in a child process with limits. Raises `SystemExit` if it cannot be
    used; the child process has printed the error.
    """
    _run(str(path))


@contextmanager
def read_checkpoint(
    name: str, task: TaskName, template: str | None, languages: tuple[str, str] | None
) -> Iterator[tuple[Path, Path | None]]:
    """Yield the folder with the weights of a checkpoint, and for one that others wrote a folder
    with its other files, which a child process with limits has written.

    `name` is a folder, a GGUF file, or a model that `located` downloads. `template` is the chat
    template for a checkpoint that has none; None if there are no dialogues. Raises `SystemExit` if
    the files cannot be used; the child process has printed the error.
    """
    with located(name) as path, TemporaryDirectory(prefix="sightline-") as parts, ExitStack() as opened:
        folder = checkpoint_of(path)
        if path.is_file():  # a GGUF file
            folder = Path(opened.enter_context(TemporaryDirectory(prefix="sightline-")))
            _run(str(path), str(folder))
        _run(str(folder), parts, task, json.dumps(template), json.dumps(languages))
        yield folder, Path(parts) if is_pretrained(folder) else None


def _run(*arguments: str) -> None:
    status = run_limited("sightline.export.training_check", arguments, EXIT_USAGE)
    if status:
        sys.exit(status)


def main(path: Path, *arguments: str) -> int:
    """Check files; print the error if they cannot be used, and return the exit status."""
    status = EXIT_USAGE
    try:
        growth = GGUF_GROWTH if path.suffix == ".gguf" else 1
        begin_step(f"reading {path}", growth * folder_bytes(path))
        check(path, *arguments)
        return 0
    except MemoryError:
        message = out_of_memory()
    except KeyboardInterrupt:
        message, status = "interrupted", EXIT_INTERRUPTED
    except (OSError, ValueError) as error:
        message = one_line(error)
        if str(path) not in message:
            message = f"{path}: {message}"
    except BaseException as error:  # a panic of a library, or a value of another type than is expected
        message = f"{path} cannot be used: {one_line(error)}; it may be damaged"
    return fail(message, status)


def check(path: Path, parts: str = "", task: str = "", template: str = "null", languages: str = "null") -> None:
    """Read a tokenizer, or a checkpoint whose other files are written to the folder `parts`; a GGUF
    file is converted to a checkpoint in this folder.

    Texts that are difficult for some tokenizers are encoded. The last two arguments are JSON.
    Raises `ImportFailedError` for files that cannot be imported, and `UsageError` for those that
    cannot be trained for the task.
    """
    from sightline.export.check.serving import check_texts, read_served_tokenizer

    if path.suffix == ".gguf":
        from sightline.export.sources.gguf import convert

        convert(path, Path(parts))
        return
    file, size = path, None
    if parts and is_pretrained(path):
        pair = json.loads(languages)
        config = write_parts(path, Path(parts), task, json.loads(template), pair and tuple(pair))  # type: ignore[arg-type]
        file, size = Path(parts) / TOKENIZER, config.vocab_size
    elif parts:
        from sightline.model.training.start import start_from

        labels = ("", "x") if task in ("classification", "tagging") else ()  # any two; they do not change what is read
        file, size = path / TOKENIZER, start_from(path, task, labels).config.vocab_size
    tokenizer = read_served_tokenizer(file)
    check_texts(tokenizer, size or len(tokenizer))


def write_parts(
    path: Path, out: Path, task: TaskName, template: str | None, pair: tuple[str, str] | None
) -> PretrainedConfig:
    """Describe a checkpoint in the layout of Hugging Face, and write its files besides the weights
    to the folder `out`. Returns the configuration of its model.
    """
    from sightline.export.describe import describe_source
    from sightline.export.options import ExportOptions
    from sightline.export.sources.download import TEXT_FILES
    from sightline.export.sources.opened_checkpoint import Folder
    from sightline.export.sources.sentence_transformers import read_tokenizer_limit

    folder = Folder(path)
    source = describe_source(folder, ExportOptions())
    model, embedding = source.model, source.embedding
    assert model is not None, "a folder of Hugging Face has a description"
    folder.config.check_all_read()
    kind = "a decoder" if model.is_decoder_only else "an encoder-decoder" if model.decoder else "an encoder"
    if kind != TASKS[task].model or source.pair_template is not None:
        raise UsageError(
            f"{path} is {kind} ({source.family}), but the task {task} needs {TASKS[task].model}; use another checkpoint"
        )
    if folder.module or (task == "encoder" and source.dense):
        raise UsageError(
            f"{path}: modules.json names a subfolder or layers after the pooling, which cannot be trained; use "
            "another checkpoint, or a copy of its Transformer alone, without modules.json"
        )
    if task == "reranking" and not source.reads_pairs:
        raise UsageError(
            f"{path}: the tokenizer has no form of pairs of texts that is supported; use another checkpoint"
        )
    names = (str(file.relative_to(path)) for file in sorted(path.rglob("*")))
    texts: dict[str, bytes] = {
        name: data
        for name in names
        if TEXT_FILES.fullmatch(name)
        and name not in (CONFIG, "modules.json", "config_sentence_transformers.json")
        and (task == "encoder" or not ("/" in name or name.startswith("sentence_")))
        and (data := folder.bytes(name)) is not None
    }
    fields = (folder.json_object(CONFIG) or {}) | {"model_type": source.family}  # not that of other code
    settings = folder.json_object(_GENERATION) or {}
    tokenizer, targets = (source.tokenizers[name] for name in (source.source_tokenizer, source.target_tokenizer))
    positions, prefix, chat = source.limits.max_source_tokens, source.tokens.start_ids[1:], source.chat
    separator = model.encoder.embedding.type_separator if model.encoder is not None else None
    if task in ("classification", "reranking", "tagging"):
        positions = min(model.max_positions, read_tokenizer_limit(folder.json) or model.max_positions)
    if task == "encoder":
        texts |= _sentence_files(embedding.pooling if embedding else "mean", positions, texts)
    if source.languages is not None:
        tokenizer, prefix = _with_languages(source.languages, pair, tokenizer)
        if source.languages.target_prefix:
            settings["forced_bos_token_id"] = prefix[0]
    if template is not None and chat is None:
        from sightline.export.sources.chat_template import read_chat_template

        try:
            chat = read_chat_template(folder)  # raises the reason if there is one that is not supported
        except ValueError as error:
            raise UsageError(f"the chat template of the checkpoint cannot be used: {error}") from None
        special = folder.json_object("special_tokens_map.json") or {}
        chat = chat or find_template(template, folder.json_object(_TOKENIZER_CONFIG) or {}, special)
        texts.setdefault(_TEMPLATE, template.encode())
    config = _config(
        task=task,
        vocab_size=max(source.limits.vocabulary, source.limits.source_vocabulary or 0),
        max_positions=positions,
        pad_id=source.tokens.pad_id,
        bos_id=source.tokens.start_ids[0],
        eos_id=source.tokens.end_ids[0],
        fields=fields,
        labels=_labels(model, task),
        pooling=embedding.pooling if embedding else "mean",
        chat={} if chat is None else chat.model_dump(),
        target_prefix=prefix if task == "translation" else (),
        type_separators=() if separator is None or task != "reranking" else (separator,),
        target_tokenizer="" if targets is tokenizer or task != "translation" else targets.to_str(),
    )
    if template is not None:
        config = _with_end(config, tokenizer, source.tokens.end_ids, settings)
    if settings:
        texts[_GENERATION] = _json(settings)
    if TOKENIZER in texts:
        texts.setdefault(_TOKENIZER_CONFIG, _json({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (out / CONFIG).write_text(model_config_to_json(config), encoding="utf-8")
    (out / TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
    for name, data in texts.items():
        file = out / PRETRAINED / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return config


def _labels(model: Any, task: str) -> tuple[str, ...]:
    """Return the labels whose rows of the output layer a training can continue with."""
    kind = "" if model.head is None else model.head.label_kind
    if task == "reranking":
        return (RELEVANCE,) if kind == "score" else ()
    return model.labels if len(model.labels) > 1 and (kind == "tokens") == (task == "tagging") else ()


def _config(**fields: Any) -> PretrainedConfig:
    """Return a configuration with the dropout of the checkpoint."""
    from sightline.model.architectures.pretrained import dropout_key, transformers_config

    config = PretrainedConfig(**fields)
    try:
        made = transformers_config(config)
    except Exception as error:  # third-party values that no model can have raise several classes
        raise ImportFailedError(
            f"{CONFIG} is no configuration of transformers, so that this checkpoint of the family {config.family} can "
            f"be imported at most, not trained: {one_line(error)}; use a checkpoint of another family, such as bert"
        ) from None
    original = type(made).from_dict(dict(config.fields))
    key = dropout_key(original)
    return dataclasses.replace(config, dropout=0.0 if key is None else float(getattr(original, key)))


def _json(values: Any) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _sentence_files(pooling: str, positions: int, texts: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of sentence-transformers of an encoder whose vectors have length 1."""
    kinds = ("Transformer", "Pooling", "Normalize")
    files = {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, path) in enumerate(zip(kinds, ("", "1_Pooling", "2_Normalize"), strict=True))
        ],
        "1_Pooling/config.json": {"pooling_mode": _POOLING_MODES[pooling]},
    }
    if not any(name.startswith("sentence_") for name in texts):
        files["sentence_bert_config.json"] = {"max_seq_length": positions, "do_lower_case": False}
    return {name: _json(values) for name, values in files.items()}


def _with_languages(
    languages: Languages, pair: tuple[str, str] | None, tokenizer: Tokenizer
) -> tuple[Tokenizer, tuple[int, ...]]:
    """Return a tokenizer that adds the tokens of the languages to each source, and the first tokens
    of each target.
    """
    source, target = pair or (languages.source, languages.target)
    has_tokens = (
        languages.source_prefix or languages.source_suffix,
        languages.target_prefix,
        languages.source_prefix_of_target,
    )
    if any(has_tokens):
        if pair is None:
            raise UsageError("the checkpoint has several languages; name those of the data with --source and --target")
        for tag, known in ((source, languages.sources), (target, languages.targets)):
            if tag not in known and not (known == languages.sources and languages.source_prefix_of_target):
                raise UsageError(f"the checkpoint has no language {tag}; it has {', '.join(known)}")
    before = (*languages.source_prefix_of_target.get(target, ()), *languages.source_prefix.get(source, ()))
    after = languages.source_suffix.get(source, ())
    if before or after:
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        ids = [*before, *tokenizer.encode("").ids, *after]
        names = [tokenizer.id_to_token(id_) for id_ in ids]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*names[: len(before)], "$A", *names[len(before) :]],
            special_tokens=sorted(set(zip(names, ids, strict=True))),
        )
    return tokenizer, languages.target_prefix.get(target, ())


def _with_end(
    config: PretrainedConfig, tokenizer: Tokenizer, end_ids: tuple[int, ...], settings: dict[str, Any]
) -> PretrainedConfig:
    """Let a generated text also end with the token that ends a reply in the chat template; add it
    to the `settings` of the generation.
    """
    from sightline.model.data.chat_template import dialogue_encoder

    end_id, fields = dialogue_encoder(config, tokenizer).end_token(), dict(config.fields)
    if end_id not in end_ids:
        fields["eos_token_id"] = [end_id, *end_ids]
        if settings:
            settings["eos_token_id"] = [end_id, *end_ids]
    return dataclasses.replace(config, eos_id=end_id, fields=fields)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
