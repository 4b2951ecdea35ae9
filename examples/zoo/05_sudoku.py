"""
A reasoner of 4 x 4 Sudoku, started many times
==============================================

A tiny network reads its own proposal over and over, until it agrees with it::

    z = phi(z) = norm(x + mlp(z, means of z over each cell's row, column and box)),

16 cells of 32 features, x the given digits. It trains from random starts, with the gradient of the
last four updates, as recursive reasoners do. An answer that breaks a rule keeps changing, and so
its residual tells it from a right one, without the solution. Each puzzle is started 16 times and
the start of the least residual answers: more thinking, no more training. It trains on puzzles of
five digits; those of the test have four, and belong to 88 of the 288 grids that it has not seen.
"""

from itertools import permutations

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from fixpoint import Phantom, Picard
from fixpoint.models import DEQ

STEPS, STARTS, H = 40, 16, 32
cell = torch.arange(16)
groups = torch.stack([cell // 4, cell % 4, cell // 8 * 2 + cell % 4 // 2])  # row, column, box
means = (groups[:, :, None] == groups[:, None]).float() / 4  # (3, 16, 16)


def all_grids() -> Tensor:
    """List the 288 grids, (288, 16), digits 0 to 3."""
    lines = torch.tensor(list(permutations(range(4))))
    grids = lines[torch.cartesian_prod(*[torch.arange(24)] * 4)].flatten(1)
    for group in groups:
        parts = grids[:, group.argsort()].view(-1, 4, 4)
        grids = grids[(parts.sort(2).values == cell[:4]).all((1, 2))]
    return grids


def puzzles(known: Tensor, count: int, digits: int) -> tuple[Tensor, Tensor]:
    """Draw `count` puzzles, and keep those with one solution, (B, 16, 5); and the solutions."""
    solutions = known[torch.randint(len(known), (count,))]
    given = torch.rand(count, 16).argsort(1) < digits
    fits = ((grids == solutions[:, None]) | ~given[:, None]).all(2).sum(1) == 1
    seen = torch.where(given, solutions, 4)
    return nn.functional.one_hot(seen[fits], 5).float(), solutions[fits]


class Proposal(nn.Module):
    """phi(z, x) of (B, 16, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4 * H, 64), nn.GELU(), nn.Linear(64, H))
        self.norm = nn.LayerNorm(H)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        heard = torch.einsum("gij,bjh->bigh", means, z).flatten(2)
        return self.norm(x + self.mlp(torch.cat([z, heard], 2)))


torch.manual_seed(0)
grids = all_grids()[torch.randperm(288)]
embed, head = nn.Linear(5, H), nn.Linear(H, 4)
solver = Picard(max_iter=12, rtol=0, atol=0)  # twelve updates, and no tolerance in training
deq = DEQ(Proposal(), solver, Phantom(4, value="last"), on_failure="ignore")
optimizer = torch.optim.AdamW([*deq.parameters(), *embed.parameters(), *head.parameters()], lr=3e-3)
for _ in range(STEPS):
    x, solution = puzzles(grids[:200], 512, digits=5)
    optimizer.zero_grad()
    z = deq(embed(x), torch.randn(len(x), 16, H))
    nn.functional.cross_entropy(head(z).transpose(1, 2), solution).backward()
    optimizer.step()

x, solution = puzzles(grids[200:], 4096, digits=4)
with torch.no_grad():
    z0 = torch.randn(len(x) * STARTS, 16, H)
    z = deq(embed(x).repeat_interleave(STARTS, 0), z0, max_iter=30, rtol=1e-3)
right = (head(z).argmax(2).view(-1, STARTS, 16) == solution[:, None]).all(2)
residual = deq.solution.residual.view(-1, STARTS)
counts, accuracies = (1, 2, 4, 8, 16), []
for count in counts:
    best = residual[:, :count].argmin(1, keepdim=True)
    accuracies.append(right.gather(1, best).float().mean().item())
print(f"{len(x)} puzzles: {accuracies[0]:.3f} solved by one start, {accuracies[-1]:.3f} by 16")
ordered = right.flatten()[residual.flatten().argsort()].float()  # by residual
tenth = len(ordered) // 10
print(f"right: {ordered[:tenth].mean():.3f} of the tenth of starts with the least residual,")
print(f"{ordered[-tenth:].mean():.3f} of that with the largest")

_, (left, axes) = plt.subplots(1, 2, figsize=(6.4, 3), layout="constrained")
logs = residual.log10()
left.hist([logs[right], logs[~right]], 40, stacked=True, label=["right", "wrong"])
left.set(xlabel="residual / tolerance, log10", ylabel="starts")
left.legend()
axes.semilogx(counts, accuracies, "o-", base=2)
axes.set(xlabel="starts a puzzle", ylabel="solved by the least residual")
plt.show()
