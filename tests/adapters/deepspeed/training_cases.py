"""Trains with DeepSpeed in many settings with one library and writes what came of it: two processes under torchrun.

python training_cases.py LIBRARY FOLDER [CASE ...]
"""

import copy
import importlib
import os
import pickle
import sys
from pathlib import Path

import torch

from tests.support.parity import build, record
from tests.support.small_models import plain_data

AUTO = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
STAGES = {
    **{stage: {**AUTO, "zero_optimization": {"stage": stage}} for stage in (0, 1, 2)},
    3: {**AUTO, "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
}
OF_CONFIGURATION = {
    **STAGES[2],
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
}


def offloaded(stage, *what, **settings):
    config = copy.deepcopy(STAGES[stage])
    config["zero_optimization"] |= {f"offload_{name}": {"device": "cpu", "pin_memory": False} for name in what}
    return {**config, **settings}


SHARED = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "trainer": {"eval_dataset": plain_data(32)}}
BEST = {**SHARED, **EVALUATED, "load_best_model_at_end": True}
IN_PLAIN_TORCH = {"zero_force_ds_cpu_optimizer": False}
#: Name → model and settings.
CASES = {
    **{f"stage {stage}": ("plain", {**SHARED, "deepspeed": config}) for stage, config in STAGES.items()},
    "accumulation 3": ("plain", {**SHARED, "deepspeed": STAGES[2], "gradient_accumulation_steps": 3}),
    "best": ("plain", {**BEST, "deepspeed": STAGES[2], "save_total_limit": 2}),
    "best, stage 3": ("plain", {**BEST, "deepspeed": STAGES[3]}),
    "llama": ("llama", {**SHARED, "deepspeed": STAGES[2], "gradient_accumulation_steps": 3, "save_steps": 1}),
    "llama, stage 3": ("llama", {**SHARED, "deepspeed": STAGES[3]}),
    "bert": ("bert", {**SHARED, "deepspeed": STAGES[1]}),
    "adapters": ("peft", {**SHARED, "deepspeed": STAGES[2]}),
    "adapters, stage 3": ("peft", {**SHARED, "deepspeed": STAGES[3]}),
    "bf16": ("llama", {**SHARED, "deepspeed": {**STAGES[2], "bf16": {"enabled": "auto"}}, "bf16": True}),
    "bf16, plain": ("plain", {**SHARED, "deepspeed": {**STAGES[2], "bf16": {"enabled": "auto"}}, "bf16": True}),
    "configuration's own": ("plain", {**SHARED, "deepspeed": OF_CONFIGURATION}),
    "configuration's optimizer": (
        "plain",
        {**SHARED, "deepspeed": {**OF_CONFIGURATION, "scheduler": None}, "lr_scheduler_type": "cosine"},
    ),
    "configuration's schedule": ("plain", {**SHARED, "deepspeed": {**OF_CONFIGURATION, "optimizer": None}}),
    "offload": ("plain", {**SHARED, "deepspeed": offloaded(2, "optimizer", **IN_PLAIN_TORCH)}),
    "offload, stage 3": ("plain", {**SHARED, "deepspeed": offloaded(3, "optimizer", "param", **IN_PLAIN_TORCH)}),
    "offload, DeepSpeed's Adam": ("plain", {**SHARED, "deepspeed": offloaded(2, "optimizer")}),
    "unclipped": ("plain", {**SHARED, "deepspeed": STAGES[2], "max_grad_norm": 0.0}),
    "weights only": ("plain", {**SHARED, "deepspeed": STAGES[2], "save_only_model": True}),
}
#: Runs that go on from a step.
RESUMED = (
    *(("stage 2", 6), ("llama", 3)),
    *((name, 4) for name in ("stage 2", "stage 3", "bf16", "configuration's own", "configuration's optimizer")),
    *(("offload", 4), ("adapters", 4)),
)


def forget():
    """Let transformers' next Trainer begin with another configuration."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


def run(library, name, folder, resume=None):
    model, settings = CASES[name]
    settings = {key: dict(value) if key == "trainer" else value for key, value in settings.items()}
    config = settings.get("deepspeed")
    if config is not None:
        settings["deepspeed"] = {key: value for key, value in config.items() if value is not None}
    trainer, recorder = build(library, model, folder, **settings)
    output = trainer.train(resume_from_checkpoint=resume)
    found = record(trainer, recorder, folder, global_step=output.global_step, training_loss=output.training_loss)
    if trainer.deepspeed is not None:
        weights = trainer.accelerator.get_state_dict(trainer.deepspeed) or {}
        found.weights = {name: tensor.clone() for name, tensor in weights.items()}
        states = folder.glob("checkpoint-*/global_step*/*")
        found.extra["states"] = sorted(str(path.relative_to(folder)) for path in states)
    forget()
    return {**vars(found), "random": torch.get_rng_state()}


def without_compiler():
    """Gloo will do; DeepSpeed would compile something faster for the CPU, which takes a minute.

    A process that is killed meanwhile leaves torch's lock behind, for which the next one waits without end.
    """
    # `deepspeed.comm.torch` is torch itself: the package's attribute is not the module of that name.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def main(library, folder, *chosen):
    without_compiler()
    torch.set_num_threads(1)
    if chosen:
        found = {name: run(library, name, folder / library / name) for name in chosen}
        (folder / f"{library}-{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(found))
        return
    importlib.import_module(library)
    found = {name: run(library, name, folder / library / name.replace(", ", "-")) for name in CASES}
    for name, step in RESUMED:
        found[f"{name}, resumed at {step}"] = resume_run(library, library, name, step, folder)
        if library == "hftrainer":
            found[f"{name}, resumed at {step} from theirs"] = resume_run(library, "transformers", name, step, folder)
    if library == "hftrainer":
        for name in ("stage 0", "llama"):  # the same with replicas
            model, settings = CASES[name]
            CASES[f"{name}, replicas"] = (model, {**settings, "deepspeed": None})
            found[f"{name}, replicas"] = run(library, f"{name}, replicas", folder / "replicas" / name)
    (folder / f"{library}-{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(found))


def resume_run(library, writer, name, step, folder):
    checkpoint = folder / writer / name.replace(", ", "-") / f"checkpoint-{step}"
    return run(library, name, folder / "resumed" / f"{library}-{writer}-{name}-{step}", str(checkpoint))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])


#: Of losses and norms: DeepSpeed adds gradients up in another order than DDP, in float32.
TOLERANCE = 5e-7
