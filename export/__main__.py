"""`python -m sightline.export zoo`: export the runs of the study."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sightline.base.bundle import BundleError
from sightline.base.errors import exit_status
from sightline.base.options import add_options, check, given_flags
from sightline.export.errors import VerificationError
from sightline.export.options import RunOptions
from sightline.model.systems import SYSTEMS


def main(arguments: Sequence[str] | None = None) -> int:
    """Export all finished runs of `python -m sightline.model zoo`, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sightline.export", description=main.__doc__)
    parser.add_argument("zoo", choices=["zoo"])
    parser.add_argument("runs", type=Path, help="parent folder of the runs")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLES", help="parent folder of the bundles")
    parser.add_argument(
        "--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME", help="export only these"
    )
    parser.add_argument("--lazy", action="store_true", help="let the service load these models on their first use")
    add_options(parser, RunOptions, RunOptions.model_fields)
    parsed = parser.parse_args(arguments)
    from sightline.export.commands import zoo

    try:
        options = check(RunOptions, given_flags(RunOptions, vars(parsed)))
        record = zoo(parsed.runs, parsed.out, parsed.systems, parsed.lazy, options)
    except (OSError, ValueError, BundleError, VerificationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_status(error)
    print(record.model_dump_json(indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
