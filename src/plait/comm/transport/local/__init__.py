"""Transport between ranks that are threads of one process, of which one runs at a time.

cooperative_scheduler → operations (pending collectives and messages of a group) → transport
"""

from plait.comm.transport.local.cooperative_scheduler import CooperativeScheduler
from plait.comm.transport.local.transport import LocalRank, RankThread, current_local_rank

__all__ = ["CooperativeScheduler", "LocalRank", "RankThread", "current_local_rank"]
