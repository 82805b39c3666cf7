"""Mixing: the weights of a round's graph, and their application to rows of parameters."""

from flower_privdec.graph.mixing.matrix import AverageMatrix, Hosted, Link, MixingMatrix, SparseMatrix, Term
from flower_privdec.graph.mixing.schedule import Mixing, spectral_gap
from flower_privdec.graph.mixing.weights import mixing_matrix

__all__ = [
    "AverageMatrix",
    "Hosted",
    "Link",
    "Mixing",
    "MixingMatrix",
    "SparseMatrix",
    "Term",
    "mixing_matrix",
    "spectral_gap",
]
