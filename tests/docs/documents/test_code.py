"""What transformers' documents show in code, signatures and docstrings works, block after block: see blocks.toml."""

import functools
import inspect
import re
import shutil
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from hftrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from hftrainer.arguments.fields import table
from hftrainer.trainer_callback import ProgressCallback
from tests.docs.documents.running import losses, make_args
from tests.support import small_models
from tests.support.parity import assert_agree, assert_same_weights, build


def make_trainer(folder, trainer_class=Trainer, model=None, data=8, **trainer_kwargs):
    fields = TrainingArguments.__dataclass_fields__
    settings = {name: trainer_kwargs.pop(name) for name in list(trainer_kwargs) if name in fields}
    trainer_kwargs.setdefault("train_dataset", small_models.plain_data(data))
    return trainer_class(
        small_models.make_plain() if model is None else model, make_args(folder, **settings), **trainer_kwargs
    )


def my_custom_loss(logits, labels):
    return nn.functional.multi_margin_loss(logits, labels)


class MyTrainer(Trainer):
    """From the documents of v4.1, with its own loss."""

    def compute_loss(self, model, inputs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs[0]
        return my_custom_loss(logits, labels)


class MultilabelTrainer(Trainer):
    """From the documents of v4.15."""

    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.get("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.BCEWithLogitsLoss()
        loss = loss_fct(
            logits.view(-1, self.model.config.num_labels), labels.float().view(-1, self.model.config.num_labels)
        )
        return (loss, outputs) if return_outputs else loss


class CustomTrainer(Trainer):
    """From the Chinese guide."""

    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


#: Class → its loss of logits and labels.
LOSSES = {
    MyTrainer: my_custom_loss,
    MultilabelTrainer: nn.functional.binary_cross_entropy_with_logits,
    CustomTrainer: functools.partial(nn.functional.cross_entropy, weight=torch.tensor([1.0, 2.0, 3.0])),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_overridden_compute_loss_is_used_by_training_and_evaluation(kind, tmp_path):
    model, data = small_models.without_dropout(small_models.make_bert)(), small_models.text_data(8)
    for row in data:
        row["labels"] = torch.tensor(row.pop("label"))
        if kind is MultilabelTrainer:
            row["labels"] = nn.functional.one_hot(row["labels"], 3).float()
    if kind is MultilabelTrainer:
        model.config.problem_type = "multi_label_classification"
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    labels = batch.pop("labels")

    def expected():
        return pytest.approx(LOSSES[kind](model(**batch).logits, labels).item(), rel=1e-6)

    before = expected()
    trainer = make_trainer(tmp_path, kind, model, max_steps=3, learning_rate=1e-2, train_dataset=data)
    trainer.train()
    logged = losses(trainer.state.log_history)
    assert logged[0] == before
    assert logged[2] < logged[0]
    assert trainer.evaluate(data)["eval_loss"] == expected()
    assert trainer.predict(data).predictions.shape == (8, 3)


class OwnOptimizer(Trainer):
    asked = 0

    def create_optimizer_and_scheduler(self, num_training_steps):
        self.asked += 1
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0, num_training_steps)


def test_overridden_create_optimizer_and_scheduler_is_used(tmp_path):
    trainer = make_trainer(tmp_path, OwnOptimizer)
    trainer.train()
    assert trainer.asked == 1
    assert [line["learning_rate"] for line in trainer.state.log_history if "loss" in line] == [0.1, 0.1]


#: Methods of v4.15 and their parameters.
SIGNATURES = """
  add_callback: callback
  create_scheduler: num_training_steps optimizer=None
  evaluate: eval_dataset=None ignore_keys=None metric_key_prefix='eval'
  evaluation_loop: dataloader description prediction_loss_only=None ignore_keys=None metric_key_prefix='eval'
  floating_point_ops: inputs
  get_eval_dataloader: eval_dataset=None
  get_test_dataloader: test_dataset
  hyperparameter_search: hp_space=None compute_objective=None n_trials=20 direction='minimize' backend=None hp_name=None
  log: logs
  log_metrics: split metrics
  metrics_format: metrics
  pop_callback: callback
  predict: test_dataset ignore_keys=None metric_key_prefix='test'
  prediction_loop: dataloader description prediction_loss_only=None ignore_keys=None metric_key_prefix='eval'
  prediction_step: model inputs prediction_loss_only ignore_keys=None
  push_to_hub: commit_message='End of training' blocking=True
  remove_callback: callback
  save_metrics: split metrics combined=True
  train: resume_from_checkpoint=None trial=None ignore_keys_for_eval=None
  training_step: model inputs
  main_process_first: local=True desc='work'"""


def read_parameters(text):
    pairs = re.findall(r"(\w+)(?:=('[^']*'|\([^)]*\)|\S+))?", text)
    return {name: eval(default) if default else inspect.Parameter.empty for name, default in pairs}


def parameters(function):
    found = inspect.signature(function).parameters
    return {name: each.default for name, each in found.items() if name != "self"}


@pytest.mark.parametrize(("name", "text"), re.findall(r"(\w+): (.*)", SIGNATURES))
def test_method_accepts_documented_parameters(name, text):
    """By position or by name; parameters that later releases added come after them, with a default."""
    documented = read_parameters(text)
    ours = parameters(getattr(TrainingArguments if name == "main_process_first" else Trainer, name))
    assert dict(list(ours.items())[: len(documented)]) == documented
    added = {name: ours[name] for name in ours.keys() - documented.keys() - {"kwargs", "unknown"}}
    assert inspect.Parameter.empty not in added.values()


def test_trainer_accepts_documented_parameters():
    """The first seven by position, as in later releases, and all by name."""
    text = "model=None args=None data_collator=None train_dataset=None eval_dataset=None tokenizer=None model_init=None"
    documented = read_parameters(f"{text} compute_metrics=None callbacks=None optimizers=(None,None)")
    ours = parameters(Trainer)
    assert {name: ours[name] for name in documented} == documented
    assert list(ours)[:7] == ["processing_class" if name == "tokenizer" else name for name in documented][:7]


def test_generation_settings_by_position_and_by_name(tmp_path, monkeypatch):
    """`max_length` and `num_beams`, for one call; the prefix of predict() is that of later releases."""
    model, data, asked = small_models.make_t5(), small_models.t5_data(4), []
    generate = model.generate

    def generate_and_record(*inputs, **settings):
        asked.append((settings.get("max_length"), settings.get("num_beams")))
        return generate(*inputs, **settings)

    monkeypatch.setattr(model, "generate", generate_and_record)
    args = make_args(tmp_path, Seq2SeqTrainingArguments, predict_with_generate=True)
    trainer = Seq2SeqTrainer(model, args, compute_metrics=lambda prediction: {})
    evaluated = [trainer.evaluate(data, None, "eval", 7, 2), trainer.evaluate(data, max_length=7, num_beams=2)]
    predicted = [trainer.predict(data, None, "eval", 7, 2), trainer.predict(data, max_length=7, num_beams=2)]
    assert evaluated[0]["eval_loss"] == evaluated[1]["eval_loss"]
    assert np.array_equal(predicted[0].predictions, predicted[1].predictions)
    assert predicted[0].metrics["eval_loss"] == predicted[1].metrics["test_loss"]
    trainer.evaluate(data)
    assert asked == [*[(7, 2)] * 4, (None, None)]


ARGUMENTS = """
    overwrite_output_dir=False do_train=False do_eval=False do_predict=False evaluation_strategy='no'
    prediction_loss_only=False per_device_train_batch_size=8 per_device_eval_batch_size=8 per_gpu_train_batch_size=None
    per_gpu_eval_batch_size=None gradient_accumulation_steps=1 eval_accumulation_steps=None learning_rate=5e-05
    weight_decay=0.0 adam_beta1=0.9 adam_beta2=0.999 adam_epsilon=1e-08 max_grad_norm=1.0 num_train_epochs=3.0
    max_steps=-1 lr_scheduler_type='linear' warmup_ratio=0.0 warmup_steps=0 log_level='passive'
    log_level_replica='passive' log_on_each_node=True logging_dir=None logging_strategy='steps'
    logging_first_step=False logging_steps=500 logging_nan_inf_filter=True save_strategy='steps' save_steps=500
    save_total_limit=None save_on_each_node=False no_cuda=False seed=42 bf16=False fp16=False fp16_opt_level='O1'
    half_precision_backend='auto' bf16_full_eval=False fp16_full_eval=False tf32=None local_rank=-1 xpu_backend=None
    tpu_num_cores=None tpu_metrics_debug=False debug='' dataloader_drop_last=False eval_steps=None
    dataloader_num_workers=0 past_index=-1 run_name=None disable_tqdm=None remove_unused_columns=True label_names=None
    load_best_model_at_end=False metric_for_best_model=None greater_is_better=None ignore_data_skip=False
    sharded_ddp='' deepspeed=None label_smoothing_factor=0.0 adafactor=False group_by_length=False
    length_column_name='length' report_to=None ddp_find_unused_parameters=None dataloader_pin_memory=True
    skip_memory_metrics=True use_legacy_prediction_loop=False push_to_hub=False resume_from_checkpoint=None
    hub_model_id=None hub_strategy='every_save' hub_token=None gradient_checkpointing=False fp16_backend='auto'
    push_to_hub_model_id=None push_to_hub_organization=None push_to_hub_token=None mp_parameters=''"""
OF_GENERATION = "sortish_sampler=False predict_with_generate=False generation_max_length=None generation_num_beams=None"
DEFAULTS = {TrainingArguments: ARGUMENTS, Seq2SeqTrainingArguments: f"{ARGUMENTS} {OF_GENERATION}"}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_documented_defaults_change_nothing(kind):
    """Each argument exists, and giving its documented default changes only what releases have changed since."""
    documented = read_parameters(DEFAULTS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        given, left_out = (kind("x", **settings).to_dict() for settings in (documented, {}))
    assert {name for name in left_out if given[name] != left_out[name]} == {"log_level_replica"}
    assert given.keys() == left_out.keys()
    # The classes have these defaults too, except for two that have changed.
    assert set(documented) & {
        name for name, about in table.ARGUMENTS.items() if about.past_defaults and not about.until
    } == {"log_level_replica", "report_to"}


def test_default_output_dir_is_tmp_trainer():
    assert Trainer(small_models.make_plain()).args.output_dir == "tmp_trainer"


class OwnCallback(TrainerCallback):
    pass


def test_callbacks_are_added_and_removed_by_class_and_object(tmp_path):
    trainer, kept = make_trainer(tmp_path, disable_tqdm=False), OwnCallback()

    def names():
        return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]

    before = names()
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(OwnCallback)
    trainer.add_callback(kept)
    assert "ProgressCallback" in before
    assert names() == [*(name for name in before if name != "ProgressCallback"), "OwnCallback", "OwnCallback"]
    assert trainer.pop_callback(kept) is kept
    assert isinstance(trainer.pop_callback(OwnCallback), OwnCallback)
    assert trainer.pop_callback(OwnCallback) is None
    trainer.add_callback(kept)
    assert trainer.remove_callback(kept) is None
    assert kept not in trainer.callback_handler.callbacks


def test_resume_from_latest_named_and_hub_checkpoint():
    """From the latest checkpoint, from a folder, and from the folder that hub_strategy='checkpoint' leaves."""
    short = {"max_steps": 4, "per_device_train_batch_size": 4}
    first = make_trainer("written", save_strategy="steps", save_steps=2, **short)
    first.train()
    for name in ("checkpoint-2", "elsewhere", "last-checkpoint"):
        shutil.copytree("written/checkpoint-2", f"of_{name}/{name}")
        trainer = make_trainer(f"of_{name}", **short)
        trainer.train(resume_from_checkpoint=name == "checkpoint-2" or f"of_{name}/{name}")
        assert_same_weights(trainer.model.state_dict(), first.model.state_dict())
        assert losses(trainer.state.log_history) == losses(first.state.log_history)


class TwoOutputs(small_models.Plain):
    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        return {**outputs, "hidden": outputs["logits"].exp()}


def test_ignore_keys_drop_outputs_from_predictions(tmp_path):
    shapes = []
    trainer_kwargs = {"compute_metrics": lambda prediction: shapes.append(np.shape(prediction.predictions)) or {}}
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": small_models.plain_data(4)}
    trainer = make_trainer(tmp_path, model=TwoOutputs(), **trainer_kwargs, **settings)
    trainer.train(ignore_keys_for_eval=["hidden"])
    trainer.evaluate(ignore_keys=["hidden"])
    trainer.evaluate()
    assert shapes == [(4, 3), (4, 3), (2, 4, 3)]


def test_preprocess_logits_gets_none_without_labels(tmp_path):
    seen = []
    trainer = make_trainer(tmp_path, preprocess_logits_for_metrics=lambda x, y: seen.append(y) or x.argmax(-1))
    for data in ([{"x": row["x"]} for row in small_models.plain_data(4)], small_models.plain_data(4)):
        assert trainer.predict(data).predictions.shape == (4,)
    assert seen[0] is None
    assert len(seen[1]) == 4


def test_prepare_input_matches_transformers(tmp_path):
    inputs = {"a": [torch.ones(2), (torch.zeros(1),)], "b": "text"}
    ours = assert_agree(lambda name: str(build(name, "plain", tmp_path)[0]._prepare_input(inputs)))
    assert ours == str(inputs)
