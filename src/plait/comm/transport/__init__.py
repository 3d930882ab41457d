"""How bytes travel between the ranks of a group: one interface, three implementations.

interface            what a group asks of a transport, and a rank of its world
reduction            sums, means and the like of the ranks' tensors, in rank order
torch_distributed    process groups of torch: Gloo, NCCL
shared_memory        memory and sockets between processes of one host; all else goes over torch
local                ranks that are threads of one process
"""
