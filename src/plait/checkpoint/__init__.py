"""Checkpoints: saved under one layout, loaded under any; and conversion to and from formats of torch.

    saving → save_task → tensor_file, manifest       save: agree on all ranks, then write in the background
    loading → compatibility, box_reader              load: check everything, then read each rank's shards
    checkpoint_manager                               saves a run repeatedly and removes old checkpoints
    snapshots                                        the same in shared memory, for ranks that are restarted
    folders, file_system_calls                       names of folders, atomic creation, file system calls
    box_reader → rewriting, huggingface              full tensors, one at a time, in one process
    inspecting                                       the contents of a checkpoint
    dcp → dcp_reader → pickle_reader; dcp_keys       to and from torch.distributed.checkpoint
    dtensor                                          shards as DTensors

Inside, every tensor is a plain local tensor with a `Layout`; only `dtensor` makes a `DTensor`.
"""

from typing import Any

from plait.package import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
