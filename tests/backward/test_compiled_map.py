"""A map compiled by torch.compile, solved and differentiated by loops that are not."""

import torch

from fixpoint import FixedPoint, Implicit, Picard


def test_a_compiled_map_has_the_gradient_of_the_plain_one_at_every_time_step():
    generator = torch.Generator().manual_seed(0)
    u = (0.1 * torch.randn(4, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    x = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    layer = FixedPoint(Picard(rtol=1e-10, atol=0.0), Implicit())

    def phi(z, c, u):
        return torch.tanh(z @ u.T + c)

    def gradient(phi):
        h = x.new_zeros(2, 4)
        for x_t in x:
            c = h + x_t
            h = layer(lambda z, c=c: phi(z, c, u), h.detach()).z
        return torch.autograd.grad(h.square().sum(), u)[0]

    torch._dynamo.reset()
    compiled = torch.compile(phi, backend="eager", dynamic=False)
    assert torch.allclose(gradient(compiled), gradient(phi), rtol=1e-12)
