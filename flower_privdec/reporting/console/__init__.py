"""What the command line prints: progress, summaries, plans, graphs and lists."""

from flower_privdec.reporting.console.progress import network_progress, progress, rounds
from flower_privdec.reporting.console.views import (
    comparison_text,
    plan_text,
    print_comparison,
    print_parts,
    print_plan,
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
