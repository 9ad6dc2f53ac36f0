"""TRL's own scripts, unmodified: `python -m hftrainer run -m trl.scripts.sft` does what `python -m` does."""

import ast
import json
import subprocess
import sys

import pytest

from tests.adapters.downstream import records, support
from tests.adapters.downstream.tiny_language import save_model
from tests.adapters.downstream.trl_cases import SETTINGS, answers, text

pytestmark = pytest.mark.slow
#: Who runs the script → the words before the script's name.
WAYS = {"transformers": ["-m"], "hftrainer": ["-m", "hftrainer", "run", "-m"]}
#: Script → what its data has in a row, and more words.
SCRIPTS = {
    "sft": (text, "--lr_scheduler_type cosine --use_peft --lora_r 4 --lora_target_modules q_proj v_proj"),
    "dpo": (answers, "--loss_type ipo --gradient_checkpointing False"),
}


def flags() -> list[str]:
    """The command line after the script's name; the model and the data are beside the way's own folder."""
    settings = {**SETTINGS, "output_dir": "output", "model_name_or_path": "../model", "dataset_name": "../data"}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def printed(output: str) -> list:
    """What a script has printed, line by line; log lines as dicts."""
    lines = [line for line in output.splitlines() if line.strip()]
    return [support.comparable(ast.literal_eval(line)) if line.startswith("{'") else line for line in lines]


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_of_trl_prints_and_writes_the_same(tmp_path, script):
    row, more = SCRIPTS[script]
    save_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for split, rows in {"train": range(40), "test": range(40, 46)}.items():
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(json.dumps(row(index)) for index in rows))
    processes = {}
    for way, words in WAYS.items():
        (tmp_path / way).mkdir()
        line = [sys.executable, *words, f"trl.scripts.{script}", *flags(), *more.split()]
        environment = support.environment(tmp_path / f"{way}_cache")
        processes[way] = subprocess.Popen(
            line, env=environment, cwd=tmp_path / way, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    results = {}
    for way, process in processes.items():
        output, errors = process.communicate()
        assert process.returncode == 0, f"{way}:\n{output[-2000:]}\n{errors[-8000:]}"
        results[way] = printed(output), support.comparable(records.files(tmp_path / way / "output"))
    assert results["hftrainer"][0] == results["transformers"][0]
    assert results["hftrainer"][1] == results["transformers"][1]
    assert "checkpoint-6/trainer_state.json" in results["transformers"][1]
