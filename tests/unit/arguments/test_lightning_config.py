"""`lightning_config` passes keywords to Lightning's Trainer, but for those that the Trainer's arguments set."""

import inspect
import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from hftrainer import HfArgumentParser, TrainingArguments
from hftrainer.arguments.lightning_config import ALLOWED, FORWARDED, RELEASE_KEYWORDS, RESERVED
from hftrainer.errors import InvalidArgument
from tests.support.arguments import make_quiet_trainer


def test_every_trainer_keyword_of_lightning_is_classified():
    keywords = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    ours = {"async_checkpoint", "environment", "on_save_error", "behaviour"}
    assert keywords | ours == FORWARDED | RESERVED.keys() | ALLOWED.keys() | set(RELEASE_KEYWORDS)
    assert not FORWARDED & RESERVED.keys() and not ours & keywords


def test_keywords_reach_lightnings_trainer(tmp_path):
    config = {"profiler": "simple", "detect_anomaly": True, "limit_val_batches": 2, "benchmark": True}
    trainer = make_quiet_trainer(tmp_path, lightning_config=config)
    trainer.train()
    assert trainer.lightning_trainer._detect_anomaly
    assert isinstance(trainer.lightning_trainer.profiler, SimpleProfiler)
    seen = []
    trainer.compute_metrics = lambda prediction: seen.append(len(prediction.predictions)) or {}
    trainer.evaluate()
    assert seen == [16]


def train_with_profiler(tmp_path, profiler, **settings):
    settings = {"max_steps": 8, "gradient_accumulation_steps": 2, **settings}
    trainer = make_quiet_trainer(tmp_path, lightning_config={"profiler": profiler}, **settings)
    trainer.train()
    return trainer


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_profiler_report_is_logged_once(tmp_path, profiler, caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        train_with_profiler(tmp_path, profiler, eval_strategy="steps", eval_steps=4)
    (report,) = (record.getMessage() for record in caplog.records if "Profiler Report" in record.getMessage())
    hooks = "train_dataloader_next training_step backward configure_gradient_clipping optimizer_step validation_step"
    for name in hooks.split():
        assert name in report


def test_profiler_report_goes_to_its_file(tmp_path, capfd):
    """Also when the arguments in a checkpoint hold the profiler."""
    profiler = SimpleProfiler(dirpath=tmp_path, filename="profile")
    trainer = train_with_profiler(tmp_path, profiler, save_strategy="steps", save_steps=4)
    report = next(tmp_path.glob("fit-profile*")).read_text()
    assert report.count("Profiler Report") == 1
    assert "training_step" in report
    assert "Profiler Report" not in "".join(capfd.readouterr())
    assert "SimpleProfiler" in trainer.args.to_json_string()
    saved = torch.load(tmp_path / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert not [value for value in vars(saved.lightning_config["profiler"]).values() if hasattr(value, "parameters")]
    assert "[Strategy]SingleDevice.backward" in profiler.recorded_durations  # what it recorded is as it was


def test_pass_through_profiler_prints_no_report(tmp_path, capfd):
    train_with_profiler(tmp_path, PassThroughProfiler())
    assert "Profiler Report" not in "".join(capfd.readouterr())


def test_max_time_stops_training(tmp_path):
    trainer = make_quiet_trainer(tmp_path, lightning_config={"max_time": {"seconds": 0}}, max_steps=50)
    assert trainer.train().global_step < 50


def test_precision_overrides_bf16_with_a_warning(tmp_path, caplog):
    trainer = make_quiet_trainer(tmp_path, lightning_config={"precision": "32-true"}, bf16=True)
    assert "lightning_config['precision']='32-true' overrides bf16=True" in caplog.text
    trainer.train()
    assert trainer.lightning_trainer.precision == "32-true"
    trainer = make_quiet_trainer(tmp_path, lightning_config={"precision": "bf16-mixed"})
    trainer.train()
    assert trainer.lightning_trainer.precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", '{"detect_anomaly": true}'), ("config.yaml", "detect_anomaly: true\n")]
)
def test_config_is_read_from_json_and_yaml_files(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    trainer = make_quiet_trainer(tmp_path, lightning_config=str(tmp_path / name))
    trainer.train()
    assert trainer.lightning_trainer._detect_anomaly


def test_config_is_read_from_the_command_line(tmp_path):
    line = ["--output_dir", str(tmp_path), "--lightning_config", '{"detect_anomaly": "true"}']
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
    assert args.lightning_config == {"detect_anomaly": True}
    assert "detect_anomaly=True" in str(args.explain())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(({name: 1}, rf"\['{name}'\] is reserved for the Trainer: use ") for name in sorted(RESERVED)),
        ({"strategy": "fsdp"}, r"\['strategy'\]='fsdp' is not supported: it must be 'auto' or 'ddp'"),
        ({"precision": "16-true"}, r"\['precision'\]='16-true' is not supported: it must be '32-true' or"),
        ({"profilr": "simple"}, r"\['profilr'\]: lightning.Trainer has no such argument; did you mean 'profiler'"),
        ("absent.json", "the file does not exist"),
        ("a.json", r"a.json is not valid JSON: .*line 1 column 14"),
        ("a.yaml", r"a.yaml is not valid YAML: (.|\n)*line 1"),
        ("b.json", "is of type list"),
    ],
)
def test_invalid_config_is_refused(tmp_path, monkeypatch, config, message):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a.json": '{"profiler": }', "a.yaml": "profiler: [", "b.json": "[1]"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        TrainingArguments(str(tmp_path), lightning_config=config)
