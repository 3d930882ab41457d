from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.sharding.buffer_specs import StoragePolicy

WIDE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16


def parameter(dtype: torch.dtype, *, trains: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=trains)


def dtypes_of(policy: StoragePolicy, one: nn.Parameter) -> tuple[torch.dtype, ...]:
    """What layers compute with, what the optimizer updates, gradients are added up in, and travel in."""
    return (policy.dtype_of(one), policy.master_of(one), policy.gradient_of(one), policy.reduce_of(one))


@pytest.mark.parametrize(
    ("told", "dtypes"),
    [
        ({}, (WIDE, WIDE, WIDE, WIDE)),
        ({"compute": HALF}, (HALF, HALF, HALF, HALF)),
        ({"compute": HALF, "master": SINGLE}, (HALF, SINGLE, SINGLE, SINGLE)),
        ({"compute": HALF, "gradient": SINGLE}, (HALF, HALF, SINGLE, SINGLE)),
        ({"compute": HALF, "master": SINGLE, "reduce": HALF}, (HALF, SINGLE, SINGLE, HALF)),
        ({"compute": HALF, "master": SINGLE, "gradient": HALF}, (HALF, SINGLE, HALF, HALF)),
        ({"master": SINGLE}, (WIDE, SINGLE, SINGLE, SINGLE)),
        ({"reduce": SINGLE}, (WIDE, WIDE, WIDE, SINGLE)),
    ],
    ids=str,
)
def test_each_dtype_of_a_storage_policy_defaults_to_the_one_before(
    told: dict[str, torch.dtype], dtypes: tuple[torch.dtype, ...]
) -> None:
    assert dtypes_of(StoragePolicy(**told), parameter(WIDE)) == dtypes


def test_integer_tensors_keep_their_dtype() -> None:
    policy = StoragePolicy(compute=HALF, master=SINGLE, gradient=SINGLE, reduce=HALF)
    assert dtypes_of(policy, parameter(torch.int64, trains=False)) == (torch.int64,) * 4


def test_a_frozen_parameter_has_no_master() -> None:
    policy = StoragePolicy(compute=HALF, master=SINGLE)
    frozen = parameter(WIDE, trains=False)
    assert (policy.dtype_of(frozen), policy.master_of(frozen)) == (HALF, HALF)
