"""`sightline translate` with a toy bundle; tests/e2e/test_translate_file.py has the shipped one."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sightline.__main__ import main
from sightline.base.bundle import BundleError, Coverage
from sightline.base.bundle_files import read_manifest, write_manifest
from sightline.commands import documents, translate
from sightline.service.engine.engine import Engine
from sightline.service.inference import translation
from sightline.service.inference.service import Backend
from sightline.service.loading import load_bundles
from tests.support.tables import read_table

LINES = ("A man sleeps.", "", "Two girls are playing on the beach.", "  \t", "“Wait!” shouts Zoë.")
DATA = "".join(f"{line}\n" for line in LINES).encode()

Translate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def translated(bundle: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Translate:
    """A function that translates lines and returns the exit code, the output and the errors."""

    def run(lines: Sequence[str] | bytes = LINES, *arguments: str, folder: Path = bundle) -> tuple[int, str, str]:
        data = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
        (tmp_path / "source").write_bytes(data)
        code = main(["translate", str(tmp_path / "source"), "--bundle", str(folder), "--threads", "1", *arguments])
        output, errors = capfdbinary.readouterr()
        return code, output.decode(), errors.decode()

    return run


def test_each_line_is_translated_and_blank_lines_stay_blank(translated: Translate) -> None:
    code, output, errors = translated()
    assert (code, errors) == (0, "")
    lines = output.split("\n")
    assert [bool(line.strip()) for line in lines] == [True, False, True, False, True, False]
    assert lines[3] == LINES[3]
    for index in (0, 2, 4):  # alone it gives the same
        assert translated([LINES[index]]) == (0, f"{lines[index]}\n", "")


def test_a_report_has_the_lines_with_omitted_or_doubtful_words(
    translated: Translate, bundle: Path, tmp_path: Path
) -> None:
    copied, report = tmp_path / "copied", tmp_path / "report.tsv"
    shutil.copytree(bundle, copied)
    coverage = Coverage(layer=0, head=0, auroc=0.9, insertions=1, threshold=2.0)
    for chosen in (coverage, None):
        write_manifest(copied, read_manifest(copied).model_copy(update={"coverage": chosen}))
        if chosen is not None:
            assert translated(LINES, "--repair", "--report", str(report), folder=copied)[0] == 0
            repaired = [line.split("\t") for line in report.read_text(encoding="utf-8").splitlines()[1:]]
            split = ("--repair", "--no-split-sentences", "--report", str(report))
            assert translated(["A man sleeps. A dog runs."], *split, folder=copied)[0] == 0
            assert "split" in report.read_text(encoding="utf-8").split("\t")[-1]
            assert translated(LINES, "--report", str(report), folder=copied) == translated(folder=copied)
    head, *rows = [line.split("\t") for line in report.read_text(encoding="utf-8").splitlines()]
    assert head == ["line", "coverage", "omitted", "doubtful", "repair"]
    assert [row[0] for row in rows] == ["1", "3", "5"] and rows[0][2] == "A man sleeps"
    assert [row[0] for row in repaired] == ["1", "3", "5"] and all(row[4] for row in repaired)
    assert not any(row[4] for row in rows)
    code, _, errors = translated(LINES, "--report", str(report), folder=copied)
    assert code and errors.startswith("error: --report is not supported by") and "`sightline coverage`" in errors
    code, _, errors = translated(LINES, "--report", str(report), "--to", "de", folder=copied)
    assert code and errors == "error: --report is for the lines of a file; leave out --to\n"
    code, _, errors = translated(LINES, "--report", str(tmp_path / "source"), folder=copied)
    assert code == 2 and errors.endswith("/source is also the source or --out; choose another file\n")


@pytest.mark.parametrize("num_lines", [0, 2, 3])
def test_a_run_that_continues_keeps_the_rows_of_the_report(
    translated: Translate, bundle: Path, tmp_path: Path, num_lines: int
) -> None:
    copied, out, report = tmp_path / "copied", tmp_path / "out", tmp_path / "report.tsv"
    shutil.copytree(bundle, copied)
    coverage = Coverage(layer=0, head=0, auroc=0.9, insertions=1, threshold=2.0)
    write_manifest(copied, read_manifest(copied).model_copy(update={"coverage": coverage}))
    arguments = ("--out", str(out), "--report", str(report))
    assert translated(LINES, *arguments, folder=copied)[0] == 0
    complete = out.read_bytes(), report.read_bytes()
    assert [row.split(b"\t")[0] for row in complete[1].splitlines()] == [b"line", b"1", b"3", b"5"]
    out.unlink()
    kill_after(partial(translated, folder=copied), out, num_lines)
    assert translated(LINES, *arguments, folder=copied)[0] == 0
    assert (out.read_bytes(), report.read_bytes()) == complete


def interrupt_second_group(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Interrupt the translation of the second group of texts, each of which has one text."""
    groups: list[Any] = []

    async def fail_at_second(call: Any, model: Any, texts: Any, *rest: Any) -> Any:
        groups.append(texts)
        if len(groups) == 2:
            raise KeyboardInterrupt
        return await translation.translate_marked(call, model, texts, *rest)

    monkeypatch.setattr("sightline.translation.files.document.MAX_TEXTS", 1)
    monkeypatch.setattr(documents, "translate_marked", fail_at_second)
    return groups


def test_sentences_of_documents_are_repaired_and_counted_over_interruptions(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document, folder = tmp_path / "a.html", tmp_path / "copied"
    document.write_text("<p>A <b>man</b> sleeps.</p>")
    shutil.copytree(bundle, folder)
    command = ["translate", str(document), "--bundle", str(folder), "--threads", "1", "--to", "de"]
    assert main([*command, "--out", str(tmp_path / "plain")]) == 0
    for threshold, is_flagged in ((0.0, False), (2.0, True)):
        coverage = Coverage(layer=0, head=0, auroc=0.9, insertions=1, threshold=threshold)
        write_manifest(folder, read_manifest(folder).model_copy(update={"coverage": coverage}))
        capfd.readouterr()
        out = tmp_path / str(threshold)
        assert main([*command, "--repair", "--out", str(out)]) == 0
        number = f"{out}/a.de.html: sentences that were translated again: 1\n"
        assert capfd.readouterr().err == number * is_flagged
        found, plain = ((folder / "a.de.html").read_text() for folder in (out, tmp_path / "plain"))
        assert found.count("<b>") == 1 and (is_flagged or found == plain)
    document.write_text("<p>A man sleeps.</p><p>A dog runs.</p>")
    interrupt_second_group(monkeypatch)
    assert main([*command, "--repair", "--out", str(tmp_path / "continued")]) == 130
    capfd.readouterr()
    assert main([*command, "--repair", "--out", str(tmp_path / "continued")]) == 0
    assert capfd.readouterr().err.endswith("sentences that were translated again: 2\n")


def test_the_last_line_needs_no_end_and_a_mark_of_byte_order_does_not_count(translated: Translate) -> None:
    expected = translated(["A man sleeps.", "", "A man sleeps."])
    assert expected[0] == 0
    for data in (b"A man sleeps.\n\nA man sleeps.", b"\xef\xbb\xbfA man sleeps.\n\nA man sleeps.\n"):
        assert translated(data) == expected
    assert translated(b"") == (0, "", "")


PARAGRAPHS = b"  A man sleeps.   Two girls\tplay.\r\n\r\n \t\nWait!  A dog runs. \r\nA man\n"


def test_a_paragraph_is_translated_sentence_by_sentence_with_its_spacing(translated: Translate) -> None:
    """The reference translates each sentence as a line of its own."""
    sentences = ["A man sleeps.", "Two girls\tplay.", "Wait!", "A dog runs.", "A man"]
    first, second, third, fourth, fifth, _ = translated(sentences, "--no-split-sentences")[1].split("\n")
    expected = f"  {first}   {second}\r\n\r\n \t\n{third}  {fourth} \r\n{fifth}\n"
    assert translated(PARAGRAPHS) == (0, expected, "")
    assert translated(PARAGRAPHS, "--split-sentences") == (0, expected, "")


def test_lines_that_are_not_split_lose_windows_line_ends_and_blanks(
    translated: Translate, bundle: Path, tmp_path: Path
) -> None:
    code, output, errors = translated(PARAGRAPHS, "--no-split-sentences")
    assert (code, errors, "\r" in output) == (0, "", False)
    assert [bool(line) for line in output.split("\n")] == [True, False, False, True, True, False]
    assert output != translated(PARAGRAPHS)[1].replace("\r", "")
    text = translated(["A man sleeps. A dog runs."], "--no-split-sentences")
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    manifest = read_manifest(other).model_copy(update={"training_unit": "text"})
    write_manifest(other, manifest)
    assert translated(["A man sleeps. A dog runs."], folder=other) == text
    write_manifest(other, manifest.model_copy(update={"languages": None}))
    error = "error: --split-sentences is supported only by models that translate, and toy does not.\n"
    assert translated(["A man sleeps."], "--split-sentences", folder=other) == (2, "", error)


def test_a_sentence_that_is_too_long_is_named(translated: Translate, bundle: Path) -> None:
    limit = read_manifest(bundle).limits.max_source_tokens
    fitting = "A man sleeps. " * limit
    assert translated([fitting])[0] == 0
    code, output, errors = translated(["a", f"A man. X {'x ' * limit}"])
    assert (code, output) == (1, "")
    assert re.search(rf"/source, line 2, sentence 2 has \d+ tokens, but toy reads at most {limit};", errors)


def test_only_line_feeds_end_a_line(translated: Translate) -> None:
    assert translated(["A\u2028man\x0bsleeps.\x85", "b"])[1].count("\n") == 2


def test_standard_input_is_translated_as_a_file_is(
    bundle: Path, translated: Translate, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    expected = translated()[1]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(DATA)))
    assert main(["translate", "-", "--bundle", str(bundle), "--threads", "1"]) == 0
    assert capfdbinary.readouterr().out.decode() == expected


def test_beams_are_searched(translated: Translate) -> None:
    greedy, beams = translated()[1], translated(LINES, "--beams", "4")[1]
    assert greedy != beams and greedy.count("\n") == beams.count("\n")


def test_many_lines_share_the_steps_of_the_engine(translated: Translate, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = Engine.step

    def count(engine: Engine, *limit: float) -> None:
        step(engine, *limit)
        steps.append(engine.num_running)

    monkeypatch.setattr(Engine, "step", count)
    assert translated(["A man sleeps."] * 200)[0] == 0
    assert max(steps) >= 30


def test_an_output_file_is_written_and_never_overwritten(translated: Translate, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert translated(LINES, "--out", str(out)) == (0, "", "")
    assert out.read_text(encoding="utf-8") == translated()[1]
    assert not (tmp_path / "out.progress").exists()
    error = f"error: {out} exists; remove it or choose another --out\n"
    assert translated(LINES, "--out", str(out)) == (2, "", error)


def kill_after(translated: Translate, out: Path, num_lines: int, torn: bytes = b"") -> bytes:
    """Leave what a process leaves that is killed after some lines and the beginning of one more."""
    code, _, errors = translated(LINES, "--out", str(out))
    assert code == 0, errors
    complete = out.read_bytes()
    out.unlink()
    with pytest.MonkeyPatch.context() as patch:

        def die(*_: object, **__: object) -> None:
            raise SystemExit

        patch.setattr(translate, "translate_into", die)
        with contextlib.suppress(SystemExit):
            translated(LINES, "--out", str(out))
    with out.with_name("out.progress").open("ab") as file:
        for line in complete.decode().split("\n")[:num_lines]:
            file.write(json.dumps(line).encode() + b"\n")
        file.write(torn)
    return complete


@pytest.mark.parametrize(("num_lines", "torn"), [(0, b""), (0, b'"Ei'), (1, b""), (3, b'"Zo'), (5, b"")])
def test_a_killed_run_is_continued_after_its_complete_lines(
    translated: Translate, tmp_path: Path, num_lines: int, torn: bytes
) -> None:
    out = tmp_path / "out"
    complete = kill_after(translated, out, num_lines, torn)
    expected = f"continuing {out} after line {num_lines}\n" if num_lines else ""
    assert translated(LINES, "--out", str(out)) == (0, "", expected)
    assert out.read_bytes() == complete
    assert not (tmp_path / "out.progress").exists()


def test_a_run_with_another_source_model_or_option_continues_nothing(
    translated: Translate, bundle: Path, tmp_path: Path
) -> None:
    out, progress = tmp_path / "out", tmp_path / "out.progress"
    kill_after(translated, out, 2)
    begun = progress.read_bytes()
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    manifest = read_manifest(other)
    files = {**manifest.files, "more": next(iter(manifest.files.values()))}
    write_manifest(other, manifest.model_copy(update={"files": files}))
    for lines, options, folder, changed in (
        ([*LINES, "more"], (), bundle, "source"),
        (LINES, ("--beams", "2"), bundle, "number of beams"),
        (LINES, (), other, "model"),
        (LINES, ("--no-split-sentences",), bundle, "splitting of sentences"),
        ([*LINES, "more"], ("--beams", "2"), bundle, "source and number of beams"),
    ):
        code, _, errors = translated(lines, "--out", str(out), *options, folder=folder)
        assert (code, progress.read_bytes()) == (2, begun)
        way = f"remove {progress} to start again, or choose another --out"
        assert errors == f"error: {out} was begun with another {changed}; {way}\n"
    progress.write_text("{}\n")
    assert "was begun with another program; remove" in translated(LINES, "--out", str(out))[2]


def test_two_processes_do_not_write_one_file(translated: Translate, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kill_after(translated, out, 1)
    with (tmp_path / "out.progress").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        error = f"error: {out} is being written by another process; choose another --out\n"
        assert translated(LINES, "--out", str(out)) == (1, "", error)


def test_the_source_is_not_the_output(translated: Translate, tmp_path: Path) -> None:
    error = f"error: {tmp_path}/source exists; remove it or choose another --out\n"
    assert translated(LINES, "--out", str(tmp_path / "source")) == (2, "", error)
    assert (tmp_path / "source").read_text(encoding="utf-8").startswith(LINES[0])


def test_a_line_that_is_too_long_is_named_before_anything_is_translated(
    translated: Translate, bundle: Path, tmp_path: Path
) -> None:
    limit = read_manifest(bundle).limits.max_source_tokens
    code, output, errors = translated(["A man sleeps.", "", "x " * limit])
    assert (code, output) == (1, "")
    message = rf"/source, line 3 has \d+ tokens, but toy reads at most {limit}; split it into shorter lines"
    assert re.fullmatch(rf"error: .*{message}\n", errors)
    assert translated(["x " * limit], "--out", str(tmp_path / "out"))[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_line_that_is_not_utf_8_is_named(translated: Translate) -> None:
    code, output, errors = translated(b"A man\nsleeps\xff.\n")
    assert (code, output) == (1, "")
    assert errors.endswith("/source, line 2 is not UTF-8; convert the file to UTF-8\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    read_table(__file__),
)
def test_an_error_of_the_user_is_one_line(
    arguments: list[str],
    message: str,
    bundle: Path,
    classifier_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_text("A man sleeps.\n")
    names = {"tmp": tmp_path, "bundle": bundle, "judge": classifier_bundle}
    assert main(["translate", *(one.format(**names) for one in arguments)]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1
    assert errors.startswith(f"error: {message.format(**names)}")


@pytest.mark.parametrize("beams", ["0", "9", "x", "-1", "1.5"])
def test_a_number_of_beams_that_is_not_allowed_is_named(beams: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["translate", "x", f"--beams={beams}"])
    assert ended.value.code == 2
    expected = f"error: --beams must be a whole number from 1 to 8, got {beams!r}; see `sightline translate"
    assert capsys.readouterr().err.startswith(expected)


def test_more_beams_than_rows_are_an_error(translated: Translate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGHTLINE_MAX_ROWS", "2")
    error = "error: --beams must be at most 2, the rows of toy (SIGHTLINE_MAX_ROWS), got 4.\n"
    assert translated(LINES, "--beams", "4") == (2, "", error)


def test_a_model_that_the_service_loads_on_first_use_translates(
    translated: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = translated()
    monkeypatch.setenv("SIGHTLINE_LAZY_MODELS", "*")
    assert translated()[:2] == expected[:2] and expected[0] == 0


def test_without_a_bundle_the_default_model_or_the_first_that_translates_is_used(
    bundle: Path,
    classifier_bundle: Path,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    translated: Translate,
) -> None:
    expected = translated()[1]
    folder = tmp_path / "bundles"
    shutil.copytree(classifier_bundle, folder / "classifier")
    (tmp_path / "source2").write_bytes(DATA)
    arguments = ["translate", str(tmp_path / "source2"), "--bundles", str(folder), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert capfdbinary.readouterr().err.decode() == (
        f"error: no bundle in {folder} can be used: each of them cannot translate, because it is no encoder-decoder; "
        "name one with --bundle\n"
    )
    shutil.copytree(bundle, folder / "toy")
    (folder / "broken").mkdir()
    (folder / "broken" / "manifest.json").write_text("{}")
    assert main(arguments) == 0
    warning = f"warning: {folder}/broken/manifest.json has schema_version None"
    assert capfdbinary.readouterr().err.decode().startswith(warning)
    assert (tmp_path / "out").read_text(encoding="utf-8") == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIGHTLINE_DEFAULT_MODEL", "toy-classifier")  # it cannot translate
        assert main([*arguments[:-1], str(tmp_path / "out2")]) == 0
        other = json.loads((bundle / "manifest.json").read_text()) | {"name": "another"}
        shutil.copytree(bundle, folder / "another")
        (folder / "another" / "manifest.json").write_text(json.dumps(other))
        capfdbinary.readouterr()
        assert main([*arguments[:-1], str(tmp_path / "out3")]) == 2
        assert capfdbinary.readouterr().err.decode().splitlines()[-1] == (
            f"error: several bundles in {folder} can be used: another, toy; name one with --bundle, or set a "
            "default with `sightline models default` or SIGHTLINE_DEFAULT_MODEL"
        )
        patch.setenv("SIGHTLINE_DEFAULT_MODEL", "toy-classifier,toy")
        assert main([*arguments[:-1], str(tmp_path / "out3")]) == 0


def test_a_model_that_continues_texts_is_rejected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source").write_text("A dog runs.\n")
    bundle, tasks = "bundles/smalltalk-chat-gatt", "generate, encode, attention"
    assert main(["translate", str(tmp_path / "source"), "--bundle", bundle]) == 2
    reason = f"cannot translate, because it is no encoder-decoder; its tasks are {tasks}"
    assert capfd.readouterr() == ("", f"error: {bundle} {reason}\n")


def test_an_engine_that_fails_is_an_error_that_keeps_the_lines_before(
    translated: Translate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(engine: Engine) -> None:
        raise SystemExit

    def load(*arguments: Any) -> Backend:
        backend = load_bundles(*arguments)
        monkeypatch.setattr(Engine, "step", die)
        return backend

    monkeypatch.setattr("sightline.service.loading.load_bundles", load)
    code, _, errors = translated(["", *LINES], "--out", str(tmp_path / "out"))
    assert code == 1
    assert f"error: line 2 of {tmp_path}/source: " in errors
    assert (tmp_path / "out.progress").read_text().splitlines()[1:] == ['""']


def test_an_interrupted_run_says_how_to_continue(
    translated: Translate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(translate.LineTranslator, "translate_line", interrupt)
        code, _, errors = translated(LINES, "--out", str(out))
    assert code == 130
    assert errors.endswith("error: interrupted after 0 of 5 lines; the same command continues\n")
    assert translated(LINES, "--out", str(out))[0] == 0


def test_a_terminal_has_a_progress_bar(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("A man sleeps.\n" * 40)
    command = [sys.executable, "-m", "sightline", "translate", str(tmp_path / "source"), "--bundle", str(bundle)]
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    done = subprocess.run([*command, "--threads", "1"], stdout=subprocess.PIPE, stderr=end, check=True)
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(terminal, 4096):
            shown += data
    os.close(terminal)
    assert done.stdout.count(b"\n") == 40
    assert b"| 0/40 [00:00<?, ?line/s]" in shown
    assert b"| 40/40 [" in shown
    assert shown.decode().splitlines()[-1].startswith("40 lines in ") and shown.endswith(b" s with toy\r\n")


def test_a_reader_that_leaves_ends_the_command_without_a_traceback(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("A man sleeps.\n" * 20_000)
    command = [sys.executable, "-m", "sightline", "translate", str(tmp_path / "source"), "--bundle", str(bundle)]
    with subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.wait(timeout=30) == 141
        assert running.stderr.read() == b""


def test_a_pipe_gets_the_lines_and_stays(bundle: Path, tmp_path: Path, translated: Translate) -> None:
    expected = translated()[1]
    (tmp_path / "source2").write_bytes(DATA)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    code = main(["translate", str(tmp_path / "source2"), "--bundle", str(bundle), "--out", str(pipe)])
    assert reader.communicate(timeout=30)[0].decode() == expected
    assert code == 0 and pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("pipe")) == ["pipe"]


@pytest.mark.parametrize("kind", ["empty file", "link to an empty file", "link to nothing"])
def test_a_failure_removes_only_what_the_command_has_created(
    bundle: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source2").write_text("A dog runs.\n")
    out, target = tmp_path / "out", tmp_path / "target"
    if kind == "empty file":
        out.touch()
    else:
        out.symlink_to(target)
        if kind == "link to an empty file":
            target.touch()

    def fail(*arguments: Any, **named: Any) -> int:
        raise BundleError("the engine failed")

    monkeypatch.setattr(translate, "translate_into", fail)
    assert main(["translate", str(tmp_path / "source2"), "--bundle", str(bundle), "--out", str(out)]) == 1
    assert os.path.lexists(out) and out.is_symlink() == (kind != "empty file")
    assert not (tmp_path / "out.progress").exists()
    monkeypatch.undo()
    assert main(["translate", str(tmp_path / "source2"), "--bundle", str(bundle), "--out", str(out)]) == 0
    assert out.read_text().count("\n") == 1 and out.is_symlink() == (kind != "empty file")


def test_documents_are_translated_beside_or_into_a_folder_and_continued(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, page = tmp_path / "a.txt", tmp_path / "b.md"
    text.write_text("A man sleeps.\n\nTwo girls play.\n\n12\n")
    page.write_text("# A man\n\n- A **dog** runs.\n")
    command = ["translate", str(text), str(page), "--bundle", str(bundle), "--threads", "1", "--to", "de"]
    assert main(command) == 0
    expected = (tmp_path / "a.de.txt").read_text()
    assert expected.endswith("\n\n12\n") and expected != text.read_text()
    assert (tmp_path / "b.de.md").read_text().startswith("# ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.de.txt", "a.txt", "b.de.md", "b.md"]
    capfd.readouterr()
    assert main(command) == 0  # what exists is not translated again
    assert capfd.readouterr().err.count("exists; remove it to translate") == 2
    one, named = ["translate", str(text), *command[3:], "--out"], tmp_path / "text.txt"
    assert main([*one, str(named)]) == 0
    assert named.read_text() == expected
    for rejected in (
        [*command, "--out", str(named)],
        [*one, str(tmp_path / "text.md")],
        [*one, "t.txt", "--to", "de,fr"],
    ):
        assert main(rejected) == 2
        assert "must be a folder, or for one document and one language a file" in capfd.readouterr().err

    out, groups = tmp_path / "out", interrupt_second_group(monkeypatch)
    assert main([*command, "--out", str(out)]) == 130
    assert [path.name for path in out.iterdir()] == ["a.de.txt.progress"]
    assert main([*command, "--out", str(out)]) == 0
    assert (out / "a.de.txt").read_text() == expected
    assert [group[0].text for group in groups].count("A man sleeps.\n\n") == 1
    assert sorted(path.name for path in out.iterdir()) == ["a.de.txt", "b.de.md"]


def test_a_damaged_document_does_not_stop_the_others(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.docx").write_bytes(b"PK")
    (tmp_path / "b.txt").write_text("A man sleeps.")
    files = [str(tmp_path / "a.docx"), str(tmp_path / "b.txt")]
    assert main(["translate", *files, "--bundle", str(bundle), "--threads", "1", "--to", "de"]) == 1
    assert "a.docx is damaged, or no file of its format; save it again with its program\n" in capfd.readouterr().err
    assert (tmp_path / "b.de.txt").exists() and not (tmp_path / "a.de.docx").exists()


def test_documents_go_over_two_bundles_from_the_language_that_they_have(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    languages = json.loads((bundle / "manifest.json").read_text())["languages"]
    for name, source, target in (("first", "pt", "en"), ("second", "en", "de")):
        shutil.copytree(bundle, tmp_path / "bundles" / name)
        other = {"name": name, "languages": languages | {"sources": [source], "targets": [target]}}
        manifest = json.loads((bundle / "manifest.json").read_text()) | other
        (tmp_path / "bundles" / name / "manifest.json").write_text(json.dumps(manifest))
    document = tmp_path / "a.txt"
    document.write_text("Um homem anda de bicicleta. Dois cachorros correm na praia.\n")
    command = ["translate", str(document), "--bundles", str(tmp_path / "bundles"), "--threads", "1"]
    assert main([*command, "--to", "de"]) == 0
    detected = (tmp_path / "a.de.txt").read_text()
    assert main([*command, "--to", "de", "--out", str(tmp_path / "pt"), "--from", "pt"]) == 0
    assert main([*command, "--to", "de", "--out", str(tmp_path / "en"), "--from", "en"]) == 0
    assert (tmp_path / "pt" / "a.de.txt").read_text() == detected != (tmp_path / "en" / "a.de.txt").read_text()
    capfd.readouterr()
    assert main([*command, "--to", "fr"]) == 1 and main([*command, "--from", "pt"]) == 2
    no_route, no_target = capfd.readouterr().err.splitlines()[-2:]
    assert no_route.endswith("No model translates between these languages. Supported: en to de; pt to de, en.")
    assert no_target == "error: --from needs --to, such as --to de"


@pytest.mark.parametrize(("name", "separator"), [("terms.tsv", "\t"), ("terms.csv", ",")])
def test_terms_of_a_file_are_in_the_documents(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, separator: str
) -> None:
    document, terms = tmp_path / "a.txt", tmp_path / name
    document.write_text("man\n")
    terms.write_text(f"man{separator}Herr Z\n\nred dog{separator}Fuchs\n")
    command = ["translate", str(document), "--bundle", str(bundle), "--threads", "1", "--glossary", str(terms)]
    assert main([*command, "--to", "de"]) == 0
    assert "Herr Z" in (tmp_path / "a.de.txt").read_text()
    for text, arguments, reason in (
        (
            "man\n",
            ["--to", "de"],
            f"{terms}, line 1 must have a term and its translation, of at most 200 characters each",
        ),
        ("a", [], "--glossary needs --to, such as --to de"),
        ("a", ["--to", "de", "--glossary", "a.txt"], "--glossary a.txt must be a .tsv or a .csv file"),
    ):
        terms.write_text(text)
        assert main([*command, *arguments]) == 2
        assert capfd.readouterr().err.endswith(f"error: {reason}\n")
