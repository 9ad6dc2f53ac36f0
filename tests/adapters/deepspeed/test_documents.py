"""The blocks of the documents that need DeepSpeed, by document and line: see tests/docs/documents.

fp16, which the blocks ask for, needs a GPU: here its section is read, and training is without it.
"""

import json
import math

import pytest
import torch

from hftrainer import Trainer, TrainingArguments
from hftrainer.errors import InvalidArgument, InvalidConfig
from hftrainer_deepspeed.start import check_config
from tests.adapters.deepspeed.training_cases import STAGES
from tests.docs.documents import running
from tests.docs.documents.running import losses, make_args
from tests.support.launchers import END_OF_FILE, free_port
from tests.support.small_models import make_plain, plain_data

#: 292 and 349.
ZERO = """{"zero_optimization": {
  "stage": 2, "allgather_partitions": true, "allgather_bucket_size": 5e8, "overlap_comm": true,
  "reduce_scatter": true, "reduce_bucket_size": 5e8, "contiguous_gradients": true, "cpu_offload": true}}"""
FP16 = '{"fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},}'
OPTIMIZER = """{"zero_allow_untested_optimizer": true, "optimizer": {
  "type": "AdamW", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}}"""
SCHEDULER = """{"scheduler": {
  "type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}}"""
AMP = '{"amp": {"enabled": true, "opt_level": "O1"}}'
CLIPPING = '{"gradient_clipping": 1.0,}'
STAGE_2 = {"zero_optimization": {"stage": 2}}


def mend_json(text):
    """Two of the blocks have a comma too many, which no reader of JSON takes."""
    return json.loads(text.replace(",}", "}"))


def with_params(optimizer, **params):
    """The file of 245 has these values in place of those of 390 and 448."""
    return {**optimizer, "params": {**optimizer["params"], **params}}


LONG = {
    **json.loads(ZERO),
    "zero_allow_untested_optimizer": True,
    "optimizer": with_params(json.loads(OPTIMIZER)["optimizer"], lr=3e-5),
    "scheduler": with_params(json.loads(SCHEDULER)["scheduler"], warmup_max_lr=3e-5, warmup_num_steps=500),
}
#: Line of v4.1 → configuration and arguments.
RUNS = {
    201: (STAGE_2, running.NORMAL),
    245: (LONG, "--output_dir out"),
    292: (
        json.loads(ZERO),
        "--output_dir out --learning_rate 3e-5 --warmup_steps 500 --adam_beta1 0.8 --adam_beta2 0.999 "
        "--adam_epsilon 1e-8 --weight_decay 3e-7 --lr_scheduler_type constant_with_warmup",
    ),
    333: (STAGE_2, "--output_dir out --per_device_train_batch_size 8 --gradient_accumulation_steps 2"),
    390: ({**STAGE_2, **json.loads(OPTIMIZER)}, "--output_dir out"),
    429: (STAGE_2, "--output_dir out --lr_scheduler_type constant_with_warmup --learning_rate 3e-5 --warmup_steps 500"),
    435: (STAGE_2, "--output_dir out --lr_scheduler_type linear --learning_rate 3e-5 --warmup_steps 500"),
    448: ({**STAGE_2, **json.loads(SCHEDULER)}, "--output_dir out"),
    509: ({**STAGE_2, **mend_json(CLIPPING)}, running.NORMAL),
    "max_grad_norm": (STAGE_2, f"{running.NORMAL} --max_grad_norm 0.5"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v4.1")
    lines = []
    for line, (config, words) in RUNS.items():
        (folder / f"ds_config-{line}.json").write_text(json.dumps(config))
        lines.append(f"{words} --deepspeed ds_config-{line}.json")
    block = f"deepspeed --num_gpus=2 your_program.py {running.join_runs(*lines)}"
    ranks = running.run(folder, block, "your_program.py")
    return [dict(zip(RUNS, runs, strict=True)) for runs in ranks]


def rates(run):
    return [line["learning_rate"] for line in run["logs"] if "loss" in line]


@pytest.mark.parametrize("line", [f"trainer_api_v4.1:{line}" for line in RUNS if isinstance(line, int)])
def test_configuration_of_the_document_trains(line, found):
    number = int(line.rpartition(":")[2])
    for rank, runs in enumerate(found):
        run, given = runs[number], RUNS[number][0]
        assert (run["place"], run["kind"]) == ([rank, rank, 2], "DEEPSPEED")
        assert len(losses(run["logs"])) == 2
        for section in given.keys() - {"zero_optimization"}:
            assert run["deepspeed"][section] == given[section]
        zero = dict(run["deepspeed"]["zero_optimization"])
        assert zero["stage"] == 2
        if number in (245, 292):
            assert zero["offload_optimizer"] == {"device": "cpu"}
    assert found[0][number]["weights"] == found[1][number]["weights"]
    runs, run = found[0], found[0][number]
    expected = {
        245: [0.0, 3e-5 * math.log(2) / math.log(500)],  # DeepSpeed's formula
        448: [0.0, 1e-3 * math.log(2) / math.log(1000)],
        292: [0.0, 3e-5 / 500],
        390: [5e-4, 0.0],  # the next step's, as the release logs it beside an optimizer of DeepSpeed's
        429: [0.0, 3e-5 / 500],
        435: [0.0, 3e-5 / 500],
    }
    if number in expected:
        assert rates(run) == pytest.approx(expected[number], abs=1e-12)
    if number == 245:  # the same, but for the schedule's formula
        assert losses(run["logs"])[0] == losses(runs[292]["logs"])[0]
    if number == 333:
        sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        assert [run["deepspeed"][name] for name in sizes] == [32, 8, 2]
    if number == 509:
        clipping = [runs[name]["deepspeed"]["gradient_clipping"] for name in (509, "max_grad_norm")]
        assert clipping == [1.0, 0.5]


def test_malformed_json_of_the_document_is_refused(tmp_path):
    """As they stand, two of the blocks are no JSON, for the release as for ours."""
    for name, text in {"fp16": FP16, "clipping": CLIPPING}.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)
        with pytest.raises(InvalidArgument, match="not valid JSON"):
            TrainingArguments("o", use_cpu=True, deepspeed=str(path))


@pytest.mark.parametrize("line", ["trainer_api_v4.1:474"])
def test_fp16_section_of_the_document_is_read(line):
    args = TrainingArguments("o", use_cpu=True, deepspeed={**STAGE_2, **mend_json(FP16)})
    assert args.hf_deepspeed_config.dtype() == torch.float16
    assert args.hf_deepspeed_config.config["fp16"] == mend_json(FP16)["fp16"]


@pytest.mark.parametrize("line", ["trainer_api_v4.1:491"])
def test_amp_section_of_the_document_is_refused(line):
    """DeepSpeed, which gets the section unchanged, no longer has it."""
    args = TrainingArguments("o", use_cpu=True, deepspeed={**STAGE_2, **json.loads(AMP)})
    assert args.hf_deepspeed_config.config["amp"] == {"enabled": True, "opt_level": "O1"}
    with pytest.raises(InvalidConfig, match=r"deepspeed: amp=.* is refused by DeepSpeed .*has been removed"):
        check_config(args.hf_deepspeed_config)


FINETUNE = """
--model_name_or_path sshleifer/distill-mbart-en-ro-12-4 --data_dir wmt_en_ro
--output_dir output_dir --overwrite_output_dir
--do_train --n_train 500 --num_train_epochs 1
--per_device_train_batch_size 1  --freeze_embeds
--src_lang en_XX --tgt_lang ro_RO --task translation"""


@pytest.mark.parametrize("line", ["trainer_api_v4.1:212"])
def test_deepspeed_launcher_uses_all_devices(line, tmp_path):
    """On a machine without GPUs DeepSpeed finds one device for each group of processors."""
    folder = tmp_path / "examples" / "seq2seq"
    folder.mkdir(parents=True)
    (folder / "ds_config.json").write_text(json.dumps(STAGE_2))
    words = " ".join(FINETUNE.split())
    block = f"cd examples/seq2seq\ndeepspeed ./finetune_trainer.py --deepspeed ds_config.json {words} {running.TINY}"
    found = running.run(tmp_path, block, "examples/seq2seq/finetune_trainer.py")
    for rank, (run,) in enumerate(found):
        assert (run["place"], run["kind"]) == ([rank, rank, len(found)], "DEEPSPEED")
        assert (run["script"]["task"], run["deepspeed"]["train_batch_size"]) == ("translation", len(found))


@pytest.mark.parametrize("line", ["trainer_api_v4.48:3"])
def test_deepspeed_launcher_without_a_config_trains_replicas(line, tmp_path):
    """Without its integration: replicas, as the release trains them."""
    block = f"deepspeed --num_gpus 2 trainer-program.py {running.join_runs(running.NORMAL)}"
    found = running.run(tmp_path, block, "trainer-program.py", RELEASE=running.join_runs(running.NORMAL))
    assert [run["kind"] for run, _ in found] == ["MULTI_CPU"] * 2
    running.assert_as_release(found)


SHARED = f"""
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 2
{END_OF_FILE}"""
FILE = """
deepspeed_config:
  deepspeed_config_file: ds_zero3_config.json
  zero3_init_flag: true
"""
PLUGIN = """
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 0.7
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero_stage: 2
mixed_precision: bf16
"""
#: Line of the guide → what its file has of its own.
FILES = {"trainer_guide_zh_v4.48:448": FILE, "trainer_guide_zh_v4.48:467": PLUGIN}


@pytest.mark.parametrize("line", FILES)
def test_accelerate_file_of_the_document_trains(line, tmp_path):
    """With two processes instead of its four."""
    (tmp_path / "ds_zero3_config.json").write_text(json.dumps(STAGES[3]))
    (tmp_path / "config.yaml").write_text(SHARED + FILES[line])
    launcher = f"accelerate launch --config_file config.yaml --main_process_port {free_port()} trainer-program.py"
    found = running.run(tmp_path, f"{launcher} {running.join_runs(running.NORMAL)}", "trainer-program.py")
    for rank, (run,) in enumerate(found):
        assert (run["place"], run["kind"]) == ([rank, rank, 2], "DEEPSPEED")
        config = run["deepspeed"]
        if FILES[line] is FILE:
            assert (config["zero_optimization"]["stage"], run["precision"]) == (3, "no")
        else:
            zero = config["zero_optimization"]
            assert (zero["stage"], run["precision"], config["gradient_clipping"]) == (2, "bf16", 0.7)
            assert zero["offload_optimizer"]["device"] == "cpu"
    first, second = (losses(run["logs"]) for (run,) in found)
    assert len(first) == 2
    assert first == second


@pytest.mark.parametrize("line", ["trainer_behaviours_v4.48:521"])
def test_changed_arguments_are_propagated_to_the_configuration(line, tmp_path):
    args = make_args(tmp_path, deepspeed=STAGES[2])
    trainer = Trainer(make_plain(), args, train_dataset=plain_data(8))
    args.per_device_train_batch_size, args.max_grad_norm = 2, 0.25
    trainer.propagate_args_to_deepspeed()
    config = args.hf_deepspeed_config.config
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_clipping"]) == (2, 0.25)
