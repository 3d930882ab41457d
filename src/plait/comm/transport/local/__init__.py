"""Ranks that are threads of one process, of which one runs at a time.

turns (which thread runs; deadlocks) → calls (collectives and messages of a group) → transport (a rank's view)
"""

from plait.comm.transport.local.transport import LocalRank, RankThread, current_local_rank
from plait.comm.transport.local.turns import Turns

__all__ = ["LocalRank", "RankThread", "Turns", "current_local_rank"]
