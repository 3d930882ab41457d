"""Proof that a woven run computes what the single device computes, or the first place where it does not.

reference    the single device in plain PyTorch: everything it computes is recorded   (rank 0)
noise        the same again with every number shaken by its rounding: what rounding explains
sharing      each rank gets what it will need of the recording
observer     the woven run, compared instruction by instruction
report       all ranks' findings: equal, or the first difference and what probably caused it
"""
