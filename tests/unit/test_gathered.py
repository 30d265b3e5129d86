"""`Gathered`: what makes a layer look its weights up again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedar.model.gathered import Gathered


def test_the_value_is_made_once_and_again_when_a_parameter_is_another_tensor() -> None:
    linear = nn.Linear(4, 4)
    made: list[Tensor] = []

    def make() -> Tensor:
        made.append(linear.weight)
        return linear.weight

    gathered = Gathered((linear,), make)
    assert gathered.get() is linear.weight
    with torch.no_grad():
        linear.weight.add_(1.0)
    assert gathered.get() is linear.weight
    assert len(made) == 1
    linear.weight = nn.Parameter(torch.zeros(4, 4))
    assert gathered.get() is linear.weight
    assert len(made) == 2
    linear.to(torch.bfloat16)
    gathered.get()
    assert len(made) == 3
    linear.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, assign=True)
    assert gathered.get() is linear.weight
    assert len(made) == 4
