import torch

from plait.ranks.transport.buffers import as_bytes, copy_out, dense, output_buffer


def test_a_tensor_of_one_element_or_none_has_bytes_whatever_its_stride() -> None:
    for rows in (0, 1):
        column = torch.ones(rows, 2)[:, 1]
        flat = as_bytes(dense(column))
        assert flat.tolist() == list(torch.ones(rows).view(torch.uint8))
        flat.zero_()  # the same memory: what arrives there is the tensor's
        assert column.tolist() == [0.0] * rows


def test_a_received_tensor_is_copied_only_for_another_dtype_or_stride() -> None:
    plain, strided = torch.zeros(2, 3), torch.zeros(3, 2).t()
    received = output_buffer(plain, plain.shape, plain)
    assert received.data_ptr() == plain.data_ptr()
    assert copy_out(torch.ones(2, 3), plain) is plain
    assert plain.sum() == 0, "it was received into"
    received = output_buffer(strided, strided.shape, strided.double())
    assert (received.dtype, received.shape) == (torch.float64, (2, 3))
    assert received.is_contiguous()
    assert copy_out(received.fill_(1.0), strided) is strided
    assert strided.sum() == 6
    assert copy_out(received, None) is received
    assert output_buffer(None, [4], plain).shape == (4,)
