"""Communication graphs: the directed edges of each round."""

from flower_privdec.catalogue import TOPOLOGIES
from flower_privdec.graph.topology.connectivity import check_topology, joint_connectivity
from flower_privdec.graph.topology.graphs import (
    CompleteTopology,
    DirectedExponential,
    EdgeArray,
    RandomEdges,
    StaticTopology,
    Topology,
    as_networkx,
    edge_array,
    in_neighbors,
)
from flower_privdec.graph.topology.named import build_topology, topology_options

__all__ = [
    "TOPOLOGIES",
    "CompleteTopology",
    "DirectedExponential",
    "EdgeArray",
    "RandomEdges",
    "StaticTopology",
    "Topology",
    "as_networkx",
    "build_topology",
    "check_topology",
    "edge_array",
    "in_neighbors",
    "joint_connectivity",
    "topology_options",
]
