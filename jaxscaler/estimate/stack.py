"""A cluster as a software stack finds it: what plans predict of runs by others than XLA.

The planner's figures are what the best measured kernels and collectives reach. The constants of
`efficiency.csv` are the shares of that which whole runs of a stack reached (`constants.py`).
"""

from __future__ import annotations

from dataclasses import replace

from jaxscaler.cluster.cluster import Cluster
from jaxscaler.estimate.constants import constants_for


def under_stack(cluster: Cluster, stack: str) -> Cluster:
    """`cluster` with the speeds that a stack reaches of products, memory and collectives.

    Start-up of kernels, attention and waves of tiles stay as the planner has them. Raises
    ConfigError for an unknown stack.
    """
    found = constants_for(cluster.device, stack)
    device = replace(
        cluster.device,
        achievable=min(1.0, cluster.device.achievable * found.matmul),
        hbm_bandwidth=cluster.device.hbm_bandwidth * found.vector,
    )
    levels = tuple(
        replace(
            level,
            link=level.link.faster(found.network if level.link.kind == "network" else found.fabric),
        )
        for level in cluster.levels
    )
    return replace(cluster, device=device, levels=levels)
