"""Several Ray nodes on this machine, for trying what runs on many: they end with this script.

    python scripts/local_cluster.py [--nodes 3] [--cpus 4] [--object-store-mb 100]

Prints the address once all are up, to be given to a run:

    staleflow run cluster.address=127.0.0.1:6399

Each node is a raylet of its own, with its own object store, processes and, in a run, its own weights in
shared memory. CPUs are only counted, so there may be more of them than the machine has. `kill -USR1` of the
script's process adds a node.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The nodes' processes inherit it: one thread each unless a part asks for more.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    """Start, print, wait for Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--cpus", type=int, default=4, help="CPUs that each node says it has")
    parser.add_argument("--object-store-mb", type=int, default=100, help="of each node")
    parser.add_argument(
        "--address-file", type=Path, help="where the address is written, too, when all are up"
    )
    options = parser.parse_args()
    if options.nodes < 1 or options.object_store_mb < 76:
        parser.error("--nodes is at least 1, and Ray's object store at least 76 MB")

    from staleflow.runtime.backends.ray.connect import use_token

    use_token()  # as `ray start` and a run with cluster.address do, which then agree
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": options.cpus, "object_store_memory": options.object_store_mb * 2**20}
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: stopped.append(n))
    wanted = [options.nodes]
    signal.signal(signal.SIGUSR1, lambda *_: wanted.append(1))

    def own(number: int) -> dict[str, float]:
        """A resource of each node's own, so that a config can say what is to run there."""
        return {f"node_{number}": options.cpus}

    head = {**arguments, "include_dashboard": False, "resources": own(0)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = 1
    try:
        while nodes < options.nodes and not stopped:
            cluster.add_node(**arguments, resources=own(nodes))
            nodes += 1
        print(f"{options.nodes} nodes, {options.nodes * options.cpus} CPUs; Ctrl-C ends them")
        print(f"cluster.address={cluster.address}", flush=True)
        if options.address_file is not None:
            aside = Path(tempfile.mkstemp(dir=options.address_file.parent)[1])
            aside.write_text(cluster.address)
            aside.replace(options.address_file)
        while not stopped:
            time.sleep(0.2)
            while nodes < sum(wanted):
                cluster.add_node(**arguments, resources=own(nodes))
                nodes += 1
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
