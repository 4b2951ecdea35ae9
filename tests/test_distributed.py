"""Processes with a part of the batch each give the gradients of one with all of it."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import nn

from fixpoint import Anderson, FixedPoint, Implicit


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4).double()
        self.layer = FixedPoint(Anderson(rtol=1e-12, atol=1e-12), Implicit())

    def forward(self, x):
        return self.layer(lambda z: torch.tanh(0.4 * self.linear(z) + x), torch.zeros_like(x)).z


def batch():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def work(rank, folder, processes, device):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
    )
    model = nn.parallel.DistributedDataParallel(Block().to(device))
    rows = batch().chunk(processes)[rank].to(device)
    model(rows).square().mean().backward()
    torch.save([p.grad.cpu() for p in model.parameters()], f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    # gloo's threads outlive DistributedDataParallel's reference to them and now and then abort the
    # interpreter while it shuts down; the gradients are saved, so leave without shutting down.
    os._exit(0)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize(
    ("processes", "device"), [(2, "cpu"), pytest.param(1, "cuda", marks=pytest.mark.gpu)]
)
def test_gradients_equal_those_of_one_process(processes, device, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    torch.multiprocessing.spawn(work, args=(str(tmp_path), processes, device), nprocs=processes)
    model = Block()
    model(batch()).square().mean().backward()
    for rank in range(processes):
        for p, grad in zip(model.parameters(), torch.load(tmp_path / f"{rank}.pt"), strict=True):
            assert torch.allclose(p.grad, grad, rtol=1e-9, atol=1e-12)
