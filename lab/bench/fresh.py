"""Check that the figures of the README are not much older than the code that they measure.

Run as `python -m lab.bench.fresh`, part of `make check`. A stored result names its commit. The
check counts the commits since then that changed a file on which the figures depend.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.bench.commit import ROOT, git, head
from lab.bench.record import RESULTS, Recorded, read_results
from lab.bench.targets import HEADLINE, MAX_COMMITS

SERVING = (
    *("bundles/multi30k-en-de/manifest.json", "constraints.txt", "sightline/base", ":(glob)service/*.py"),
    *(f"service/{name}" for name in ("api", "engine", "http", "inference", "runtime", "tasks", "workers")),
    *(f"lab/bench/{name}.py" for name in ("compare", "models", "peer_app", "peers", "servers")),
    *("loadtest/client.py", "loadtest/load.py", "loadtest/sentences.txt"),
)
IMPORTED = (  # files that also decide about models of the catalogue
    *(f"service/compat/openai/{name}.py" for name in ("chat", "chat_schemas", "embeddings", "schemas")),
    *(
        f"export/{name}"
        for name in ("convert", "families", "graphs", "pipeline.py", "sources/catalogue.py", "writing.py")
    ),
)
FILES = {
    comparison.section: SERVING if comparison.section == "shipped" else (*SERVING, *IMPORTED) for comparison in HEADLINE
}
REMEDY = "run `make bench-readme` on a quiet machine and commit its results"


def find_stale(results: Mapping[str, Recorded], root: Path = ROOT) -> Iterator[tuple[str, bool]]:
    """Yield a sentence about each section of the README, and whether its figures must be measured
    again.
    """
    is_complete = git(root, "rev-parse", "--is-shallow-repository") == "false"
    for section in results.keys() - FILES.keys():  # these have no limit, but must be of this repository
        commit = str(results[section].machine["commit"])
        if is_complete and git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
            yield f"{section} was measured at {commit[:12]}, which is not in this repository: measure it again", True
    for section, files in FILES.items():
        if section not in results:
            yield f"{section} is not measured: {REMEDY}", True
            continue
        commit = str(results[section].machine["commit"])
        counted = git(root, "rev-list", "--count", "--no-merges", f"{commit}..HEAD", "--", *files)
        if changed := results[section].machine.get("changed"):
            yield f"{section} was measured with {len(changed)} uncommitted files: {REMEDY}", True
        elif counted is not None:
            is_stale = int(counted) > MAX_COMMITS
            facts = f"{section} was measured at {commit[:12]}; {counted} commits since then changed files that it uses"
            yield f"{facts}, and at most {MAX_COMMITS} may: {REMEDY}" if is_stale else facts, is_stale
        elif head(root) is None:
            yield f"{section} was not checked, because git or the repository is missing", False
        elif not is_complete:
            reason = f"the history of this clone does not reach back to {commit[:12]}"
            yield f"{section} was not checked, because {reason}; `git fetch --unshallow` gets the rest", False
        else:
            yield f"{section} was measured at {commit[:12]}, which is not in this repository: {REMEDY}", True


def main() -> int:
    """Print the age of each section and return the exit status."""
    sentences = list(find_stale(read_results(RESULTS)))
    for sentence, is_stale in sentences:
        print(f"error: {sentence}" if is_stale else sentence)
    return int(any(is_stale for _, is_stale in sentences))


if __name__ == "__main__":
    sys.exit(main())
