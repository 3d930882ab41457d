"""What does a sparse layer cost besides its products? Prints counts of a layer and micro-batch, on one rank.

Operations below autograd that are no views, the bytes that they write, and Python's calls but those of the
transport, forward and backward: the difference between a step with four layers and one with two, so that the
rest drops out.
"""

import argparse
import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch
from model import BATCH, batch, config
from plait_ep import add_plan_options
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeForCausalLM

import plait
from plait.models.huggingface import from_huggingface


class OperationCounter(TorchDispatchMode):
    """Counts operations by name, and the bytes of what they return in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = Counter[str](), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.calls[function.__name__.split(".")[0]] += 1
            tensors = result if isinstance(result, tuple | list) else [result]
            self.bytes += sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))
        return result


def counted(layers: int, plan: plait.Plan, experts: int, top_k: int) -> Counter[str]:
    """Counts of a step of rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = config(layers)
    sizes.num_experts, sizes.num_experts_per_tok = experts, top_k
    model = from_huggingface(Qwen3MoeForCausalLM(sizes))
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    rows, index = BATCH // plan.dp, engine.mesh.index("dp")
    given = batch(0, index * rows, (index + 1) * rows)
    for _ in range(2):
        engine.forward_backward(*given)
    with OperationCounter() as operations:
        engine.forward_backward(*given)
    calls = Counter[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        waits = "/ranks/transport/" in frame.f_code.co_filename  # as often as another rank is late
        calls["calls of Python"] += event == "call" and not waits

    sys.setprofile(note)
    engine.forward_backward(*given)
    sys.setprofile(None)
    calls |= {f"aten {name}": count for name, count in operations.calls.items()}
    return calls | Counter({"operations": operations.calls.total(), "bytes written": operations.bytes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_plan_options(parser)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    options = vars(parser.parse_args())
    experts, top_k = options.pop("experts"), options.pop("top_k")
    plan = plait.Plan(**options)
    four, two = (plait.launch(counted, n, plan, experts, top_k, ranks=plan.world)[0] for n in (4, 2))
    for name in sorted(four, key=lambda name: (name.startswith("aten"), two[name] - four[name])):
        if each := (four[name] - two[name]) / 2 / plan.microbatches:
            print(f"{each:12,.1f}  {name}")


if __name__ == "__main__":
    main()
