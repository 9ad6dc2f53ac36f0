"""The model card: its contents for different runs, and the errors for wrong arguments."""

import functools
import importlib
import logging
import os
import queue
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, constants, metadata_load

from hftrainer import TrainerCallback, TrainingArguments, TrainingSummary
from hftrainer.cli import install
from hftrainer.errors import InvalidArgument
from hftrainer.model_card import card_contents
from hftrainer.model_card.card_contents import evaluation_rows, final_results, markdown_table
from tests.support.parity import EVERY_STEP, accuracy, build
from tests.support.releases import pinned, release_of
from tests.support.small_models import make_plain, plain_data

TOKEN = "hf_this-is-the-secret"
MEASURED = {"compute_metrics": accuracy}


def make_trainer(folder, model="plain", **settings):
    return build("hftrainer", model, folder, **{"max_steps": 6, **settings})[0]


def make_card(trainer, **kwargs):
    trainer.create_model_card(**kwargs)
    path = Path(trainer.args.output_dir) / "README.md"
    return metadata_load(path), path.read_text()


@pytest.fixture(scope="module")
def trained_trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "my-model"
    trainer = make_trainer(folder, trainer=MEASURED, eval_strategy="steps", eval_steps=3, hub_token=TOKEN)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain_card(trained_trainer):
    """The metadata and the text of the card of a plain module."""
    return make_card(trained_trainer, tasks="tabular-classification", dataset_tags="me/blobs", license="mit")


def test_plain_module_card_has_metadata_of_the_run(trained_trainer, plain_card):
    metadata, _ = plain_card
    assert "library_name" not in metadata and "base_model" not in metadata  # no library loads it
    assert metadata["license"] == "mit"
    assert metadata["tags"] == ["generated_from_trainer"]
    (result,) = metadata["model-index"][0]["results"]
    assert result["task"] == {"name": "Tabular Classification", "type": "tabular-classification"}
    assert result["metrics"][0]["value"] == trained_trainer.state.log_history[-2]["eval_accuracy"]


def test_plain_module_card_describes_the_run_with_a_table_and_a_plot(trained_trainer, plain_card):
    from markdown_it import MarkdownIt

    _, text = plain_card
    assert "A model of class `Plain`, trained on me/blobs." in text
    assert "- training: 38 samples\n- evaluation: 19 samples" in text
    assert TOKEN not in text
    page = MarkdownIt().enable("table").render(text.split("\n---\n", 1)[1])
    assert page.count("<h2>") == 4 and page.count("<tr>") == 3
    assert '<img src="training.png"' in page
    assert '<th style="text-align:center">Validation Loss</th>' in page
    folder = Path(trained_trainer.args.output_dir)
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(folder)) == ["README.md", "training.png"]


def test_card_without_training_has_no_results_table(tmp_path):
    """The main process alone writes it, also into a deleted folder; an evaluation adds its metrics."""
    trainer = make_trainer(tmp_path / "out", trainer=MEASURED)
    trainer.is_world_process_zero = lambda: False
    trainer.create_model_card()
    assert os.listdir(tmp_path / "out") == []
    del trainer.is_world_process_zero
    os.rmdir(tmp_path / "out")
    metadata, text = make_card(trainer)
    assert metadata == {"tags": ["generated_from_trainer"], "model-index": [{"name": "out", "results": []}]}
    assert "Training results" not in text and "Results on" not in text
    trainer.evaluate()
    metadata, text = make_card(trainer)
    assert metadata["metrics"] == ["accuracy"]
    assert "- Accuracy: " in text and "Runtime" not in text
    assert "Training results" not in text  # a single evaluation makes neither a curve nor a table
    assert os.listdir(tmp_path / "out") == ["README.md"]


def test_card_in_training_has_columns_for_each_eval_set(tmp_path, monkeypatch):
    monkeypatch.setattr("hftrainer.model_card.card._SECONDS_BETWEEN_PLOTS", float("inf"))
    rows, drawn, data = [], [], plain_data()

    class Cards(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            if len(state.log_history) >= 6:  # there is only one point before
                rows.append(make_card(trainer)[1].count("\n|") - 2)
                drawn.append((tmp_path / "training.png").read_bytes())

    trainer_kwargs = {"eval_dataset": {"a": data[:9], "b": data[9:20]}, "callbacks": [Cards()], **MEASURED}
    trainer = make_trainer(tmp_path, eval_strategy="steps", trainer=trainer_kwargs)
    trainer.train()
    assert len(set(drawn)) == 1  # there is a recent plot
    _, text = make_card(trainer)
    assert "| Training Loss | Epoch | Step | A Loss | A Accuracy | B Loss | B Accuracy |" in text
    assert text.count("\n|") == 2 + 3
    assert rows == [2, 3, 3]
    assert "- evaluation, a: 9 samples\n- evaluation, b: 11 samples" in text
    assert (tmp_path / "training.png").read_bytes() != drawn[-1]


def test_results_are_those_of_the_best_model(tmp_path):
    measured = iter([0.5, 0.9, 0.1])
    trainer_kwargs = {"compute_metrics": lambda _: {"accuracy": next(measured, 0.25)}}
    best = {**EVERY_STEP, "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    trainer = make_trainer(tmp_path, trainer=trainer_kwargs, **best)
    trainer.train()
    assert "- Accuracy: 0.9\n" in make_card(trainer)[1]
    trainer.evaluate()
    assert "- Accuracy: 0.25\n" in make_card(trainer)[1]


SUMMARY = {"train_runtime": 1.0, "train_loss": 0.5, "total_flos": 1.0, "epoch": 1.0, "step": 4}


def test_results_that_are_not_numbers_are_left_out():
    several = {"eval_loss": 2.0, "eval_f1": np.float64(0.5), "eval_a|b": torch.tensor(3), "eval_c": np.ones(2)}
    history = [
        {"loss": 1.0, "train_runtime": 0.1, "epoch": 0.5, "step": 2},  # as with include_num_input_tokens_seen
        {"eval_loss": float("nan"), "eval_accuracy": float("inf"), "eval_matrix": [[1]], "epoch": 0.5, "step": 2},
        {**several, "epoch": 1.0, "step": 4},
        SUMMARY,
    ]
    assert markdown_table(evaluation_rows(history)).splitlines() == [
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


def test_tags_of_an_existing_card_are_kept(tmp_path, caplog):
    trainer, own_tags = make_trainer(tmp_path), ["mine"]
    trainer.model.model_tags = ["of-the-model"]
    cards = {"tags:\n- of-the-card\n- 3": ["of-the-card"], "tags: one": ["one"], "tags: [": [], "- a list": []}
    for head, kept in cards.items():
        (tmp_path / "README.md").write_text(f"---\n{head}\n---\n# By hand\n")
        tags = make_card(trainer, tags=own_tags)[0]["tags"]
        assert tags == ["mine", "of-the-model", *kept, "generated_from_trainer"]
    assert own_tags == ["mine"]
    assert caplog.text.count("README.md cannot be read, so its tags are not kept") == 2


@pytest.mark.skipif(release_of("peft") < pinned("peft"), reason="the tags are those of the newest PEFT's own card")
def test_adapter_of_an_unnamed_model_has_no_base_model(tmp_path):
    """PEFT writes an empty base model, and the Hub refuses such a card."""
    metadata, text = make_card(make_trainer(tmp_path, "peft"), model_name="name")
    assert metadata["library_name"] == "peft"
    assert "base_model" not in metadata
    assert metadata["tags"] == ["generated_from_trainer", "lora", "transformers"]
    assert "# name\n\nAn adapter for a model of class `LlamaForCausalLM`, trained." in text


def test_base_model_in_a_folder_is_left_out(tmp_path):
    trainer = make_trainer(tmp_path, "bert")
    trainer.model.config._name_or_path = str(tmp_path)
    assert "base_model" not in make_card(trainer)[0]
    metadata, text = make_card(trainer, finetuned_from="/else/where")
    assert "base_model" not in metadata  # not a valid repository name
    assert "`BertForSequenceClassification`, fine-tuned from `/else/where`." in text
    assert metadata["library_name"] == "transformers"


def test_datasets_are_named_by_builder_and_config():
    from datasets import Dataset, DatasetInfo

    def named(builder, split=None):
        return Dataset(Dataset.from_dict({"x": [1]}).data, DatasetInfo(builder_name=builder, config_name="c"), split)

    several = {"a": named("glue"), "b": named("imdb"), "c": named("glue", "test"), "d": [1]}
    assert card_contents.datasets_of(named("glue", "train")) == [("glue", "c", "train")]
    assert card_contents.datasets_of(several) == [("glue", "c", None), ("imdb", "c", None)]
    for nameless in (*map(named, ("csv", "generator", "imagefolder", None)), None):
        assert card_contents.datasets_of(nameless) == []


def raise_no_network():
    raise OSError("no network")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(lambda: SimpleNamespace(tags=["pytorch", "license:apache-2.0"]), "apache-2.0"), (raise_no_network, None)],
    ids=["answers", "refuses"],
)
def test_licence_is_that_of_the_base_model(tmp_path, monkeypatch, answer, expected):
    """The Hub is asked once; without its answer the card has no licence."""
    asked = queue.SimpleQueue()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", lambda self, name, **_: asked.put(name) or answer())
    monkeypatch.setattr(card_contents, "license_of", functools.cache(card_contents.license_of.__wrapped__))
    trainer = make_trainer(tmp_path, "bert")
    trainer.model.config._name_or_path = "org/base"
    assert [make_card(trainer)[0].get("license") for _ in range(2)] == [expected] * 2
    assert asked.get() == "org/base"
    assert asked.empty()
    assert make_card(trainer, license="mit")[0]["license"] == "mit"


def test_given_optimizer_and_schedule_are_described(tmp_path):
    def hyperparameters(*args, **settings):
        return TrainingSummary.from_trainer(make_trainer(*args, **settings)).hyperparameters

    model = make_plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    found = hyperparameters(tmp_path, trainer={"model": model, "optimizers": (optimizer, schedule)})
    assert found["optimizer"].startswith("SGD, lr=0.5, momentum=0.9, ")
    assert found["lr_scheduler_type"] == "StepLR"
    trainer_kwargs = {"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 0.1})}
    found = hyperparameters(tmp_path, trainer=trainer_kwargs, lr_scheduler_kwargs={"a": 1}, bf16=True)
    assert found["optimizer"] == "Adagrad, lr=0.1"
    assert found["lr_scheduler_kwargs"] == {"a": 1}
    assert found["mixed_precision_training"] == "Native AMP (bf16)"
    assert found["training_steps"] == 6
    found = hyperparameters(tmp_path, optim="adafactor", optim_args="decay_rate=-0.7", max_steps=-1)
    assert found["optimizer"].startswith("adafactor, optim_args=decay_rate=-0.7")
    assert found["num_epochs"] == 2.0


def test_batch_sizes_count_all_processes(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=3)
    monkeypatch.setattr(TrainingArguments, "world_size", 4)
    monkeypatch.setattr(type(trainer.accelerator.processes), "data_world_size", 2)  # two of them share a model
    expected = {"num_devices": 4, "total_train_batch_size": 4 * 2 * 3, "total_eval_batch_size": 8 * 2}
    for card, name in (("", "multi-CPU"), ("FSDP", "multi-CPU (FSDP)")):
        monkeypatch.setattr(trainer._hftrainer.strategy, "card_name", card)
        found = TrainingSummary.from_trainer(trainer).hyperparameters
        assert {**expected, "distributed_type": name}.items() <= found.items()


def test_card_without_matplotlib_has_no_plot(trained_trainer, monkeypatch, caplog):
    (Path(trained_trainer.args.output_dir) / "training.png").unlink(missing_ok=True)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.INFO, "hftrainer"):
        texts = [make_card(trained_trainer)[1] for _ in range(2)]
    assert caplog.text.count("pip install 'hftrainer[plot]'") == 1
    assert "![" not in texts[1] and "| Training Loss" in texts[1]


#: Hides these libraries: they can neither be imported nor found among the installed.
BARE = """
import importlib.machinery, importlib.metadata, sys
ABSENT = ("transformers", "jinja2", "matplotlib", "datasets", "peft", "accelerate")
find, installed = importlib.machinery.PathFinder.find_spec, importlib.metadata.distribution
def find_spec(name, *more):
    return None if name.split(".")[0] in ABSENT else find(name, *more)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
importlib.metadata.distribution = lambda name: installed("absent" if name in ABSENT else name)
from tests.support.small_models import make_plain, plain_data
from hftrainer import Trainer, TrainingArguments
args = TrainingArguments(sys.argv[1], max_steps=2, use_cpu=True, save_strategy="no", logging_steps=1)
trainer = Trainer(make_plain(), args, train_dataset=plain_data())
trainer.train()
trainer.create_model_card(language="en")
"""


def test_card_is_written_without_transformers_and_jinja2(tmp_path, processes):
    words = [sys.executable, "-c", BARE, str(tmp_path / "out")]  # a fork server has some of what is absent
    done = subprocess.run(words, env=processes.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "README.md").read_text()
    assert metadata_load(tmp_path / "out" / "README.md")["language"] == ["en"]
    assert "- Lightning 2" in text and "Transformers" not in text


@pytest.mark.parametrize(
    ("card_kwargs", "message"),
    [
        ({"tags": 5}, r"tags=5: pass a string or a list of strings"),
        ({"language": ["en", 1]}, r"language=\['en', 1\]: pass a string or a list of strings"),
        ({"license": ["mit"]}, r"license=\['mit'\]: pass a string"),
        ({"finetuned_from": 3}, r"finetuned_from=3: pass a string"),
        ({"dataset_tags": "a", "dataset_args": ["x", "y"]}, r"dataset_args=\['x', 'y'\]: more values than"),
        ({"licence": "mit"}, "unexpected keyword argument 'licence'"),
    ],
)
def test_wrong_card_value_is_refused(tmp_path, card_kwargs, message):
    with pytest.raises((InvalidArgument, TypeError), match=message):
        make_trainer(tmp_path).create_model_card(**card_kwargs)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"spilt": "test"}, "dataset_metadata does not allow the key 'spilt'; did you mean 'split'"),
        (3, "dataset_metadata=3: pass a dict or a list of dicts"),
        ([{"xyz": 1}], "allowed keys: config, split, revision"),
    ],
)
def test_wrong_dataset_metadata_is_refused(metadata, message):
    with pytest.raises(InvalidArgument, match=message):
        TrainingSummary("m", dataset_metadata=metadata)


def test_install_swaps_training_summary_of_transformers():
    importlib.import_module("transformers.modelcard")  # before, or it would keep what it takes from other modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        install.install()
    try:
        from transformers.modelcard import TrainingSummary as Swapped

        assert Swapped is TrainingSummary
    finally:
        install.uninstall()
