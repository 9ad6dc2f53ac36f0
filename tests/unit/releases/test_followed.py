"""A Trainer follows the configured or installed release of transformers, whose differences are listed."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

from hftrainer import TrainingArguments, install, uninstall
from hftrainer.errors import InvalidArgument
from hftrainer.releases import followed
from hftrainer.releases.earlier import POLICIES, PolicyUntil4_48
from hftrainer.releases.policy import NEWEST, RELEASES, ReleasePolicy
from tests.support.arguments import make_quiet_trainer


@pytest.mark.parametrize("kind", POLICIES[:-1])
def test_policy_class_describes_all_its_changes(kind):
    reset = {"gradient_divisor"} if str(kind.last_release) == "5.1" else set()
    others = {"__doc__", "__module__", "last_release", "own_changes", "defaults"}
    assert kind.own_changes.keys() | reset == vars(kind).keys() - others
    assert kind.last_release in RELEASES
    assert kind.last_release < kind.__base__.last_release
    for name in kind.own_changes:
        assert vars(kind)[name] != getattr(kind.__base__, name)


@pytest.mark.parametrize(
    ("release", "kind"), [("5.24", ReleasePolicy), ("5.23", ReleasePolicy), ("5.3", "5.3"), ("4.48", PolicyUntil4_48)]
)
def test_release_gets_its_policy(release, kind):
    policy = followed.from_text(release)
    assert str(policy.release) == release
    assert type(policy) is kind or str(policy.last_release) == kind


def test_policy_lists_the_changes_of_its_release():
    assert not ReleasePolicy().all_changes()
    assert [name for name in followed.from_text("5.15").all_changes() if "num_items" in name] == ["num_items"]
    integer, python_int = (followed.from_text(release).all_changes()["num_items"] for release in ("4.50", "4.49"))
    assert (integer, python_int) == ("num_items_in_batch is an integer", "num_items_in_batch is a Python int")
    between = [release for release in RELEASES if "gradient_divisor" in followed.make_policy(release).all_changes()]
    assert list(map(str, between)) == ["5.2", "5.3", "5.4", "5.5"]


def test_trainer_follows_the_configured_release(tmp_path):
    trainer = make_quiet_trainer(tmp_path, lightning_config={"behaviour": "4.57.6"})
    assert trainer._hftrainer.policy.release == (4, 57)
    trainer = make_quiet_trainer(tmp_path, lightning_config='{"behaviour": "5.10"}')  # as from a command line
    assert trainer._hftrainer.policy.release == (5, 10)


@pytest.mark.parametrize(
    ("release", "message"),
    [
        (
            "4.30",
            "'4.30' is not a release of transformers whose behaviour is known, from 4.48 to 5.24; "
            "the nearest is '4.48'",
        ),
        ("4.58", "the nearest is '4.57'."),
        ("newest", "from 4.48 to 5.24."),
        (5.10, "5.10 would be read as 5.1: write the release as text"),
        (None, "write a release as text"),
    ],
)
def test_unknown_releases_are_refused(release, message):
    with pytest.raises(InvalidArgument, match=re.escape(message)) as error:
        TrainingArguments(lightning_config={"behaviour": release})
    assert str(error.value).startswith("lightning_config['behaviour']: ")


def test_newer_release_than_known_follows_the_newest(tmp_path, caplog):
    caplog.set_level("INFO", logger="hftrainer")
    for _ in range(2):
        assert make_quiet_trainer(tmp_path, lightning_config={"behaviour": "7.1"})._hftrainer.policy.release == NEWEST
    said = [record for record in caplog.records if "transformers 7.1 is newer than" in record.getMessage()]
    assert [record.levelname for record in said] == ["INFO"]


@pytest.mark.parametrize(
    ("version", "config", "is_told"),
    [("5.2.0", {}, True), ("5.2.0", {"behaviour": str(NEWEST)}, False), (f"{NEWEST}.0", {}, False)],
)
def test_older_installed_release_is_described(version, config, is_told, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__=version))
    sentence = followed.describe_older_release(config) or ""
    assert (f"transformers 5.2 is installed, but this Trainer follows {NEWEST}" in sentence) == is_told


@pytest.mark.parametrize(
    ("version", "release"),
    [("4.57.6", "4.57"), ("5.2.0", "5.2"), ("5.24.0.dev0", "5.24"), ("6.0.0", str(NEWEST)), ("4.30.2", "4.48")],
)
def test_install_follows_the_installed_release(version, release, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"transformers": version}[name])
    fields = TrainingArguments.__dataclass_fields__
    todays = {name: fields[name].default for name in ("optim", "report_to", "warmup_ratio")}
    install()
    try:
        assert str(followed.from_config({}).release) == release
        assert str(make_quiet_trainer(tmp_path, report_to="none")._hftrainer.policy.release) == release
        args = TrainingArguments(report_to="none")
        assert (args.optim == "adamw_torch") == (release == "4.48")
        assert args.average_tokens_across_devices == (release != "4.48")
        assert TrainingArguments.report_to == ("all" if release.startswith("4.") else "none")
    finally:
        uninstall()
    assert followed.from_config({}).release == NEWEST
    assert {
        name: TrainingArguments.__dataclass_fields__[name].default for name in ("optim", "report_to", "warmup_ratio")
    } == todays


def test_explain_prints_the_followed_release():
    newest = str(TrainingArguments().explain())
    assert f"Behaves like transformers {NEWEST}, the newest known release." in newest
    explained = TrainingArguments(lightning_config={"behaviour": "4.57"}).explain()
    assert f"Behaves like transformers 4.57, which differs from {NEWEST}:" in str(explained)
    assert "logged_loss: the loss is logged with four decimal places" in str(explained)
    assert "logs_rate_of_step" not in str(explained)
    shown = json.loads(explained.to_json())["behaviour"]
    assert shown["release"] == "4.57"
    assert shown["differences"].keys() == followed.from_text("4.57").all_changes().keys()


def test_explain_names_the_installed_release(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.6")
    assert "follow the installed 4.57;" in str(TrainingArguments().explain())
    assert "follow the installed" not in str(TrainingArguments(lightning_config={"behaviour": "4.57"}).explain())


def test_losses_of_release_4_57_are_rounded(tmp_path):
    found = []
    for config in ({}, {"behaviour": "4.57"}):
        trainer = make_quiet_trainer(tmp_path, lightning_config=config, max_steps=3, logging_steps=1)
        trainer.train()
        found.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    exact, rounded = found
    assert rounded == [round(loss, 4) for loss in exact] != exact
