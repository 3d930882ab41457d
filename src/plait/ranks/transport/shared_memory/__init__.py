"""Transport between processes of one host: short messages over Unix sockets, tensors in shared memory.

channel → group_channels (messages between all ranks of a group) → shared_staging → transport
"""
