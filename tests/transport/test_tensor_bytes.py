import gc

import pytest
import torch

from hocket.transport.tensor_bytes import as_bytes, view_bytes


def test_bytes_are_the_memory_and_keep_it() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    view = view_bytes(tensor)
    view[0:2] = b"\x07\x00"
    assert tensor[0, 0] == 7 and view.nbytes == 12 and view.format == "B"
    del tensor
    gc.collect()
    assert bytes(view) == b"\x07\x00\x01\x00\x02\x00\x03\x00\x04\x00\x05\x00"
    assert [part.nbytes for part in as_bytes([torch.ones(2), torch.ones(0), torch.tensor(1.0)])] == [8, 4]
    with pytest.raises(ValueError, match="not contiguous"):
        view_bytes(torch.ones(2, 3).t())
