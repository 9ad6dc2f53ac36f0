"""TRL's SFTTrainer with a mixture: a column names the source of each sample, since TRL tokenizes one dataset."""

import json
import subprocess
import sys

import pytest

from tests.adapters.downstream import support
from tests.adapters.downstream.tiny_language import save_model, sentence

pytestmark = pytest.mark.slow
SCRIPT = """
import json
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

config = SFTConfig(
    "output", max_steps=20, logging_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    report_to="none", use_cpu=True, bf16=False, save_steps=10, seed=7,
    mixture_column="source", mixture_weights={"code": 0.75, "chat": 0.25},
)
data = load_dataset("json", data_files="data.jsonl", split="train")


def train(checkpoint):
    trainer = SFTTrainer("model", args=config, train_dataset=data)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.state.log_history[:-1]


print(json.dumps([train(None), train("output/checkpoint-10")]))
"""


def test_sft_trainer_mixes_sources_and_resumes(tmp_path):
    save_model(tmp_path / "model")
    rows = [{"text": sentence(index, 4 + index % 9), "source": "code" if index % 3 else "chat"} for index in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "hftrainer", "run", "script.py"],
        env=support.environment(tmp_path / "cache"), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    lines, resumed = json.loads(done.stdout.splitlines()[-1])
    assert len(lines) == 4
    for line in lines:
        assert line["loss"] == line["loss/code"] + line["loss/chat"]
        assert abs(line["samples/code"] - 15) <= 2 and line["samples/code"] + line["samples/chat"] == 20
        assert line["tokens/code"] > line["tokens/chat"] > 0
    assert sum(line["samples/code"] for line in lines) == 60  # of 80 samples
    # TRL's counter of tokens begins anew at a resume, in transformers too.
    assert [{**line, "num_tokens": 0} for line in resumed] == [{**line, "num_tokens": 0} for line in lines]
