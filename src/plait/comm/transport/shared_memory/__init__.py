"""Transport between processes of one host: short messages over Unix sockets, tensors in shared memory.

listener → channel → channels (messages between all ranks of a group) → shared_staging → algorithms
"""
