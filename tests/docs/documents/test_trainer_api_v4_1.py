"""The blocks of the Trainer's documentation of v4.1, by line; those of DeepSpeed are in tests/adapters/deepspeed."""

import pytest
import torch

from hftrainer import Trainer
from tests.docs.documents import shell
from tests.docs.documents.support import losses, parsed, quiet
from tests.support.tiny import make_bert, text_data, without_dropout

FINETUNE = """\
cd examples/seq2seq
python -m torch.distributed.launch --nproc_per_node=2 ./finetune_trainer.py \
"""
TRANSLATE = """
--model_name_or_path sshleifer/distill-mbart-en-ro-12-4 --data_dir wmt_en_ro
--output_dir output_dir --overwrite_output_dir
--do_train --n_train 500 --num_train_epochs 1
--per_device_train_batch_size 1  --freeze_embeds
--src_lang en_XX --tgt_lang ro_RO --task translation
--fp16"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By rank and run: with --sharded_ddp, without it, and the normal arguments; these by the release, too."""
    words = " ".join(TRANSLATE.split())
    lines = shell.several(f"{words} --sharded_ddp", words, shell.NORMAL)
    script, folder = "examples/seq2seq/finetune_trainer.py", tmp_path_factory.mktemp("v4.1")
    return shell.run(folder, FINETUNE + lines, script, RELEASE=shell.several(shell.NORMAL))


def test_line_145(found):
    """Sharded as whole: FairScale's losses, too, were those of replicas."""
    for rank, (sharded, whole, *_) in enumerate(found):
        assert sharded["place"] == whole["place"] == [rank, rank, 2]
        assert (sharded["kind"], whole["kind"]) == ("FSDP", "MULTI_CPU")
        assert sharded["sharding"]["strategy"] == "shard_grad_op"
        assert sharded["precision"] == whole["precision"] == "fp16"
        assert losses(sharded["logs"]) == pytest.approx(losses(whole["logs"]), rel=1e-3)  # of float16
        assert (len(losses(sharded["logs"])), sharded["script"]["n_train"]) == (2, 500)
    assert found[0][0]["weights"] == found[1][0]["weights"]


def test_line_195(found):
    shell.assert_as_release(found)


class MyTrainer(Trainer):
    """The block, with a loss of its own."""

    def compute_loss(self, model, inputs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs[0]
        return my_custom_loss(logits, labels)


def my_custom_loss(logits, labels):
    return torch.nn.functional.multi_margin_loss(logits, labels)


def test_line_46(tmp_path):
    """Trains on its loss, which is the evaluation's too."""
    data, model = text_data(8), without_dropout(make_bert)()
    batch = {key: torch.stack([torch.as_tensor(row[key]) for row in data]) for key in data[0]}
    labels = batch.pop("label")
    trainer = MyTrainer(model, quiet(tmp_path, max_steps=3, learning_rate=1e-2), train_dataset=data)
    expected = my_custom_loss(model(**batch).logits, labels).item()
    trainer.train()
    logged = losses(trainer.state.log_history)
    assert logged[0] == pytest.approx(expected, rel=1e-6)
    assert logged[2] < logged[0]
    metrics = trainer.evaluate(data)
    assert metrics["eval_loss"] == pytest.approx(my_custom_loss(model(**batch).logits, labels).item(), rel=1e-6)
    assert trainer.predict(data).predictions.shape == (8, 3)


def test_line_468(tmp_path):
    args = parsed("--fp16 --fp16_backend amp")
    assert (args.fp16, args.fp16_backend) == (True, "amp")
    trainer = Trainer(make_bert(), args, train_dataset=text_data(8))
    assert trainer.accelerator.mixed_precision == "fp16"


def test_line_485():
    """Apex's amp is gone; its O1 is what torch's autocast does."""
    with pytest.warns(FutureWarning, match="[Aa]pex"):
        trainer = Trainer(
            make_bert(), parsed("--fp16 --fp16_backend apex --fp16_opt_level 01"), train_dataset=text_data(8)
        )
    assert trainer.accelerator.mixed_precision == "fp16"
