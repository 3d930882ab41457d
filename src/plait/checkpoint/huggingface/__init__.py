"""Checkpoints from and to folders of Hugging Face (`config.json` and safetensors), in one process, offline.

config_json     the sizes of plait's own models, read from a checkpoint, and from and to config.json
tensor_names    the tensors of plait's own models and those of transformers
export_import   a checkpoint → a folder, and a folder → a checkpoint
"""
