"""The documentation is current: links, generated tables, names of settings and metrics, figures."""

import functools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from docs.generate import PAGES, fill, make_parts
from docs.limits import LIMITS
from lab.bench import report
from lab.bench.record import RESULTS, read_results
from lab.study.__main__ import RESULTS as STUDY_RESULTS
from sightline import __version__
from sightline.base.bundle import SCHEMA_VERSION
from sightline.base.bundle_files import read_manifest
from sightline.service.api_errors import Limit
from sightline.service.app import endpoints_of
from sightline.service.discovery import find_bundles
from sightline.service.metrics import Metrics
from sightline.service.runtime.state_memory import row_bytes
from sightline.service.settings import SETTINGS, Settings, env_name

FOLDERS = ("bundles", "docs", "lab")
DOCUMENTS = sorted([*Path().glob("*.md"), *(page for folder in FOLDERS for page in Path(folder).rglob("*.md"))])
CURRENT = [page for page in DOCUMENTS if page.name != "CHANGELOG.md"]  # it has names of earlier versions, too
README = Path("README.md").read_text(encoding="utf-8")
MAKEFILE = Path("Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
ENDPOINTS = endpoints_of(Settings())
UNIT = Path("deploy/sightline.service")
MONITORING = [Path("deploy", name) for name in ("prometheus/alerts.yml", "grafana/sightline.json")]


def anchors_of(document: Path) -> set[str]:
    """Return the anchors of all headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)(?:#([^)]+))?\)", document.read_text(encoding="utf-8"))
    for link, anchor in links:
        target = document.parent / link if link else document
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), f"{link}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_make_targets_that_are_named_exist(document: Path) -> None:
    named = set(re.findall(r"`(?:RUNTIME=gpu )?make ([a-z-]+)", document.read_text(encoding="utf-8")))
    assert named <= TARGETS


def test_every_target_is_phony_and_says_what_it_does() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", MAKEFILE, flags=re.MULTILINE)
    assert set(phony.split()) == TARGETS
    described = set(re.findall(r"^([a-z-]+):.*## \S", MAKEFILE, flags=re.MULTILINE))
    assert described == TARGETS


def test_the_decision_records_are_all_listed() -> None:
    records = {path.name for path in Path("docs/adr").glob("0*.md")}
    listed = set(re.findall(r"\((0[^)]+\.md)\)", Path("docs/adr/index.md").read_text(encoding="utf-8")))
    assert records == listed


def test_the_site_has_every_page() -> None:
    navigation = Path("mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = set(re.findall(r"- (\S+\.md)$", navigation, flags=re.MULTILINE))
    pages = {str(page.relative_to("docs")) for page in PAGES}
    assert {name for name in named if not name.startswith("repository/")} == pages


parts = functools.cache(make_parts)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_generated_tables_are_current(page: Path) -> None:
    """`python -m docs.generate` writes them again."""
    text = page.read_text(encoding="utf-8")
    assert fill(text, parts()) == text


@pytest.mark.parametrize("document", [*DOCUMENTS, *MONITORING, UNIT], ids=str)
def test_settings_and_metrics_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"SIGHTLINE_[A-Z_]*[A-Z]\b", text))
    if document.name != "CHANGELOG.md":  # it names settings of earlier versions, too
        assert named <= set(map(env_name, SETTINGS))
    families = {metric.name for metric in Metrics("0").registry.collect()}
    metrics = families | {f"{name}{suffix}" for name in families for suffix in ("_total", "_bucket", "_sum", "_count")}
    assert set(re.findall(r"\bsightline_[a-z0-9_]+", text)) <= metrics | {"sightline_serving"}  # the wheel


@functools.cache
def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("document", CURRENT, ids=str)
def test_files_options_extras_and_routes_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    codes = re.findall(r"`([^`\n]+)`", text)
    folders = "|".join({path.parts[0] for path in tracked_files() if path.parent.parts} - {"bundles"})
    paths = {path for code in codes for path in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]*\w", code)}
    assert not {path for path in paths if not Path(path).exists()}
    modules = {name for code in codes for name in re.findall(r"(?<![\w./-])\w+\.(?:py|js)\b", code)}
    others = {"chat.py", "run_ner.py"}  # an example, and a file of Transformers
    assert modules - others <= {path.name for path in tracked_files()}

    commands = [code for code in codes if code.startswith("sightline ")]
    options = {name for command in commands for name in re.findall(r"(?<!\S)--(?:no-)?([a-z][\w-]*)", command)}
    reference = "".join(Path(f"docs/reference/{page}.md").read_text(encoding="utf-8") for page in ("cli", "training"))
    assert options <= set(re.findall(r"--(?:no-)?([a-z][\w-]*)", reference))

    installed = re.findall(r"pip install [^`\n]*\[([a-z,]+)\]", text)
    extras = {name for names in installed for name in names.split(",")} | set(re.findall(r"\bextra `([a-z]+)`", text))
    assert extras <= set(PROJECT["optional-dependencies"])

    routes = "|".join(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(f"{one.method} {one.path}")) for one in ENDPOINTS)
    named = re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) /[^`\s?]*)", text)
    assert not [route for route in named if not re.fullmatch(routes, route)]


def test_the_table_of_limits_has_every_limit_of_settings_and_metrics() -> None:
    sources = [limit.source for limit in LIMITS]
    assert {name for name in SETTINGS if name.startswith("max_") or name.endswith("_s")} <= set(sources)
    labels = [limit.label for limit in LIMITS if limit.label is not None]
    assert sorted(labels) == sorted(get_args(Limit))
    assert {limit.code for limit in LIMITS} >= {"overloaded", "body_too_large", "rate_limit_exceeded"}
    for limit in LIMITS:
        assert limit.source in SETTINGS or limit.value, limit


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="`make docs` installs MkDocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "search" / "search_index.json").exists()
    sources = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")]
    assert not [link for text in sources for link in re.findall(r"<(?:script|link|img)[^>]*https?://[^>]*>", text)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    installed = "/opt/sightline/.venv-serve-cpu/bin/sightline"
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(installed, "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == __version__
    assert f"now {__version__.rpartition('.')[0]} |" in Path("SECURITY.md").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in Path("CHANGELOG.md").read_text(encoding="utf-8")
    manifest = Path("docs/reference/manifest.md").read_text(encoding="utf-8")
    assert f"| {__version__} | {SCHEMA_VERSION} |" in manifest


def test_the_rows_of_the_shipped_models_have_the_documented_size() -> None:
    page = Path("docs/how-to/tune.md").read_text(encoding="utf-8")
    bundles = find_bundles(Path("bundles"))
    sizes = {folder.name: row_bytes(manifest) / 1e6 for folder, manifest in bundles.items() if not manifest.lazy}
    for name, size in sizes.items():
        (documented,) = re.findall(rf"^\| `{name}` \| ([\d.]+)", page, flags=re.MULTILINE)
        assert float(documented) == pytest.approx(size, rel=0.1), name
    (total,) = re.findall(r"^\| the seven that load at start \| (\d+) \|", page, flags=re.MULTILINE)
    assert round(sum(sizes.values())) == int(total)


@pytest.mark.parametrize("document", report.DOCUMENTS, ids=str)
def test_figures_are_those_of_the_committed_results(document: Path, tmp_path: Path) -> None:
    """`python -m lab.bench --report` writes them again."""
    written = tmp_path / document.name
    shutil.copy(document, written)
    report.write_documents(read_results(RESULTS), [written])
    assert written.read_text(encoding="utf-8") == document.read_text(encoding="utf-8")


def test_the_licences_of_the_readme_are_those_of_the_bundles() -> None:
    for licence in {read_manifest(folder).license for folder in find_bundles(Path("bundles"))}:
        assert licence in README or "Apache" in licence, licence


def test_the_cards_of_the_lab_have_the_tasks_of_its_models() -> None:
    for folder, manifest in find_bundles(Path("lab/bundles")).items():
        card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
        assert f"| tasks | {', '.join(manifest.tasks)} |" in card, folder


def test_no_text_names_the_package_of_a_stranger() -> None:
    """On the package index, the name `sightline` belongs to others."""
    pattern = r"pip install [^.]*\bsightline(\[|[^-_./a-z]|$)"
    done = subprocess.run(
        ["git", "grep", "-nIE", pattern, "--", ":!CHANGELOG.md", ":!docs/adr", ":!tests"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("folder", [RESULTS, STUDY_RESULTS])
def test_commands_of_results_name_no_folder_of_one_machine(folder: Path) -> None:
    commands = [recorded.command for recorded in read_results(folder).values()]
    assert len(commands) > 15
    assert [command for command in commands if re.search(r"[ =](?:/|~|\.\.)", command)] == []
