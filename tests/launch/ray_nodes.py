"""A Ray cluster of several nodes on this machine, for tests: told what to do in lines, and ended by their end."""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes = {cluster.head_node.node_id: cluster.head_node}
    print(cluster.address, cluster.head_node.node_id, flush=True)
    try:
        for line in sys.stdin:
            verb, *rest = line.split()
            if verb == "add":
                options = {"num_gpus": int(rest[1])} if len(rest) > 1 else {}
                node = cluster.add_node(num_cpus=int(rest[0]), **options)
                nodes[node.node_id] = node
                print(node.node_id, flush=True)
            else:
                cluster.remove_node(nodes.pop(rest[0]), allow_graceful=False)
                print("removed", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
