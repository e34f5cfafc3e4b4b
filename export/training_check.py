"""Check of the third-party files that a training reads, in a process with limits.

`sightline train` begins with a checkpoint (`--from`) or a tokenizer (`--tokenizer`) that others may
have written. Before the training reads them, a child process with the limits of an import does. The
training itself has no limits.
"""

import sys
from pathlib import Path

from sightline.base.errors import EXIT_INTERRUPTED, EXIT_USAGE
from sightline.export.import_errors import one_line
from sightline.export.limits import begin_step, folder_bytes, out_of_memory, run_limited
from sightline.model.data.chat_format import CHAT_TEMPLATE
from sightline.model.data.records import TaskName


def check_files(path: Path, task: TaskName, has_dialogues: bool) -> None:
    """Read files in a child process with limits, as a training will read them in this process.

    `path` is a folder of a checkpoint, or a `tokenizer.json`. Raises `SystemExit` if the files
    cannot be used; the child process has printed the error.
    """
    template = [CHAT_TEMPLATE] if has_dialogues else []
    status = run_limited("sightline.export.training_check", [str(path), task, *template], EXIT_USAGE)
    if status:
        sys.exit(status)


def main(path: Path, task: TaskName, template: str | None = None) -> int:
    """Check files; print the error if they cannot be used, and return the exit status."""
    status = EXIT_USAGE
    try:
        check(path, task, template)
        return 0
    except MemoryError:
        message = out_of_memory()
    except KeyboardInterrupt:
        message, status = "interrupted", EXIT_INTERRUPTED
    except (OSError, ValueError) as error:
        message = one_line(error)
    except BaseException as error:  # a panic of a library, or a value of another type than is expected
        message = f"{path} cannot be used: {one_line(error)}; it may be damaged"
    sys.stderr.write(f"error: {message}\n")
    return status


def check(path: Path, task: TaskName, template: str | None = None) -> None:
    """Read a checkpoint or a tokenizer, and encode texts that are difficult for some tokenizers.

    `template` is for a checkpoint that has none; None if there are no dialogues. Errors are those
    of `start_from`, and `ImportFailedError` for a tokenizer that cannot be served, so that it
    should not be trained with.
    """
    from sightline.export.check.serving import check_texts, read_served_tokenizer
    from sightline.model.parts import TOKENIZER

    if not path.is_dir():
        begin_step(f"reading {path}", folder_bytes(path))
        tokenizer = read_served_tokenizer(path)
        check_texts(tokenizer, len(tokenizer))
        return
    from sightline.model.training.start import checkpoint_folder, start_from

    begin_step(f"reading {path}", folder_bytes(path))
    file = checkpoint_folder(path) / TOKENIZER
    served = read_served_tokenizer(file) if file.is_file() else None
    labels = ("", "x") if task == "classification" else ()  # any two; they do not change what is read
    start = start_from(path, task, labels, chat_template=template)
    if served is not None:
        check_texts(served, start.config.vocab_size)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))  # type: ignore[arg-type]
