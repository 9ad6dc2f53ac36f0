"""`report_to` selects the trackers that are installed and not switched off, and refuses what cannot work."""

import dataclasses
import importlib

import pytest
from transformers.integrations import integration_utils

import hftrainer
from hftrainer import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
from hftrainer.errors import InvalidArgument, MissingPackage, UnsupportedArgument
from hftrainer.trackers.registry import TRACKERS, select_trackers
from tests.support import tracking
from tests.support.tracking import Recorder

THEIRS = integration_utils.INTEGRATION_TO_CALLBACK


@pytest.fixture
def install_only(monkeypatch):
    """Make a set of packages look installed, and no other tracker's."""
    real = importlib.util.find_spec
    known = {module for kind in TRACKERS.values() for each in kind.modules for module in each.split("|")}
    known |= {"azureml", "azureml.core", "transformers"}

    def install(*packages):
        def find(name, *args):
            if name not in known:
                return real(name, *args)
            return importlib.machinery.ModuleSpec(name, None) if name in packages else None

        monkeypatch.setattr("hftrainer.trackers.registry.importlib.util.find_spec", find)

    return install


def test_report_to_all_selects_installed_trackers(install_only, monkeypatch):
    monkeypatch.delenv("DISABLE_MLFLOW_INTEGRATION", raising=False)
    install_only("wandb", "tensorboardX", "mlflow", "transformers", "codecarbon", "flytekit", "trackio")
    trackio = ["trackio"] if "trackio" in THEIRS else []
    assert (
        select_trackers("all") == select_trackers(["all"]) == ["mlflow", "tensorboard", "wandb", "codecarbon", *trackio]
    )
    monkeypatch.setenv("WANDB_DISABLED", "true")
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    assert select_trackers("all") == ["tensorboard", "codecarbon", *trackio]
    assert select_trackers("wandb") == []
    install_only("tensorboard", "trackio")  # without transformers
    assert select_trackers("all") == ["tensorboard"]
    assert select_trackers("none") == select_trackers([]) == select_trackers(None) == []


def test_report_to_all_selects_what_transformers_finds():
    found = integration_utils.get_available_reporting_integrations()
    assert select_trackers("all") == [name for name in found if name != "neptune"]


def test_tracker_names_of_transformers_are_known(monkeypatch):
    assert THEIRS.keys() - {"neptune"} <= TRACKERS.keys()
    assert select_trackers(["csv", "csv"]) == ["csv"]
    monkeypatch.setenv("COMET_MODE", "disabled")
    assert select_trackers("comet") == []
    monkeypatch.setenv("COMET_MODE", "sometimes")
    with pytest.raises(InvalidArgument, match=r"COMET_MODE='sometimes' must be one of 'get_or_create'"):
        select_trackers("comet")


@pytest.mark.newest_peer
def test_our_trackers_are_those_of_newest_transformers():
    assert TRACKERS.keys() - {"csv"} == THEIRS.keys() - {"neptune"}


def test_tracker_unknown_to_installed_transformers_needs_upgrade(monkeypatch, install_only):
    """trackio and kubeflow came after v4.48."""
    for name in ("trackio", "kubeflow"):
        monkeypatch.delitem(THEIRS, name, raising=False)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1")
    install_only("transformers", "trackio", "codecarbon")
    assert select_trackers("all") == ["codecarbon"]
    assert select_trackers("csv") == ["csv"]
    for name in ("trackio", "kubeflow"):
        with pytest.raises(MissingPackage, match=f"report_to='{name}' .* pip install --upgrade transformers"):
            select_trackers(name)


@pytest.mark.parametrize("report_to", ["none", ["csv"]])
def test_kubeflow_job_reports_to_kubeflow(tmp_path, monkeypatch, report_to):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1")
    trainer = tracking.make_tracked_trainer("hftrainer", tmp_path, "plain", report_to=report_to)
    assert trainer.args.report_to == [*([] if report_to == "none" else report_to), "kubeflow"]
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    trainer = tracking.make_tracked_trainer("hftrainer", tmp_path, "plain", report_to=report_to)
    assert "kubeflow" not in trainer.args.report_to


#: `report_to` or other arguments of a Trainer; no package of a tracker is installed but those that are named.
REFUSED = [
    ("wanbd", InvalidArgument, r"report_to='wanbd' is not a tracker; did you mean 'wandb'\? Valid names"),
    (["none", "tensorboard"], InvalidArgument, "'none' cannot be"),
    (["all", "wandb"], InvalidArgument, "'all' cannot be"),
    ({"report_to": 3}, InvalidArgument, "report_to=3"),
    (["csv", "comet"], MissingPackage, r"report_to='comet_ml' needs .* pip install comet-ml"),
    ("clearml", MissingPackage, r"'clearml', which uses .* pip install clearml transformers"),
    ("neptune", UnsupportedArgument, "Neptune's service has ended"),
    ("kubeflow", MissingPackage, "pip install transformers"),
    ("kubeflow with transformers", InvalidArgument, "KUBEFLOW_TRAINER_SERVER_URL"),
    ({"trainer": {"loggers": [True]}}, InvalidArgument, r"loggers contains True \(bool\)"),
    ({"trainer": {"loggers": [Recorder]}}, InvalidArgument, r"loggers contains <class .*Recorder'> \(ABCMeta\)"),
    ({"trainer": {"loggers": True}}, InvalidArgument, r"loggers=True \(bool\): pass a list"),
    ({"trainer": {"callbacks": [Recorder()]}}, InvalidArgument, r"Recorder is a Lightning logger, .*loggers="),
    ({"lightning_config": {"logger": Recorder()}}, InvalidArgument, r"use report_to or Trainer\(loggers="),
]


@pytest.mark.parametrize(("given", "kind", "words"), REFUSED)
def test_invalid_trackers_and_loggers_are_refused(tmp_path, install_only, given, kind, words):
    install_only(*["transformers"] if "transformers" in given else [])
    if not isinstance(given, dict):
        given = {"report_to": given.split(" ")[0] if isinstance(given, str) else given}
    with pytest.raises(kind, match=words):
        tracking.make_tracked_trainer("hftrainer", tmp_path, "plain", **given)


@pytest.mark.parametrize(("release", "default"), [("4.57.6", ["all"]), ("5.0.0", [])])
def test_install_gives_report_to_default_of_the_release(monkeypatch, release, default):
    """However arguments are made, the default is that of the installed transformers, until `uninstall()`."""
    monkeypatch.setattr("hftrainer.releases.followed.importlib.metadata.version", lambda name: release)
    # of what other tests import
    monkeypatch.setattr("hftrainer.cli.install.check_earlier_imports", lambda: [])

    @dataclasses.dataclass
    class Own(TrainingArguments):
        more: int = 1

    def found():
        parsed = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(["--output_dir", "x"])[0]
        return [each.report_to for each in (TrainingArguments("x"), Seq2SeqTrainingArguments("x"), parsed)]

    hftrainer.install()
    try:
        assert found() == [default] * 3
    finally:
        hftrainer.uninstall()
    assert [*found(), Own("x").report_to] == [[]] * 4
