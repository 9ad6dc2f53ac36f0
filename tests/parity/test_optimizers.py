"""Each optimizer of `optim` trains as in transformers, or its reason is here; so do those that the user passes."""

import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import hftrainer
from hftrainer.errors import MissingPackage
from hftrainer.optimizers.factory import OPTIMIZERS, optimizer_cls_and_kwargs
from hftrainer.optimizers.schedules import SCHEDULES
from hftrainer.trainer_utils import SchedulerType
from hftrainer.training_args import OptimizerNames
from tests.support import parity
from tests.support.parity import EVALUATED, assert_agree, assert_same_weights, build, compare, train
from tests.support.small_models import make_llama, make_plain

transformers = importlib.import_module("transformers")
LOW_RANK = {"optim_target_modules": ["q_proj", "v_proj"], "optim_args": "rank=4,update_proj_gap=2"}
#: Optimizer whose package cannot be installed here → the module and the class that it needs.
NOT_INSTALLABLE = {
    "adamw_torch_xla": ("torch_xla.amp.syncfree", "AdamW"),
    "adamw_torch_npu_fused": ("torch_npu.optim", "NpuFusedAdamW"),
    "adamw_apex_fused": ("apex.optimizers", "FusedAdam"),
    "adamw_anyprecision": ("torchdistx.optimizers", "AnyPrecisionAdamW"),
}
#: Optimizers whose kernels need a GPU: only their arguments are compared.
NEED_A_GPU = {"galore_adamw_8bit", "galore_adamw_8bit_layerwise", "adalomo"}
#: Optimizers that transformers 5.23 has removed, or cannot build.
NO_PEER = {"adamw_hf", "adamw_apex_fused", "galore_adafactor_layerwise"}
EQUAL = [name for name in OPTIMIZERS if name not in NOT_INSTALLABLE.keys() | NEED_A_GPU | NO_PEER]


def settings_of(name, **settings):
    low_rank = LOW_RANK if name.startswith(("galore", "apollo")) else {}
    return {"optim": name, "max_steps": 6, "logging_steps": 1, "save_strategy": "no", **low_rank, **settings}


def test_every_optimizer_and_schedule_is_known_and_documented():
    assert OPTIMIZERS.keys() == {name.value for name in OptimizerNames}
    page = (Path(__file__).parents[2] / "docs/guides/one-device.md").read_text().partition("## Optimizers")[2]
    first_cells = [
        line.split("|")[1] for line in page.splitlines() if line.startswith("| `") and "`optim` |" not in line
    ]
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(OPTIMIZERS)
    assert SCHEDULES.keys() == set(SchedulerType)


@pytest.mark.parametrize("name", EQUAL)
def test_optimizer_trains_alike(tmp_path, name):
    layer_wise = name.endswith("layerwise")  # transformers steps them with the peak rate whatever the schedule says
    schedule = {"lr_scheduler_type": "constant"} if layer_wise else {"gradient_accumulation_steps": 2}
    ours = compare(tmp_path, "llama", **settings_of(name, **schedule))
    assert not torch.equal(ours.weights["lm_head.weight"], make_llama().state_dict()["lm_head.weight"])


def without_parameters(group):
    return {key: value for key, value in group.items() if key != "params"}


@pytest.mark.parametrize("name", sorted(NEED_A_GPU))
def test_optimizer_that_needs_a_gpu_gets_the_same_arguments(tmp_path, name):
    def run(library):
        trainer, _ = build(library, "llama", tmp_path / library, **settings_of(name, lr_scheduler_type="constant"))
        kind, kwargs = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        groups = [{**group, "params": len(group["params"])} for group in kwargs.pop("params", [])]
        inner = kwargs.pop("optimizer_dict", {}).values()
        built = [(type(each), without_parameters(each.param_groups[0])) for each in inner]
        return (kind.__name__, sorted(kwargs.keys() - {"model"}), groups if not built else [], built)

    assert_agree(run)


@pytest.mark.parametrize("name", sorted(NOT_INSTALLABLE))
def test_missing_package_is_named_and_its_optimizer_gets_the_same_kwargs(tmp_path, monkeypatch, name):
    """A stand-in takes the place of the package's class."""
    trainer, _ = build("hftrainer", "llama", tmp_path, **settings_of(name))
    with pytest.raises(MissingPackage, match=f"optim='{name}' needs .*(pip install|build https)"):
        trainer.train()

    class StandIn(torch.optim.AdamW):
        pass

    module, attribute = NOT_INSTALLABLE[name]
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
    setattr(sys.modules[module], attribute, StandIn)
    ours = optimizer_cls_and_kwargs(hftrainer.TrainingArguments(str(tmp_path), optim=name, use_cpu=True))
    assert ours[0] is StandIn
    if name not in NO_PEER:
        args = transformers.TrainingArguments(str(tmp_path), optim=name, use_cpu=True, report_to="none")
        assert ours == transformers.Trainer.get_optimizer_cls_and_kwargs(args)


def test_layerwise_galore_adafactor_is_galore_adafactor(tmp_path):
    """transformers cannot build it. Ours steps within backward."""

    def run(name):
        model = make_llama()
        for layer in model.model.layers:  # the dummy optimizer draws a random number, and dropout would follow
            layer.self_attn.attention_dropout = 0.0
        settings = {**settings_of("galore_adafactor"), "max_grad_norm": 0.0, "optim": name}
        return train("hftrainer", "llama", tmp_path / name, **settings, trainer={"model": model})

    together, apart = run("galore_adafactor"), run("galore_adafactor_layerwise")
    assert_same_weights(apart.weights, together.weights)


HALFWAY = {"save_strategy": "steps", "save_steps": 3}


@pytest.mark.parametrize("name", "galore_adamw apollo_adamw adamw_torch_8bit schedule_free_adamw adafactor".split())
def test_optimizer_resumes_alike(tmp_path, name):
    parity.compare_resumed(tmp_path, "llama", 3, **settings_of(name, **HALFWAY))


def test_layer_wise_optimizers_follow_the_schedule_and_resume(tmp_path):
    settings = settings_of("galore_adamw_layerwise", **HALFWAY)
    whole = train("hftrainer", "llama", tmp_path, **settings)
    trainer, _ = build("hftrainer", "llama", tmp_path, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_weights(dict(trainer.model.state_dict()), whole.weights)
    rates = {group["lr"] for own in trainer.optimizer.optimizer_dict.values() for group in own.param_groups}
    assert len(rates) == 1 and 0 < rates.pop() < trainer.args.learning_rate


OPTIONS = [
    ("sgd", "momentum=0.9,dampening=0.1,nesterov=false"),
    ("sgd", "momentum=0.9,nesterov=true,weight_decay=0.1"),
    ("adagrad", "lr_decay=0.1,eps=1e-6"),
    ("rmsprop", "momentum=0.5,alpha=0.9,eps=1e-6,centered=yes"),
    ("ademamix", "beta1=0.8,beta3=0.99,alpha=2.0,t_alpha=5,t_beta3=5"),
    ("adamw_torch_4bit", "bf16_stochastic_round=true"),
    ("grokadamw", "alpha_init=0.9,lamb=1.0,gamma=0.2"),
    ("schedule_free_adamw", "weight_lr_power=1.0,r=0.5"),
    ("stable_adamw", "max_lr=0.1"),
    ("galore_adamw", "rank=2,update_proj_gap=3,scale=0.5,proj_type=reverse_std"),
    ("apollo_adamw", "rank=1,proj=svd,scale_type=tensor,scale=2.0,update_proj_gap=3"),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_optim_args_train_alike(tmp_path, name, options):
    compare(tmp_path, "llama", **settings_of(name, optim_args=options, warmup_steps=2))


@pytest.mark.parametrize("targets", ["all-linear", ".*mlp.*", ["q_proj", "lm_head"]], ids=["all", "pattern", "names"])
def test_optim_target_modules_train_alike(tmp_path, targets):
    compare(tmp_path, "llama", **settings_of("galore_adamw", optim_target_modules=targets))


def test_8bit_optimizer_keeps_32_bits_for_embeddings(tmp_path):
    """bitsandbytes does so for embeddings, in both libraries."""

    def run(library):
        trainer, _ = build(library, "llama", tmp_path / library, optim="adamw_8bit", max_steps=1)
        big = torch.nn.Embedding(300, 16)
        trainer.model.set_input_embeddings(big)
        trainer.train()
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        bits = optimizer.get_config(0, 0, optimizer.param_groups[0])["optim_bits"]
        return bits, optimizer.state[big.weight]["state1"].dtype

    assert assert_agree(run)[1] == torch.float32


class Factory:
    """Since v5.0, a class that is no optimizer is instantiated, and the instance called with the model."""

    def __call__(self, model, momentum):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


class PlainSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("kind", "kwargs"), [(torch.optim.Adagrad, {"lr": 0.05}), (Factory, {"momentum": 0.5}), (PlainSGD, {"lr": 0.1})]
)
def test_optimizer_cls_and_kwargs_trains_alike(tmp_path, kind, kwargs):
    compare(tmp_path, "plain", trainer={"optimizer_cls_and_kwargs": (kind, kwargs)})


def with_sgd(make_schedule=lambda optimizer: None, lr=0.1, **options):
    def make():
        model = make_plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
        return {"model": model, "optimizers": (optimizer, make_schedule(optimizer))}

    return make


@pytest.mark.parametrize("accumulation", [1, 2])
def test_optimizer_hooks_see_the_gradients(tmp_path, accumulation):
    seen = []

    def halve(optimizer, args, kwargs):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        seen.append(all(grad is not None for grad in grads))
        for grad in grads:
            grad.mul_(0.5)

    trainer_kwargs = with_sgd(lambda optimizer: optimizer.register_step_pre_hook(halve) and None)
    compare(tmp_path, "plain", trainer=trainer_kwargs, gradient_accumulation_steps=accumulation)
    assert seen and all(seen)


class OwnScheduler:
    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1

    def get_last_lr(self):
        return [0.1 / (1 + self.steps)]

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    "own": OwnScheduler,
    "greedy": lambda optimizer: transformers.optimization.GreedyLR(optimizer, patience=0),  # none of torch's classes
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_given_schedulers_train_alike(tmp_path, kind):
    trainer_kwargs = with_sgd(SCHEDULERS[kind], lr=0.5, momentum=0.9 if kind == "step" else 0)
    ours = compare(
        tmp_path, "plain", trainer=trainer_kwargs, logging_steps=1, metric_for_best_model="loss", **EVALUATED
    )
    assert len({line["learning_rate"] for line in ours.logs if "learning_rate" in line}) > 1
