"""Your own layers, dataset and loop: which token stands most often in a sequence? On two stages × two shards.

.venv/bin/python examples/roads/research.py
"""

import torch
from torch import nn

import plait

PLAN = plait.Plan(pp=2, dp=2, strategy="full", schedule="zb-h1", microbatches=4)


class Mix(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.glu(self.mix(self.norm(x))).mean(dim=1, keepdim=True)


def train(steps: int) -> float:
    mesh = plait.Mesh(PLAN)
    model = nn.Sequential(nn.Embedding(8, 32), Mix(32), Mix(32), nn.Flatten(), nn.Linear(32 * 15, 8))
    engine = plait.parallelize(model, PLAN, mesh, loss=nn.functional.cross_entropy, broadcast=True)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.01), lr=1e-2)
    tokens = torch.randint(8, (4096, 15), generator=torch.Generator().manual_seed(0))
    data = plait.Loader(torch.utils.data.TensorDataset(tokens, tokens.mode().values), batch=64)
    for step in range(steps):
        loss = engine.forward_backward(*data.share(step, mesh.index("dp"), mesh.size("dp")))
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    print(f"loss of the last step: {plait.launch(train, 60, ranks=PLAN.world)[0]:.3f}")
