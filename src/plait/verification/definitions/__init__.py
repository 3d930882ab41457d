"""Functions and layers written out from their definitions, for the reference run, in place of plait's code.

documents      which positions are of one document, and the position in it
attention      softmax attention, with a mask of all pairs
rotary         frequencies, their scaling, the rotation of pairs
layers         the layers of plait's own models; `huggingface`: those around modules of transformers
functions      `plait.attention`, `plait.positions` and the others that layers of users call
"""
