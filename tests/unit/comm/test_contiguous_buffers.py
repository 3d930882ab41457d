import pytest
import torch

from plait.comm.contiguous_buffers import as_bytes, dense


@pytest.mark.parametrize("rows", [0, 1])
def test_a_tensor_of_one_element_or_none_has_bytes_whatever_its_stride(rows: int) -> None:
    column = torch.ones(rows, 2)[:, 1]
    flat = as_bytes(dense(column))
    assert flat.tolist() == list(torch.ones(rows).view(torch.uint8))
    flat.zero_()  # the same memory: what arrives there is the tensor's
    assert column.tolist() == [0.0] * rows
