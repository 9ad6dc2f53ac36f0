"""Both libraries write the same to each tracker of `report_to`: one suite for all, and tests of each."""

import json

import pytest

from tests.support import tracking
from tests.support.parity import LIBRARIES
from tests.support.tracking import make_tracked_trainer

#: Arguments that transformers sets by the machine, and the folder of the run.
DIFFERENT = {"accelerator_config", "dataloader_pin_memory", "output_dir"}


def train(make, **settings):
    trainer = make(**settings)
    trainer.train()
    return trainer


def train_evaluate_predict(make):
    trainer = train(make)
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    trainer.train()
    return trainer


def train_and_resume(make):
    train(make, save_strategy="steps", save_steps=4, max_steps=4)
    trainer = make()
    trainer.train(resume_from_checkpoint=True)
    return trainer


def evaluate(make):
    trainer = make()
    trainer.evaluate()
    return trainer


class TrackerSuite:
    tracker: type
    script = staticmethod(train_evaluate_predict)
    #: Of the first training, `evaluate`, and the second training.
    eval_steps = (3, 6, 8, 8, 3, 6, 8)
    #: Minimum number of arguments and configuration values that both libraries write.
    hyperparameters = 130

    @pytest.fixture(autouse=True)
    def _tracker(self, tmp_path, monkeypatch):
        pytest.importorskip(self.tracker.package)
        self.tmp_path, self.monkeypatch = tmp_path, monkeypatch
        monkeypatch.chdir(tmp_path)
        yield
        self.opened.close()

    def open(self, library="hftrainer", model="bert", **settings):
        """A tracker with a folder for one library, and what makes Trainers that write to it."""
        self.opened = tracker = self.tracker(self.tmp_path / library, self.monkeypatch)

        def make(**kwargs):
            return make_tracked_trainer(library, tracker.folder, model, **{**tracker.settings, **settings, **kwargs})

        return tracker, make

    def run_and_read(self, library, script, **settings):
        tracker, make = self.open(library, **settings)
        trainer = script(make)  # when their Trainer is deleted, it ends its run
        written = tracker.read()
        del trainer
        tracker.close()
        return written

    def assert_alike(self, script, **settings):
        ours, theirs = (self.run_and_read(library, script, **settings) for library in reversed(LIBRARIES))
        assert self.drop_duplicates(ours.curves) == self.drop_duplicates(theirs.curves)
        assert self.comparable(ours.details) == self.comparable(theirs.details)
        assert bool(ours.hyperparameters) == bool(theirs.hyperparameters)
        # transformers writes some of them again in each training
        for mine, other in zip(ours.hyperparameters, theirs.hyperparameters, strict=False):
            known = mine.keys() & other.keys() - DIFFERENT
            assert len(known) >= self.hyperparameters
            assert {name: mine[name] for name in known} == {name: other[name] for name in known}
        return ours

    def drop_duplicates(self, curves):
        return curves

    def comparable(self, details):
        return details

    def test_whole_script_writes_the_same(self):
        """Names, steps and values of curves; the arguments and the configuration once."""
        ours = self.assert_alike(self.script)
        assert ours.steps("train/loss") == [2, 4, 6, 8] * (2 if self.script is train_evaluate_predict else 1)
        assert ours.steps("eval/loss") == list(self.eval_steps)
        assert "train/train_runtime" in ours.curves
        assert len(ours.hyperparameters) == 1
        self.check(ours)

    def check(self, ours):
        """What else is to be seen of a whole script."""

    def test_resumed_run_writes_the_same(self):
        assert self.assert_alike(train_and_resume).steps("train/loss") == [2, 4, 6, 8]

    def test_evaluation_alone_writes_the_same(self):
        assert self.assert_alike(evaluate).steps("eval/loss") == [0]


class TestTensorBoard(TrackerSuite):
    tracker = tracking.TensorBoard
    hyperparameters = 100

    def comparable(self, details):
        """transformers writes the texts again at each beginning."""
        texts = [{tag: entries[0] for tag, entries in each.items()} for each in details["texts"]]
        return {**details, "texts": texts}

    def check(self, ours):
        (written,) = ours.details["texts"]
        assert written.keys() == {"model_config/text_summary"}
        assert ours.hyperparameters[0]["max_steps"] == 8

    def test_texts_are_written_and_other_types_reported(self, caplog):
        logs = {"loss": 1.0, "eval_note": "words", "other": [1, 2], "flag": True}
        ours = self.assert_alike(lambda make: make().log(dict(logs)))
        assert ours.curves["train/flag"] == [(0, 1.0)]
        assert ours.details["texts"] == [{"eval/note/text_summary": [(0, "words")]}]
        assert "train/other=[1, 2] (list) is not a number" in caplog.text


class TestWandB(TrackerSuite):
    tracker = tracking.WandB

    def comparable(self, details):
        size = details["configuration"].get("model/num_parameters")
        return {"size": size, **{name: details[name] for name in ("lines", "summary", "run")}}

    def check(self, ours):
        assert [line["train/global_step"] for line in ours.details["lines"]][:10] == [2, 3, 4, 6, 6, 8, 8, 8, 8, 8]
        assert ours.details["run"] == [("huggingface", "a-run")]
        assert ("*", "train/global_step") in ours.details["axes"]

    @pytest.mark.parametrize(("uploads", "count"), [("end", 2), ("checkpoint", 4)])
    def test_uploaded_artifacts_are_the_same(self, uploads, count):
        """Artifacts have transformers' names, aliases and metadata, and hold the files of the model."""
        self.monkeypatch.setenv("WANDB_LOG_MODEL", uploads)
        found = {}
        for library in LIBRARIES:
            artifacts = self.run_and_read(library, train, save_strategy="steps", save_steps=4).details["artifacts"]
            found[library] = [(a.name, a.type, sorted(a.aliases), sorted(json.loads(a.metadata))) for a in artifacts]
            files = {entry.path for entry in artifacts[-1].manifest.contents}
        assert found["hftrainer"] == found["transformers"]
        assert found["hftrainer"][-1][2] == ["final_model", "latest"]
        assert {"model.safetensors", "config.json", "model_architecture.txt"} <= files  # ours, the last
        assert len(found["hftrainer"]) == count

    def test_run_opened_by_the_user_is_used(self):
        import wandb

        _, make = self.open(model="plain")
        mine = wandb.init(project="mine", name="opened before")
        trainer = make()
        trainer.train()
        assert wandb.run is trainer.loggers[0].experiment is mine
        assert mine.summary["train/global_step"] == 8
        assert mine.config["per_device_train_batch_size"] == 4

    def test_watch_variable_logs_gradients(self):
        import wandb

        self.monkeypatch.setenv("WANDB_WATCH", "gradients")
        self.open(model="plain", max_steps=101, eval_strategy="no")[1]().train()
        assert any(name.startswith("gradients/") for name in dict(wandb.run.summary))


class TestMLflow(TrackerSuite):
    tracker = tracking.MLflow
    script = staticmethod(train)  # transformers would begin runs without a name for what follows
    eval_steps = (3, 6, 8)
    hyperparameters = 100

    def drop_duplicates(self, curves):
        """MLflow keeps one of several equal entries of the same millisecond."""
        return {name: list(dict.fromkeys(entries)) for name, entries in curves.items()}

    def check(self, ours):
        assert ours.details["runs"] == [("a-run", "FINISHED")]

    def test_resumed_run_writes_the_same(self):
        """One run, where transformers begins another at each resume; with a tag that says so."""
        ours, theirs = (self.run_and_read(library, train_and_resume) for library in reversed(LIBRARIES))
        assert self.drop_duplicates(ours.curves) == self.drop_duplicates(theirs.curves)
        assert ours.details["runs"] == theirs.details["runs"][:1]
        assert ours.details["tags"][0]["hftrainer.resumed_from_step"] == "4"

    def test_experiment_and_tags_come_from_the_environment(self):
        self.monkeypatch.setenv("MLFLOW_TAGS", '{"release": "1"}')
        self.monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tiny")
        assert self.assert_alike(train, max_steps=2).details["tags"][0]["release"] == "1"

    def test_run_opened_by_the_user_is_used(self):
        import mlflow

        self.monkeypatch.setenv("MLFLOW_FLATTEN_PARAMS", "1")
        self.monkeypatch.setenv("MLFLOW_MAX_LOG_PARAMS", "7")
        tracker, make = self.open(model="plain")
        with mlflow.start_run(run_name="mine") as mine:
            trainer = make()
            trainer.train()
            trainer.log({"odd(name)": 1.0})
            assert mlflow.active_run().info.run_id == mine.info.run_id
            ours = tracker.read()
        assert len(ours.hyperparameters[0]) == 7
        assert ours.curves["train/odd_name_"] == [(8, 1.0)]
        assert ours.details["runs"] == [("mine", "RUNNING")]

    def test_run_can_be_chosen_by_id_or_nested(self):
        import mlflow

        _, make = self.open(model="plain", run_name="child")
        with mlflow.start_run() as before:
            pass
        self.monkeypatch.setenv("MLFLOW_RUN_ID", before.info.run_id)
        make().train()
        assert len(mlflow.search_runs()) == 1
        self.monkeypatch.setenv("MLFLOW_NESTED_RUN", "TRUE")
        with mlflow.start_run(run_name="parent") as parent:
            make().train()
            assert mlflow.active_run().info.run_id == parent.info.run_id
        child = mlflow.search_runs(output_format="list")[0]
        assert (child.info.run_name, child.data.tags["mlflow.parentRunId"]) == ("child", parent.info.run_id)


class TestComet(TrackerSuite):
    tracker = tracking.Comet

    def check(self, ours):
        assert ours.details["epochs"]["train/loss"][0] == 0.2
        assert "test/loss" in ours.curves
