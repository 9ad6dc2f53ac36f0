"""What the docstrings of the Trainer of v4.48 say in code, by line."""

import importlib

import numpy as np
import pytest
import torch
from torch import nn

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.trainer_utils import default_compute_objective, default_hp_space_optuna, default_hp_space_ray
from tests.docs.documents.support import losses, quiet
from tests.support.parity import build
from tests.support.tiny import (
    make_bert,
    make_llama,
    make_plain,
    pad,
    plain_data,
    text_data,
    tokenizer,
    varied_language_data,
)


def make(folder, trainer_class=Trainer, model=None, data=8, **given):
    """A Trainer of a tiny model; keywords that are arguments go to its arguments."""
    fields = TrainingArguments.__dataclass_fields__
    settings = {name: given.pop(name) for name in list(given) if name in fields}
    given.setdefault("train_dataset", plain_data(data))
    model = make_plain() if model is None and "model_init" not in given else model
    return trainer_class(model, quiet(folder, **settings), **given)


@pytest.fixture
def pair(tmp_path):
    """Ours and the release's, of the same model and arguments, each with an optimizer."""
    made = [build(name, "plain", tmp_path / name)[0] for name in ("hftrainer", "transformers")]
    for trainer in made:
        trainer.create_optimizer_and_scheduler(num_training_steps=10)
    return made


# ---- What a Trainer is made with ------------------------------------------------------------------------------------


def test_line_21(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Trainer(make_plain()).args.output_dir == "tmp_trainer"


def test_lines_24_43(tmp_path):
    assert make(tmp_path).data_collator.__name__ == "default_data_collator"
    words = tokenizer()
    collated = make(tmp_path, model=make_bert(), processing_class=words).data_collator
    assert type(collated).__name__ == "DataCollatorWithPadding"
    with pytest.warns(FutureWarning, match="processing_class"):
        trainer = make(tmp_path, model=make_bert(), tokenizer=words)
    assert trainer.processing_class is words
    trainer.save_model()
    assert (tmp_path / "tokenizer.json").is_file()


def test_lines_38_370(tmp_path):
    """A dict of sets, one of whose losses chooses the best checkpoint."""
    data1, data2 = plain_data(8), plain_data(20)[8:]
    trainer = make(
        tmp_path,
        eval_dataset={"data1": data1, "data2": data2},
        metric_for_best_model="eval_data1_loss",
        **dict.fromkeys(("eval_strategy", "save_strategy"), "steps"),
        **dict.fromkeys(("eval_steps", "save_steps"), 1),
        load_best_model_at_end=True,
        learning_rate=0.1,
        max_steps=3,
    )
    trainer.train()
    lines = trainer.state.log_history
    found = {line["step"]: line["eval_data1_loss"] for line in lines if "eval_data1_loss" in line}
    assert sorted(found) == [1, 2, 3]
    assert any("eval_data2_loss" in line for line in lines)
    assert trainer.state.best_metric == min(found.values())
    metrics = trainer.evaluate({"data1": data1, "data2": data2})
    assert metrics["eval_data1_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)
    assert trainer.evaluate(data2)["eval_loss"] == metrics["eval_data2_loss"]


def test_line_48(tmp_path):
    """Each call to train() begins with a new model, and the function may take the trial."""
    given = []

    def with_trial(trial):
        given.append(trial)
        return make_plain()

    for model_init in (make_plain, with_trial):
        trainer = make(tmp_path, model_init=model_init)
        trainer.train()
        first = losses(trainer.state.log_history)
        trainer.train()
        assert losses(trainer.state.log_history) == first
    assert given
    assert set(given) == {None}


def test_line_52(tmp_path):
    seen = []

    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        seen.append((int(num_items_in_batch), len(labels)))
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 1}
    trainer = make(tmp_path, data=6, compute_loss_func=compute_loss_func, **settings)
    trainer.train()
    assert seen == [(6, 2)] * 3  # of the whole window, not of its micro-batches


def test_line_58(tmp_path):
    seen = []

    def compute_metrics(prediction, compute_result):
        seen.append((len(prediction.predictions), compute_result))
        return {"batches": len(seen)} if compute_result else {}

    settings = {"batch_eval_metrics": True, "per_device_eval_batch_size": 4}
    trainer = make(tmp_path, compute_metrics=compute_metrics, **settings)
    assert trainer.evaluate(plain_data(10))["eval_batches"] == 3
    assert seen == [(4, False), (4, False), (2, True)]


class Notes(TrainerCallback):
    """Whether a run is under way when it is evaluated and when it ends."""

    def __init__(self):
        self.seen = []

    def on_evaluate(self, args, state, control, **kwargs):
        self.seen.append(self.trainer.is_in_train)


def test_lines_65_106_116_127(tmp_path):
    """By class or object; what is not there is None."""
    trainer = make(tmp_path, disable_tqdm=False)
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert "ProgressCallback" in names
    trainer.remove_callback(importlib.import_module("hftrainer.trainer_callback").ProgressCallback)
    trainer.add_callback(Notes)
    kept = Notes()
    trainer.add_callback(kept)
    now = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert now == [*(name for name in names if name != "ProgressCallback"), "Notes", "Notes"]
    assert trainer.pop_callback(kept) is kept
    assert isinstance(trainer.pop_callback(Notes), Notes)
    assert trainer.pop_callback(Notes) is None
    trainer.add_callback(kept)
    assert trainer.remove_callback(kept) is None
    assert kept not in trainer.callback_handler.callbacks


def test_lines_68_71(tmp_path):
    trainer = make(tmp_path, max_steps=4, learning_rate=0.4, optim="adamw_torch")
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])
    model = make_plain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = make(tmp_path, model=model, optimizers=(optimizer, schedule))
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates == pytest.approx([0.1, 0.05])
    chosen = (torch.optim.Adagrad, {"lr": 0.3, "eps": 1e-3})
    trainer = make(tmp_path, optimizer_cls_and_kwargs=chosen, optim="adamw_torch", optim_args="amsgrad=True")
    trainer.create_optimizer()
    assert isinstance(trainer.optimizer, torch.optim.Adagrad)
    assert trainer.optimizer.defaults["eps"] == 1e-3
    with pytest.raises(RuntimeError):
        make(tmp_path, model=model, optimizers=(optimizer, None), optimizer_cls_and_kwargs=chosen)


def test_line_79(tmp_path):
    seen = []

    def best(logits, labels):
        seen.append(labels)
        return logits.argmax(-1)

    trainer = make(tmp_path, preprocess_logits_for_metrics=best)
    unlabelled = [{"x": row["x"]} for row in plain_data(4)]
    assert trainer.predict(unlabelled).predictions.shape == (4,)
    assert trainer.predict(plain_data(4)).predictions.shape == (4,)
    assert seen[0] is None
    assert len(seen[1]) == 4


def test_lines_83_85_89_91_94(tmp_path):
    notes = Notes()
    trainer = make(tmp_path, eval_dataset=plain_data(4), eval_strategy="steps", eval_steps=1, callbacks=[notes])
    notes.trainer, model = trainer, trainer.model
    assert trainer.model_wrapped is model
    assert (trainer.is_model_parallel, trainer.place_model_on_device, trainer.is_in_train) == (False, True, False)
    trainer.train()
    trainer.evaluate()
    assert notes.seen == [True, True, False]
    assert trainer.model is model
    assert trainer.is_in_train is False

    class Stays(TrainingArguments):
        place_model_on_device = False

    assert Trainer(make_plain(), quiet(tmp_path, Stays)).place_model_on_device is False


def test_lines_99_103(tmp_path):
    trainer = make(tmp_path, model=make_llama(), neftune_noise_alpha=5.0)
    tokens, embeddings = torch.tensor([[1, 2, 3]]), trainer.model.get_input_embeddings()
    plain = embeddings(tokens)
    trainer._activate_neftune(trainer.model)
    embeddings.train()
    assert not torch.equal(embeddings(tokens), plain)
    trainer._deactivate_neftune(trainer.model)
    assert torch.equal(embeddings(tokens), plain)


# ---- Loaders, optimizer and schedule --------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from plain_data(8)


def test_lines_138_150(tmp_path):
    trainer = make(tmp_path, eval_dataset={"first": plain_data(3), "second": plain_data(5)})
    assert isinstance(trainer._get_train_sampler(), torch.utils.data.RandomSampler)
    loaded = [sum(len(batch["x"]) for batch in trainer.get_eval_dataloader(name)) for name in ("first", "second")]
    assert loaded == [3, 5]
    streaming = make(tmp_path, train_dataset=Stream())
    assert streaming._get_train_sampler() is None
    order = torch.cat([batch["x"] for batch in streaming.get_train_dataloader()])
    assert torch.equal(order, torch.stack([row["x"] for row in plain_data(8)]))


class Own(Trainer):
    """Overrides the method that the text names, and counts its calls."""

    asked = 0

    def create_optimizer_and_scheduler(self, num_training_steps):
        self.asked += 1
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0, num_training_steps)


def test_line_165(tmp_path):
    trainer = make(tmp_path, Own)
    trainer.train()
    assert trainer.asked == 1
    assert [line["learning_rate"] for line in trainer.state.log_history if "loss" in line] == [0.1, 0.1]


def test_lines_170_182_185_188_195(pair):
    """As the release's, of the same model."""
    ours, theirs = pair
    assert sorted(ours.get_decay_parameter_names(ours.model)) == sorted(theirs.get_decay_parameter_names(theirs.model))
    assert ours.get_num_trainable_parameters() == theirs.get_num_trainable_parameters()
    assert ours.get_learning_rates() == theirs.get_learning_rates()
    sizes = [[[each.numel() for each in group] for group in trainer.get_optimizer_group()] for trainer in pair]
    assert sizes[0] == sizes[1]
    for trainer in pair:
        first = trainer.optimizer.param_groups[0]
        assert trainer.get_optimizer_group(first["params"][0])["weight_decay"] == first["weight_decay"]
    kinds = [type(each).get_optimizer_cls_and_kwargs(each.args) for each in pair]
    assert kinds[0] == kinds[1]


def test_lines_203_210_214(pair):
    ours, theirs = pair
    for trainer in pair:
        trainer.lr_scheduler = None
        trainer.create_scheduler(num_training_steps=8)
        trainer.optimizer.step()
    rates = []
    for trainer in pair:
        rates.append([])
        for _ in range(8):
            trainer.lr_scheduler.step()
            rates[-1] += trainer.lr_scheduler.get_last_lr()
    assert rates[0] == rates[1]
    assert rates[0][-1] == 0.0
    loader = ours.get_train_dataloader()
    assert ours.num_examples(loader) == theirs.num_examples(theirs.get_train_dataloader()) == 38
    tokens = [{"input_ids": torch.ones(2, 5)}, {"input_ids": torch.ones(3, 4)}]
    assert (Trainer.num_tokens(tokens), Trainer.num_tokens(tokens, max_steps=7)) == (22, 70)  # gone in v5


# ---- Runs -----------------------------------------------------------------------------------------------------------


def test_line_225(tmp_path):
    given = []

    def model_init(trial):
        given.append(trial)
        return make_plain()

    trainer = make(tmp_path, model_init=model_init)
    trainer.train(trial={"learning_rate": 0.25})
    assert given[-1] == {"learning_rate": 0.25}
    assert trainer.args.learning_rate == 0.25


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits, "hidden": logits.exp()}


def test_line_227(tmp_path):
    """In the evaluations of a run, and in evaluate()."""
    shapes = []

    def compute_metrics(prediction):
        shapes.append(np.shape(prediction.predictions))
        return {}

    given = {"eval_dataset": plain_data(4), "compute_metrics": compute_metrics}
    trainer = make(tmp_path, model=TwoOutputs(), eval_strategy="steps", eval_steps=2, **given)
    trainer.train(ignore_keys_for_eval=["hidden"])
    trainer.evaluate(ignore_keys=["hidden"])
    trainer.evaluate()
    assert shapes == [(4, 3), (4, 3), (2, 4, 3)]


def test_line_235(tmp_path):
    """The loss decides, and less is better."""
    evaluated = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    trainer = make(tmp_path, eval_dataset=plain_data(4), **evaluated)
    assert trainer.args.metric_for_best_model == "loss"
    assert [trainer._determine_best_metric({"eval_loss": loss}, None) for loss in (2.0, 3.0, 1.0)] == [
        True,
        False,
        True,
    ]


def test_lines_259_270(tmp_path):
    """Spaces and objective of the search, and a search in two directions."""
    optuna = pytest.importorskip("optuna")
    theirs = importlib.import_module("transformers.trainer_utils")
    trial = optuna.trial.FixedTrial(
        {"learning_rate": 1e-4, "num_train_epochs": 2, "seed": 3, "per_device_train_batch_size": 8}
    )
    assert default_hp_space_optuna(trial) == theirs.default_hp_space_optuna(trial)
    metrics = {"eval_loss": 0.5, "eval_a": 1.0, "eval_b": 2.0, "epoch": 3.0, "eval_runtime": 7.0}
    assert default_compute_objective(dict(metrics)) == theirs.default_compute_objective(dict(metrics)) == 3.0
    assert default_hp_space_ray.__name__ == theirs.default_hp_space_ray.__name__
    sigopt = importlib.import_module("hftrainer.trainer_utils").default_hp_space_sigopt
    with pytest.raises(Exception, match="SigOpt"):
        sigopt(trial)
    trainer = make(tmp_path, model_init=make_plain, eval_dataset=plain_data(4), eval_strategy="epoch", max_steps=1)
    runs = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1)},
        compute_objective=lambda metrics: [metrics["eval_loss"], -metrics["eval_loss"]],
        n_trials=2,
        direction=["minimize", "maximize"],
        backend="optuna",
        hp_name=lambda trial: f"run-{trial.number}",
    )
    assert all(run.objective[0] == -run.objective[1] for run in runs)
    assert {"learning_rate"} == set(runs[0].hyperparameters)


# ---- Steps and evaluations ------------------------------------------------------------------------------------------


def test_lines_301_311(tmp_path):
    trainer = make(tmp_path, bf16=True)
    nested = {"a": [torch.ones(2), (torch.zeros(1),)], "b": "text"}
    prepared = trainer._prepare_input(nested)
    assert type(prepared["a"][1]) is tuple
    assert (prepared["a"][0].device.type, prepared["b"]) == ("cpu", "text")
    with trainer.autocast_smart_context_manager(), trainer.compute_loss_context_manager():
        assert torch.is_autocast_enabled("cpu") == trainer_of_release_autocasts(tmp_path)


def trainer_of_release_autocasts(folder):
    """Whether the release's own context does."""
    theirs, _ = build("transformers", "plain", folder / "theirs", bf16=True)
    with theirs.autocast_smart_context_manager(), theirs.compute_loss_context_manager():
        return torch.is_autocast_enabled("cpu")


def test_line_379(tmp_path):
    def bleu(prediction):
        return {"bleu": 1.0}

    trainer = make(tmp_path, compute_metrics=bleu)
    assert trainer.evaluate(plain_data(4))["eval_bleu"] == 1.0
    assert trainer.evaluate(plain_data(4), metric_key_prefix="other")["other_bleu"] == 1.0
    assert trainer.predict(plain_data(4)).metrics["test_bleu"] == 1.0


def test_lines_408_414(tmp_path):
    """Sequences of several lengths, padded with -100; and what is returned, by name and by place."""
    data = varied_language_data(6)
    trainer = make(tmp_path, model=make_llama(), data_collator=pad, per_device_eval_batch_size=1)
    output = trainer.predict(data)
    longest = max(len(row["labels"]) for row in data)
    assert output.label_ids.shape == (6, longest)
    for row, predicted, labels in zip(data, output.predictions, output.label_ids, strict=True):
        assert np.array_equal(labels[: len(row["labels"])], row["labels"].numpy())
        assert (labels[len(row["labels"]) :] == -100).all()
        assert (predicted[len(row["labels"]) :] == -100).all()
    predictions, label_ids, metrics = output
    assert predictions is output.predictions
    assert label_ids is output.label_ids
    assert "test_loss" in metrics


def test_line_425(tmp_path):
    gathered = make(tmp_path)._gather_and_numpify([torch.ones(2), (torch.zeros(1),)], "eval")
    assert isinstance(gathered[0], np.ndarray)
    assert gathered[1][0].tolist() == [0.0]


def test_lines_448_460(tmp_path, pair):
    """A loss, logits and labels, each of which may be None; and operations as a number."""
    trainer = make(tmp_path)
    rows = plain_data(4)
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    loss, logits, labels = trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=False)
    assert (loss.shape, logits.shape, labels.shape) == ((), (4, 3), (4,))
    assert trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=True)[1:] == (None, None)
    batch.pop("labels")
    loss, logits, labels = trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=False)
    assert (loss, labels) == (None, None)
    assert logits.shape == (4, 3)
    ours, theirs = (each.__class__.floating_point_ops(_with_model(each, make_bert()), text_batch()) for each in pair)
    assert ours == theirs > 0


def _with_model(trainer, model):
    trainer.model = model
    return trainer


def text_batch():
    return {"input_ids": torch.stack([row["input_ids"] for row in text_data(2)])}


def test_line_519(tmp_path):
    """Patterns of SageMaker's files, once."""
    trainer = make(tmp_path)
    trainer._add_sm_patterns_to_gitignore()
    trainer._add_sm_patterns_to_gitignore()
    lines = (tmp_path / ".gitignore").read_text().split()
    assert sorted(lines) == ["*.sagemaker-uploaded", "*.sagemaker-uploading"]
