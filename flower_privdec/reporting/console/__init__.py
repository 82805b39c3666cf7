"""What the command line prints: progress, summaries, plans, graphs and lists."""

from flower_privdec.reporting.console.plans import print_plan
from flower_privdec.reporting.console.progress import progress
from flower_privdec.reporting.console.views import print_comparison, print_parts, print_summary, print_topology

__all__ = [
    "print_comparison",
    "print_parts",
    "print_plan",
    "print_summary",
    "print_topology",
    "progress",
]
