"""Our errors are of the class that transformers raises in the same situation: scripts catch that one."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from unittest import mock

import pytest
import torch
import transformers
import transformers.hyperparameter_search
import transformers.integrations.integration_utils
import transformers.trainer_optimizer
import transformers.trainer_pt_utils

from tests.support.parity import LIBRARIES
from tests.support.small_models import Stream, make_plain, plain_data


def build_arguments(library, folder, **settings):
    defaults = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, "max_steps": 2}
    return library.TrainingArguments(str(folder), **{**defaults, **settings})


def build_trainer(library, folder, settings=None, **trainer_kwargs):
    trainer_kwargs = {"train_dataset": plain_data(8), **trainer_kwargs}
    if "model" not in trainer_kwargs and "model_init" not in trainer_kwargs:
        trainer_kwargs["model"] = make_plain()
    return library.Trainer(args=build_arguments(library, folder, **(settings or {})), **trainer_kwargs)


def module(library, name):
    return importlib.import_module(f"{library.__name__}.{name}")


@contextlib.contextmanager
def without_packages(*packages):
    """As if packages were not installed, also to modules of transformers that have looked already."""
    if not packages:
        yield
        return
    find, loaded = importlib.util.find_spec, {name for name in sys.modules if name.split(".")[0] in packages}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, dict.fromkeys({*loaded, *packages})))
        hidden = lambda name, *rest: None if name.split(".")[0] in packages else find(name, *rest)  # noqa: E731
        stack.enter_context(mock.patch.object(importlib.util, "find_spec", hidden))
        looked = transformers.trainer_optimizer, transformers.integrations.integration_utils
        for holder in (*looked, transformers.hyperparameter_search):
            for name in vars(holder):
                if name.startswith("is_") and name.endswith("_available"):
                    stack.enter_context(mock.patch.object(holder, name, return_value=False))
        yield


# Functions that return a function of a library and a folder, which provokes an error.


def make_arguments(**settings):
    return lambda library, folder: build_arguments(library, folder, **settings)


def make_trainer(settings=None, missing=(), method=None, keywords=None, **kwargs):
    def provoke(library, folder):
        with without_packages(*missing):
            made = build_trainer(library, folder, settings, **kwargs)
            return method and getattr(made, method)(**(keywords or {}))

    return provoke


def train(settings=None, resume=None, **kwargs):
    return make_trainer(settings, method="train", keywords={"resume_from_checkpoint": resume}, **kwargs)


def create_optimizer(*missing, **settings):
    return make_trainer(settings, missing, "create_optimizer")


def search(backend, *missing, **kwargs):
    keywords = {"backend": backend, "n_trials": 1}
    return make_trainer(None, missing, "hyperparameter_search", keywords, eval_dataset=plain_data(8), **kwargs)


def with_optimizer(**kwargs):
    model = make_plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_trainer(optimizers=(optimizer, None), **{"model": model, **kwargs})


def early_stopping(**settings):
    def provoke(library, folder):
        callback = library.EarlyStoppingCallback()
        return build_trainer(library, folder, settings, eval_dataset=plain_data(8), callbacks=[callback]).train()

    return provoke


class NoLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)

    def forward(self, x, labels=None):
        return {"logits": self.layer(x)}


def resume_unsafe(library, folder):
    build_trainer(library, folder, {"save_strategy": "steps", "save_steps": 2}).train()
    torch.save({"state": NoLoss()}, folder / "checkpoint-2" / "optimizer.pt")
    for manifest in (folder / "checkpoint-2").glob("*manifest*"):
        manifest.unlink()
    return build_trainer(library, folder).train(resume_from_checkpoint=str(folder / "checkpoint-2"))


EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
BEST_OFF_BEAT = {**EACH_STEP, "eval_steps": 2, "save_steps": 3, "load_best_model_at_end": True}
#: Name of an optimizer or tracker → the package it needs.
OF_OPTIMIZERS = (
    {"adamw_bnb_8bit": "bitsandbytes", "lomo": "lomo_optim", "schedule_free_adamw": "schedulefree"}
    | {"grokadamw": "grokadamw", "stable_adamw": "optimi", "adamw_torch_4bit": "torchao"}
    | {"adamw_anyprecision": "torchdistx", "adamw_torch_npu_fused": "torch_npu", "adamw_torch_xla": "torch_xla"}
)
OF_TRACKERS = {
    **{name: name for name in ("wandb", "mlflow", "clearml", "dvclive", "trackio", "swanlab", "codecarbon")},
    **{"azure_ml": "azureml", "flyte": "flytekit"},
}
#: Situation → what provokes it, with either library.
SITUATIONS = {
    # arguments
    "argument that is unknown": make_arguments(learning_rat=1.0),
    "choice: interval": make_arguments(eval_strategy="sometimes"),
    "choice: schedule": make_arguments(lr_scheduler_type="zigzag"),
    "choice: optimizer": make_arguments(optim="fastest"),
    "choice: hub": make_arguments(hub_strategy="never"),
    "choice: debug": make_arguments(debug="everything"),
    "interval of 0": make_arguments(logging_steps=0),
    "interval of 1.5": make_arguments(eval_strategy="steps", eval_steps=1.5),
    "best model: strategies": make_arguments(load_best_model_at_end=True, save_strategy="steps"),
    "best model: multiple": make_arguments(**BEST_OFF_BEAT),
    "best model: metric": make_trainer({"save_strategy": "best"}),
    "two precisions": make_arguments(fp16=True, bf16=True),
    "two precisions of evaluation": make_arguments(fp16_full_eval=True, bf16_full_eval=True),
    "plateau without evaluation": make_arguments(lr_scheduler_type="reduce_lr_on_plateau"),
    "empty cache every 0": make_arguments(torch_empty_cache_steps=0),
    "empty cache every -1": make_arguments(torch_empty_cache_steps=-1),
    "empty cache every 1.0": make_arguments(torch_empty_cache_steps=1.0),
    "empty cache every none": make_arguments(torch_empty_cache_steps="none"),
    "negative warmup": make_arguments(warmup_steps=-1),
    "prefetching without processes": make_trainer({"dataloader_prefetch_factor": 2}),
    "tracker that is unknown": make_trainer({"report_to": "paper"}),
    "accelerator_config: key": make_arguments(accelerator_config={"split": True}),
    "accelerator_config: file": make_arguments(accelerator_config="/nowhere.json"),
    "accelerator_config: class": make_arguments(accelerator_config=transformers.trainer_pt_utils.AcceleratorConfig),
    "accumulation twice": make_trainer(
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}, "gradient_accumulation_steps": 3}
    ),
    "keyword of a schedule": train({"lr_scheduler_kwargs": {"speed": 1}}),
    "optim_args": create_optimizer(optim="sgd", optim_args="momentum"),
    # what a Trainer is given
    "no model": lambda library, folder: library.Trainer(args=build_arguments(library, folder)),
    "model_init returns None": make_trainer(model_init=lambda: None),
    "model_init takes two": make_trainer(model_init=lambda one, two: make_plain()),
    "two optimizers": with_optimizer(optimizer_cls_and_kwargs=(torch.optim.SGD, {})),
    "optimizer and model_init": with_optimizer(model=None, model_init=make_plain),
    "evaluation without data": make_trainer({"eval_strategy": "steps", "eval_steps": 1}),
    "evaluate() without data": make_trainer(method="evaluate"),
    "train() without data": train(train_dataset=None),
    "stream without max_steps": make_trainer({"max_steps": -1}, train_dataset=Stream(8)),
    "callbacks is no list": make_trainer(callbacks=3),
    "a callback that is none": make_trainer(callbacks=[3]),
    "metric without compute_result": make_trainer(
        {"batch_eval_metrics": True}, compute_metrics=lambda prediction: {}, eval_dataset=plain_data(8)
    ),
    # runs
    "model without loss": train(model=NoLoss()),
    "batches without inputs": train(train_dataset=[{"z": torch.ones(8)}] * 8),
    "empty data": train(train_dataset=[]),
    "no checkpoint": train(resume=True),
    "folder that is not there": train(resume="/nowhere/checkpoint-2"),
    "objects in a checkpoint": resume_unsafe,
    "metric that is not there": train(
        {**EACH_STEP, "load_best_model_at_end": True, "metric_for_best_model": "f1"}, eval_dataset=plain_data(8)
    ),
    "early stopping without metric": early_stopping(eval_strategy="steps", eval_steps=1),
    "early stopping without evaluation": early_stopping(metric_for_best_model="loss"),
    "checkpointing without method": train({"gradient_checkpointing": True}),
    "noise without embeddings": train({"neftune_noise_alpha": 5.0}),
    "rates without optimizer": make_trainer(method="get_learning_rates"),
    # packages that are missing
    "without galore": create_optimizer("galore_torch", optim="galore_adamw", optim_target_modules="all-linear"),
    "without apollo": create_optimizer("apollo_torch", optim="apollo_adamw", optim_target_modules="all-linear"),
    **{f"without {package}": create_optimizer(package, optim=name) for name, package in OF_OPTIMIZERS.items()},
    **{f"without {package}": make_trainer({"report_to": name}, [package]) for name, package in OF_TRACKERS.items()},
    "without liger": train({"use_liger_kernel": True}),
    # searches
    "search without model_init": search(None),
    "search by nothing that is known": search("guessing", model_init=make_plain),
    "search by what has ended": search("sigopt", model_init=make_plain),
    "search without ray": search("ray", "optuna", "ray", "wandb", model_init=make_plain),
    "search without any": search(None, "optuna", "ray", "wandb", model_init=make_plain),
    # functions and small classes
    "parser: key": lambda library, folder: library.HfArgumentParser(library.TrainingArguments).parse_dict({"x": 1}),
    "parser: truth": lambda library, folder: module(library, "hf_argparser").string_to_bool("perhaps"),
    "schedule without steps": lambda library, folder: module(library, "optimization").get_scheduler(
        "linear", torch.optim.SGD(make_plain().parameters(), lr=0.1)
    ),
    "prediction out of range": lambda library, folder: library.EvalPrediction([1], [2])[7],
    "state that is not defined": lambda library, folder: module(library, "trainer_callback").ExportableState().state(),
}
#: Situations where ours is of another class: one error names all wrong arguments, or huggingface_hub is optional.
NOT_THE_SAME = {
    "clipping to a word": train({"max_grad_norm": "a"}),
    "JSON that is malformed": make_arguments(lr_scheduler_kwargs="{bad"),
    "level that is unknown": make_trainer({"log_level": "loud"}),
    "file of fsdp": make_trainer({"fsdp": "full_shard", "fsdp_config": "/nowhere.json"}),
    "no Hub": make_trainer({"push_to_hub": True, "hub_token": "hf_token"}),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [*SITUATIONS, *NOT_THE_SAME])
def test_error_is_of_the_class_that_transformers_raises(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    errors = []
    for library in reversed(LIBRARIES):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which class it is, is the question
            {**SITUATIONS, **NOT_THE_SAME}[name](importlib.import_module(library), tmp_path / library)
        errors.append(caught.value)
    ours, theirs = errors
    assert isinstance(ours, type(theirs)) is (name in SITUATIONS), (type(ours).__mro__, theirs)
    assert name in SITUATIONS or isinstance(ours, (ValueError, RuntimeError))
