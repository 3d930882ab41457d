#!/bin/sh
# From conversations and a model of Hugging Face to a fine-tuned model, in a folder with chats.jsonl and model/:
# train all of it, export for transformers; then train adapters (LoRA) on it, export them for peft. Options of
# `plait train` may follow.
set -e
plait train --model.name model --data.source chats.jsonl --data.validation_source chats.jsonl --train.batch 8 \
    --train.steps 80 --train.microbatches 1 --train.lr 5e-3 --train.validate_every 20 --parallel.tp 2 --run.dir runs/all \
    --train.sample 'What is the capital of Norway?' "$@"
plait checkpoint export runs/all/checkpoints tuned --format huggingface
plait train --model.name tuned --data.source chats.jsonl --data.validation_source chats.jsonl --train.batch 8 \
    --train.steps 20 --train.microbatches 2 --model.lora.rank 4 --parallel.pp 2 --run.dir runs/adapter "$@"
plait checkpoint export runs/adapter/checkpoints adapter --format peft
