"""Flower deployments on this machine: where a round's time goes, and what becomes of a run when a part of it fails.

python -m tools.flower_deployed           # seconds of a round, by part
python -m tools.flower_deployed.events    # killed, restarted, stopped, guarded: what happens
"""
