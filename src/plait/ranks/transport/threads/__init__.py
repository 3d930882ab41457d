"""Transport between ranks that are threads of one process, of which one runs at a time.

cooperative_scheduler → operations (pending collectives and messages of a group) → transport
"""
