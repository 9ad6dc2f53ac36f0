"""Checkpoints of a device resume exactly with its random states, and are saved in the background."""

import threading
from collections import OrderedDict, defaultdict

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing import ProcessExitedException

from hftrainer import TrainerCallback
from hftrainer.checkpointing.writing import writer
from hftrainer.checkpointing.writing.files import HostCopies
from tests.gpu import ranks
from tests.gpu.support import DEVICE, HERE, assert_same_weights, build, train

#: 20 optimizer steps in two epochs of 10; steps 7 and 14 are in the middle of each.
SAVING = {**HERE, "save_strategy": "steps", "save_steps": 7}


def test_resume_after_kill_is_exact(tmp_path):
    """BERT has dropout in each layer, whose masks come from the device's own generator."""
    whole = train("hftrainer", "bert", tmp_path / "whole", **SAVING)
    with pytest.raises(ProcessExitedException) as ended:
        ranks.run(ranks.train_until_killed, 1, "bert", tmp_path / "killed", SAVING)
    assert ended.value.signal_name == "SIGKILL"
    states = torch.load(tmp_path / "killed/checkpoint-14/rng_state.pth", weights_only=False)
    assert isinstance(states[DEVICE], torch.Tensor)
    resumed = train("hftrainer", "bert", tmp_path / "killed", resume=True, **SAVING)
    assert resumed.logs[:-1] == whole.logs[:-1]  # the last has the mean loss of its own steps
    assert_same_weights(resumed.weights, whole.weights)


class Copies(TrainerCallback):
    def __init__(self):
        self.at, self.later = {}, threading.Event()

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        if control.should_save:
            averages = {name: optimizer.state[value]["exp_avg"] for name, value in model.named_parameters()}
            pairs = (model.state_dict(), averages)
            self.at[state.global_step] = [{name: value.clone() for name, value in each.items()} for each in pairs]
        if state.global_step == 4:
            self.later.set()


@pytest.mark.parametrize("held", [False, True], ids=["written at once", "written two steps later"])
def test_background_save_has_weights_of_its_step(tmp_path, monkeypatch, held):
    """Whether it is written at once or two steps later, while training goes on."""
    copies, threads, publish = Copies(), [], writer.CheckpointWriter._publish_checkpoint

    def observed(self, *args):
        threads.append(threading.current_thread())
        if held:
            copies.later.wait()
        publish(self, *args)

    monkeypatch.setattr(writer.CheckpointWriter, "_publish_checkpoint", observed)
    settings = {**HERE, "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "bf16": True}
    background = {"lightning_config": {"async_checkpoint": True}, "trainer": {"callbacks": [copies]}}
    trainer, _ = build("hftrainer", "wide", tmp_path, **settings, **background)
    trainer.train()
    assert len(threads) == 3
    assert threading.main_thread() not in threads
    names = [name for name, _ in trainer.model.named_parameters()]
    for step, (weights, averages) in copies.at.items():
        folder = tmp_path / f"checkpoint-{step}"
        assert_same_weights(load_file(folder / "model.safetensors", device=DEVICE), weights)
        saved = torch.load(folder / "optimizer.pt", map_location=DEVICE)
        # Decayed parameters come first in the optimizer's groups, biases after them.
        order = [name for decayed in (True, False) for name in names if name.endswith("weight") is decayed]
        assert_same_weights({name: saved["state"][i]["exp_avg"] for i, name in enumerate(order)}, averages)
    assert list(copies.at) == [2, 4, 6]
    changed = [not torch.equal(copies.at[2][0][name], copies.at[4][0][name]) for name in names]
    assert all(changed), "training has not gone on"


def test_host_copies_are_separate_tied_and_reused():
    """They do not change with the originals, are tied where these are, and the next copy reuses their memory."""
    weight = torch.randn(1024, 1024, device=DEVICE)  # large enough to be pinned
    added = OrderedDict(weight=weight, tied=weight.t(), part=weight[3:5], parameter=nn.Parameter(weight[0]))
    added.update(none=torch.empty(0, device=DEVICE), sparse=torch.eye(3, device=DEVICE).to_sparse())
    added._metadata = {"version": 1}
    states = {"model": added, "lists": defaultdict(list, step=[torch.tensor(3, device=DEVICE), "text", (1.5, None)])}
    expected = [value.detach().cpu().clone() for value in added.values()]
    copies = HostCopies()
    first = copies.copy(states)
    weight.zero_()
    assert first["model"]._metadata == {"version": 1}
    assert [value.device.type for value in first["model"].values()] == ["cpu"] * len(added)
    for value, original in zip(first["model"].values(), expected, strict=True):
        assert torch.equal(value.to_dense(), original.to_dense())
    tied = {first["model"][name].untyped_storage().data_ptr() for name in ("weight", "tied", "part", "parameter")}
    assert len(tied) == 1
    assert type(first["lists"]) is defaultdict
    assert first["lists"]["step"] == [torch.tensor(3), "text", (1.5, None)]
    copies.begin()
    again = copies.copy(states)["model"]["weight"]
    assert again.untyped_storage().data_ptr() in tied
    assert not again.any()
    assert again.is_pinned() == (DEVICE == "cuda")
