"""A cluster of two nodes on this machine that serves, and loses a node at each line of its input.

Another node takes the place of the lost one. Its arguments are those of `sightline serve --ray`.
"""

import argparse
import signal
import sys
from pathlib import Path

import ray
from ray import serve
from ray.cluster_utils import Cluster

from sightline.service.ray_app import application
from sightline.service.settings import make_settings, read_flags, service_parser


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--metrics-targets", type=Path)
    options, words = parser.parse_known_args()
    settings = make_settings(read_flags(service_parser(), words))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    ray.init(cluster.address)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    try:
        # All nodes have the same address here, so only one can have a proxy.
        serve.start(proxy_location="HeadOnly", http_options={"host": settings.host, "port": settings.port})
        serve.run(application(settings, options.metrics_targets), name="sightline")
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            cluster.remove_node(node, allow_graceful=False)
            node = cluster.add_node(num_cpus=1)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
