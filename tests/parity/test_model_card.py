"""The model card and the files of results, of the same run by both libraries."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import metadata_load

from hftrainer import TrainingSummary
from hftrainer.model_card import card_contents
from tests.support.parity import LIBRARIES, accuracy, build, comparable
from tests.support.small_models import make_bert, make_peft, text_data


def named_dataset():
    from datasets import Dataset, DatasetInfo

    rows = [{name: torch.as_tensor(value).tolist() for name, value in row.items()} for row in text_data(19)]
    return Dataset(Dataset.from_list(rows).data, DatasetInfo(builder_name="glue", config_name="mrpc"), "validation")


def make_pair(tmp_path_factory, model, **settings):
    both_trainers = []
    for name in LIBRARIES:
        folder = tmp_path_factory.mktemp("run") / "my-model"
        trainer, _ = build(name, model, folder, logging_steps=3, gradient_accumulation_steps=2, **settings)
        trainer.model.config._name_or_path = "org/base"
        trainer.train()
        trainer.evaluate()
        both_trainers.append(trainer)
    return both_trainers


@pytest.fixture(scope="module")
def both_trainers(tmp_path_factory):
    settings = {"eval_strategy": "steps", "eval_steps": 4, "label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"}
    trainer_kwargs = {"compute_metrics": accuracy, "eval_dataset": named_dataset()}
    return make_pair(tmp_path_factory, "bert", trainer=trainer_kwargs, **settings)


def create_cards(both_trainers, **kwargs):
    paths = [Path(trainer.args.output_dir) / "README.md" for trainer in both_trainers]
    for trainer, path in zip(both_trainers, paths, strict=True):
        path.unlink(missing_ok=True)
        trainer.create_model_card(**kwargs)
    return [metadata_load(path) for path in paths], [path.read_text() for path in paths]


def text_under(card, heading):
    return card.split(f"{heading}\n")[1].split("\n#")[0].strip()


def result_cells(card):
    lines = [line for line in text_under(card, "### Training results").splitlines() if line.startswith("|")]
    return [[re.sub("-+", "-", cell.strip()) for cell in line.split("|")[1:-1]] for line in lines]


def bullet_values(text):
    return dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith("- "))


SEVERAL = {
    "tags": ["a", "generated_from_trainer", "b"],
    "tasks": ["text-classification", "fill-mask"],
    "dataset_tags": ["imdb", "glue"],
    "dataset": ["IMDB", "GLUE"],
    "dataset_args": ["plain", "sst2"],
}
ONE_VALUE_EACH = {"language": ["en", "de"], "license": "mit", "tags": "mine", "model_name": "a name"}
ONE_VALUE_EACH |= {"finetuned_from": "bert-base-cased", "tasks": "token-classification"}
ONE_VALUE_EACH |= {"dataset_tags": "conll2003", "dataset": "CoNLL", "dataset_args": "en"}


@pytest.mark.parametrize("card_kwargs", [{}, ONE_VALUE_EACH, SEVERAL], ids=["nothing", "one of each", "several"])
def test_card_has_the_same_metadata(both_trainers, card_kwargs):
    (theirs, ours), _ = create_cards(both_trainers, **card_kwargs)
    assert ours == theirs
    assert theirs["model-index"][0]["results"][0]["metrics"][0]["type"] == "accuracy"
    assert theirs["base_model"]


def test_card_has_the_same_results_and_hyperparameters(both_trainers):
    _, (theirs, ours) = create_cards(both_trainers)
    assert result_cells(ours) == result_cells(theirs)
    assert len(result_cells(ours)) == 5
    results = [card.split("## Model description")[0].split("\n---\n")[1] for card in (ours, theirs)]
    assert bullet_values(results[0]) == bullet_values(results[1])
    values, expected = (bullet_values(text_under(card, "### Training hyperparameters")) for card in (ours, theirs))
    assert values.pop("optimizer") == "adamw_torch_fused, betas=(0.9, 0.999), epsilon=1e-08"
    assert "betas=(0.9,0.999) and epsilon=1e-08" in expected.pop("optimizer")
    assert values.pop("weight_decay") == "0.1"
    assert values == expected
    versions, wanted = (set(text_under(card, "### Framework versions").splitlines()) for card in (ours, theirs))
    assert wanted < versions


def test_training_summary_of_transformers_reads_our_trainer(both_trainers):
    from transformers.modelcard import TrainingSummary as Theirs

    expected = Theirs.from_trainer(both_trainers[0]).create_metadata()
    summary = TrainingSummary.from_trainer(both_trainers[1])
    assert Theirs.from_trainer(both_trainers[1]).create_metadata() == summary.create_metadata() == expected
    assert summary.create_model_index({"accuracy": "Accuracy"}) == expected["model-index"]


def test_task_names_are_those_of_transformers():
    from transformers.modelcard import TASK_TAG_TO_NAME_MAPPING

    assert {task: card_contents.task_name(task) for task in TASK_TAG_TO_NAME_MAPPING} == TASK_TAG_TO_NAME_MAPPING
    assert card_contents.task_of(make_bert()) == "text-classification"
    assert card_contents.task_of(make_peft()) == "text-generation"


def test_card_of_a_peft_model(tmp_path_factory):
    """transformers drops the given tags, and finds no task of an adapter."""
    both_trainers = make_pair(tmp_path_factory, "peft", max_steps=2)
    for trainer in both_trainers:
        trainer.model.base_model.model.name_or_path = "org/base"
        trainer.save_model()
        trainer.create_model_card(tags="mine", dataset_tags="glue")
    paths = [Path(trainer.args.output_dir) / "README.md" for trainer in both_trainers]
    theirs, ours = map(metadata_load, paths)
    assert set(ours.pop("tags")) == {"mine", "generated_from_trainer", *theirs.pop("tags")}
    assert ours == theirs
    assert ours["library_name"] == "peft"
    assert ours["base_model"] == "org/base"
    assert [path.read_text().count("- PEFT ") for path in paths] == [1, 1]


def test_result_files_and_printed_metrics_are_the_same(both_trainers, capsys):
    printed = []
    for trainer in both_trainers:
        trainer.save_metrics("train", {"train_loss": 0.123456789, "epoch": 1.0, "b": float("nan"), "a": {"x": [1]}})
        trainer.save_metrics("eval", {"eval_loss": 2, "epoch": 2.0})
        trainer.save_metrics("test", {"only": "here"}, combined=False)
        trainer.save_metrics("all", {"last": 1})
        trainer.save_state()
        capsys.readouterr()
        trainer.log_metrics("eval", {"eval_loss": 1.23456, "eval_runtime": 3.456, "long_name": "text", "n": 3})
        printed.append(capsys.readouterr().out)
    theirs, ours = (Path(trainer.args.output_dir) for trainer in both_trainers)
    for name in ("train", "eval", "test", "all"):
        assert (ours / f"{name}_results.json").read_bytes() == (theirs / f"{name}_results.json").read_bytes()
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (ours, theirs)]
    logs = [comparable(state.pop("log_history")) for state in states]
    assert states[0] == states[1]
    assert logs[0] == logs[1]
    assert printed[0] == printed[1] != ""
