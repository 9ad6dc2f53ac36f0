"""`lightning_config`: Lightning's own keywords, and what the Trainer's arguments rule instead."""

import inspect
import json

import lightning.pytorch as pl
import pytest
from lightning.pytorch.profilers import SimpleProfiler

from hftrainer import HfArgumentParser, Trainer, TrainingArguments
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer_lightning.config import PASSED, PLANNED, RULED
from tests.tiny import make_plain, plain_data


def make_trainer(folder, config, **settings):
    defaults = {"max_steps": 3, "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    args = TrainingArguments(str(folder), lightning_config=config, **{**defaults, **settings})
    return Trainer(make_plain(), args, train_dataset=plain_data(), eval_dataset=plain_data())


def test_every_keyword_of_lightning_is_decided():
    keywords = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    assert keywords == PASSED | RULED.keys() | PLANNED.keys()
    assert not PASSED & RULED.keys()


def test_passed_on(tmp_path, capsys):
    config = {"profiler": "simple", "detect_anomaly": True, "limit_val_batches": 2, "benchmark": True}
    trainer = make_trainer(tmp_path, config)
    trainer.train()
    assert "Profiler Report" in capsys.readouterr().out
    assert trainer.lightning_trainer._detect_anomaly
    assert isinstance(trainer.lightning_trainer.profiler, SimpleProfiler)
    seen = []
    trainer.compute_metrics = lambda prediction: seen.append(len(prediction.predictions)) or {}
    trainer.evaluate()
    assert seen == [16]


def test_profile_in_a_file(tmp_path, capsys):
    trainer = make_trainer(tmp_path, {"profiler": SimpleProfiler(dirpath=tmp_path, filename="profile")})
    trainer.train()
    assert "Profiler Report" in next(tmp_path.glob("fit-profile*")).read_text()
    assert "Profiler Report" not in capsys.readouterr().out
    assert "SimpleProfiler" in trainer.args.to_json_string()


def test_max_time_stops_training(tmp_path):
    trainer = make_trainer(tmp_path, {"max_time": {"seconds": 0}}, max_steps=50)
    assert trainer.train().global_step < 50


def test_precision_wins_and_the_conflict_is_named(tmp_path, caplog):
    trainer = make_trainer(tmp_path, {"precision": "32-true"}, bf16=True)
    assert "lightning_config['precision']='32-true' overrides bf16=True" in caplog.text
    trainer.train()
    assert trainer.lightning_trainer.precision == "32-true"
    trainer = make_trainer(tmp_path, {"precision": "bf16-mixed"})
    trainer.train()
    assert trainer.lightning_trainer.precision == "bf16-mixed"


@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_files(tmp_path, kind):
    path = tmp_path / f"config.{kind}"
    path.write_text(json.dumps({"detect_anomaly": True}) if kind == "json" else "detect_anomaly: true\n")
    trainer = make_trainer(tmp_path, str(path))
    trainer.train()
    assert trainer.lightning_trainer._detect_anomaly


def test_command_line(tmp_path):
    line = ["--output_dir", str(tmp_path), "--lightning_config", '{"detect_anomaly": "true"}']
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
    assert args.lightning_config == {"detect_anomaly": True}
    assert "detect_anomaly=True" in str(args.explain())


@pytest.mark.parametrize("name", sorted(RULED))
def test_what_the_arguments_rule(tmp_path, name):
    with pytest.raises(UnsupportedArgument, match=f"lightning_config\\['{name}'\\]: the Trainer decides this; use "):
        make_trainer(tmp_path, {name: 1})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"devices": 2}, r"\['devices'\]=2 is not supported yet"),
        ({"precision": "64-true"}, r"\['precision'\]='64-true' is not supported yet"),
        ({"profilr": "simple"}, r"\['profilr'\]: lightning.Trainer has no such keyword; did you mean 'profiler'"),
        ("absent.json", "there is no such file"),
    ],
)
def test_wrong(tmp_path, config, message):
    with pytest.raises(UnsupportedArgument, match=message):
        make_trainer(tmp_path, config)


def test_malformed(tmp_path):
    for name, text, message in (
        ("a.json", '{"profiler": }', r"a.json is malformed: .*line 1 column 14"),
        ("a.yaml", "profiler: [", r"a.yaml is malformed: (.|\n)*line 1"),
        ("b.json", "[1]", "holds a list"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UnsupportedArgument, match=message):
            make_trainer(tmp_path, str(tmp_path / name))
    with pytest.raises(InvalidArgument, match="lightning_config is no valid JSON object"):
        TrainingArguments("x", lightning_config="{broken")
