"""Studies: a paper's experiments as a grid of scenarios, run once each, and what they say about its claims."""

from flower_privdec.study.spec import Study, load_study, study_files

__all__ = ["Study", "load_study", "study_files"]
