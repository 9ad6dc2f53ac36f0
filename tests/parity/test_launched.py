"""Every setting of accelerate's launchers is followed or refused: its own options, files and variables are enumerated.

A new setting fails a test here, and gets a row in `hftrainer.arguments.accelerate` or in `OF_LAUNCHERS`.
"""

import argparse
import dataclasses
import os
import re
from pathlib import Path

import accelerate
import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import launch

from hftrainer.arguments.accelerate import VARIABLES, check_launch_variables, find_unknown_variables, find_variable
from tests.support.parity import build

#: Options of the launcher alone: launched processes see only their rank, devices and the script's arguments.
OF_LAUNCHERS = {
    *("help", "config_file", "quiet", "cpu", "multi_gpu", "tpu", "num_processes", "num_machines", "machine_rank"),
    *("main_process_ip", "main_process_port", "same_network", "rdzv_backend", "rdzv_conf", "max_restarts"),
    *("monitor_interval", "tee", "log_dir", "role", "module", "no_python", "main_training_function", "mpirun_hostfile"),
    *("tpu_use_cluster", "tpu_use_sudo", "vm", "env", "aws_access_key_id", "aws_secret_access_key"),
    *("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher"),
    *("training_script", "training_script_args"),
    # accelerate's own launcher drops these, so that its own plugin does not have them either
    *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
    # switches, without which the settings below them have no effect
    *("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config"),
}
#: Keys of accelerate's files that are no options: groups of settings, and keys for pods of TPUs.
OF_FILES = {
    *("compute_environment", "distributed_type", "use_cpu", "fp8_config", "deepspeed_config", "fsdp_config"),
    *("parallelism_config", "megatron_lm_config", "mpirun_config", "dynamo_config"),
    *("tpu_name", "tpu_zone", "command_file", "commands", "tpu_vm", "tpu_env"),
}
#: Variables that the launchers set for other libraries.
OF_OTHERS = {
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "XLA_USE_BF16", "XLA_DOWNCAST_BF16"),
}
ALL = {"use_fsdp": True, "use_megatron_lm": True, "use_parallelism_config": True, "mixed_precision": "fp8"}
SEVERAL = {"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 2}  # without which their details are left out
GIVEN = {"num_processes": 2, "num_machines": 1, "num_cpu_threads_per_process": 1, "dynamo_backend": "no"}


def variables_of_every_launcher(monkeypatch, **options):
    monkeypatch.setattr(launch, "is_fp8_available", lambda: True)
    monkeypatch.setattr(launch, "is_torch_xla_available", lambda **kwargs: True)
    monkeypatch.setattr(launch, "is_port_in_use", lambda port: False)
    launch_args = vars(launch_command_parser().parse_args(["script.py"])) | GIVEN | ALL | SEVERAL
    launch_args |= {"use_cpu": False, "deepspeed_fields_from_accelerate_config": "", **options}
    found = {}
    for prepare in (
        launch.prepare_multi_gpu_env,
        lambda args: launch.prepare_deepspeed_cmd_env(args)[1],
        lambda args: launch.prepare_simple_launcher_cmd_env(args)[1],
        lambda args: launch.prepare_tpu(argparse.Namespace(**{**vars(args), "mixed_precision": "bf16"}), {})[1],
    ):
        found |= prepare(argparse.Namespace(**launch_args))
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


def another_value(action):
    if action.choices:
        now = {action.default, (GIVEN | ALL).get(action.dest)}
        return next((each for each in action.choices if each not in now), "other")
    if action.dest == "fp8_override_linear_precision":
        return (True, True, True)
    kinds = {int: 7, float: 0.7, bool: True}
    return not action.default if isinstance(action.default, bool) else kinds.get(action.type, "other")


def launch_options():
    return {action.dest: action for action in launch_command_parser()._actions}


@pytest.mark.parametrize("option", sorted(launch_options().keys() - OF_LAUNCHERS))
def test_variables_set_by_each_launch_option_are_known(monkeypatch, option):
    before = variables_of_every_launcher(monkeypatch)
    after = variables_of_every_launcher(monkeypatch, **{option: another_value(launch_options()[option])})
    changed = {name for name, value in after.items() if before.get(name) != value}
    assert changed
    names = (before.keys() | after.keys()) - {*OF_OTHERS}
    assert not [name for name in names if find_variable(name) is None]


def test_keys_of_config_files_are_launch_options():
    found = {field.name for field in dataclasses.fields(ClusterConfig)} - OF_FILES
    assert found <= launch_options().keys()
    assert launch_options().keys() >= OF_LAUNCHERS


def test_every_variable_that_accelerate_reads_is_known():
    sources = [path for path in Path(accelerate.__file__).parent.rglob("*.py") if "test_utils" not in path.parts]
    found = {name for path in sources for name in re.findall(r"\"(ACCELERATE_[A-Z0-9_]*[A-Z0-9])\"", path.read_text())}
    assert len(found) > 25
    assert sorted(name for name in found if find_variable(name) is None) == []


REFUSED = [
    ("ACCELERATE_MIXED_PRECISION", "fp8"),
    ("ACCELERATE_DOWNCAST_BF16", "1"),
    ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "True"),
    ("ACCELERATE_USE_MEGATRON_LM", "true"),
    ("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", "DATA_PARALLEL"),
    ("ACCELERATE_TORCH_DEVICE", "cuda:1"),
    ("ACCELERATE_TORCH_DEVICE", "gpu"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_unsupported_launch_variable_is_refused(monkeypatch, tmp_path, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}=.?{value}"):
        build("hftrainer", "plain", tmp_path)


def test_every_row_that_refuses_is_tested():
    assert {name for name, row in VARIABLES.items() if row.accepted_values is not None} <= {name for name, _ in REFUSED}


def test_supported_launch_variables_are_accepted(monkeypatch, tmp_path):
    for name, value in {"SAGEMAKER_DISTRIBUTED_TYPE": "NO", "TORCH_DEVICE": "cpu", "MIXED_PRECISION": "no"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    trainer, _ = build("hftrainer", "plain", tmp_path)
    assert list(check_launch_variables(trainer.args.device)) == []
    assert find_unknown_variables() == []


def test_unknown_launch_variable_is_reported(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACUMULATION_STEPS", "4")
    build("hftrainer", "plain", tmp_path)
    assert "ACCELERATE_GRADIENT_ACUMULATION_STEPS will have no effect: no known release of accelerate" in caplog.text


@pytest.mark.parametrize(("value", "bound"), [("1", [0]), ("0", [])])
def test_cpu_affinity_variable_binds_processes_to_cores(monkeypatch, tmp_path, value, bound):
    """By accelerate's own function, as with transformers."""
    found = []
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", value)
    for module in ("accelerate.utils", "accelerate.state"):
        monkeypatch.setattr(f"{module}.set_numa_affinity", lambda index, **kwargs: found.append(index))
    for library in ("transformers", "hftrainer"):
        accelerate.state.PartialState._reset_state()
        found.clear()
        build(library, "plain", tmp_path)
        assert sorted(set(found)) == bound, library
