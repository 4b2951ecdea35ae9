"""
A market, and the tax that reaches a goal
=========================================

Sixty traders own five goods and buy with constant elasticity of substitution σ. Prices p clear the
market where the demand of each good is its supply. In logarithms the excess demand

    F(z) = log demand(p) - log supply,   z = log p,

has a root z*: the equilibrium. Demand is unchanged when all prices double, so money is fixed by
p_1 = 1 and the market of good 1 clears by itself (Walras): four equations in four prices.

A tax τ on wealth is paid out in equal parts. Which τ makes the poorest tenth twice as well off?
The slope dp/dτ, by the implicit function theorem at the equilibrium, is what Newton needs to know.
"""

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fixpoint import Implicit, Newton, Root

torch.manual_seed(0)
torch.set_printoptions(precision=4)
TRADERS, GOODS = 60, 5
owned = torch.rand(TRADERS, GOODS, dtype=torch.float64) * torch.logspace(-1, 0.5, TRADERS)[:, None]
taste = torch.softmax(torch.randn(TRADERS, GOODS, dtype=torch.float64), 1)
