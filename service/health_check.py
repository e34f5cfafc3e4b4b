"""`python -m sightline.service.health_check`: the health check of the image.

It imports nothing of the service, so that it is quick.
"""

import os
import sys
from urllib.request import ProxyHandler, build_opener

TIMEOUT_S = 2.0
ALL_INTERFACES = ("", "0.0.0.0", "::")  # noqa: S104 - nothing is bound to them


def main() -> int:
    """Return 0 if the service of the variables is ready, without a proxy of the environment."""
    host, port = os.environ.get("SIGHTLINE_HOST", "127.0.0.1"), os.environ.get("SIGHTLINE_PORT", "8000")
    host = "127.0.0.1" if host in ALL_INTERFACES else f"[{host}]" if ":" in host else host
    try:
        build_opener(ProxyHandler({})).open(f"http://{host}:{port}/health/ready", timeout=TIMEOUT_S).close()
    except OSError as error:
        print(error)  # noqa: T201 - Docker keeps it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
