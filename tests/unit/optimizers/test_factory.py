"""Settings with which no optimizer or schedule can be made are refused, and the error names what is allowed."""

import pytest
import torch

import hftrainer.optimization
from hftrainer.errors import InvalidArgument
from tests.support.parity import train
from tests.support.small_models import make_plain

WRONG = [
    ({"optim": "adamw"}, "adamw.*did you mean"),
    ({"optim": "sgd", "optim_args": "momentun=0.9"}, "unknown momentun; allowed: dampening, momentum, nesterov"),
    (
        {"optim": "adamw_torch", "optim_args": "amsgrad=true"},
        "unknown amsgrad; it has no options.*optimizer_cls_and_kwargs",
    ),
    ({"optim": "sgd", "optim_args": "momentum"}, "'momentum' is not name=value"),
    ({"optim": "sgd", "optim_args": "momentum=much"}, "momentum='much' is not a valid float"),
    ({"optim": "sgd", "optim_args": "nesterov=maybe"}, "nesterov='maybe' is not a valid flag"),
    ({"optim": "galore_adamw"}, "needs optim_target_modules"),
    ({"optim": "galore_adamw", "optim_target_modules": ["none_such"]}, "matches no linear layer of LlamaForCausalLM"),
    (
        {"optim": "galore_adamw_layerwise", "optim_target_modules": ["q_proj"], "gradient_accumulation_steps": 2},
        "gradient_accumulation_steps=2 is not possible: set it to 1",
    ),
    ({"optim": "schedule_free_adamw", "warmup_steps": 0.5}, "set warmup_steps to a number of steps, not 0.5"),
    ({"lr_scheduler_type": "consine"}, "consine.*did you mean 'cosine'"),
    (
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"cycles": 2}},
        r"unknown \['cycles'\]; did you mean 'num_cycles'\? Allowed: \['last_epoch', 'num_cycles'\]",
    ),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "set num_decay_steps"),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, "set either min_lr or min_lr_rate"),
    ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 9.0}}, "lr_end=9.0 must be below"),
    (
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 1, "decay_type": "x"}},
        "decay_type='x': choose one of linear, cosine, 1-sqrt",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_optimizer_or_schedule_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(InvalidArgument, match=message):
        train("hftrainer", "llama", tmp_path, **{"max_steps": 2, **settings})


def test_optim_beside_a_given_optimizer_is_refused(tmp_path):
    model = make_plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = hftrainer.TrainingArguments(str(tmp_path), optim="adafactor", use_cpu=True)
    with pytest.raises(InvalidArgument, match="optim='adafactor' and optimizers"):
        hftrainer.Trainer(model, args, optimizers=(optimizer, None))
    with pytest.raises(InvalidArgument, match="optim='adafactor' and optimizer_cls_and_kwargs"):
        hftrainer.Trainer(model, args, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}))


def test_schedule_without_a_number_of_steps_is_refused():
    optimizer = torch.optim.SGD(make_plain().parameters(), lr=0.1)
    for name in ("linear", "cosine", "polynomial"):
        with pytest.raises(InvalidArgument, match=f"The schedule '{name}' needs num_training_steps"):
            hftrainer.optimization.get_scheduler(name, optimizer, 0)
    with pytest.raises(InvalidArgument, match="num_training_steps or num_stable_steps"):
        hftrainer.optimization.get_wsd_schedule(optimizer, 0, 5)
