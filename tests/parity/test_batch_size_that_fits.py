"""`auto_find_batch_size`: a retry with smaller batches keeps nothing of the failed attempt."""

import re
import weakref

import pytest
import torch
from datasets import Dataset
from torch import nn

from hftrainer import TrainerState
from hftrainer.errors import InvalidArgument
from tests.support.parity import EVALUATED, assert_same_weights, build, record, subclass
from tests.support.small_models import Plain, plain_data


def run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


class Greedy(Plain):
    """Runs out of memory while training with too many samples in a batch, or at one call; or while evaluating."""

    def __init__(self, limit=99, at_call=None, evaluates=True):
        torch.manual_seed(1)
        super().__init__()
        self.limit, self.at_call, self.evaluates, self.calls = limit, at_call, evaluates, 0

    def forward(self, x, labels=None):
        self.calls += self.training
        if (len(x) > self.limit or self.calls == self.at_call) if self.training else not self.evaluates:
            run_out_of_memory()
        return super().forward(x, labels)


def make_trainer(folder, model, size=8, find=True, momentum=None, trainer=None, **settings):
    trainer_kwargs = {"model": model, "train_dataset": plain_data(), **(trainer or {})}
    if momentum is not None:
        trainer_kwargs["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), None)
    settings |= {"per_device_train_batch_size": size, "auto_find_batch_size": find}
    return build("hftrainer", "plain", folder, trainer=trainer_kwargs, **settings)


def train_with_retry(tmp_path, kind=Greedy, limits=None, size=8, prepare=lambda trainer: None, **settings):
    """Train until batches of 4 fit; returns the Trainer, after asserting that a run begun with 4 is the same."""
    outcomes = []
    for folder, limit, first, find in (("found", limits or {"at_call": 4}, size, True), ("started", {}, 4, False)):
        trainer, recorder = make_trainer(tmp_path / folder, kind(**limit), first, find, **settings)
        prepare(trainer)
        trainer.train()
        scaler = trainer.accelerator.scaler
        more = {"flos": trainer.state.total_flos, "scale": scaler and scaler.state_dict()}
        outcomes.append((trainer, record(trainer, recorder, tmp_path / folder, **more)))
    (found, ours), (_, expected) = outcomes
    assert_same_weights(ours.weights, expected.weights)
    assert (ours.logs, ours.files, ours.extra) == (expected.logs, expected.files, expected.extra)
    assert found._train_batch_size == found.state.train_batch_size == 4
    return found


@pytest.mark.parametrize("momentum", [None, 0.9], ids=["own optimizer", "optimizer of the user"])
def test_retry_equals_a_run_of_that_size(tmp_path, momentum):
    """A resumed run also begins with the smaller size."""
    saved = {"save_strategy": "steps", "save_steps": 5, **EVALUATED}
    train_with_retry(tmp_path, limits={"limit": 4}, size=16, momentum=momentum, **saved)
    resumed, _ = make_trainer(tmp_path / "found", Greedy(limit=4), 16, momentum=momentum)
    resumed.train(resume_from_checkpoint=str(tmp_path / "found" / "checkpoint-5"))
    assert resumed._train_batch_size == 4


def use_a_large_scale(trainer):
    trainer.accelerator.scaler = trainer._hftrainer.engine.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)


class Buffered(Greedy):
    """Has a buffer that is in no checkpoint but must be reset too, and frozen weights that cannot be loaded."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {**state, "frozen.weight.quant_map": torch.zeros(2)} if self.calls else state

    def forward(self, x, labels=None):
        self.seen = self.seen + self.training
        outputs = super().forward(self.frozen(x), labels)
        return {**outputs, "loss": outputs["loss"] * self.seen}


BY_LAYER = {"optim": "galore_adamw_layerwise", "optim_target_modules": ["layers.0", "layers.4"], "optim_args": "rank=2"}
LATER = {
    # the retry begins with the first weights and random states
    "memory that runs out later": {"max_steps": 6},
    # the hooks of the failed attempt's optimizers are removed
    "layer-wise optimizers": {**BY_LAYER, "max_steps": 6},
    "fp16": {"limits": {"at_call": 6}, "prepare": use_a_large_scale, "fp16": True, "max_steps": 12, "logging_steps": 1},
    "buffers and quantized weights": {"kind": Buffered, "max_steps": 6},
}


@pytest.mark.parametrize("name", LATER)
def test_retry_after_some_steps_begins_from_the_start(tmp_path, name):
    found = train_with_retry(tmp_path, **LATER[name])
    assert name != "fp16" or found.accelerator.scaler.state_dict()


def test_retry_resets_flos_metrics_length_groups_and_checkpoints(tmp_path):
    rows = plain_data()
    columns = {"x": [row["x"].tolist() for row in rows], "labels": [int(row["labels"]) for row in rows]}
    data = Dataset.from_dict({**columns, "length": [i % 11 for i in range(38)]})
    settings = {"train_sampling_strategy": "group_by_length", "save_strategy": "steps", "save_steps": 3}
    limits = {"at_call": 5}
    train_with_retry(tmp_path, limits=limits, max_steps=8, trainer={"train_dataset": data}, **settings)
    names = sorted(path.name for path in (tmp_path / "found").glob("checkpoint-*"))
    assert names == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]


def test_batch_size_is_halved_after_resuming(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, Greedy(), max_steps=2, **settings)[0].train()
    second, _ = make_trainer(tmp_path, Greedy(limit=4), max_steps=4, **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    state = TrainerState.load_from_json(str(tmp_path / "checkpoint-4" / "trainer_state.json"))
    assert state.train_batch_size == second._train_batch_size == 4


def test_out_of_memory_in_the_optimizer_step_is_retried(tmp_path):
    class Boom(torch.optim.SGD):
        failed = False

        def step(self, closure=None):
            if not Boom.failed:
                Boom.failed = True
                run_out_of_memory()
            return super().step(closure)

    model = Greedy()
    trainer_kwargs = {"optimizers": (Boom(model.parameters(), lr=0.1), None)}
    trainer, _ = make_trainer(tmp_path, model, 4, trainer=trainer_kwargs, fp16=True, max_steps=4)
    assert trainer.train().global_step == 4
    assert trainer._train_batch_size == 2


@pytest.mark.parametrize(
    ("limits", "find", "error", "message"),
    [
        ({"limit": 0}, True, RuntimeError, "one sample does not fit"),
        ({"evaluates": False}, True, InvalidArgument, "reduce per_device_eval_batch_size=8"),
        ({"limit": 0}, False, torch.OutOfMemoryError, "CUDA out of memory(.|\n)*smaller per_device_train_batch_size"),
        ({"evaluates": False}, False, torch.OutOfMemoryError, "memory(.|\n)*smaller per_device_eval_batch_size"),
    ],
)
def test_out_of_memory_that_smaller_batches_cannot_cure_is_raised(tmp_path, limits, find, error, message):
    trainer, _ = make_trainer(tmp_path, Greedy(**limits), 4, find, **EVALUATED)
    with pytest.raises(error) as raised:
        trainer.train()
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert re.search(message, text)
    assert ("per_device_eval" in text, "per_device_train" in text) == (
        "evaluates" in limits,
        "limit" in limits and not find,
    )


def test_optimizer_of_the_failed_attempt_is_freed(tmp_path):
    made, alive = [], []

    def create_optimizer(self, model=None):
        optimizer = super(type(self), self).create_optimizer(model)
        if not made or made[-1]() is not optimizer:
            made.append(weakref.ref(optimizer))
        return optimizer

    def compute_loss(self, *args, **kwargs):
        if len(made) == 2:
            alive.append(made[0]() is not None)
        return super(type(self), self).compute_loss(*args, **kwargs)

    watches = subclass(create_optimizer=create_optimizer, compute_loss=compute_loss)
    make_trainer(tmp_path, Greedy(at_call=4), trainer_class=watches, max_steps=4)[0].train()
    assert alive and not any(alive)


def test_lomo_cannot_be_retried(tmp_path):
    trainer, _ = build("hftrainer", "llama", tmp_path, optim="lomo", auto_find_batch_size=True)
    with pytest.raises(InvalidArgument, match="optim='lomo' leaves hooks"):
        trainer.train()
