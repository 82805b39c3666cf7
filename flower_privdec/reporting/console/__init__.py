"""What the command line prints: progress, summaries, plans, graphs and lists."""

from flower_privdec.reporting.console.peers_table import network_progress
from flower_privdec.reporting.console.plans import plan_text, print_plan
from flower_privdec.reporting.console.progress import progress, rounds
from flower_privdec.reporting.console.views import (
    comparison_text,
    print_comparison,
    print_parts,
    print_summary,
    print_topology,
)

__all__ = [
    "comparison_text",
    "network_progress",
    "plan_text",
    "print_comparison",
    "print_parts",
    "print_plan",
    "print_summary",
    "print_topology",
    "progress",
    "rounds",
]
