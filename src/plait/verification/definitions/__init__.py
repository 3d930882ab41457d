"""Functions and layers written out from their definitions, for the reference run, in place of plait's code.

functions      attention, positions, documents and dropout, which layers of users call
rotary         frequencies, their scaling, the rotation of pairs
experts        routers and experts; `router_losses`: their auxiliary losses and corrections
layers         the layers of plait's own models; `huggingface`: those around modules of transformers
float8         linears in 8 bits; `float8_linear_selection`: which linears of a model are; `float8_experts`
"""
