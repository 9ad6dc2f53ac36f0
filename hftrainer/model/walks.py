"""Walks over all modules of a model, made at every step.

torch's own walks make up a name for each module. With many small modules, that takes longer than their computation.
"""

from __future__ import annotations

from torch import nn

#: Methods of `nn.Module` by which a model may choose which parameters it shows.
_SHOWING = ("parameters", "named_parameters", "named_modules")


def is_training(model: nn.Module) -> bool:
    """Whether the model and all modules in it are in training mode."""
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None:
            if not module.training:
                return False
            left.extend(module._modules.values())
    return True


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """`model.parameters()`, in the same order."""
    if any(getattr(type(model), name) is not getattr(nn.Module, name) for name in _SHOWING):
        return list(model.parameters())
    found: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None:
                    found.setdefault(id(parameter), parameter)
            left.extend(reversed(module._modules.values()))
    return list(found.values())


def clear_gradients(model: nn.Module) -> None:
    """`model.zero_grad()`."""
    if "zero_grad" in vars(model) or type(model).zero_grad is not nn.Module.zero_grad:
        model.zero_grad()
        return
    for parameter in parameters(model):
        parameter.grad = None
