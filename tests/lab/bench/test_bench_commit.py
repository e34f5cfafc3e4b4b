import subprocess
from pathlib import Path

import pytest

from lab.bench import fresh, machine
from lab.bench.commit import ROOT, DirtyTreeError, commit_facts, git, head, uncommitted_changes
from lab.bench.record import Recorded, Result


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Create a git repository with a committed service, result and document."""
    for name in ("service/app.py", "lab/bench/results/maps.json", "docs/performance.md", "bundles/toy/MODEL_CARD.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n", encoding="utf-8")
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    commit_all(tmp_path, "first")
    return tmp_path


def commit_all(checkout: Path, message: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("add", "."), (*identity, "commit", "-q", "-m", message)):
        subprocess.run(["git", "-C", str(checkout), *words], check=True)


def test_a_clean_checkout_is_recorded_with_its_commit_alone(checkout: Path) -> None:
    assert commit_facts(allow_dirty=False, root=checkout) == {"commit": head(checkout)}
    assert len(head(checkout) or "") == 40


def test_results_and_documents_that_a_run_writes_do_not_make_the_checkout_dirty(checkout: Path) -> None:
    for name in ("lab/bench/results/maps.json", "lab/bench/results/new.json", "docs/performance.md"):
        (checkout / name).write_text("2\n", encoding="utf-8")
    (checkout / "bundles/toy/MODEL_CARD.md").write_text("2\n", encoding="utf-8")
    assert uncommitted_changes(checkout) == []


def test_uncommitted_changes_are_rejected_by_default_with_the_way_out(checkout: Path) -> None:
    (checkout / "service/app.py").write_text("2\n", encoding="utf-8")
    (checkout / "service/a new file.py").write_text("", encoding="utf-8")
    with pytest.raises(DirtyTreeError) as raised:
        commit_facts(allow_dirty=False, root=checkout)
    assert str(raised.value) == (
        f"service/a new file.py, service/app.py in {checkout} differ from commit {head(checkout)}. Commit the changes, "
        "or allow them with --allow-dirty; the result then lists the changed files."
    )


def test_allowed_changes_are_listed_in_the_result(checkout: Path) -> None:
    (checkout / "service/app.py").unlink()
    facts = commit_facts(allow_dirty=True, root=checkout)
    assert facts == {"commit": head(checkout), "changed": ["service/app.py"]}


def test_old_figures_of_the_readme_are_named_and_short_histories_are_not_an_error(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh, "MAX_COMMITS", 1)
    monkeypatch.setattr(fresh, "FILES", {"shipped": ("service",)})
    results = {"shipped": Recorded({"commit": head(checkout)}, "", Result())}
    for number, name in enumerate(("docs/a.md", "service/app.py", "service/app.py")):
        assert not next(fresh.find_stale(results, checkout))[1]
        (checkout / name).write_text(f"change {number}\n", encoding="utf-8")
        commit_all(checkout, f"change {number}")
    sentence, is_stale = next(fresh.find_stale(results, checkout))
    assert is_stale and "2 commits since then changed files" in sentence and "make bench-readme" in sentence
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{checkout}", str(shallow)], check=True)
    sentence, is_stale = next(fresh.find_stale(results, shallow))
    assert not is_stale and "does not reach back" in sentence and "--unshallow" in sentence
    unknown = Recorded({"commit": "0" * 40}, "", Result())
    for sentence, is_stale in fresh.find_stale({"shipped": unknown, "maps": unknown}, checkout):
        assert is_stale and "not in this repository" in sentence
    assert len(list(fresh.find_stale({"shipped": unknown, "maps": unknown}, checkout))) == 2
    assert not any("maps" in sentence for sentence, _ in fresh.find_stale({"maps": unknown}, shallow))


def test_every_file_that_a_figure_of_the_readme_depends_on_exists() -> None:
    for name in {name for files in fresh.FILES.values() for name in files}:
        assert git(ROOT, "ls-files", "--", name), name


def test_outside_a_repository_the_commit_is_unknown(tmp_path: Path) -> None:
    assert commit_facts(allow_dirty=False, root=tmp_path) == {"commit": None}


def test_a_command_with_uncommitted_changes_exits_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reject(allow_dirty: bool) -> dict[str, object]:
        assert not allow_dirty
        raise DirtyTreeError("service/app.py differs")

    monkeypatch.setattr(machine, "commit_facts", reject)
    with pytest.raises(SystemExit) as ended:
        machine.describe_or_exit(allow_dirty=False)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: service/app.py differs\n"
