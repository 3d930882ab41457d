"""A model of Hugging Face with LoRA, on packed documents of unequal length, each cut over two ranks (`cp`).

.venv/bin/python examples/gallery/packed_fine_tuning.py       needs transformers

Short documents fill rows of a fixed length. Attention stays within a document, and positions begin anew in
each. The documents: numbers that go up by equal steps. A trained model would come from `from_pretrained`.
"""

import torch
import transformers
from torch import Tensor, nn

import plait

PLAN = plait.Plan(cp=2, microbatches=2)
VOCAB, LENGTH, ROWS, STEPS = 32, 48, 8, 25
Batch = tuple[dict[str, Tensor], Tensor]


def build_model() -> nn.Sequential:
    """Return the layers of a small Llama, frozen, with trained adapters at all linears but the head."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
    )
    torch.manual_seed(0)  # the same values on every rank
    model = transformers.LlamaForCausalLM(config)
    return plait.lora(plait.models.from_huggingface(model), rank=8, alpha=16)


def make_documents(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    return [(draw(0, VOCAB) + draw(1, 4) * torch.arange(draw(4, 24))) % VOCAB for _ in range(count)]


def pack(documents: list[Tensor]) -> Batch:
    """Return `ROWS` rows of whole documents, each in the first row that has room for it, and their targets.

    A document's inputs are all its tokens but the last, its targets all but the first. The rest of a row has
    targets of -100, which do not count, and is a document of its own.
    """
    tokens, targets = torch.zeros(ROWS, LENGTH, dtype=torch.long), torch.full((ROWS, LENGTH), -100)
    ids, used = torch.zeros(ROWS, LENGTH, dtype=torch.long), [0] * ROWS
    for number, document in enumerate(documents, start=1):
        size = len(document) - 1
        row = next((row for row in range(ROWS) if used[row] + size <= LENGTH), None)
        if row is not None:
            place = slice(used[row], used[row] + size)
            tokens[row, place], targets[row, place], ids[row, place] = document[:-1], document[1:], number
            used[row] += size
    return {"tokens": tokens, "document_ids": ids}, targets


def train() -> tuple[list[float], int]:
    """Return the losses, and the number of tokens that the last one is a mean over."""
    model = build_model()
    engine = plait.parallelize(model, PLAN, plait.Mesh(PLAN), loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        losses.append(engine.forward_backward(*pack(make_documents(step, count=40))).item())
        engine.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    return losses, int(engine.loss_weight())


def main(ranks_as: str = "processes") -> None:
    losses, counted = plait.launch(train, ranks=PLAN.world, ranks_as=ranks_as)[0]
    every = list(build_model().parameters())
    trained = sum(one.numel() for one in every if one.requires_grad)
    print(f"{trained:,} of {sum(one.numel() for one in every):,} parameters are trained")
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
    print(f"{counted} of {ROWS * LENGTH} positions count in the last step")
    inputs, targets = pack(make_documents(0, count=40))
    print(plait.verify(build_model, PLAN, inputs, targets, ranks_as=ranks_as).headline())


if __name__ == "__main__":
    main()
