"""Large buffers come back when no tensor looks into them any more, and not before."""

import threading

import pytest
import torch

from fixpoint.models.ops.common import buffers as _buffers
from fixpoint.models.ops.common.buffers import empty


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(_buffers, "SMALL", 0)
    monkeypatch.setattr(_buffers, "_free", [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), (0, 4)])
def test_it_is_torch_empty(dtype, shape):
    given = empty(shape, torch.zeros(1, dtype=dtype))
    assert (given.shape, given.dtype, given.is_contiguous()) == (shape, dtype, True)
    assert given.data_ptr() % _buffers.ALIGNED == 0 or given.numel() == 0
    assert torch.equal(given.fill_(2), torch.full(shape, 2, dtype=dtype))


def test_a_block_is_used_again_once_no_one_looks_into_it():
    like = torch.zeros(1)
    first = empty((50, 3), like)
    place, view = first.data_ptr(), first[1:].fill_(1)
    del first
    other = empty((50, 3), like).fill_(2)
    assert other.data_ptr() != place
    assert (view == 1).all()
    del view
    assert empty((51, 3), like).data_ptr() != place  # of another size
    assert empty((50, 3), like).data_ptr() == place


def test_no_more_than_the_limit_is_kept(monkeypatch):
    monkeypatch.setattr(_buffers, "LIMIT", 3 * (400 + _buffers.ALIGNED))
    kept = [empty((100,), torch.zeros(1)) for _ in range(5)]
    del kept
    assert len(_buffers._free) == 3


def test_no_two_threads_get_one_block():
    def work(number):
        for _ in range(300):
            buffer = empty((64,), torch.zeros(1)).fill_(number)
            if not bool((buffer == number).all()):
                wrong.append(number)

    wrong = []
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
