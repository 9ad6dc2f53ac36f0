"""TFTrainer with torch's models and without TensorFlow; `make test-adapters` has the tests with it."""

import contextlib
import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from hftrainer import HfArgumentParser, TFTrainer, TFTrainingArguments, create_optimizer
from hftrainer.errors import InvalidArgument, UnknownKey, UnsupportedArgument
from hftrainer.optimization_tf import AdamWeightDecay, PolynomialDecay, WarmUp
from hftrainer_tensorflow import optimizers
from hftrainer_tensorflow.pipelines import Batches, RowDataset
from tests.support.checkpoints import SetFlag
from tests.support.parity import assert_same_weights
from tests.support.small_models import make_plain
from tests.support.tf_models import DenseModel, RecordingTrainer, rows


def make_args(folder, **settings):
    defaults = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "logging_steps": 1}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    return TFTrainingArguments(str(folder), **{**defaults, **quiet, "learning_rate": 1e-2, **settings})


@pytest.fixture
def make(tmp_path):
    def make(train=None, evaluated=None, kind=RecordingTrainer, model=None, folder=tmp_path, **settings):
        own = {name: settings.pop(name) for name in ("compute_metrics", "optimizers", "tb_writer") if name in settings}
        args = make_args(folder, **settings)
        return kind(DenseModel() if model is None else model, args, train_dataset=train, eval_dataset=evaluated, **own)

    return make


def train_by_hand(args, data, accumulation=1):
    """The losses and weights of a TFTrainer, computed with the formulas of Keras in plain torch."""
    model = DenseModel()
    steps_per_epoch = math.ceil(len(data) / (4 * accumulation))
    steps = steps_per_epoch * int(args.num_train_epochs)
    first = [torch.zeros_like(each) for each in model.parameters()]
    second = [torch.zeros_like(each) for each in model.parameters()]
    pipeline = RowDataset(data).repeat().shuffle(len(data), seed=args.seed).batch(4 * accumulation)
    losses, done = [], 0
    for _ in range(int(args.num_train_epochs)):
        total = 0.0
        for number, (features, labels) in zip(range(steps_per_epoch), pipeline, strict=False):
            model.zero_grad()
            outputs = model(torch.from_numpy(features["x"]), torch.from_numpy(labels).long())
            outputs["loss"].backward()
            total += outputs["loss"].item()
            rate = args.learning_rate * (1 - done / steps)
            done += 1
            correction = math.sqrt(1 - args.adam_beta2**done) / (1 - args.adam_beta1**done)
            for (name, parameter), m, v in zip(model.named_parameters(), first, second, strict=True):
                gradient = parameter.grad
                if accumulation > 1:
                    gradient = gradient.clamp(-args.max_grad_norm, args.max_grad_norm)
                m.mul_(args.adam_beta1).add_(gradient, alpha=1 - args.adam_beta1)
                v.mul_(args.adam_beta2).addcmul_(gradient, gradient, value=1 - args.adam_beta2)
                decays = "LayerNorm" not in name and "bias" not in name
                with torch.no_grad():
                    parameter.mul_(1 - rate * args.weight_decay * decays)
                    parameter.sub_(rate * correction * m / (v.sqrt() + args.adam_epsilon))
            losses.append({"loss": total / (number + 1), "learning_rate": args.learning_rate * (1 - done / steps)})
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("settings", "accumulation"),
    [
        ({}, 1),
        ({"weight_decay": 0.3, "adam_epsilon": 1e-3}, 1),
        ({"max_grad_norm": 1e-3}, 2),
        ({"max_grad_norm": 1e-2, "lightning_config": {"behaviour": "5.2"}}, 2),  # where a Trainer divides gradients too
    ],
)
def test_training_matches_the_formulas_of_keras(make, settings, accumulation):
    data = rows(24)
    trainer = make(data, num_train_epochs=2, gradient_accumulation_steps=accumulation, **settings)
    trainer.train()
    losses, weights = train_by_hand(trainer.args, data, accumulation)
    epochs = [(step + 1) / trainer.steps_per_epoch for step in range(len(losses))]
    assert [line["epoch"] for line in trainer.seen] == pytest.approx(epochs)
    for line, expected in zip(trainer.seen, losses, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["learning_rate"] == pytest.approx(expected["learning_rate"], abs=1e-9)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


def test_warm_up_schedule_matches_its_formula():
    _, schedule = create_optimizer(1.0, 10, 4, power=2.0, min_lr_ratio=0.1)
    expected = [0.0, 0.25, 0.5, 0.75] + [0.9 * (1 - step / 6) ** 2 + 0.1 for step in range(7)]
    assert [schedule(step) for step in range(11)] == pytest.approx(expected)
    assert schedule(50) == pytest.approx(0.1)
    assert isinstance(schedule, WarmUp)
    assert isinstance(create_optimizer(1.0, 10, 0)[1], PolynomialDecay)


def test_resume_within_an_epoch_is_exact(make, tmp_path):
    """Within an epoch: the same lines and weights as the undisturbed run, by the `checkpoint-xxx` in the folder."""
    settings = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 7, "eval_strategy": "epoch"}
    whole, part, resumed = (make(rows(), rows(6), folder=tmp_path / of, **settings) for of in ("whole", "part", "part"))
    whole.train()
    part._engine.add_callback(SetFlag("should_training_stop", 7))
    part.train()
    resumed.train()
    assert resumed.global_step == 15
    begun = next(index for index, line in enumerate(whole.seen) if line.get("epoch", 0) > 7 / 5)
    assert resumed.seen == whole.seen[begun:]
    assert_same_weights(resumed.model.state_dict(), whole.model.state_dict())


def test_each_sample_is_evaluated_once(make):
    def compute_metrics(prediction):
        return {"rows": len(prediction.predictions), "eval_right": float(prediction.label_ids.sum())}

    data = rows(10)
    trainer = make(None, data, compute_metrics=compute_metrics)
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == 10
    assert metrics["eval_right"] == sum(row["label"] for row in data)
    with torch.no_grad():
        outputs = trainer.model(torch.from_numpy(np.stack([row["x"] for row in data])))["logits"]
    each = nn.functional.cross_entropy(outputs, torch.tensor([row["label"] for row in data]), reduction="none")
    assert metrics["eval_loss"] == pytest.approx(np.mean([part.mean().item() for part in each.split(4)]), rel=1e-6)
    predictions, labels, metrics = trainer.predict(data[:7])
    np.testing.assert_allclose(predictions, outputs[:7].numpy(), atol=1e-6)
    assert labels.tolist() == [row["label"] for row in data[:7]]
    assert set(metrics) == {"eval_rows", "eval_right", "eval_loss"}
    assert make(None, data, dataloader_drop_last=True).get_eval_tfdataset()[1:] == (2, 8)


def test_evaluation_comes_before_the_log_line(make):
    trainer = make(rows(), rows(4), max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    for lines in (trainer.seen, trainer._engine.state.log_history):
        assert [next(iter(line)) for line in lines] == ["eval_loss", "loss"] * 2


def test_overridden_methods_are_used(make):
    calls = []

    class Own(TFTrainer):
        def get_train_tfdataset(self):
            calls.append("data")
            return super().get_train_tfdataset()

        def create_optimizer_and_scheduler(self, num_training_steps):
            calls.append(num_training_steps)
            self.optimizer, self.lr_scheduler = torch.optim.SGD(self.model.parameters(), lr=1.0), lambda step: 0.5

        def run_model(self, features, labels, training):
            logits = self.model(features["x"])["logits"]
            return nn.functional.cross_entropy(logits, labels, reduction="none"), logits  # of each instance

        def training_step(self, features, labels, nb_instances_in_global_batch):
            calls.append((len(labels), nb_instances_in_global_batch))
            return 2 * super().training_step(features, labels, nb_instances_in_global_batch)

        def prediction_step(self, features, labels, nb_instances_in_global_batch):
            return super().prediction_step(features, labels, nb_instances_in_global_batch) + 1

    data = rows(8)
    trainer = make(data, kind=Own, num_train_epochs=1)
    trainer.train()
    assert calls == ["data", 2, (4, 4), (4, 4)]
    model = DenseModel()
    pipeline = RowDataset(data).repeat().shuffle(8, seed=42).batch(4)
    for _, (features, labels) in zip(range(2), pipeline, strict=False):
        loss = 2 * model(torch.from_numpy(features["x"]), torch.from_numpy(labels))["loss"]
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data.sub_(0.5 * gradient)
    for ours, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    with torch.no_grad():
        expected = trainer.model(torch.from_numpy(data[0]["x"])[None])["logits"] + 1
    np.testing.assert_allclose(trainer.predict(data).predictions[:1], expected.numpy(), rtol=1e-5)


def test_dict_of_labels_counts_as_one_instance(make):
    """Counts as one instance: the loss of a batch is a sum, as in TFTrainer."""

    class Spans(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(4, 4)

        def forward(self, x, start_positions, end_positions):
            logits = self.dense(x)
            both = [nn.functional.cross_entropy(logits, each) for each in (start_positions, end_positions)]
            return sum(both) / 2, logits

    data = [{"x": row["x"], "start_positions": row["label"], "end_positions": 0} for row in rows(8)]
    trainer = make(data, model=Spans(), num_train_epochs=1)
    with torch.no_grad():
        features, labels = next(iter(RowDataset(data).repeat().shuffle(8, seed=42).batch(4)))
        inputs = {name: torch.from_numpy(each) for name, each in {**features, **labels}.items()}
        expected = trainer.model(**inputs)[0]
    trainer.train()
    assert trainer.seen[0]["loss"] == pytest.approx(4 * expected.item(), rel=1e-5)


def test_keras_optimizer_is_translated_to_torch():
    """Read from `get_config()`; the momentum contains the learning rate of its step."""
    model = DenseModel()
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    class SGD:
        learning_rate = 0.1

        def get_config(self):
            settings = {"momentum": 0.9, "nesterov": True, "weight_decay": None, "clipvalue": 0.5, "ema_momentum": 0.99}
            return {"name": "SGD", "learning_rate": 0.1, "use_ema": False, **settings}

    made, schedule = optimizers.to_torch(SGD(), None, model, names)
    parameter, velocity = model.out.bias, torch.zeros(3)
    expected = parameter.detach().clone()
    for gradient in ([1.0, -0.2, 0.1], [0.3, 0.3, -4.0]):
        parameter.grad = torch.tensor(gradient)
        clipped = torch.tensor(gradient).clamp(-0.5, 0.5)
        velocity = 0.9 * velocity - 0.1 * clipped
        expected = expected + 0.9 * velocity - 0.1 * clipped
        made.step()
        schedule.step()
    torch.testing.assert_close(parameter.detach(), expected)

    class EMA(SGD):
        def get_config(self):
            return {**super().get_config(), "use_ema": True}

    EMA.__name__ = "SGD"
    with pytest.raises(UnsupportedArgument, match="SGD with use_ema=True"):
        optimizers.to_torch(EMA(), None, model, names)


@pytest.mark.parametrize(
    ("clipping", "factor"), [({"clipnorm": 1.0}, 1 / 5), ({"global_clipnorm": 1.0}, 1 / 13), ({"clipnorm": 9.0}, 1)]
)
def test_clipnorm_scales_the_gradients(clipping, factor):
    """The first gradient has a norm of 5, and both together have one of 13."""
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    optimizers.clip([first, second], clipping)
    torch.testing.assert_close(first.grad, torch.tensor([3.0, 4.0]) * factor)


def test_weight_decay_includes_and_excludes_by_name():
    model = DenseModel()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    which = {"include_in_weight_decay": ["LayerNorm.w"], "exclude_from_weight_decay": ["LayerNorm", "bias"]}
    optimizer = AdamWeightDecay(0.1, weight_decay_rate=0.5, **which)
    made, schedule = optimizers.to_torch(optimizer, None, model, names)
    decayed = {names[id(parameter)] for parameter in made.param_groups[0]["params"]}
    assert decayed == {"dense.weight", "LayerNorm.weight", "out.weight"}
    assert [group["weight_decay"] for group in made.param_groups] == [0.5, 0.0]
    assert schedule.get_last_lr() == [0.1, 0.1]
    with pytest.raises(InvalidArgument, match=r"'kernel' is in no parameter's name.*'dense.weight'"):
        optimizers.to_torch(AdamWeightDecay(include_in_weight_decay=["kernel"]), None, model, names)
    with pytest.raises(UnknownKey, match="no argument decay"):
        AdamWeightDecay(decay=0.1)


def test_tb_writer_gets_the_logged_values(make, monkeypatch):
    written = []

    class Writer:
        def as_default(self):
            return contextlib.nullcontext()

        def flush(self):
            written.append("flushed")

    summary = types.SimpleNamespace(scalar=lambda name, value, step: written.append((name, step)))
    fake = types.SimpleNamespace(summary=summary, random=types.SimpleNamespace(set_seed=written.append))
    fake.config = types.SimpleNamespace(set_visible_devices=lambda devices, kind: written.append(kind))
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    make(rows(), kind=TFTrainer, max_steps=1, tb_writer=Writer()).train()
    assert written == ["GPU", 42, ("loss", 1), ("learning_rate", 1), ("epoch", 1), "flushed"]


def test_overridden_tracker_setup_is_called(make, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    called = []

    class Own(TFTrainer):
        def setup_wandb(self):
            called.append("wandb")

        def setup_comet(self):
            called.append("comet")

    for reporter in ("wandb", "none"):
        make(kind=Own, report_to=reporter)
    assert called == ["wandb"]


def test_model_and_state_are_saved(make, tmp_path):
    trainer = make(rows(), max_steps=3, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "model.safetensors").is_file()
    assert json.loads((tmp_path / "checkpoint-2" / "epoch_loss.json").read_text())["step"] == 2
    assert not (tmp_path / "epoch_loss.json").exists()
    assert trainer.args.n_replicas == trainer.args.strategy.num_replicas_in_sync == 1
    with pytest.warns(FutureWarning, match="n_replicas"):
        assert trainer.args.n_gpu == 1


def test_length_of_a_stream_is_counted(make):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from rows(6)

    trainer = make(Stream(), num_train_epochs=1)
    trainer.train()
    assert (trainer.num_train_examples, trainer.steps_per_epoch) == (6, 2)


def test_datasets_and_torch_pairs_train_alike(make):
    """Columns that the model does not take are dropped; pairs of a torch dataset are as those of tf.data."""
    datasets = pytest.importorskip("datasets")
    named = datasets.Dataset.from_list([{**row, "x": row["x"].tolist(), "text": "a word"} for row in rows()])

    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return {"x": torch.from_numpy(rows()[index]["x"])}, rows()[index]["label"]

    found = []
    for data in (rows(), named, Pairs()):
        trainer = make(data, num_train_epochs=1)
        trainer.train()
        found.append(trainer.seen)
    assert found[0] == found[2]
    assert [line["loss"] for line in found[0]] == pytest.approx([line["loss"] for line in found[1]], rel=1e-6)


def test_command_line_is_parsed_into_arguments(tmp_path):
    parser = HfArgumentParser(TFTrainingArguments)
    words = "--poly_power 2 --xla --evaluation_strategy epoch --report_to none --use_cpu"
    with pytest.warns(FutureWarning, match="evaluation_strategy is now eval_strategy"):
        (args,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), *words.split()])
    assert (args.poly_power, args.torch_compile, args.eval_strategy) == (2.0, True, "epoch")
    assert not make_args(tmp_path).torch_compile


def test_each_iteration_has_its_own_order():
    numbered = [{"x": np.array([number]), "label": number} for number in range(50)]
    pipeline, again = (RowDataset(numbered).shuffle(50, seed=1) for _ in range(2))
    first, second = ([label for _, label in pipeline] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert [label for _, label in again] == first
    resumed = Batches(pipeline.batch(50), 1)  # a new pipeline, whose second pass a resumed run begins with
    resumed.epoch = 1
    assert next(iter(resumed))["labels"].tolist() == second


def test_dropout_is_off_in_evaluations(make):
    trainer = make(None, [{"x": torch.ones(8), "labels": 1}] * 4, kind=TFTrainer, model=make_plain())
    assert trainer.evaluate() == trainer.evaluate()


class Endless:
    def cardinality(self):
        return -1

    def batch(self, size, drop_remainder=False):
        return RowDataset(rows()).repeat().batch(size)


def test_infinite_data_needs_max_steps(make):
    with pytest.raises(InvalidArgument, match=r"infinite: use dataset\.take"):
        make(Endless()).train()
    trainer = make(Endless(), max_steps=3)
    trainer.train()
    assert trainer.global_step == len(trainer.seen) == 3
    with pytest.raises(InvalidArgument, match="infinite"):
        trainer.evaluate(Endless())


x = np.zeros(4, "float32")
BAD_DATA = {
    "strings": ([({"x": np.array(["a", "b"])}, 0)] * 4, "yields strings.*tokenize"),
    "lengths": ([({"x": x}, 0), ({"x": x[:2]}, 0)] * 2, "pad them to one length"),
    "no labels": ([{"x": x}] * 4, "a dict without labels"),
    "single": ([x] * 4, "yields ndarray: TFTrainer accepts pairs"),
    "no names": ([(x, 0)] * 4, "features is a dict by names"),
    "empty": ([], "The dataset is empty"),
    "no dataset": (7, "int is not a dataset"),
    "none": (None, "needs a train_dataset"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_invalid_dataset_is_refused(make, name):
    data, message = BAD_DATA[name]
    with pytest.raises(InvalidArgument, match=message):
        make(data, remove_unused_columns=False).train()


def test_ragged_tensors_are_refused():
    ragged = types.SimpleNamespace(row_splits=[0, 1, 3])
    with pytest.raises(InvalidArgument, match=r"ragged tensors.*to_tensor"):
        next(iter(Batches([({"x": ragged, "y": x}, [0, 1, 2, 3])], 1)))


def test_missing_evaluation_data_is_refused(make):
    with pytest.raises(InvalidArgument, match="needs an eval_dataset"):
        make().evaluate()
    with pytest.raises(InvalidArgument, match="drops all 3 evaluation samples"):
        make(dataloader_drop_last=True).evaluate(rows(3))


OfKeras = type("Functional", (), {"__module__": "keras.src.models"})
OfTensorFlow = type("EagerTensor", (), {"__module__": "tensorflow.python.framework.ops"})
TFBertForNothing = type("TFBertForNothing", (), {"config": None, "get_weights": lambda self: []})
Nadam = type("Nadam", (), {"get_config": lambda self: {}})


def overriding(**methods):
    returning = {name: lambda self, *args, value=value, **kwargs: value for name, value in methods.items()}
    return {"kind": type("Own", (TFTrainer,), returning)}


OVERRIDDEN = ("apply_gradients", "distributed_training_steps", "distributed_prediction_steps")
OF_TPUS = ("tpu_name", "tpu_zone", "gcp_project")
LIGHTNING = r"Own\.{}: Lightning runs the steps".format
UNSUPPORTED = {
    "keras on TensorFlow": ({"model": OfKeras()}, "Functional is a Keras model.*KERAS_BACKEND=torch"),
    "no model": ({"model": "bert-base"}, "str is neither a torch module"),
    "no twin": ({"model": TFBertForNothing()}, "transformers has no BertForNothing"),
    "a loss": (overriding(run_model=(OfTensorFlow(), None)), r"a loss of tensorflow \(EagerTensor\).*torch must"),
    "gradients": (overriding(training_step=[torch.zeros(3)]), "training_step returns list: return the loss"),
    **{name: (overriding(**{name: None}), LIGHTNING(name)) for name in OVERRIDDEN},
    "an optimizer": ({"optimizers": (Nadam(), lambda step: 0.1)}, "optimizers: Nadam has no counterpart"),
    **{name: ({name: "mine"}, rf"{name}: TensorFlow connects.*run --tpu") for name in OF_TPUS},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_objects_are_refused(make, name):
    options, message = UNSUPPORTED[name]
    with pytest.raises(UnsupportedArgument, match=message):
        make(rows(), **options).train()


def test_schedule_needs_an_optimizer(make):
    with pytest.raises(InvalidArgument, match="a schedule but no optimizer"):
        make(rows(), optimizers=(None, lambda step: 0.1)).train()


def test_tensorflow_checkpoint_is_refused(make, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "ckpt-3.index").touch()
    with pytest.raises(UnsupportedArgument, match=r"ckpt-3\.index is a checkpoint of TensorFlow"):
        make(rows(), max_steps=1).train()
