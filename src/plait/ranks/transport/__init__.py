"""Transports, which move the bytes of a group: one interface, three implementations.

interface            `Transport`, `RankTransports`, `Pending`
buffers              contiguous buffers, their bytes, and their reduction in rank order
torch_distributed    process groups of torch: Gloo, NCCL
shared_memory        shared memory and sockets between processes of one host; the rest goes over torch
threads              ranks that are threads of one process
process_ranks        the ranks of the world that are processes; `current_ranks`, processes or threads
"""
