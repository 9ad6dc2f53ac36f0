"""The model card: its contents for different runs, and the errors for wrong arguments."""

import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, constants, metadata_load

from hftrainer import Trainer, TrainerCallback, TrainingArguments, TrainingSummary
from hftrainer.cli import install
from hftrainer.errors import InvalidArgument
from hftrainer.model_card import files, provenance
from hftrainer.model_card.results import evaluation_rows, final_results, format_value, markdown_table
from hftrainer.reporting.metrics import write_metrics
from tests.support.parity import accuracy
from tests.support.releases import pinned, release_of
from tests.support.tiny import make_bert, make_peft, make_plain, plain_data

TOKEN = "hf_this-is-the-secret"


def make_trainer(folder, model=None, trainer=None, **settings):
    defaults = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 2, "save_strategy": "no"}
    args = TrainingArguments(str(folder), **{**defaults, "disable_tqdm": True, "use_cpu": True, **settings})
    data = plain_data()
    given = {"train_dataset": data, "eval_dataset": data[:9], **(trainer or {})}
    return Trainer(model if model is not None else make_plain(), args, **given)


def read(folder):
    return metadata_load(folder / "README.md"), (folder / "README.md").read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A plain module, trained and evaluated."""
    folder = tmp_path_factory.mktemp("runs") / "my-model"
    trainer = make_trainer(folder, trainer={"compute_metrics": accuracy}, eval_strategy="steps", eval_steps=3)
    trainer.train()
    return trainer, folder


def test_card_of_a_plain_module(run):
    from markdown_it import MarkdownIt

    trainer, folder = run
    trainer.args.hub_token = TOKEN
    trainer.create_model_card(tasks="tabular-classification", dataset_tags="me/blobs", license="mit")
    metadata, text = read(folder)
    assert "library_name" not in metadata and "base_model" not in metadata  # no library loads it
    assert metadata["license"] == "mit"
    assert metadata["tags"] == ["generated_from_trainer"]
    (result,) = metadata["model-index"][0]["results"]
    assert result["task"] == {"name": "Tabular Classification", "type": "tabular-classification"}
    assert result["metrics"][0]["value"] == trainer.state.log_history[-2]["eval_accuracy"]
    assert "A model of class `Plain`, trained on me/blobs." in text
    assert "- training: 38 samples\n- evaluation: 9 samples" in text
    page = MarkdownIt().enable("table").render(text.split("\n---\n", 1)[1])
    assert page.count("<h2>") == 4 and page.count("<tr>") == 3
    assert '<img src="training.png"' in page
    assert '<th style="text-align:center">Validation Loss</th>' in page
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(folder)) == ["README.md", "training.png"]
    assert TOKEN not in text


def test_card_before_training(tmp_path):
    """Nothing has been logged, and the output folder has been deleted."""
    trainer = make_trainer(tmp_path / "out")
    os.rmdir(tmp_path / "out")
    trainer.create_model_card()
    metadata, text = read(tmp_path / "out")
    assert metadata == {"tags": ["generated_from_trainer"], "model-index": [{"name": "out", "results": []}]}
    assert "Training results" not in text and "Results on" not in text
    assert os.listdir(tmp_path / "out") == ["README.md"]


def test_card_of_an_evaluation_alone(tmp_path):
    trainer = make_trainer(tmp_path / "out", trainer={"compute_metrics": accuracy})
    trainer.evaluate()
    trainer.create_model_card()
    metadata, text = read(tmp_path / "out")
    assert metadata["metrics"] == ["accuracy"]
    assert "- Accuracy: " in text and "Runtime" not in text
    assert "Training results" not in text  # a single evaluation makes neither a curve nor a table


def test_other_processes_write_nothing(tmp_path):
    trainer = make_trainer(tmp_path / "out")
    trainer.is_world_process_zero = lambda: False
    trainer.create_model_card()
    assert os.listdir(tmp_path / "out") == []


class Cards(TrainerCallback):
    """Writes a card at each evaluation, and records its number of rows and the time of its plot."""

    def __init__(self):
        self.rows, self.drawn = [], []

    def on_evaluate(self, args, state, control, **kwargs):
        if len(state.log_history) < 6:  # one point so far
            return
        self.trainer.create_model_card()
        _, text = read(Path(args.output_dir))
        self.rows.append(text.count("\n|") - 2)
        self.drawn.append(os.stat(Path(args.output_dir) / "training.png").st_mtime_ns)


def test_several_sets_during_training(tmp_path, monkeypatch):
    data = plain_data()
    cards = Cards()
    trainer = make_trainer(
        tmp_path / "out",
        eval_strategy="steps",
        trainer={
            "eval_dataset": {"a": data[:9], "b": data[9:20]},
            "compute_metrics": accuracy,
            "callbacks": [cards],
        },
    )
    cards.trainer = trainer
    trainer.train()
    assert len(set(cards.drawn)) == 1  # during training, at most one plot a minute
    trainer.create_model_card()
    _, text = read(tmp_path / "out")
    assert "| Training Loss | Epoch | Step | A Loss | A Accuracy | B Loss | B Accuracy |" in text
    assert text.count("\n|") == 2 + 3
    assert cards.rows == [2, 3, 3]
    assert "- evaluation, a: 9 samples\n- evaluation, b: 11 samples" in text
    assert os.stat(tmp_path / "out" / "training.png").st_mtime_ns != cards.drawn[-1]


def test_results_are_those_of_the_best_model(tmp_path):
    settings = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    rising = iter([0.5, 0.9, 0.1])
    trainer = make_trainer(
        tmp_path / "out",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        trainer={"compute_metrics": lambda prediction: {"accuracy": next(rising, 0.25)}},
        **settings,
    )
    trainer.train()
    trainer.create_model_card()
    assert "- Accuracy: 0.9\n" in read(tmp_path / "out")[1]
    trainer.evaluate()
    trainer.create_model_card()
    assert "- Accuracy: 0.25\n" in read(tmp_path / "out")[1]


# ---- Results -----------------------------------------------------------------------------------------------------

SUMMARY = {"train_runtime": 1.0, "train_loss": 0.5, "total_flos": 1.0, "epoch": 1.0, "step": 4}


def test_results_that_are_no_numbers():
    history = [
        {"loss": 1.0, "train_runtime": 0.1, "epoch": 0.5, "step": 2},  # as with include_num_input_tokens_seen
        {"eval_loss": float("nan"), "eval_accuracy": float("inf"), "eval_matrix": [[1]], "epoch": 0.5, "step": 2},
        {
            "eval_loss": 2.0,
            "eval_f1": np.float64(0.5),
            "eval_a|b": torch.tensor(3),
            "eval_c": np.ones(2),
            "epoch": 1.0,
            "step": 4,
        },
        SUMMARY,
    ]
    rows = evaluation_rows(history)
    assert markdown_table(rows).splitlines() == [
        "| Training Loss | Epoch | Step | Validation Loss | Accuracy | F1  | A\\|b |",
        "| :-----------: | :---: | :--: | :-------------: | :------: | :-: | :--: |",
        "| 1.0           | 0.5   | 2    | nan             | inf      |     |      |",
        "| 1.0           | 1.0   | 4    | 2.0             |          | 0.5 | 3    |",
    ]
    assert final_results(history, None) == {"Loss": 2.0, "F1": 0.5, "A|b": 3}
    assert final_results(history[:2], None)["Accuracy"] == float("inf")
    results = {"Accuracy": float("inf"), "F1": 0.5}
    summary = TrainingSummary("m", tasks="t", dataset_tags="d", eval_results=results)
    assert [metric["type"] for metric in summary.create_metadata()["model-index"][0]["results"][0]["metrics"]] == ["f1"]
    assert "- Accuracy: inf" in summary.to_model_card()


def test_rows_of_the_training_run_alone():
    evaluation = {"eval_loss": 1.0, "epoch": 1.0, "step": 4}
    assert evaluation_rows([evaluation, evaluation]) is None
    assert len(evaluation_rows([{"loss": 1.0, "step": 1, "epoch": 0.1}, evaluation])) == 1  # training has not finished
    assert len(evaluation_rows([evaluation, evaluation, SUMMARY, evaluation])) == 2
    assert evaluation_rows([SUMMARY]) is None
    assert evaluation_rows([evaluation, SUMMARY])[0]["Training Loss"] == "No log"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.25"), (1 / 3, "0.3333"), (1e-5, "1e-05"), (1.25e-5, "1.25e-05"), (1.5e20, "1.5e+20"), (3, "3"),
     (True, "True"), ("No log", "No log"), (float("nan"), "nan")],
)  # fmt: skip
def test_how_numbers_are_shown(value, text):
    assert format_value(value) == text


# ---- Where things come from --------------------------------------------------------------------------------------


def test_tags_are_kept(tmp_path):
    trainer = make_trainer(tmp_path / "out")
    trainer.model.model_tags = ["of-the-model"]
    (tmp_path / "out" / "README.md").write_text("---\ntags:\n- of-the-card\n- 3\n---\n# By hand\n")
    given = ["mine"]
    trainer.create_model_card(tags=given)
    assert read(tmp_path / "out")[0]["tags"] == ["mine", "of-the-model", "of-the-card", "generated_from_trainer"]
    assert given == ["mine"]
    (tmp_path / "out" / "README.md").write_text("---\ntags: one\n---\n")
    trainer.create_model_card()
    assert read(tmp_path / "out")[0]["tags"] == ["of-the-model", "one", "generated_from_trainer"]


@pytest.mark.parametrize("head", ["tags: [", "- a list"])
def test_a_card_that_cannot_be_read(tmp_path, caplog, head):
    trainer = make_trainer(tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text(f"---\n{head}\n---\n")
    trainer.create_model_card(tags="mine")
    assert read(tmp_path / "out")[0]["tags"] == ["mine", "generated_from_trainer"]
    assert "README.md cannot be read, so its tags are not kept" in caplog.text


@pytest.mark.skipif(release_of("peft") < pinned("peft"), reason="the tags are those of the newest PEFT's own card")
def test_adapter_of_a_model_without_a_name(tmp_path):
    """PEFT writes an empty base model, and the Hub refuses such a card."""
    trainer = make_trainer(tmp_path / "out", model=make_peft())
    trainer.create_model_card(model_name="name")
    metadata, text = read(tmp_path / "out")
    assert metadata["library_name"] == "peft"
    assert "base_model" not in metadata
    assert metadata["tags"] == ["generated_from_trainer", "lora", "transformers"]
    assert "# name\n\nAn adapter for a model of class `LlamaForCausalLM`, trained." in text


def test_base_model_in_a_folder(tmp_path):
    trainer = make_trainer(tmp_path / "out", model=make_bert())
    trainer.model.config._name_or_path = str(tmp_path)
    trainer.create_model_card()
    assert "base_model" not in read(tmp_path / "out")[0]
    trainer.create_model_card(finetuned_from="/else/where")
    metadata, text = read(tmp_path / "out")
    assert "base_model" not in metadata  # not a valid repository name
    assert "`BertForSequenceClassification`, fine-tuned from `/else/where`." in text
    assert metadata["library_name"] == "transformers"


def test_datasets():
    from datasets import Dataset, DatasetInfo

    def named(builder, split=None):
        return Dataset(Dataset.from_dict({"x": [1]}).data, DatasetInfo(builder_name=builder, config_name="c"), split)

    assert provenance.datasets_of(named("glue", "train")) == [("glue", "c", "train")]
    assert provenance.datasets_of({"a": named("glue"), "b": named("imdb"), "c": named("glue", "test"), "d": [1]}) == [
        ("glue", "c", None),
        ("imdb", "c", None),
    ]
    for nameless in ("csv", "generator", "imagefolder", None):
        assert provenance.datasets_of(named(nameless)) == []
    assert provenance.datasets_of(None) == []


@pytest.fixture
def hub(monkeypatch):
    """Replaces the Hub's response to a request for a model."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(provenance, "LICENSE_TIMEOUT", 0.3)
    provenance.license_of.cache_clear()
    asked = []

    def answer_by(answer):
        def model_info(self, repo_id, **kwargs):
            asked.append(repo_id)
            return answer()

        monkeypatch.setattr(HfApi, "model_info", model_info)

    yield answer_by, asked
    provenance.license_of.cache_clear()


def test_licence_of_the_base_model(hub, tmp_path):
    answer_by, asked = hub
    answer_by(lambda: type("Info", (), {"tags": ["pytorch", "license:apache-2.0"]}))
    trainer = make_trainer(tmp_path / "out", model=make_bert())
    trainer.model.config._name_or_path = "org/base"
    trainer.create_model_card()
    trainer.create_model_card()
    assert read(tmp_path / "out")[0]["license"] == "apache-2.0"
    assert asked == ["org/base"]
    trainer.create_model_card(license="mit")
    assert read(tmp_path / "out")[0]["license"] == "mit"


def refuse():
    raise OSError("no network")


@pytest.mark.parametrize("answer", [refuse, threading.Event().wait], ids=["refuses", "never-answers"])
def test_a_hub_that_does_not_answer(hub, answer):
    answer_by, _ = hub
    answer_by(answer)
    start = time.perf_counter()
    assert provenance.license_of("org/base") is None
    assert time.perf_counter() - start < 30


# ---- Hyperparameters ---------------------------------------------------------------------------------------------


def hyperparameters(trainer):
    return TrainingSummary.from_trainer(trainer).hyperparameters


def test_own_optimizer_and_schedule(tmp_path):
    model = make_plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    found = hyperparameters(make_trainer(tmp_path, model, {"optimizers": (optimizer, schedule)}))
    assert found["optimizer"].startswith("SGD, lr=0.5, momentum=0.9, ")
    assert found["lr_scheduler_type"] == "StepLR"
    given = {"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 0.1})}
    found = hyperparameters(make_trainer(tmp_path, trainer=given, lr_scheduler_kwargs={"a": 1}, bf16=True))
    assert found["optimizer"] == "Adagrad, lr=0.1"
    assert found["lr_scheduler_kwargs"] == {"a": 1}
    assert found["mixed_precision_training"] == "Native AMP (bf16)"
    assert found["training_steps"] == 6
    found = hyperparameters(make_trainer(tmp_path, optim="adafactor", optim_args="decay_rate=-0.7", max_steps=-1))
    assert found["optimizer"] == "adafactor, optim_args=decay_rate=-0.7"
    assert found["num_epochs"] == 3.0


def test_several_processes(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=3)
    monkeypatch.setattr(TrainingArguments, "world_size", 4)
    monkeypatch.setattr(type(trainer.accelerator.processes), "data_processes", 2)  # two of them share a model
    found = hyperparameters(trainer)
    assert found["distributed_type"] == "multi-CPU"
    assert found["num_devices"] == 4
    assert found["total_train_batch_size"] == 4 * 2 * 3
    assert found["total_eval_batch_size"] == 8 * 2
    monkeypatch.setattr(trainer._hftrainer.engine.parallelism, "card", "FSDP")
    assert hyperparameters(trainer)["distributed_type"] == "multi-CPU (FSDP)"


# ---- What is missing, and what is wrong --------------------------------------------------------------------------


def test_without_matplotlib(run, monkeypatch, caplog):
    trainer, folder = run
    (folder / "training.png").unlink(missing_ok=True)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    files._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "hftrainer"):
        trainer.create_model_card()
        trainer.create_model_card()
    assert caplog.text.count("pip install 'hftrainer[plot]'") == 1
    assert "![" not in read(folder)[1] and "| Training Loss" in read(folder)[1]


#: As if those libraries were not there, neither to be imported nor to be found among the installed.
BARE = """
import importlib.machinery, importlib.metadata, sys
ABSENT = ("transformers", "jinja2", "matplotlib", "datasets", "peft", "accelerate")
class Bare(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else super().find_spec(name, path, target)
sys.meta_path[:] = [Bare if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
distribution = importlib.metadata.distribution
def installed(name):
    if name in ABSENT:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)
importlib.metadata.distribution = installed
from tests.support.tiny import make_plain, plain_data
from hftrainer import Trainer, TrainingArguments
args = TrainingArguments(sys.argv[1], max_steps=2, use_cpu=True, save_strategy="no", logging_steps=1)
trainer = Trainer(make_plain(), args, train_dataset=plain_data())
trainer.train()
trainer.create_model_card(language="en")
"""


def test_without_transformers(tmp_path, processes):
    words = [sys.executable, "-c", BARE, str(tmp_path / "out")]  # a fork server has some of what is absent
    done = subprocess.run(words, env=processes.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    metadata, text = read(tmp_path / "out")
    assert metadata["language"] == ["en"]
    assert "- Lightning 2" in text and "Transformers" not in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tags": 5}, r"tags=5: give a string or a list of strings"),
        ({"language": ["en", 1]}, r"language=\['en', 1\]: give a string or a list of strings"),
        ({"license": ["mit"]}, r"license=\['mit'\]: give a string"),
        ({"finetuned_from": 3}, r"finetuned_from=3: give a string"),
        ({"dataset_tags": "a", "dataset_args": ["x", "y"]}, r"dataset_args=\['x', 'y'\]: there are more values than"),
    ],
)
def test_wrong_values(run, given, message):
    trainer, folder = run
    before = sorted(os.listdir(folder))
    with pytest.raises(InvalidArgument, match=message):
        trainer.create_model_card(**given)
    assert sorted(os.listdir(folder)) == before
    with pytest.raises(TypeError, match="unexpected keyword argument 'licence'"):
        trainer.create_model_card(licence="mit")


def test_wrong_dataset_metadata():
    with pytest.raises(InvalidArgument, match="dataset_metadata does not allow the key 'spilt'; did you mean 'split'"):
        TrainingSummary("m", dataset_metadata={"spilt": "test"})
    with pytest.raises(InvalidArgument, match="dataset_metadata=3: give a dict or a list of dicts"):
        TrainingSummary("m", dataset_metadata=3)
    with pytest.raises(InvalidArgument, match="allowed keys: config, split, revision"):
        TrainingSummary("m", dataset_metadata=[{"xyz": 1}])


def test_scripts_get_our_summary():
    importlib.import_module("transformers.modelcard")  # before, or it would keep what it takes from other modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        install.install()
    try:
        from transformers.modelcard import TrainingSummary as Swapped

        assert Swapped is TrainingSummary
    finally:
        install.uninstall()


# ---- Files of results --------------------------------------------------------------------------------------------


def test_metrics_of_other_libraries(tmp_path):
    metrics = {"a": np.float32(0.5), "b": torch.tensor(2), "c": [np.int64(3)], "d": np.ones(2)}
    write_metrics(str(tmp_path), "eval", metrics, combined=True)
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"a": 0.5, "b": 2, "c": [3], "d": [1, 1]}
    with pytest.raises(TypeError, match=r"save_metrics: <object .* is not a number or text"):
        write_metrics(str(tmp_path), "eval", {"a": object()}, combined=True)
    assert json.loads((tmp_path / "eval_results.json").read_text())["b"] == 2  # the file from before
