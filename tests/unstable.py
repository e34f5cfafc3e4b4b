"""Print and count tests that failed and then passed, a defect of the test or of what it tests.

Run as `python -m tests.unstable FIRST AGAIN` with the JUnit files of a run and of the run that
repeated its failures. `build/unstable.json` keeps how often each test was unstable. The exit status
is 1 if three tests of the run are unstable, or one for the third time.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

RECORD = Path("build/unstable.json")
MOST = 2


def failed(junit: Path) -> set[str]:
    """Return the names of the tests that failed or had an error."""
    return {
        f"{case.get('classname')}::{case.get('name')}"
        for case in ElementTree.parse(junit).iter("testcase")
        if any(outcome.tag in ("failure", "error") for outcome in case)
    }


def main(arguments: Sequence[str], record: Path = RECORD) -> int:
    first, again = (failed(Path(argument)) for argument in arguments)
    counts: dict[str, int] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    unstable = sorted(first - again)
    for name in unstable:
        counts[name] = counts.get(name, 0) + 1
        print(f"unstable: {name} failed and then passed, {counts[name]} times so far; repair it")
    record.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return int(len(unstable) > MOST or any(counts[name] > MOST for name in unstable))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
