"""
An implicit graph network
=========================

Zachary's karate club: 34 members, 78 friendships, and two factions after a quarrel between its
trainer (member 0) and its manager (member 33). Of all labels the network sees those two alone, and
these two members alone have an input. Its layer is ::

    Z = phi(Z) = tanh(A Z W + X),   ||W|| = 0.95,

with A the adjacency matrix over sqrt(degrees), ||A|| = 1: rounds of messages until nothing changes.
Their number is not a choice of the architecture, and training keeps the memory of one. The
members depend on each other, so that the club is one sample: batched=False. Zachary's own model, a
flow between the two leaders, tells the faction of all members but number 8.
"""

import matplotlib.pyplot as plt
import networkx
import torch
from torch import Tensor, nn

from fixpoint import Anderson
from fixpoint.models import DEQ, bound_spectral_norm

torch.manual_seed(0)
H = 8
club = networkx.karate_club_graph()
A = torch.tensor(networkx.to_numpy_array(club, weight=None), dtype=torch.float32)
A = A / (A.sum(0)[:, None] * A.sum(0)).sqrt()
faction = torch.tensor([club.nodes[i]["club"] == "Officer" for i in club]).long()
seen = torch.tensor([0, 33])


class Rounds(nn.Module):
    """phi(Z, X) = tanh(A Z W + X), Z and X (34, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.W = bound_spectral_norm(nn.Linear(H, H, bias=False), bound=0.95)
        self.W.weight = torch.eye(H)  # the start: hand on what is heard

    def forward(self, Z: Tensor, X: Tensor) -> Tensor:
        return torch.tanh(A @ self.W(Z) + X)


given = torch.zeros(34, 2)
given[seen] = torch.eye(2)
deq = DEQ(Rounds(), Anderson(rtol=1e-5))
inputs, head = nn.Linear(2, H, bias=False), nn.Linear(H, 2)
parameters = [*deq.parameters(), *inputs.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=0.01, weight_decay=5e-3)
for _ in range(60):
    optimizer.zero_grad()
    scores = head(deq(inputs(given), torch.zeros(34, H), batched=False))
    nn.functional.cross_entropy(scores[seen], faction[seen]).backward()
    optimizer.step()
wrong = (scores.argmax(1) != faction).nonzero().flatten().tolist()
print(f"{34 - len(wrong)} of 34 members in their faction; not so: {wrong}")
print(deq.solution)

# %%
# The color of each member is the network's probability, its outline the faction that it joined.
probability = scores.softmax(1)[:, 1].detach().numpy()
_, (left, right) = plt.subplots(1, 2, figsize=(6.8, 3.2), layout="constrained", width_ratios=(3, 2))
places = networkx.spring_layout(club, seed=3, iterations=200)
edges = ["C3" if joined else "C0" for joined in faction]
networkx.draw_networkx(
    club, places, ax=left, node_color=probability, cmap="coolwarm", vmin=0, vmax=1,
    edgecolors=edges, linewidths=2, edge_color="0.8", font_size=8,
)  # fmt: skip
left.axis("off")
order = probability.argsort()
right.bar(range(34), probability[order], color=[edges[i] for i in order])
right.axhline(0.5, color="k", linestyle=":")
right.set(xlabel="member, sorted", ylabel="probability of the manager's faction")
plt.show()
