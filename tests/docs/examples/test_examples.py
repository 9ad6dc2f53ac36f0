"""Each example of the gallery, for six steps, as it is and with the import line of a transformers user.

Both leave the same files behind: logs, in which measured times are left out, and weights. What the examples reach in
full length is for readers to see.
"""

from pathlib import Path

import pytest

from tests.docs.examples.support import EXAMPLES, SHORT, assert_same, finish, found, logs, start
from tests.support import warm

SAME = [
    *("text_classification", "token_classification", "question_answering", "causal_lm_packing", "masked_lm"),
    *("seq2seq_summarization", "segmentation", "audio_classification", "distillation", "lora"),
    *("custom_training_step", "search"),
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def by_both(name: str, folder: Path, launcher: list[str]) -> tuple[Path, Path]:
    """The folders of an example that was run as it is, and with transformers in its import line."""
    text = (EXAMPLES / f"{name}.py").read_text()
    code = text.split('"""', 2)[2]
    assert code.count("\nfrom hftrainer import ") == 1, "one line is all that a transformers user would change"
    assert code.count("hftrainer") == 1, "the example knows nothing else of hftrainer"
    theirs = folder / f"{name}_of_transformers.py"
    theirs.write_text(text.replace("\nfrom hftrainer import ", "\nfrom transformers import "))
    scripts = {folder / "ours": EXAMPLES / f"{name}.py", folder / "theirs": theirs}
    words = {each: [warm.PYTHON, *launcher, str(script), *SHORT] for each, script in scripts.items()}
    again = warm.AGAIN if launcher else {}
    processes = {each: start(line, each, **again) for each, line in words.items()}
    for each, process in processes.items():
        finish(process, each)
    return folder / "ours", folder / "theirs"


@pytest.mark.parametrize("name", SAME)
def test_the_numbers_of_transformers(name, tmp_path):
    assert_same(*by_both(name, tmp_path, []))


def test_fsdp(tmp_path):
    """Two processes of each library. Without a GPU transformers trains replicas, which add up in another order."""
    assert_same(*by_both("fsdp", tmp_path, TORCHRUN), tolerance=5e-7)


def run(name: str, folder: Path, *words: str) -> tuple[str, Path]:
    """What an example that is ours alone prints, and its output folder."""
    process = start([warm.PYTHON, str(EXAMPLES / f"{name}.py"), *SHORT, *words], folder / "here", **warm.AGAIN)
    return finish(process, folder / "here"), folder / "here" / "demo_output" / name


def test_multi_task(tmp_path):
    printed, output = run("multi_task", tmp_path)
    lines = [line for line in logs(output / "trainer_state.json") if "digit_loss" in line]
    assert len(lines) == 3
    for line in lines:
        parts = line["digit_loss"] + line["parity_loss"] + line["ink_loss"]
        assert line["loss"] == pytest.approx(parts, rel=1e-5)
    assert "eval_ink_error: 0." in printed


def test_lightning_callbacks(tmp_path):
    words = ("--max_steps", "-1", "--num_train_epochs", "3", "--eval_strategy", "epoch", "--save_strategy", "epoch")
    printed, output = run("lightning_callbacks", tmp_path, *words)
    assert "Parameters that learn, by epoch: [5130, 5130, 14698]" in printed
    assert "optimizer_step" in printed, "the profiler's table"
    assert found(output, "tables/**/metrics.csv")
    assert found(output, "checkpoint-*/lightning_callbacks.pt")


def test_killed_and_resumed(tmp_path):
    """Long enough to be killed in the middle: the first save ends it."""
    words = ("--max_steps", "40", "--save_steps", "5", "--eval_strategy", "no")
    printed, output = run("killed_and_resumed", tmp_path, *words)
    assert "It had ended before" not in printed
    assert "Killed; there is" in printed
    assert "The weights of both are the same, to the last bit." in printed
    assert (
        logs(output / "killed" / "trainer_state.json")[:-1] == logs(output / "undisturbed" / "trainer_state.json")[:-1]
    )


def test_every_example_is_tested():
    alone = {"multi_task", "lightning_callbacks", "killed_and_resumed"}
    elsewhere = {"digits_vit", "plain_torch", "tf_trainer", "dpo", "embeddings"}  # tests/api, with_tf, downstream
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAME, "fsdp"} | alone | elsewhere
