"""Corpora, tokenizers, prepared token shards, and the order of training batches."""
