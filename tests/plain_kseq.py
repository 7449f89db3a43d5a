"""The row of K-SEQ by torch and by bisection, in float64: what the compiled one is compared with."""

import torch
from torch import Tensor

from foretoken.verify.kseq import first_pass, solve_rho


def row(p: Tensor, q: Tensor, draws: tuple[int, ...]) -> Tensor:
    target, draft = p.double() / p.double().sum(), q.double() / q.double().sum()
    rho = solve_rho(target, draft, len(draws))
    passing = torch.minimum(draft, target / rho)
    c = torch.minimum(first_pass(passing.sum().clamp(max=1), len(draws)), rho)
    found, reach = torch.zeros_like(target), torch.ones_like(rho)
    for x in draws:
        accept = passing[x] / draft[x]
        found[x] += reach * accept
        reach = reach * (1 - accept)
    residual = (target - c * passing).clamp(min=0)
    return (found + reach * residual / residual.sum()).to(p.dtype)
