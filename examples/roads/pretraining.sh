#!/bin/sh
# From a folder of texts to a trained model, in a folder with texts/: prepare, train on four ranks (two pipeline
# stages, each cut over two tensor-parallel ranks), go on with the parameters sharded over two data-parallel ranks,
# export for transformers. Options of `plait train` may follow.
set -e
options="--data.source corpus --model.name llama --model.layers 2 --model.hidden 64 --model.context 128 --train.batch 16
    --train.microbatches 2 --train.lr 3e-3 --train.steps 60 --train.validate_every 20 --run.save_every 20"
plait data prepare texts corpus --tokenizer bytes
plait train $options --train.steps 40 --parallel.pp 2 --parallel.tp 2 "$@"
plait train $options --run.resume auto --parallel.dp 2 --parallel.strategy full --train.sample 'def ' --train.sample_tokens 80 "$@"
plait checkpoint export runs/latest/checkpoints exported --format huggingface
