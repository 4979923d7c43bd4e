"""A training of which every sample counts in the result, and what one process makes of it: for laws across engines."""

import json
import sys
from pathlib import Path

SCRIPT = Path(__file__)
ROWS, BATCH = 24, 12  # samples, and those of a global batch


def train(part: int) -> list[float]:
    """The parameters after two epochs in batches of ``part`` samples for each worker."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import hocket

    hocket.init()
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(ROWS, 3)
    data = TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = hocket.distribute(model, optimizer, DataLoader(data, batch_size=part))
    for _ in range(2):
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


if __name__ == "__main__":
    found = train(int(sys.argv[2]))
    import hocket

    if hocket.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
