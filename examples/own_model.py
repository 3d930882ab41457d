"""Your own model on two pipeline stages: an `nn.Sequential` whose input is a dictionary.

.venv/bin/python examples/own_model.py                        starts two local ranks
.venv/bin/torchrun --nproc-per-node 2 examples/own_model.py   joins torchrun's two

The task: does token 7 occur in a sequence? The first layers return two tensors, as a dictionary.
"""

import torch
from torch import Tensor, nn

import plait

VOCAB, WIDTH, LENGTH, ROWS, STEPS = 50, 64, 12, 64, 40
Batch = dict[str, Tensor]


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, batch: Batch) -> Batch:
        return {"x": self.table(batch["tokens"]), "mask": batch["mask"]}


class Pool(nn.Module):
    def forward(self, batch: Batch) -> Tensor:
        return (batch["x"] * batch["mask"].unsqueeze(-1)).sum(dim=1)


def make_batch(step: int) -> tuple[Batch, Tensor]:
    """Return the batch of a step, the same on all ranks of the pipeline."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    tokens[::2, 0] = 7
    mask = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
    return {"tokens": tokens, "mask": mask}, ((tokens == 7) & mask).any(dim=1).long()


def train() -> None:
    plan = plait.Plan(pp=2, microbatches=4)
    mesh = plait.Mesh(plan)
    with torch.device("meta"):  # values depend on name and seed, not on the plan
        model = nn.Sequential(
            Embed(), Pool(), nn.Linear(WIDTH, 128), nn.ReLU(inplace=True), nn.Linear(128, 2)
        )
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.01), lr=1e-2)
    for step in range(STEPS):
        loss = engine.forward_backward(*make_batch(step))
        optimizer.step()
        optimizer.zero_grad()
        if mesh.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss:.3f}")
    unseen = engine.evaluate(*make_batch(STEPS))
    if mesh.rank == 0:
        print(f"unseen batch: loss {unseen:.3f}")


plait.launch(train, ranks=2)
