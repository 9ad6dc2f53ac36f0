"""The blocks of the Chinese guide to the Trainer of v4.48, by line, that are in no other document."""

import pytest
import torch
from torch import nn

from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.table import make_plan
from hftrainer.parallel.fsdp.settings import FsdpSettings
from tests.docs.documents import shell
from tests.docs.documents.support import losses, parsed, quiet
from tests.support.launching import FSDP_FILE, port
from tests.support.parity import compare
from tests.support.tiny import make_bert, text_data, without_dropout

# ---- Code -----------------------------------------------------------------------------------------------------------


class CustomTrainer(Trainer):
    """The block."""

    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


def test_line_46(tmp_path):
    model, data = without_dropout(make_bert)(), text_data(8)
    batch = {key: torch.stack([torch.as_tensor(row[key]) for row in data]) for key in data[0]}
    labels, weight = batch.pop("label"), torch.tensor([1.0, 2.0, 3.0])

    def expected():
        return nn.functional.cross_entropy(model(**batch).logits, labels, weight).item()

    trainer = CustomTrainer(model, quiet(tmp_path, max_steps=3, learning_rate=1e-2), train_dataset=data)
    before = expected()
    trainer.train()
    logged = losses(trainer.state.log_history)
    assert logged[0] == pytest.approx(before, rel=1e-6)
    assert logged[-1] < logged[0]
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected(), rel=1e-6)
    assert trainer.predict(data).predictions.shape == (8, 3)


def test_line_540(tmp_path):
    """Noise in training as the release draws it, and none afterwards."""
    compare(tmp_path / "alike", "llama", neftune_noise_alpha=0.1, max_steps=2)
    model, data = make_bert(), text_data(8)
    args = quiet(tmp_path, neftune_noise_alpha=0.1)
    embeddings = model.get_input_embeddings()
    trainer = Trainer(model, args=args, train_dataset=data)
    trainer.train()
    assert not embeddings._forward_hooks
    tokens = torch.tensor([[1, 2, 3]])
    embeddings.train()
    assert torch.equal(embeddings(tokens), nn.functional.embedding(tokens, embeddings.weight, embeddings.padding_idx))


# ---- Options --------------------------------------------------------------------------------------------------------


def test_line_318():
    """The keys of `--fsdp_config`, as this guide spells them: with `fsdp_` before most."""
    shared = {"limit_all_gathers": "True", "activation_checkpointing": "True", "fsdp_forward_prefetch": "True"}
    read = {"version": 1, "forward_prefetch": True, "limit_all_gathers": True, "activation_checkpointing": True}
    for prefetch, name in (("backward_pre", "BACKWARD_PRE"), ("backward_pos", "BACKWARD_POST")):
        keys = {**shared, "fsdp_backward_prefetch": prefetch, "fsdp_transformer_layer_cls_to_wrap": ["BertLayer"]}
        args = TrainingArguments("o", use_cpu=True, fsdp="full_shard auto_wrap", fsdp_config=keys)
        expected = FsdpSettings(**read, backward_prefetch=name, wrap_classes=("BertLayer",))
        assert ResolvedArguments(args).fsdp == expected
    keys = {**shared, "fsdp_min_num_params": 2000}
    args = TrainingArguments("o", use_cpu=True, fsdp="full_shard auto_wrap", fsdp_config=keys)
    expected = FsdpSettings(**read, min_num_params=2000, auto_wrap_policy="SIZE_BASED_WRAP")
    assert ResolvedArguments(args).fsdp == expected


VISIBLE = {
    173: "CUDA_VISIBLE_DEVICES=0,2 python -m torch.distributed.launch trainer-program.py",
    179: "CUDA_VISIBLE_DEVICES=2,0 python -m torch.distributed.launch trainer-program.py",
    193: "export CUDA_VISIBLE_DEVICES=0,2\npython -m torch.distributed.launch trainer-program.py",
}


@pytest.mark.parametrize("line", VISIBLE)
def test_visible_gpus(line, tmp_path):
    """As with torchrun, whose test has the order of the GPUs."""
    block = f"{VISIBLE[line]} {shell.several(shell.NORMAL)}"
    ((run,),) = shell.run(tmp_path, block, "trainer-program.py")
    shell.assert_as_release_alone(run)
    assert run["environment"][0] == ("2,0" if line == 179 else "0,2")


# ---- run_glue.py ----------------------------------------------------------------------------------------------------

GLUE = "examples/pytorch/text-classification/run_glue.py"
#: The block's words; the output folder is not in /tmp here.
WORDS = """
--model_name_or_path google-bert/bert-base-cased --task_name $TASK_NAME --do_train --do_eval --max_seq_length 128
--per_device_train_batch_size {size} --learning_rate {rate} --num_train_epochs 3 --output_dir out/$TASK_NAME/
--overwrite_output_dir"""


def words(size, rate):
    return " ".join(WORDS.format(size=size, rate=rate).split())


def test_line_365(tmp_path, monkeypatch):
    """It trains and evaluates; on a Mac, by the same words, on Apple's GPU."""
    given = words(32, "2e-5")
    block = f"export TASK_NAME=mrpc\npython {GLUE} {shell.several(given)}"
    ((run,),) = shell.run(tmp_path, block, GLUE, INSTALL="1")
    assert run["trainer"] == "hftrainer.trainer_seq2seq"
    assert (run["script"]["task_name"], run["script"]["max_seq_length"]) == ("mrpc", 128)
    assert (run["device"], run["logs"][0]["learning_rate"]) == ("cpu", 2e-5)
    assert run["metrics"]["eval_loss"] < run["logs"][0]["loss"]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    own = "--do_train --do_eval --per_device_train_batch_size 32 --learning_rate 2e-5 --overwrite_output_dir"
    args = parsed(own, use_cpu=False)
    assert (make_plan(ResolvedArguments(args)).accelerator, str(args.device), args.n_gpu) == ("mps", "mps", 1)


def launched(folder, before, monkeypatch, **environment):
    """Two processes of the block."""
    monkeypatch.setenv("TASK_NAME", "mrpc")
    block = f"cd transformers\n{before} ./{GLUE} {shell.several(words(16, '5e-5'))}"
    return shell.run(folder, block, f"transformers/{GLUE}", **environment)


def test_lines_490_505(tmp_path, monkeypatch):
    """FSDP by the file of line 421, which `accelerate config` has written, and by options: the same weights."""
    (tmp_path / "default_config.yaml").write_text(FSDP_FILE)
    options = (
        "accelerate launch --num_processes=2 --use_fsdp --mixed_precision=bf16 "
        "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap=BertLayer "
        "--fsdp_sharding_strategy=1 --fsdp_state_dict_type=FULL_STATE_DICT"
    )
    configured = str(tmp_path / "default_config.yaml")
    by_file = launched(tmp_path / "file", "accelerate launch", monkeypatch, CONFIGURED=configured)
    by_options = launched(tmp_path / "options", options, monkeypatch)
    for rank in (0, 1):
        for (run,) in (by_file[rank], by_options[rank]):
            assert (run["place"], run["kind"], run["precision"]) == ([rank, rank, 2], "FSDP", "bf16")
            assert run["sharding"]["strategy"] == "full_shard"
            assert run["sharding"]["wrap_classes"] == ["BertLayer"]
            assert run["sharding"]["state_dict_type"] == "FULL_STATE_DICT"
            assert run["metrics"]["eval_loss"] < run["logs"][0]["loss"]
    assert by_file[0][0]["weights"] == by_options[0][0]["weights"]


#: The file of line 401, with two processes instead of eight, on one machine instead of two.
TWO_MACHINES = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: {rank} #change rank as per the node
main_process_ip: 127.0.0.1
main_process_port: {port}
main_training_function: main
mixed_precision: fp16
num_machines: 2
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def test_line_401(tmp_path):
    free = port()
    for rank in (0, 1):
        (tmp_path / f"{rank}.yaml").write_text(TWO_MACHINES.format(rank=rank, port=free))
    start = f"accelerate launch --config_file {{}}.yaml trainer-program.py {shell.several(shell.NORMAL)}"
    found = shell.run(tmp_path, f"{start.format(1)} &\n{start.format(0)}\nwait $!", "trainer-program.py")
    for rank, (run,) in enumerate(found):
        assert (run["place"], run["kind"], run["precision"]) == ([rank, 0, 2], "MULTI_CPU", "fp16")
    assert found[0][0]["weights"] == found[1][0]["weights"]
    assert len(losses(found[0][0]["logs"])) == 2
