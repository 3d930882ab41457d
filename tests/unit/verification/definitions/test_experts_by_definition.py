"""Routers and experts by definition give what plait's own give, of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parity.norm import assert_equal
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.gated_activation import GatedActivation
from plait.tensor.experts.router import Router
from plait.tensor.experts.routing import Routing
from plait.verification.definitions.attention_and_dropout import Definitions
from plait.verification.definitions.experts import FORWARDS, experts_of_largest

HIDDEN, EXPERTS, TOP_K, TOKENS = 8, 12, 3, 40
ROUTINGS = {
    "softmax": Routing(),
    "not normalized": Routing(normalized=False, scale=2.0),
    "of chosen": Routing(scores="softmax_of_chosen"),
    "groups": Routing(scores="sigmoid", corrected=True, groups=4, chosen_groups=2, scale=2.5),
    "corrected": Routing(corrected=True),
}
ACTIVATION = GatedActivation(slope=1.702, offset=1.0, limit=0.5, interleaved=True)


def results(modules: list[nn.Module], by_definition: bool) -> dict[str, Tensor]:
    router, experts = modules
    if by_definition:
        Definitions().install(modules, FORWARDS)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits, weights, indices = router(hidden.requires_grad_())
    output = experts(hidden, indices, weights)
    for parameter in (*router.parameters(), *experts.parameters()):
        parameter.grad = None
    (output.square().sum() + logits.square().sum()).backward()
    assert hidden.grad is not None
    found = {"output": output.detach(), "logits": logits.detach(), "input": hidden.grad}
    for name, module in (("router", router), ("experts", experts)):
        found |= {f"{name}.{path}": one.grad for path, one in module.named_parameters()}  # type: ignore[misc]
    return {**found, "indices": indices}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["plain", "gpt-oss", "weights first"])
def test_definitions_of_routers_and_experts_give_what_plait_computes(routing: str, kind: str) -> None:
    has_bias = kind == "gpt-oss"
    router = Router(HIDDEN, EXPERTS, TOP_K, routing=ROUTINGS[routing], bias=has_bias)
    options = {"bias": True, "transposed": True, "activation": ACTIVATION} if has_bias else {}
    experts = Experts(HIDDEN, 6, EXPERTS, weights_first=kind == "weights first", **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    for module in (router, experts):
        for tensor in (*module.parameters(), *module.buffers()):
            nn.init.normal_(tensor, std=0.5)
    modules = [router.double(), experts.double()]
    own, defined = results(modules, False), results(modules, True)
    assert torch.equal(own.pop("indices"), defined.pop("indices"))
    assert_equal(own, defined, 1e-12, "a result")


def test_of_equal_scores_the_lowest_number_is_chosen() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, -torch.inf, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    chosen, margins = experts_of_largest(Routing(), scores, None, 3)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2]]
    assert margins.tolist() == [1.0, 0.0]


def test_a_choice_of_all_experts_has_an_infinite_margin() -> None:
    assert experts_of_largest(Routing(), torch.rand(2, 3), None, 3)[1].isinf().all()


def test_the_margin_between_groups_counts() -> None:
    """Groups add up to 5.0, 4.9 and 1; within the first the scores are 2 apart."""
    routing = Routing(scores="sigmoid", groups=3)
    scores = torch.tensor([[3.5, 1.5, 4.8, 0.1, 0.5, 0.5]], dtype=torch.float64)
    chosen, margins = experts_of_largest(routing, scores, None, 1)
    assert chosen.tolist() == [[0]]
    torch.testing.assert_close(margins, torch.tensor([0.1], dtype=torch.float64))


def test_padding_has_no_experts() -> None:
    router, book = Router(HIDDEN, EXPERTS, TOP_K), Definitions()
    book.install([router], FORWARDS)
    with book.running(torch.tensor([[0, -1], [-1, 3]])):
        indices = router(torch.randn(4, HIDDEN))[2]
    assert (indices == -1).all(-1).tolist() == [False, True, True, False]
