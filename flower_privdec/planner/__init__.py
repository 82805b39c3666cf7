"""What a run would cost, before it starts: noise, ε over the rounds, the best K, memory, time, what is unsound."""

from flower_privdec.planner.plan import make_plan

__all__ = ["make_plan"]
