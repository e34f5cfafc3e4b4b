import json
from pathlib import Path

import pytest

from export.__main__ import main


@pytest.fixture
def sentences_path(tmp_path: Path) -> Path:
    path = tmp_path / "sentences.txt"
    path.write_text("A man sleeps.\n", encoding="utf-8")
    return path


def test_export_writes_a_bundle_and_verify_accepts_it(
    checkpoint: Path, tmp_path: Path, sentences_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my-model"
    assert main([str(checkpoint), "--out", str(out), "--sentences", str(sentences_path)]) == 0
    assert capsys.readouterr().out.startswith(str(out))
    assert json.loads((out / "manifest.json").read_text(encoding="utf-8"))["name"] == "my-model"
    arguments = ["verify", str(out), "--checkpoint", str(checkpoint), "--sentences", str(sentences_path)]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["sentences"] == 1


def test_a_failed_verification_exits_with_1_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, sentences_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "toy"
    arguments = [str(checkpoint), "--out", str(out), "--sentences", str(sentences_path), "--tolerance", "0"]
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith("error: ONNX Runtime is not PyTorch (tolerance 0): hidden differ by")
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--out", "toy"], "nowhere is not a checkpoint: it has no config.json"),
        (["verify", "nowhere", "--checkpoint", "elsewhere"], "nowhere is not a bundle: it has no manifest.json"),
        (["nowhere", "--out", "toy", "--sentences", "none.txt"], "No such file or directory: 'none.txt'"),
    ],
)
def test_what_is_missing_exits_with_2_and_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and output.err.count("\n") == 1
    assert message in output.err
    assert not any(tmp_path.iterdir())


def test_weights_that_do_not_fit_exit_with_2_and_one_line(
    checkpoint: Path, tmp_path: Path, sentences_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "d_ff": 128}), encoding="utf-8")
    assert main([str(folder), "--out", str(tmp_path / "toy"), "--sentences", str(sentences_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_name_that_no_request_could_use_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(checkpoint), "--out", str(tmp_path / "toy"), "--name", "no/slash"]) == 2
    assert "is not a name" in capsys.readouterr().err


def test_a_bundle_that_is_replaced_keeps_what_it_says_of_itself(
    checkpoint: Path, tmp_path: Path, sentences_path: Path
) -> None:
    out = tmp_path / "toy"
    arguments = [str(checkpoint), "--out", str(out), "--sentences", str(sentences_path)]
    said = []
    for more in (["--description", "a toy", "--license", "for research"], [], ["--license", "Apache-2.0"]):
        assert main([*arguments, *more]) == 0
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
        said.append((manifest["name"], manifest["description"], manifest["license"]))
    assert said == [("toy", "a toy", "for research"), ("toy", "a toy", "for research"), ("toy", "a toy", "Apache-2.0")]
