"""Checkpoints, and the DTensor edge: how what plait holds is written, read, and shown to torch's own tools.

    saving → writing → tensor_file, manifest      loading → reading
    wholes → converting, huggingface              whole tensors, one at a time, in one process
    inspecting                                    what is in a checkpoint
    folders                                       which checkpoint stands where
    dcp → dcp_planning, dcp_names → dcp_source    to and from torch.distributed.checkpoint
    series                                        the checkpoints of a run
    dtensor, torch_plan                           parameters as DTensors, plans of torch as rules

Inside, every tensor is a plain local one with a `Layout`; a `DTensor` is made here, and nowhere else.
"""
