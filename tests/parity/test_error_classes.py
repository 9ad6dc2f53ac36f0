"""Our errors are of the class that transformers raises in the same situation: scripts catch that one."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from unittest import mock

import pytest
import torch
import transformers.integrations.integration_utils
import transformers.trainer_optimizer
import transformers.trainer_pt_utils

from tests.support.tiny import make_plain, plain_data

LIBRARIES = ("hftrainer", "transformers")


def arguments(library, folder, **settings):
    defaults = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, "max_steps": 2}
    return library.TrainingArguments(str(folder), **{**defaults, **settings})


def trainer(library, folder, settings=None, **given):
    given = {"train_dataset": plain_data(8), **given}
    if "model" not in given and "model_init" not in given:
        given["model"] = make_plain()
    return library.Trainer(args=arguments(library, folder, **(settings or {})), **given)


def module(library, name):
    return importlib.import_module(f"{library.__name__}.{name}")


@contextlib.contextmanager
def without(package, *holders):
    """As if a package were not installed, to whoever looks for it, and to `holders`, which have looked already."""
    find, loaded = importlib.util.find_spec, {name for name in sys.modules if name.split(".")[0] == package}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, dict.fromkeys({*loaded, package})))
        hidden = lambda name, *rest: None if name.split(".")[0] == package else find(name, *rest)  # noqa: E731
        stack.enter_context(mock.patch.object(importlib.util, "find_spec", hidden))
        for holder in holders:
            for name in vars(holder):
                if name.startswith("is_") and name.endswith("_available"):
                    stack.enter_context(mock.patch.object(holder, name, return_value=False))
        yield


def make_arguments(**settings):
    return lambda library, folder: arguments(library, folder, **settings)


def make_trainer(settings=None, **given):
    return lambda library, folder: trainer(library, folder, settings, **given)


def train(settings=None, resume=None, **given):
    return lambda library, folder: trainer(library, folder, settings, **given).train(resume_from_checkpoint=resume)


def with_optimizer(**given):
    def provoke(library, folder):
        model = make_plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return trainer(library, folder, optimizers=(optimizer, None), **{"model": model, **given})

    return provoke


def optimizer_without(name, package, **settings):
    def provoke(library, folder):
        with without(package, transformers.trainer_optimizer):
            return trainer(library, folder, {"optim": name, **settings}).create_optimizer()

    return provoke


def tracker_without(name, package):
    def provoke(library, folder):
        with without(package, transformers.integrations.integration_utils):
            return trainer(library, folder, {"report_to": name})

    return provoke


def search(**given):
    return lambda library, folder: trainer(library, folder, **given).hyperparameter_search(n_trials=1)


def search_with(backend):
    def provoke(library, folder):
        made = trainer(library, folder, model_init=make_plain, eval_dataset=plain_data(8))
        return made.hyperparameter_search(backend=backend, n_trials=1)

    return provoke


def search_without_any(backend):
    """A search where no library for one is installed."""

    def provoke(library, folder):
        with contextlib.ExitStack() as stack:
            for package in ("optuna", "ray", "wandb"):
                stack.enter_context(without(package, transformers.integrations.integration_utils))
            patched = importlib.import_module("transformers.hyperparameter_search")
            for name in [name for name in vars(patched) if name.startswith("is_") and name.endswith("_available")]:
                stack.enter_context(mock.patch.object(patched, name, return_value=False))
            return search_with(backend)(library, folder)

    return provoke


def early_stopping(**settings):
    def provoke(library, folder):
        callback = library.EarlyStoppingCallback()
        return trainer(library, folder, settings, eval_dataset=plain_data(8), callbacks=[callback]).train()

    return provoke


class NoLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)

    def forward(self, x, labels=None):
        return {"logits": self.layer(x)}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from plain_data(8)


def resume_unsafe(library, folder):
    trainer(library, folder, {"save_strategy": "steps", "save_steps": 2}).train()
    torch.save({"state": NoLoss()}, folder / "checkpoint-2" / "optimizer.pt")
    for manifest in (folder / "checkpoint-2").glob("*manifest*"):
        manifest.unlink()
    return trainer(library, folder).train(resume_from_checkpoint=str(folder / "checkpoint-2"))


EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
BEST_OFF_BEAT = {**EACH_STEP, "eval_steps": 2, "save_steps": 3, "load_best_model_at_end": True}
# situation -> what provokes it, with either library
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
    "optim_args": lambda library, folder: trainer(
        library, folder, {"optim": "sgd", "optim_args": "momentum"}
    ).create_optimizer(),
    # what a Trainer is given
    "no model": lambda library, folder: library.Trainer(args=arguments(library, folder)),
    "model_init returns None": make_trainer(model_init=lambda: None),
    "model_init takes two": make_trainer(model_init=lambda one, two: make_plain()),
    "two optimizers": with_optimizer(optimizer_cls_and_kwargs=(torch.optim.SGD, {})),
    "optimizer and model_init": with_optimizer(model=None, model_init=make_plain),
    "evaluation without data": make_trainer({"eval_strategy": "steps", "eval_steps": 1}),
    "evaluate() without data": lambda library, folder: trainer(library, folder).evaluate(),
    "train() without data": train(train_dataset=None),
    "stream without max_steps": make_trainer({"max_steps": -1}, train_dataset=Stream()),
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
    "clipping to a word": train({"max_grad_norm": "a"}),
    "rates without optimizer": lambda library, folder: trainer(library, folder).get_learning_rates(),
    # packages that are missing
    "without bitsandbytes": optimizer_without("adamw_bnb_8bit", "bitsandbytes"),
    "without galore": optimizer_without("galore_adamw", "galore_torch", optim_target_modules="all-linear"),
    "without apollo": optimizer_without("apollo_adamw", "apollo_torch", optim_target_modules="all-linear"),
    "without lomo": optimizer_without("lomo", "lomo_optim"),
    "without schedulefree": optimizer_without("schedule_free_adamw", "schedulefree"),
    "without grokadamw": optimizer_without("grokadamw", "grokadamw"),
    "without torch-optimi": optimizer_without("stable_adamw", "optimi"),
    "without torchao": optimizer_without("adamw_torch_4bit", "torchao"),
    "without torchdistx": optimizer_without("adamw_anyprecision", "torchdistx"),
    "without torch_npu": optimizer_without("adamw_torch_npu_fused", "torch_npu"),
    "without torch_xla": optimizer_without("adamw_torch_xla", "torch_xla"),
    **{
        f"without {package}": tracker_without(name, package)
        for name, package in {
            "wandb": "wandb",
            "mlflow": "mlflow",
            "clearml": "clearml",
            "dvclive": "dvclive",
            "trackio": "trackio",
            "swanlab": "swanlab",
            "azure_ml": "azureml",
            "codecarbon": "codecarbon",
            "flyte": "flytekit",
        }.items()
    },
    "without liger": train({"use_liger_kernel": True}),
    # searches
    "search without model_init": search(),
    "search by nothing that is known": search_with("guessing"),
    "search by what has ended": search_with("sigopt"),
    "search without ray": search_without_any("ray"),
    "search without any": search_without_any(None),
    # small ones
    "parser: key": lambda library, folder: library.HfArgumentParser(library.TrainingArguments).parse_dict({"x": 1}),
    "parser: truth": lambda library, folder: module(library, "hf_argparser").string_to_bool("perhaps"),
    "schedule without steps": lambda library, folder: module(library, "optimization").get_scheduler(
        "linear", torch.optim.SGD(make_plain().parameters(), lr=0.1)
    ),
    "prediction out of range": lambda library, folder: library.EvalPrediction([1], [2])[7],
    "state that is not defined": lambda library, folder: module(library, "trainer_callback").ExportableState().state(),
}
#: Where ours cannot be of that class -> why. Each is a ValueError or RuntimeError all the same.
NOT_THE_SAME = {
    "JSON that is malformed": (
        make_arguments(lr_scheduler_kwargs="{bad"),
        "one error names all wrong arguments; JSONDecodeError is a ValueError too",
    ),
    "level that is unknown": (make_trainer({"log_level": "loud"}), "one error names all wrong arguments"),
    "file of fsdp": (
        make_trainer({"fsdp": "full_shard", "fsdp_config": "/nowhere.json"}),
        "one error names all wrong arguments",
    ),
    "no Hub": (
        make_trainer({"push_to_hub": True, "hub_token": "hf_token"}),
        "the class is one of huggingface_hub, which need not be there",
    ),
}


def provoke(situation, name, folder) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which class it is, is the question
        situation(importlib.import_module(name), folder)
    return caught.value


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", sorted(SITUATIONS))
def test_class_of_transformers(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ours, theirs = (provoke(SITUATIONS[name], library, tmp_path / library) for library in LIBRARIES)
    assert isinstance(ours, type(theirs)), (type(ours).__mro__, theirs)


@pytest.mark.parametrize("name", sorted(NOT_THE_SAME))
def test_differences(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ours, theirs = (provoke(NOT_THE_SAME[name][0], library, tmp_path / library) for library in LIBRARIES)
    assert not isinstance(ours, type(theirs))
    assert isinstance(ours, (ValueError, RuntimeError))
