"""A model and its optimizer in the shards of torch's distributed checkpoints."""

import torch

from hftrainer.checkpointing.sharded import model_state, optimizer_state, save_shards
from tests.support.small_models import make_plain


def make_stepped():
    model = make_plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8), torch.tensor([0, 1]))["loss"].backward()
    optimizer.step()
    return model, optimizer


def write_shards(folder, **settings):
    model, optimizer = make_stepped()
    optimizer.param_groups[0].update(settings)
    states = {"model": model_state(model, full=False), "optimizer": optimizer_state(model, optimizer, full=False)}
    save_shards(states, folder)
    return model
