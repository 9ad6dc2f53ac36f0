"""The documents' shell blocks run with their options for launchers, sharding and GPUs: see blocks.toml."""

import functools
import json

import pytest
from safetensors.torch import load_file

from hftrainer import TrainingArguments
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.parallel.fsdp_settings import FsdpSettings
from tests.docs.documents import program, running
from tests.docs.documents.running import NORMAL, join_runs, losses
from tests.support.launchers import END_OF_FILE, FSDP_FILE, free_port
from tests.support.parity import comparable

#: Option → settings that it becomes.
FSDP = {
    "full_shard": {},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "no_shard": {"version": 1, "strategy": "no_shard"},
    "hybrid_shard": {"version": 1, "strategy": "hybrid_shard"},
    "hybrid_shard_zero2": {"version": 1, "strategy": "hybrid_shard_zero2"},
    "full_shard offload": {"cpu_offload": True},
    "shard_grad_op offload": {"strategy": "shard_grad_op", "cpu_offload": True},
    "full_shard auto_wrap": {},
    "shard_grad_op auto_wrap": {"strategy": "shard_grad_op"},
    "full_shard offload auto_wrap": {"cpu_offload": True},
    "shard_grad_op offload auto_wrap": {"strategy": "shard_grad_op", "cpu_offload": True},
    "full shard": {},
}
#: The keys of `--fsdp_config` that the text names, and what they become.
KEYS = {"transformer_layer_cls_to_wrap": ["Linear"], "backward_prefetch": "backward_pos", "forward_prefetch": "True"}
KEYS |= {"limit_all_gathers": "True", "activation_checkpointing": "True", "use_orig_params": True}
TRUE = dict.fromkeys(("forward_prefetch", "limit_all_gathers", "activation_checkpointing", "use_orig_params"), True)
READ = FsdpSettings(**TRUE, version=1, wrap_classes=("Linear",), backward_prefetch="BACKWARD_POST")
BY_SIZE = FsdpSettings(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=9)
T5 = "--output_dir out --learning_rate 0.3 --model_name_or_path t5 --predict_with_generate --generation_max_length 6"
LINES = {
    **{words: f'{NORMAL} --fsdp "{words}"' for words in FSDP},
    "file": f"{NORMAL} --fsdp full_shard --fsdp_config fsdp_config.json",
    "size": f"""{NORMAL} --fsdp "full_shard auto_wrap" --fsdp_config '{{"min_num_params":9}}'""",
    "shards": f"""{NORMAL} --fsdp full_shard --fsdp_config '{{"state_dict_type":"SHARDED_STATE_DICT"}}'"""
    " --final_model final",
    "generates": f"{T5} --fsdp full_shard",
    "generates whole": T5,
    "replicas": NORMAL,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("torchrun")
    (made / "fsdp_config.json").write_text(json.dumps(KEYS))
    return made


@pytest.fixture(scope="module")
def by_torchrun(folder):
    """Results by rank and command line; `release` is what transformers itself logs."""
    block = "CUDA_VISIBLE_DEVICES=2,0 torchrun --nproc_per_node=2 trainer-program.py " + join_runs(*LINES.values())
    ranks = running.run(folder, block, "trainer-program.py", RELEASE=join_runs(NORMAL))
    return [dict(zip([*LINES, "release"], runs, strict=True)) for runs in ranks]


def settings_of(run):
    classes = run["sharding"]["wrap_classes"]
    return FsdpSettings(**{**run["sharding"], "wrap_classes": classes and tuple(classes)})


def test_torchrun_logs_match_transformers(by_torchrun):
    running.assert_as_release([[runs["replicas"], runs["release"]] for runs in by_torchrun])
    assert {runs["replicas"]["environment"]["CUDA_VISIBLE_DEVICES"] for runs in by_torchrun} == {"2,0"}


@pytest.mark.parametrize("words", FSDP)
def test_fsdp_option_shards_with_losses_of_replicas(words, by_torchrun):
    for runs in by_torchrun:
        assert runs[words]["kind"] == "FSDP"
        assert settings_of(runs[words]) == FsdpSettings(**FSDP[words])
        assert losses(runs[words]["logs"]) == pytest.approx(losses(runs["replicas"]["logs"]), rel=5e-7)
    first = by_torchrun[0]
    assert first[words]["weights"] == pytest.approx(first["replicas"]["weights"], abs=1e-5)


def test_fsdp_config_keys_reach_the_settings(by_torchrun):
    for runs in by_torchrun:
        for name, expected in {"file": READ, "size": BY_SIZE}.items():
            assert settings_of(runs[name]) == expected
            assert losses(runs[name]["logs"]) == pytest.approx(losses(runs["replicas"]["logs"]), rel=5e-7)
    args = TrainingArguments("o", use_cpu=True, fsdp="full_shard", fsdp_config=KEYS)
    assert ResolvedArguments(args).fsdp == READ


def test_save_model_writes_whole_model_from_shards(by_torchrun, folder):
    """Although its checkpoints are sharded."""
    written = load_file(folder / "final" / "model.safetensors")
    sums = {name: value.sum().item() for name, value in written.items()}
    for runs in by_torchrun:
        assert runs["shards"]["sharding"]["state_dict_type"] == "SHARDED_STATE_DICT"
        assert sums == pytest.approx(runs["shards"]["weights"], abs=1e-6)


def test_sharded_model_generates_same_tokens(by_torchrun):
    for runs in by_torchrun:
        assert runs["generates"]["kind"] == "FSDP"
        assert runs["generates"]["tokens"] == runs["generates whole"]["tokens"]
        assert any(any(line) for line in runs["generates"]["tokens"])


OF_V4_1 = """
--model_name_or_path sshleifer/distill-mbart-en-ro-12-4 --data_dir wmt_en_ro
--output_dir output_dir --overwrite_output_dir
--do_train --n_train 500 --num_train_epochs 1
--per_device_train_batch_size 1  --freeze_embeds
--src_lang en_XX --tgt_lang ro_RO --task translation
--fp16"""
OF_V4_15 = """
--model_name_or_path t5-small --per_device_train_batch_size 1
--output_dir output_dir --overwrite_output_dir
--do_train --max_train_samples 500 --num_train_epochs 1
--dataset_name wmt16 --dataset_config "ro-en"
--source_lang en --target_lang ro
--fp16"""
#: The words without and with --sharded_ddp, and the strategy that does it here.
SHARDED = {
    (OF_V4_1, "--sharded_ddp"): "shard_grad_op",
    (OF_V4_15, "--sharded_ddp simple"): "shard_grad_op",
    (OF_V4_15, "--sharded_ddp zero_dp_3"): "full_shard",
    (OF_V4_15, "--sharded_ddp zero_dp_2"): "shard_grad_op",
    (OF_V4_15, '--sharded_ddp "zero_dp_2 cpu_offload"'): "shard_grad_op",
    (OF_V4_15, '--sharded_ddp "zero_dp_3 auto_wrap"'): "full_shard",
}


@pytest.fixture(scope="module")
def by_launch(tmp_path_factory):
    """Results by rank and options; `release` is what transformers itself logs."""
    chosen = [*SHARDED, (OF_V4_1, ""), (OF_V4_15, ""), (NORMAL, "")]
    lines = join_runs(*(" ".join(f"{words} {option}".split()) for words, option in chosen))
    script, given = "examples/seq2seq/finetune_trainer.py", "export CUDA_VISIBLE_DEVICES=0,2\ncd examples/seq2seq\n"
    block = f"{given}python -m torch.distributed.launch --nproc_per_node=2 ./finetune_trainer.py {lines}"
    ranks = running.run(tmp_path_factory.mktemp("launch"), block, script, RELEASE=join_runs(NORMAL))
    return [dict(zip([*chosen, "release"], runs, strict=True)) for runs in ranks]


def test_distributed_launch_logs_match_transformers(by_launch):
    running.assert_as_release([[runs[NORMAL, ""], runs["release"]] for runs in by_launch])
    assert {runs[NORMAL, ""]["environment"]["CUDA_VISIBLE_DEVICES"] for runs in by_launch} == {"0,2"}


@pytest.mark.parametrize(("words", "option"), SHARDED, ids=[option for _, option in SHARDED])
def test_sharded_ddp_has_losses_of_replicas(words, option, by_launch):
    """The losses are those of replicas, as FairScale's were."""
    for rank, runs in enumerate(by_launch):
        sharded, whole = runs[words, option], runs[words, ""]
        assert sharded["place"] == whole["place"] == [rank, rank, 2]
        assert (sharded["kind"], whole["kind"]) == ("FSDP", "MULTI_CPU")
        assert sharded["precision"] == whole["precision"] == "fp16"
        script = sharded["script"]
        assert (script["n_train"], script["dataset_config_name"]) in ((500, None), (None, "ro-en"))
        assert sharded["sharding"]["strategy"] == SHARDED[words, option]
        assert sharded["sharding"]["cpu_offload"] == ("cpu_offload" in option)
        assert len(losses(sharded["logs"])) == 2
        assert losses(sharded["logs"]) == pytest.approx(losses(whole["logs"]), rel=1e-3)  # of float16
    assert by_launch[0][words, option]["weights"] == by_launch[1][words, option]["weights"]


@functools.cache
def logs_of_transformers():
    return comparable(program.logs_of_release(join_runs(NORMAL).split()))


VARIABLES = ["VISIBLE_DEVICES=2,0", "VISIBLE_DEVICES=", "VISIBLE_DEVICES=1,0"]
VARIABLES += ["DEVICE_ORDER=PCI_BUS_ID", "DEVICE_ORDER=FASTEST_FIRST"]


@pytest.mark.parametrize("variable", VARIABLES)
def test_gpu_variables_reach_a_cpu_script_unchanged(variable, tmp_path):
    """Without a GPU the script trains on the CPU like transformers, and sees the variable unchanged."""
    name, _, value = f"CUDA_{variable}".partition("=")
    (run,) = running.run_python(tmp_path, join_runs(NORMAL), **{name: value})
    assert comparable(run["logs"]) == logs_of_transformers()
    assert (run["place"], run["device"], run["environment"][name]) == ([0, 0, 1], "cpu", value)


GLUE = "examples/pytorch/text-classification/run_glue.py"
#: The block's words; the output folder is not in /tmp here.
WORDS = """
--model_name_or_path google-bert/bert-base-cased --task_name $TASK_NAME --do_train --do_eval --max_seq_length 128
--per_device_train_batch_size {size} --learning_rate {rate} --num_train_epochs 3 --output_dir out/$TASK_NAME/
--overwrite_output_dir"""


def glue_words(size, rate):
    return join_runs(" ".join(WORDS.format(size=size, rate=rate).split()))


def test_accelerate_launch_logs_match_transformers(tmp_path):
    """accelerate is told that there are two GPUs; without any it would start one process."""
    block = f"accelerate launch --num_processes 2 trainer-program.py {join_runs(NORMAL)}"
    found = running.run(tmp_path, block, "trainer-program.py", RELEASE=join_runs(NORMAL))
    assert len(found) == 2
    running.assert_as_release(found)


def test_run_glue_trains_and_evaluates(tmp_path):
    given = glue_words(32, "2e-5").replace("$TASK_NAME", "mrpc")
    (run,) = running.run_python(tmp_path, given, fresh=True, INSTALL="1")
    assert run["trainer"] == "hftrainer.trainer_seq2seq"
    assert (run["script"]["task_name"], run["script"]["max_seq_length"]) == ("mrpc", 128)
    assert (run["device"], run["logs"][0]["learning_rate"]) == ("cpu", 2e-5)
    assert run["metrics"]["eval_loss"] < run["logs"][0]["loss"]


def test_run_glue_fsdp_by_file_and_options_gives_same_weights(tmp_path):
    """The file is one that `accelerate config` has written."""
    (tmp_path / "default_config.yaml").write_text(FSDP_FILE)
    options = (
        "--num_processes=2 --use_fsdp --mixed_precision=bf16 --fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP "
        "--fsdp_transformer_layer_cls_to_wrap=BertLayer --fsdp_sharding_strategy=1 "
        "--fsdp_state_dict_type=FULL_STATE_DICT"
    )
    weights = []
    for name, words, config in (("file", "", str(tmp_path / "default_config.yaml")), ("options", options, "")):
        block = f"cd transformers\naccelerate launch {words} ./{GLUE} {glue_words(16, '5e-5')}"
        found = running.run(tmp_path / name, block, f"transformers/{GLUE}", TASK_NAME="mrpc", CONFIGURED=config)
        for rank, (run,) in enumerate(found):
            assert (run["place"], run["kind"], run["precision"]) == ([rank, rank, 2], "FSDP", "bf16")
            assert run["sharding"]["strategy"] == "full_shard"
            assert run["sharding"]["wrap_classes"] == ["BertLayer"]
            assert run["sharding"]["state_dict_type"] == "FULL_STATE_DICT"
            assert run["metrics"]["eval_loss"] < run["logs"][0]["loss"]
            weights.append(run["weights"])
    assert len(weights) == 4
    assert weights[0] == weights[2]


#: With two processes instead of eight, on one machine instead of two.
TWO_MACHINES = f"""
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: {{rank}} #change rank as per the node
main_process_ip: 127.0.0.1
main_process_port: {{port}}
main_training_function: main
mixed_precision: fp16
num_machines: 2
num_processes: 2
{END_OF_FILE}"""


def test_accelerate_launch_joins_two_machines(tmp_path):
    free = free_port()
    for rank in (0, 1):
        (tmp_path / f"{rank}.yaml").write_text(TWO_MACHINES.format(rank=rank, port=free))
    start = f"accelerate launch --config_file {{}}.yaml trainer-program.py {join_runs(NORMAL)}"
    found = running.run(tmp_path, f"{start.format(1)} &\n{start.format(0)}\nwait $!", "trainer-program.py")
    for rank, (run,) in enumerate(found):
        assert (run["place"], run["kind"], run["precision"]) == ([rank, 0, 2], "MULTI_CPU", "fp16")
    assert found[0][0]["weights"] == found[1][0]["weights"]
    assert len(losses(found[0][0]["logs"])) == 2
