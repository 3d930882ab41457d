"""A training of two ranks by an installed plait, which `.ci/package` runs outside of the repository."""

from __future__ import annotations

from pathlib import Path

import torch

import plait


def train(tokens: torch.Tensor) -> float:
    """Return the loss after ten steps on this rank's stage of a small GPT."""
    plan = plait.Plan(pp=2, schedule="zb-h1", microbatches=4)
    model = plait.models.gpt2(layers=2, hidden=32, heads=2, vocab=64, context=16)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=1e-2)
    for _ in range(10):
        loss = engine.forward_backward(tokens[:, :-1], tokens[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    package = Path(plait.__file__).parent
    assert "site-packages" in package.parts, f"plait comes from {package}, not from the installed wheel"
    assert (package / "py.typed").is_file()
    losses = plait.launch(train, torch.arange(8 * 17).reshape(8, 17) % 64, ranks=2)
    assert losses[0] == losses[1] < 4.0, losses
    print(f"two ranks trained: loss {losses[0]:.2f}")
