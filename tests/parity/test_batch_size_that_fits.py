"""`auto_find_batch_size`: starting again with smaller batches leaves nothing of the failed attempt."""

import weakref

import pytest
import torch
from torch import nn

import hftrainer
from hftrainer.errors import InvalidArgument
from tests.support.parity import EVALUATED, assert_same_weights, build, record, train
from tests.support.tiny import Plain, plain_data


class Greedy(Plain):
    """Runs out of memory above some samples in a batch while training, or at one call."""

    def __init__(self, limit=4, at_call=None):
        super().__init__()
        self.limit, self.at_call, self.calls = limit, at_call, 0

    def forward(self, x, labels=None):
        self.calls += self.training
        if self.training and (len(x) > self.limit if self.at_call is None else self.calls == self.at_call):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return super().forward(x, labels)


def greedy(**kwargs):
    torch.manual_seed(1)
    return Greedy(**kwargs)


@pytest.mark.parametrize("user_optimizer", [False, True])
def test_batch_size_that_fits(tmp_path, user_optimizer):
    """Ends at the size that fits, with the result of starting there, and keeps it in the checkpoint."""

    def run(folder, model, **settings):
        given = {"model": model, "train_dataset": plain_data()}
        if user_optimizer:
            given["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None)
        saved = {"save_strategy": "steps", "save_steps": 5, **EVALUATED}
        trainer, recorder = build("hftrainer", "plain", folder, trainer=given, **saved, **settings)
        trainer.train()
        return trainer, record(trainer, recorder, folder)

    found, ours = run(tmp_path / "a", greedy(), per_device_train_batch_size=16, auto_find_batch_size=True)
    assert found._train_batch_size == found.state.train_batch_size == 4
    _, expected = run(tmp_path / "b", greedy(), per_device_train_batch_size=4)
    assert_same_weights(ours.weights, expected.weights)
    assert ours.logs == expected.logs
    assert ours.files == expected.files
    # A resumed run begins with that size.
    given = {"model": greedy(), "train_dataset": plain_data()}
    if user_optimizer:
        given["optimizers"] = (torch.optim.SGD(given["model"].parameters(), lr=0.1, momentum=0.9), None)
    resumed, _ = build(
        "hftrainer",
        "plain",
        tmp_path / "a",
        trainer=given,
        per_device_train_batch_size=16,
        auto_find_batch_size=True,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    assert resumed._train_batch_size == 4


def test_memory_that_runs_out_later(tmp_path):
    """After some steps: the run begins again where it began, not with what the failed one left."""
    given = {"train_dataset": plain_data()}
    settings = {"per_device_train_batch_size": 8, "max_steps": 6}
    trainer, recorder = build(
        "hftrainer",
        "plain",
        tmp_path / "a",
        trainer={**given, "model": greedy(at_call=4)},
        auto_find_batch_size=True,
        **settings,
    )
    trainer.train()
    settings["per_device_train_batch_size"] = 4
    expected = train("hftrainer", "plain", tmp_path / "b", trainer={**given, "model": greedy(limit=99)}, **settings)
    ours = record(trainer, recorder, tmp_path / "a", **expected.extra)
    assert_same_weights(ours.weights, expected.weights)
    assert ours.logs == expected.logs


def test_memory_that_cannot_be_saved(tmp_path):
    settings = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model": greedy(limit=0)}, **settings)
    with pytest.raises(RuntimeError, match="one sample does not fit"):
        trainer.train()

    class EatsInEvaluation(Plain):
        def forward(self, x, labels=None):
            if not self.training:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return super().forward(x, labels)

    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model": EatsInEvaluation()}, **settings, **EVALUATED)
    with pytest.raises(InvalidArgument, match="reduce per_device_eval_batch_size=8"):
        trainer.train()
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model": greedy(limit=0)})
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()


def found_and_started(tmp_path, prepare=lambda trainer: None, model=None, **settings):
    """A run that memory drove from 8 samples to 4, and one that began there."""
    outcomes = []
    for name, size, limit in (("found", 8, {"at_call": settings.pop("at", 4)}), ("started", 4, {"limit": 99})):
        found = name == "found"
        given = {"model": (model or greedy)(**limit) if model is None else model(found)}
        trainer, recorder = build(
            "hftrainer",
            "plain",
            tmp_path / name,
            per_device_train_batch_size=size,
            auto_find_batch_size=found,
            trainer={**given, **settings.get("trainer", {})},
            **{key: value for key, value in settings.items() if key != "trainer"},
        )
        prepare(trainer)
        trainer.train()
        outcomes.append((trainer, record(trainer, recorder, tmp_path / name)))
    (found, ours), (started, expected) = outcomes
    assert_same_weights(ours.weights, expected.weights)
    assert ours.logs == expected.logs
    return found, started


def test_found_with_layer_wise_optimizers(tmp_path):
    """The hooks of the failed attempt's optimizers step no more."""
    settings = {"optim": "galore_adamw_layerwise", "optim_target_modules": ["layers.0", "layers.4"]}
    found_and_started(tmp_path, optim_args="rank=2", max_steps=6, **settings)


def test_found_with_fp16(tmp_path):
    def with_a_large_scale(trainer):
        trainer.accelerator.scaler = trainer._hftrainer.engine.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    found, started = found_and_started(tmp_path, with_a_large_scale, fp16=True, max_steps=12, logging_steps=1, at=6)
    assert found.accelerator.scaler.state_dict() == started.accelerator.scaler.state_dict()


def test_memory_that_runs_out_in_the_optimizer(tmp_path):
    class Boom(torch.optim.SGD):
        failed = False

        def step(self, closure=None):
            if not Boom.failed:
                Boom.failed = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return super().step(closure)

    model = greedy(limit=99)
    given = {"model": model, "optimizers": (Boom(model.parameters(), lr=0.1), None)}
    settings = {"fp16": True, "max_steps": 4, "auto_find_batch_size": True}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=given, **settings)
    assert trainer.train().global_step == 4
    assert trainer._train_batch_size == 2


def test_found_with_buffers_and_quantized_weights(tmp_path):
    """Buffers that no checkpoint has come back too; frozen weights that cannot be loaded stay."""

    class Buffered(Greedy):
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

    def make(found):
        torch.manual_seed(1)
        return Buffered(**({"at_call": 4} if found else {"limit": 99}))

    found_and_started(tmp_path, model=make, max_steps=6)


def test_found_counts_and_lengths(tmp_path):
    """FLOs, the log of metrics, and the groups of lengths begin anew; the failed attempt's checkpoints go."""
    from datasets import Dataset

    rows = plain_data(38)
    data = Dataset.from_dict(
        {
            "x": [row["x"].tolist() for row in rows],
            "labels": [int(row["labels"]) for row in rows],
            "length": [i % 11 for i in range(38)],
        }
    )
    settings = {"train_sampling_strategy": "group_by_length", "max_steps": 8, "save_strategy": "steps", "save_steps": 3}
    found, started = found_and_started(tmp_path, at=5, trainer={"train_dataset": data}, logging_steps=2, **settings)
    assert found.state.total_flos == started.state.total_flos
    names = [sorted(path.name for path in (tmp_path / run).glob("checkpoint-*")) for run in ("found", "started")]
    assert names[0] == names[1] == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]


def test_found_after_resuming(tmp_path):
    """Halved once more after a resume: the checkpoint says so."""
    settings = {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 8,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    first, _ = build("hftrainer", "plain", tmp_path, trainer={"model": greedy(limit=99)}, max_steps=2, **settings)
    first.train()
    second, _ = build("hftrainer", "plain", tmp_path, trainer={"model": greedy(limit=4)}, max_steps=4, **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    state = hftrainer.TrainerState.load_from_json(str(tmp_path / "checkpoint-4" / "trainer_state.json"))
    assert state.train_batch_size == second._train_batch_size == 4


def test_the_failed_attempt_is_let_go(tmp_path):
    """Its optimizer is gone when the smaller batch is tried."""
    made, alive = [], []

    class Watches(hftrainer.Trainer):
        def create_optimizer(self, model=None):
            optimizer = super().create_optimizer(model)
            if not made or made[-1]() is not optimizer:
                made.append(weakref.ref(optimizer))
            return optimizer

        def compute_loss(self, model, inputs, *args, **kwargs):
            if len(made) == 2:
                alive.append(made[0]() is not None)
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer, _ = build(
        "hftrainer",
        "plain",
        tmp_path,
        trainer={"model": greedy(at_call=4)},
        trainer_class=lambda _: Watches,
        auto_find_batch_size=True,
        max_steps=4,
    )
    trainer.train()
    assert alive and not any(alive)


def test_lomo_cannot_start_again(tmp_path):
    trainer, _ = build("hftrainer", "llama", tmp_path, optim="lomo", auto_find_batch_size=True)
    with pytest.raises(InvalidArgument, match="optim='lomo' leaves hooks"):
        trainer.train()
