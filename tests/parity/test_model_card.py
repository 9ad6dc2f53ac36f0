"""The model card and the files of results, of the same run by both libraries."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from huggingface_hub import metadata_load

from hftrainer import TrainingSummary
from hftrainer.model_card import provenance
from tests.support.differences import MEASURED
from tests.support.parity import LIBRARIES, accuracy, build
from tests.support.tiny import make_bert, make_peft, text_data


def named_dataset(count=19):
    from datasets import Dataset, DatasetInfo

    rows = Dataset.from_list(
        [
            {name: getattr(value, "tolist", lambda v=value: v)() for name, value in row.items()}
            for row in text_data(count)
        ]
    )
    return Dataset(rows.data, DatasetInfo(builder_name="glue", config_name="mrpc"), split="validation")


def make_pair(tmp_path_factory, model, **settings):
    pair = []
    for library in LIBRARIES:
        folder = tmp_path_factory.mktemp("run") / "my-model"
        trainer, _ = build(library, model, folder, logging_steps=3, gradient_accumulation_steps=2, **settings)
        trainer.model.config._name_or_path = "org/base"
        trainer.train()
        trainer.evaluate()
        pair.append(trainer)
    return pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(
        tmp_path_factory,
        "bert",
        eval_strategy="steps",
        eval_steps=4,
        label_smoothing_factor=0.1,
        lr_scheduler_type="cosine",
        trainer={"compute_metrics": accuracy, "eval_dataset": named_dataset()},
    )


def card_of(trainer, **given):
    path = Path(trainer.args.output_dir) / "README.md"
    path.unlink(missing_ok=True)
    trainer.create_model_card(**given)
    return metadata_load(path), path.read_text()


def section(card, heading):
    """What stands below a heading."""
    return card.split(f"{heading}\n")[1].split("\n#")[0].strip()


def rows(card):
    lines = [
        line.split("|")[1:-1] for line in section(card, "### Training results").splitlines() if line.startswith("|")
    ]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert all(set(cell) == {":", "-"} for cell in cells[1])
    return [cells[0], *cells[2:]]


def bullets(text):
    return dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith("- "))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="nothing"),
        pytest.param(
            {
                "language": ["en", "de"],
                "license": "mit",
                "tags": "mine",
                "model_name": "a name",
                "finetuned_from": "bert-base-cased",
                "tasks": "token-classification",
                "dataset_tags": "conll2003",
                "dataset": "CoNLL",
                "dataset_args": "en",
            },
            id="everything",
        ),
        pytest.param(
            {
                "tags": ["a", "generated_from_trainer", "b"],
                "tasks": ["text-classification", "fill-mask"],
                "dataset_tags": ["imdb", "glue"],
                "dataset": ["IMDB", "GLUE"],
                "dataset_args": ["plain", "sst2"],
            },
            id="several",
        ),
    ],
)
def test_same_metadata(pair, given):
    theirs, ours = (card_of(trainer, **given)[0] for trainer in pair)
    assert ours == theirs
    assert theirs["model-index"][0]["results"][0]["metrics"][0]["type"] == "accuracy"
    assert theirs["base_model"]


def test_same_results_and_hyperparameters(pair):
    theirs, ours = (card_of(trainer)[1] for trainer in pair)
    assert rows(ours) == rows(theirs)
    assert len(rows(ours)) == 4
    before = "## Model description"
    assert bullets(ours.split(before)[0].split("\n---\n")[1]) == bullets(theirs.split(before)[0].split("\n---\n")[1])
    values, expected = (bullets(section(card, "### Training hyperparameters")) for card in (ours, theirs))
    assert values.pop("optimizer") == "adamw_torch_fused, betas=(0.9, 0.999), epsilon=1e-08"
    assert "betas=(0.9,0.999) and epsilon=1e-08" in expected.pop("optimizer")
    assert values.pop("weight_decay") == "0.1"
    assert values == expected
    versions = section(theirs, "### Framework versions").splitlines()
    assert set(versions) < set(section(ours, "### Framework versions").splitlines())


def test_their_summary_reads_our_trainer(pair):
    from transformers.modelcard import TrainingSummary as Theirs

    theirs, ours = pair
    assert Theirs.from_trainer(ours).create_metadata() == Theirs.from_trainer(theirs).create_metadata()
    summary = TrainingSummary.from_trainer(ours)
    assert summary.create_metadata() == Theirs.from_trainer(theirs).create_metadata()
    assert summary.create_model_index({"accuracy": "Accuracy"}) == summary.create_metadata()["model-index"]


def test_tasks_by_class():
    from transformers.modelcard import TASK_MAPPING, TASK_TAG_TO_NAME_MAPPING, _get_mapping_values

    expected = {name: task for task, names in TASK_MAPPING.items() for name in _get_mapping_values(names)}
    assert provenance._tasks_by_class() == expected
    assert {task: provenance.task_name(task) for task in TASK_TAG_TO_NAME_MAPPING} == TASK_TAG_TO_NAME_MAPPING
    assert provenance.task_of(make_bert()) == "text-classification"
    assert provenance.task_of(make_peft()) == "text-generation"


def test_peft(tmp_path_factory):
    """Theirs loses the tags that were asked for, and knows no task of an adapter."""
    pair = make_pair(tmp_path_factory, "peft", max_steps=2)
    for trainer in pair:
        trainer.model.base_model.model.name_or_path = "org/base"
        trainer.save_model()
        trainer.create_model_card(tags="mine", dataset_tags="glue")
    theirs, ours = (Path(trainer.args.output_dir) / "README.md" for trainer in pair)
    own, expected = metadata_load(ours), metadata_load(theirs)
    assert set(own.pop("tags")) == {"mine", "generated_from_trainer", *expected.pop("tags")}
    assert own == expected
    assert own["library_name"] == "peft"
    assert own["base_model"] == "org/base"
    assert ours.read_text().count("- PEFT ") == theirs.read_text().count("- PEFT ") == 1


def test_files_of_results(pair):
    for trainer in pair:
        trainer.save_metrics("train", {"train_loss": 0.123456789, "epoch": 1.0, "b": float("nan"), "a": {"x": [1]}})
        trainer.save_metrics("eval", {"eval_loss": 2, "epoch": 2.0})
        trainer.save_metrics("test", {"only": "here"}, combined=False)
        trainer.save_metrics("all", {"last": 1})
        trainer.save_state()
    theirs, ours = (Path(trainer.args.output_dir) for trainer in pair)
    for name in ("train", "eval", "test", "all"):
        assert (ours / f"{name}_results.json").read_bytes() == (theirs / f"{name}_results.json").read_bytes()
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (ours, theirs)]
    for state in states:
        for line in state["log_history"]:
            for name in [name for name in line if name.endswith(MEASURED)]:
                line[name] = "measured"
    assert states[0] == states[1]
    printed = []
    for trainer in pair:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            trainer.log_metrics("eval", {"eval_loss": 1.23456, "eval_runtime": 3.456, "long_name": "text", "n": 3})
        printed.append(out.getvalue())
    assert printed[0] == printed[1]
