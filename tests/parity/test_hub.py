"""Both libraries push the same commits and files, in the same order, to a local Hub with the real API."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

import hftrainer
from tests.support.hub_runs import TOKEN, hub as hub, make_pushing
from tests.support.hub_server import Commit, Repo
from tests.support.known_differences import OWN_FILES
from tests.support.parity import assert_agree
from tests.support.small_models import tokenizer

#: Files whose contents are the same in both libraries.
SAME_BYTES = (".safetensors", "config.json", "tokenizer.json", "notes.txt", "modules.json")


def pop_commits(hub, name="me/my-run"):
    """Remove a repository; returns whether it was private, and what is comparable of its commits, by branch."""

    def comparable(commit):
        names = sorted(name for name in commit.changed if name.split("/")[-1] not in OWN_FILES)
        return commit.message, names, {name: commit.files[name] for name in names if name.endswith(SAME_BYTES)}

    repo = hub.repos.pop(name)
    hub.objects.clear()
    return repo.private, {branch: list(map(comparable, commits[1:])) for branch, commits in repo.branches.items()}


#: Strategy → commits in three steps with a save at the second and the last; a checkpoint is a commit of its own.
STRATEGIES = {"end": 0, "every_save": 2, "checkpoint": 4, "all_checkpoints": 4}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_hub_strategy_pushes_the_same_commits(hub, tmp_path, strategy):
    def run(name):
        settings = {"hub_model_id": "org/named", "hub_strategy": strategy}
        trainer_kwargs = {"processing_class": tokenizer()}
        trainer, callback = make_pushing(name, tmp_path / name / "my-run", trainer=trainer_kwargs, **settings)
        trainer.train()
        during = len(hub.repos["org/named"].messages())
        trainer.save_model()
        returned = trainer.push_to_hub("With a card", tags="tested", blocking=name == "transformers")
        message = (returned if name == "transformers" else returned.result()).commit_message
        return during, message, callback.begun, trainer.hub_model_id, pop_commits(hub, "org/named")

    assert assert_agree(run)[0] == STRATEGIES[strategy]


class WithModules:
    """Libraries whose models have files of their own copy them from the checkpoint before super() uploads."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir or self.args.output_dir, "modules.json").write_text(f"[{self.state.global_step}]")

    def _push_from_checkpoint(self, checkpoint_folder):
        shutil.copy(Path(checkpoint_folder, "modules.json"), self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)


#: Name → number of commits, the model, the arguments.
SETTINGS = {
    "peft": (2, "peft", {}),
    "plain by epoch": (1, "plain", {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 1}),
    "private": (4, "bert", {"hub_private_repo": True, "save_only_model": True, "hub_strategy": "checkpoint"}),
    "revision": (1, "bert", {"hub_revision": "dev", "max_steps": 2}),
    "rotation": (6, "bert", {"save_total_limit": 1, "hub_strategy": "all_checkpoints", "save_steps": 1}),
    "overridden": (2, "plain", {"trainer_class": lambda library: type("Own", (WithModules, library.Trainer), {})}),
}


@pytest.mark.parametrize(("commits", "model", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_each_hub_setting_pushes_the_same_commits(hub, tmp_path, commits, model, settings):
    def run(name):
        if "hub_revision" in settings:
            hub.repos["me/my-run"] = Repo(branches={name: [Commit("initial commit", {})] for name in ("main", "dev")})
        trainer, _ = make_pushing(name, tmp_path / name / "my-run", model=model, **settings)
        trainer.train()
        assert trainer.hub_model_id == "me/my-run"
        return pop_commits(hub)

    _, found = assert_agree(run)
    assert sum(map(len, found.values())) == commits
    if "trainer_class" in settings:
        assert [files["modules.json"] for *_, files in found["main"]] == [b"[2]", b"[3]"]


def test_push_to_hub_without_the_argument_creates_the_repository(hub, tmp_path):
    def run(name):
        folder, settings = tmp_path / name / "my-run", {"save_strategy": "no", "max_steps": 1}
        trainer, _ = make_pushing(name, folder, push_to_hub=False, **settings)
        trainer.train()
        assert not hub.repos
        trainer.push_to_hub(private=True, revision="main")
        return trainer.hub_model_id, pop_commits(hub)

    assert assert_agree(run)[1][0] is True


def test_arguments_of_transformers_push_but_their_token_is_not_saved(hub, tmp_path):
    trainer, _ = make_pushing("transformers", tmp_path / "run", hub_strategy="checkpoint", max_steps=2)
    ours = hftrainer.Trainer(trainer.model, trainer.args, train_dataset=trainer.train_dataset)
    ours.train()
    step = "Training in progress, step 2"
    assert hub.repos["me/run"].messages() == [step, f"{step}, checkpoint"]
    assert TOKEN.encode() not in (tmp_path / "run" / "checkpoint-2" / "training_args.bin").read_bytes()
    assert trainer.args.hub_token == TOKEN


def test_offline_mode_still_pushes_by_a_custom_client(hub, tmp_path, monkeypatch):
    """Only the client obeys HF_HUB_OFFLINE: one that reaches a local Hub, or a mock, uploads."""
    client = _http.default_client_factory()
    client.event_hooks = {}
    monkeypatch.setattr(_http, "_GLOBAL_CLIENT", client)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def run(name):
        make_pushing(name, tmp_path / name / "my-run", hub_strategy="end")[0].push_to_hub("Now")
        return pop_commits(hub)

    assert len(assert_agree(run)[1]["main"]) == 1
