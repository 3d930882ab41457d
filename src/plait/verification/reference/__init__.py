"""The reference run of a verification: one device, plain PyTorch, every tensor recorded."""
