"""The table of dated behaviours, and how a release is chosen."""

import ast
import json
import re
from pathlib import Path

import pytest

from hftrainer import TrainingArguments, install, uninstall
from hftrainer.arguments import behaviours
from hftrainer.arguments.behaviours import EARLIER_DEFAULTS, NEWEST, RELEASES, TABLE, Behaviours
from hftrainer.errors import InvalidArgument
from tests.support.arguments import make_trainer

ROOT = Path(__file__).parents[3]


def asked_in(module: str) -> set[str]:
    path = (ROOT / "hftrainer").joinpath(*module.split(".")).with_suffix(".py")
    return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_row_is_decided_where_it_says(name):
    change = TABLE[name]
    assert change.since in RELEASES[1:]
    assert name in asked_in(change.decided_in)


@pytest.mark.parametrize("release", RELEASES)
def test_switches_are_on_since_their_release(release):
    followed = behaviours.of(release)
    assert followed.release == release
    for name, change in TABLE.items():
        older = RELEASES.index(change.begun) <= RELEASES.index(release) < RELEASES.index(change.since)
        assert getattr(followed, name) is not older
    assert followed.differences().keys() == {name for name in TABLE if not getattr(followed, name)}


def test_the_newest_is_the_default(tmp_path):
    assert behaviours.of(NEWEST) == Behaviours() == make_trainer(tmp_path)._hftrainer.behaviours
    assert not Behaviours().differences()


def test_a_release_is_chosen_once_for_a_trainer(tmp_path):
    trainer = make_trainer(tmp_path, lightning_config={"behaviour": "4.57.6"})
    assert trainer._hftrainer.behaviours.release == "4.57"
    trainer = make_trainer(tmp_path, lightning_config='{"behaviour": "5.10"}')  # as from a command line
    assert trainer._hftrainer.behaviours.release == "5.10"
    with pytest.raises(AttributeError):
        trainer._hftrainer.behaviours.logs_whole_loss = False


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "4.30",
            "'4.30' is not a release of transformers whose behaviour is known, from 4.48 to 5.24; "
            "the nearest is '4.48'",
        ),
        ("4.58", "the nearest is '4.57'."),
        ("newest", "from 4.48 to 5.24."),
        (5.10, "give the release as text: the number 5.10 would be read as 5.1"),
        (None, "give a release as text"),
    ],
)
def test_unknown_releases_are_refused(given, message):
    with pytest.raises(InvalidArgument, match=re.escape(message)) as error:
        TrainingArguments(lightning_config={"behaviour": given})
    assert str(error.value).startswith("lightning_config['behaviour']: ")


def test_a_release_that_is_newer_than_known_follows_the_newest(tmp_path, caplog):
    caplog.set_level("INFO", logger="hftrainer")
    behaviours._inform.cache_clear()
    for _ in range(2):
        assert make_trainer(tmp_path, lightning_config={"behaviour": "7.1"})._hftrainer.behaviours.release == NEWEST
    said = [record for record in caplog.records if "transformers 7.1 is newer than" in record.getMessage()]
    assert [record.levelname for record in said] == ["INFO"]


@pytest.mark.parametrize(
    ("version", "followed"),
    [("4.57.6", "4.57"), ("5.2.0", "5.2"), ("5.24.0.dev0", "5.24"), ("6.0.0", NEWEST), ("4.30.2", "4.48")],
)
def test_install_follows_the_installed_release(version, followed, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"transformers": version}[name])
    todays = {name: TrainingArguments.__dataclass_fields__[name].default for name in EARLIER_DEFAULTS}
    install()
    try:
        assert behaviours.chosen({}).release == followed
        assert make_trainer(tmp_path, report_to="none")._hftrainer.behaviours.release == followed
        args = TrainingArguments(report_to="none")
        assert (args.optim == "adamw_torch") == (followed == "4.48")
        assert args.average_tokens_across_devices == (followed != "4.48")
        assert TrainingArguments.report_to == ("all" if followed.startswith("4.") else "none")
    finally:
        uninstall()
    assert behaviours.chosen({}).release == NEWEST
    assert {name: TrainingArguments.__dataclass_fields__[name].default for name in EARLIER_DEFAULTS} == todays


def test_explain_prints_what_is_in_force():
    newest = str(TrainingArguments().explain())
    assert f"Behaves as transformers {NEWEST}, the newest release that is known." in newest
    explained = TrainingArguments(lightning_config={"behaviour": "4.57"}).explain()
    assert f"Behaves as transformers 4.57, where it differs from {NEWEST}:" in str(explained)
    assert "logs_whole_loss: the loss is logged with four decimal places" in str(explained)
    assert "logs_rate_of_step" not in str(explained)
    shown = json.loads(explained.to_json())["behaviour"]
    assert shown["release"] == "4.57"
    assert shown["differences"].keys() == behaviours.of("4.57").differences().keys()


def test_explain_names_the_installed_release(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.6")
    assert "follow the installed 4.57;" in str(TrainingArguments().explain())
    chosen = TrainingArguments(lightning_config={"behaviour": "4.57"})
    assert "follow the installed" not in str(chosen.explain())


def test_numbers_of_an_earlier_release(tmp_path):
    found = []
    for config in ({}, {"behaviour": "4.57"}):
        trainer = make_trainer(tmp_path, lightning_config=config, max_steps=3, logging_steps=1)
        trainer.train()
        found.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    exact, rounded = found
    assert rounded == [round(loss, 4) for loss in exact] != exact
