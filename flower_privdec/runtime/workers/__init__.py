"""One cohort in blocks of peers, dealt out to processes that share its rows; the same bits for any number of them."""

from flower_privdec.runtime.workers.crew import Crew
from flower_privdec.runtime.workers.dealt_blocks import Dealing, deal
from flower_privdec.runtime.workers.forked import GoneError
from flower_privdec.runtime.workers.starting import start_engine

__all__ = ["Crew", "Dealing", "GoneError", "deal", "start_engine"]
