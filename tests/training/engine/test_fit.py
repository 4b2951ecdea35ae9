"""The training loop against a plain loop in torch, and how it counts what is right."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from fixpoint.data import move, random_moves, random_rotations
from fixpoint.models import ERNN, LastStateClassifier
from fixpoint.training import Epoch, Recipe, evaluate, fit, make_task


def model(seed=0):
    torch.manual_seed(seed)
    layer = ERNN(9, 4, rank=2, timesteps=16, batch_first=True)
    return LastStateClassifier(layer, 4, 2)


def train(network, data, **options):
    return list(started(network, data, **options))


def started(network, data, **options):
    settings = {"epochs": 2, "batch_size": 32, "lr": 1e-2, "halve_every": 1, "seed": 0} | options
    training = Recipe().changed(**settings).training
    fabric = Fabric(accelerator="cpu", devices=1)
    return fit(fabric, network, make_task(fabric, data, training), training)


def untimed(epochs):
    return [epoch._replace(seconds=0.0) for epoch in epochs]


def equal_parameters(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_it_lowers_the_loss_and_beats_chance(tiny):
    epochs = train(model(), tiny, epochs=12, lr=2e-2, halve_every=4)
    assert [epoch.number for epoch in epochs] == list(range(1, 13))
    losses = [epoch.train_loss for epoch in epochs]
    assert losses[0] == pytest.approx(math.log(2), abs=0.15)
    assert losses[-1] < losses[0] - 0.1
    # Chance is 50 %, with a s.d. of 5.6 % on 81 windows.
    assert epochs[-1].accuracy > 50 + 3 * 5.6
    assert all(epoch.seconds > 0 for epoch in epochs)


def test_padding_after_the_last_step_changes_nothing(tiny):
    """Sequences of 3 to 16 steps train as with another padding, and the last real step counts."""
    lengths = {f"lengths_{p}": 3 + torch.arange(len(getattr(tiny, f"x_{p}"))) % 14
               for p in ("train", "test")}  # fmt: skip

    def padded(value):
        x = {}
        for part in ("train", "test"):
            whole = getattr(tiny, f"x_{part}")
            real = torch.arange(16)[:, None] < lengths[f"lengths_{part}"].view(-1, 1, 1)
            x[f"x_{part}"] = torch.where(real, whole, value)
        return replace(tiny, **x, **lengths)

    results = []
    for value in (0.0, 7.0):
        network = model()
        results.append((untimed(train(network, padded(value))), network))
    assert results[0][0] == results[1][0]
    assert equal_parameters(results[0][1], results[1][1])
    network, data = results[0][1].eval(), padded(0.0)
    with torch.no_grad():
        logits = network(data.x_test, data.lengths_test)
        for row in range(0, 81, 20):
            alone = network(data.x_test[row : row + 1, : data.lengths_test[row]])
            torch.testing.assert_close(logits[row : row + 1], alone)
    expected = (logits.argmax(1) == data.y_test).double().mean() * 100
    assert results[0][0][-1].accuracy == pytest.approx(expected.item())


def test_it_is_the_plain_loop(tiny):
    """Adam, batches in the order of a generator with the seed, lr halved; bit for bit."""
    given, plain = model(), model()
    epochs = train(given, tiny, epochs=3, halve_every=2, seed=5)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    order = torch.Generator().manual_seed(5)
    for number in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 if number < 2 else 5e-3
        total = 0.0
        for rows in torch.randperm(189, generator=order).split(32):
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(tiny.x_train[rows]), tiny.y_train[rows])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        # Means of six batches, summed in float32.
        assert epochs[number].train_loss == pytest.approx(total / 189, rel=1e-6)
        with torch.no_grad():
            logits = plain(tiny.x_test)
        right = (logits.argmax(1) == tiny.y_test).sum().item()
        assert epochs[number].accuracy == pytest.approx(100 * right / 81)
        assert epochs[number].test_loss == F.cross_entropy(logits, tiny.y_test).item()
    assert equal_parameters(given, plain)


def test_rotations_are_drawn_after_the_order(late):
    """Against a plain loop; the test windows stay as they are, and both are normalized."""
    given, plain = model(), model()
    epochs = train(given, late, epochs=2, batch_size=40, rotate=30.0, seed=5)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    order = torch.Generator().manual_seed(5)
    x, y = late.x_train, late.y_train
    for number in range(2):
        for rows in torch.randperm(63, generator=order).split(40):
            turns = random_rotations(len(rows), 30.0, generator=order)
            turned = (x[rows].view(-1, 48, 3) @ turns.mT).view(-1, 16, 9)
            optimizer.zero_grad()
            F.cross_entropy(plain(late.inputs(turned)), y[rows]).backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] /= 2
        with torch.no_grad():
            logits = plain(late.inputs(late.x_test))
        assert epochs[number].test_loss == F.cross_entropy(logits, late.y_test).item()
    assert equal_parameters(given, plain)


def inputs_seen(data, training, rank=0, world=1):
    """What a process gives its model in an epoch of one batch."""
    task, seen = make_task(Fabric(accelerator="cpu", devices=1), data, training), []
    task.fabric = SimpleNamespace(global_rank=rank, world_size=world, device=torch.device("cpu"))

    def logits(x):
        seen.append(x)
        return torch.zeros(len(x), 2)

    list(task.losses(logits, torch.Generator().manual_seed(0)))
    (x,) = seen
    return x


@pytest.mark.parametrize("sensors", [(), (1, 0, 1)])
@pytest.mark.parametrize("change", [{"rotate": 90.0}, {"move": 1}])
def test_changes_do_not_depend_on_the_number_of_processes(late, sensors, change):
    """Two processes with every other row each see what one with all rows sees."""
    late = replace(late, sensors=sensors, image=(2, 8))
    training = Recipe().changed(**change, batch_size=63).training
    whole = inputs_seen(late, training)
    for rank in (0, 1):
        part = inputs_seen(late, training, rank, 2)
        torch.testing.assert_close(part, whole[rank::2], rtol=0, atol=1e-5)


def test_each_sensor_of_a_window_turns_by_itself(late):
    late = replace(late, sensors=(1, 0, 1))
    seen = inputs_seen(late, Recipe().changed(rotate=90.0, batch_size=63).training)
    order = torch.Generator().manual_seed(0)
    x = late.x_train[torch.randperm(63, generator=order)].unflatten(2, (3, 3))
    turns = random_rotations(2 * 63, 90.0, generator=order).view(63, 2, 3, 3)[:, [1, 0, 1]]
    expected = late.inputs(torch.einsum("bvij,btvj->btvi", turns, x).flatten(2))
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-4)


def test_images_are_moved_after_they_are_rotated(late):
    late = replace(late, image=(2, 8))
    seen = inputs_seen(late, Recipe().changed(move=1, rotate=90.0, batch_size=63).training)
    order = torch.Generator().manual_seed(0)
    x = late.x_train[torch.randperm(63, generator=order)]
    x = (x.view(63, 48, 3) @ random_rotations(63, 90.0, generator=order).mT).view(x.shape)
    moved = move(x, (2, 8), random_moves(63, 1, generator=order))
    torch.testing.assert_close(seen, late.inputs(moved), rtol=0, atol=1e-5)


def test_data_normalized_already_are_not_rotated(tiny):
    with pytest.raises(ValueError, match="har2-sample has none: .* not normalized or with"):
        train(model(), tiny, rotate=10.0)


def test_it_is_deterministic_given_a_seed(tiny):
    first, second, other = model(), model(), model()
    losses = untimed(train(first, tiny))
    torch.rand(7)  # the global generator does not matter
    assert untimed(train(second, tiny)) == losses
    assert equal_parameters(first, second)
    assert untimed(train(other, tiny, seed=1)) != losses
    assert not equal_parameters(first, other)


@pytest.mark.parametrize(
    ("halve_every", "expected"), [(1, [1, 1 / 2, 1 / 4, 1 / 8]), (2, [1, 1, 1 / 2, 1 / 2])]
)
def test_the_learning_rate_halves(tiny, halve_every, expected):
    seen = []
    hook = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"])
    )
    try:
        train(model(), tiny, epochs=4, halve_every=halve_every, batch_size=100)
    finally:
        hook.remove()
    assert seen == [
        1e-2 * fraction for fraction in expected for _ in range(2)
    ]  # two batches an epoch


def test_each_epoch_is_yielded_when_it_is_done(tiny):
    network = model()
    before = [p.detach().clone() for p in network.parameters()]
    epochs = started(network, tiny, batch_size=200)
    first = next(epochs)
    assert first.number == 1
    middle = [p.detach().clone() for p in network.parameters()]
    # Adam's first step is lr in every number with a gradient.
    moved = [(m - b).abs().max().item() for m, b in zip(middle, before, strict=True)]
    assert max(moved) == pytest.approx(1e-2, rel=1e-3)
    assert next(epochs).number == 2
    assert isinstance(first, Epoch)
    assert next(epochs, None) is None


class Table(nn.Module):
    """Logits of the window number x: rows of a table."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        return self.logits[x[:, 0, 0].long()]


NAN = math.nan


def numbers(count):
    return torch.arange(count, dtype=torch.float32).reshape(count, 1, 1)


def test_evaluate_counts_windows_that_are_not_finite_as_wrong():
    logits = torch.tensor([[0.0, 2.0], [0.0, 2.0], [NAN, 9.0], [NAN, NAN], [math.inf, 0.0]])
    y = torch.tensor([1, 0, 1, 0, 0])
    loss, accuracy = evaluate(Table(logits), numbers(5), y)
    assert accuracy == 20.0
    # The other two: log(1 + e^-2) and log(1 + e^2).
    assert loss == pytest.approx((math.log1p(math.exp(-2)) + math.log1p(math.exp(2))) / 2)


def test_evaluate_of_a_nan_window_through_the_model(tiny):
    network = model()
    x = tiny.x_test.clone()
    _, clean = evaluate(network, x, tiny.y_test)
    with torch.no_grad():
        right = (network(x).argmax(1) == tiny.y_test).nonzero().flatten()
    x[right[0], 3] = NAN
    loss, accuracy = evaluate(network, x, tiny.y_test)
    assert accuracy == pytest.approx(clean - 100 / 81)
    assert math.isfinite(loss)


def test_evaluate_with_no_finite_window():
    loss, accuracy = evaluate(Table(torch.full((3, 2), NAN)), numbers(3), torch.zeros(3).long())
    assert accuracy == 0.0
    assert math.isnan(loss)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_evaluate_does_not_depend_on_the_batch_size(batch_size):
    logits = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    y = torch.arange(7) % 2
    expected = evaluate(Table(logits), numbers(7), y)
    assert evaluate(Table(logits), numbers(7), y, batch_size=batch_size) == expected


def test_evaluate_runs_in_eval_mode_without_gradient():
    class Modes(Table):
        def forward(self, x):
            self.seen = (self.training, torch.is_grad_enabled())
            return super().forward(x)

    network = Modes(torch.zeros(2, 2)).train()
    evaluate(network, numbers(2), torch.zeros(2).long())
    assert network.seen == (False, False)
