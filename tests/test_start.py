"""What makes processes of tests start quickly changes nothing that they do."""

import subprocess
import sys

CODE = """
import sys, torch
parameter = torch.nn.Parameter(torch.ones(2))
for kind in (torch.optim.SGD, torch.optim.Adam):
    optimizer = kind([parameter], lr=0.5)
    (parameter ** 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert parameter.grad is None and not torch.equal(parameter, torch.ones(2))
assert torch.is_grad_enabled() and "torch._dynamo" not in sys.modules
import torch._dynamo
assert torch.compile(lambda x: x + 1, backend="eager")(parameter).requires_grad
(parameter ** 2).sum().backward()
optimizer.step()
optimizer.zero_grad()
assert parameter.grad is None
"""


def test_torch_is_as_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
