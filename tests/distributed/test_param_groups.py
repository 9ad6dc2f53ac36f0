"""Two processes keep `param_groups` in each way of training, and find moments by name in each kind of checkpoint."""

import pytest
import torch

from hftrainer.errors import UnsupportedArgument
from tests.support.parity import build
from tests.support.small_models import MODELS, make_llama, without_dropout

GROUPS = [{"pattern": "*.embed*", "lr": 1e-3, "weight_decay": 0.0}, {"pattern": "*.mlp.*", "lr_scale": 0.5}]
#: The same settings in other groups.
REGROUPED = [
    {"pattern": "*.up_proj.*", "lr_scale": 0.5},
    {"pattern": ["*.gate_proj.*", "*.down_proj.*"], "lr": 0.5e-2},
    {"pattern": "*.embed*", "lr": 1e-3, "weight_decay": 0.0},
    {"pattern": "*", "lr_scale": 1.0},
]
FIRST, SHARDED = {"version": 1}, {"state_dict_type": "SHARDED_STATE_DICT"}
WAYS = {
    "ddp": {},
    "dcp": {"checkpoint_format": "dcp"},
    "fsdp1 full": {"fsdp": "full_shard auto_wrap", "fsdp_config": FIRST},
    "fsdp1 sharded": {"fsdp": "full_shard auto_wrap", "fsdp_config": {**FIRST, **SHARDED}},
    "fsdp2 full": {"fsdp": True},
    "fsdp2 sharded": {"fsdp": True, "fsdp_config": SHARDED},
    "fsdp2 dcp": {"fsdp": True, "checkpoint_format": "dcp"},
}
#: Groups that change nothing: under FSDP, a run that resumes without `param_groups` needs them.
SAME = [{"pattern": "*", "lr_scale": 1.0}]
#: Name → the entries, and the run that it resumes.
RUNS = {
    "undisturbed": (GROUPS, None),
    "resumed": (GROUPS, "undisturbed"),
    "regrouped": (REGROUPED, "undisturbed"),
    "ungrouped": (None, "undisturbed"),
    "plain": (None, None),
    "grouped": (SAME, "plain"),
}


def train_all(folder):
    """Way and run → the full weights at its end, and name and rate of each group."""
    results = {}
    for way, settings in WAYS.items():
        for run, (entries, before) in RUNS.items():
            place = folder / way.replace(" ", "_") / (before or run)
            model = (without_dropout(make_llama), MODELS["llama"][1])
            steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
            trainer, _ = build("hftrainer", model, place, param_groups=entries, **steps, **settings)
            try:
                trainer.train(resume_from_checkpoint=None if before is None else str(place / "checkpoint-2"))
            except UnsupportedArgument as error:
                results[way, run] = str(error)
                continue
            weights = {name: value.clone() for name, value in trainer.accelerator.get_state_dict(trainer.model).items()}
            groups = [(group.get("name"), len(group["params"])) for group in trainer.optimizer.param_groups]
            results[way, run] = (weights, groups)
    return results


@pytest.fixture(scope="module")
def results(processes, tmp_path_factory):
    return processes.run_ranks(train_all, 2, tmp_path_factory.mktemp("groups"))[0]


@pytest.mark.parametrize("way", WAYS)
def test_each_strategy_keeps_the_groups_of_ddp(results, way):
    (weights, groups), (expected, named) = results[way, "undisturbed"], results["ddp", "undisturbed"]
    assert groups == named
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", ["resumed", "regrouped", "grouped"])
@pytest.mark.parametrize("way", WAYS)
def test_runs_with_equal_settings_resume_exactly(results, way, run):
    (weights, _), (expected, _) = results[way, run], results[way, RUNS[run][1]]
    for name, value in weights.items():  # 0.02 apart without the moments
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_states_stored_by_name_do_not_resume_without_groups(results, way):
    if way == "ddp":
        assert [name for name, _ in results[way, "ungrouped"][1]] == [None, None]
    else:
        assert "was written with 4 parameter groups, but the optimizer has 2" in results[way, "ungrouped"]
