"""Checkpoints from and to folders of Hugging Face: `config.json` and safetensors. In one process, offline.

sizes       of plait's own models: all that such a folder says of a model
naming      which of their tensors is which of ours
configs     sizes from and to config.json
exporting   a checkpoint → a folder        importing   a folder → a checkpoint
"""
