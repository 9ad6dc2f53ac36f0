"""What both libraries push to a Hub that speaks the real API: the commits, their order, their files."""

import importlib
import shutil
from pathlib import Path

import pytest

from tests.support.differences import OWN_FILES
from tests.support.hub_runs import TOKEN, make_pushing
from tests.support.hub_runs import hub as hub
from tests.support.parity import LIBRARIES, build
from tests.support.tiny import tokenizer

#: Whose contents both libraries write alike.
SAME_BYTES = (".safetensors", "config.json", "tokenizer.json", "notes.txt")


def pushed(repo, branch="main"):
    """What can be compared of each commit, in their order."""
    commits = repo.branches[branch][1:]
    return [
        (
            commit.message,
            sorted(name for name in commit.changed if name.split("/")[-1] not in OWN_FILES),
            {name: commit.files[name] for name in commit.changed if name.endswith(SAME_BYTES)},
        )
        for commit in commits
    ]


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_strategies(hub, tmp_path, strategy):
    """Commits during training, by `save_model`, and by `push_to_hub` with what goes to the model card."""
    found = {}
    for name in LIBRARIES:
        settings = {
            "hub_model_id": f"org/{name}",
            "hub_strategy": strategy,
            "trainer": {"processing_class": tokenizer()},
        }
        trainer, callback = make_pushing(name, tmp_path / name / "run", **settings)
        trainer.train()
        during = len(hub.repos[f"org/{name}"].commits())
        trainer.save_model()
        returned = trainer.push_to_hub("With a card", tags="tested", blocking=name == "transformers")
        message = (returned if name == "transformers" else returned.result()).commit_message
        found[name] = (
            during,
            message,
            callback.begun,
            trainer.hub_model_id.split("/")[0],
            pushed(hub.repos[f"org/{name}"]),
        )
    assert found["hftrainer"] == found["transformers"]
    assert found["hftrainer"][0] == {"end": 0, "every_save": 2}.get(strategy, 4)


def run(name, tmp_path, **settings):
    trainer, _ = make_pushing(name, tmp_path / name / "my-run", **settings)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        pytest.param("peft", {}, id="peft"),
        pytest.param("plain", {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 1}, id="plain-by-epoch"),
        pytest.param(
            "bert", {"hub_private_repo": True, "save_only_model": True, "hub_strategy": "checkpoint"}, id="private"
        ),
        pytest.param("bert", {"hub_revision": "dev", "max_steps": 2}, id="revision"),
        pytest.param(
            "bert", {"save_total_limit": 1, "hub_strategy": "all_checkpoints", "save_steps": 1}, id="rotation"
        ),
    ],
)
def test_settings(hub, tmp_path, model, settings):
    """Named after the output folder, in the user's own name."""
    found = {}
    for name in LIBRARIES:
        if "hub_revision" in settings:
            from huggingface_hub import HfApi

            api = HfApi(endpoint=hub.url, token=TOKEN)
            api.create_repo("me/my-run")
            api.create_branch("me/my-run", branch="dev")
        assert run(name, tmp_path, model=model, **settings).hub_model_id == "me/my-run"
        repo = hub.repos.pop("me/my-run")
        hub.objects.clear()
        found[name] = (repo.private, {branch: pushed(repo, branch) for branch in repo.branches})
    assert found["hftrainer"] == found["transformers"]
    assert sum(map(len, found["hftrainer"][1].values())) >= 1


def test_without_the_argument(hub, tmp_path):
    """`push_to_hub()` makes the repository when it is first called, private if asked."""
    found = {}
    for name in LIBRARIES:
        trainer, _ = make_pushing(name, tmp_path / name / "run", push_to_hub=False, save_strategy="no", max_steps=1)
        trainer.train()
        assert not hub.repos
        trainer.push_to_hub(private=True, revision="main")
        repo = hub.repos.pop("me/run")
        found[name] = (trainer.hub_model_id, repo.private, pushed(repo))
        hub.objects.clear()
    assert found["hftrainer"] == found["transformers"]


def test_arguments_of_transformers(hub, tmp_path):
    """Ours takes them, and pushes what they say."""
    import hftrainer

    trainer, _ = make_pushing("transformers", tmp_path / "run", hub_strategy="checkpoint", max_steps=2)
    ours = hftrainer.Trainer(trainer.model, trainer.args, train_dataset=trainer.train_dataset)
    ours.train()
    assert [message for message, _ in hub.repos["me/run"].commits()] == [
        "Training in progress, step 2",
        "Training in progress, step 2, checkpoint",
    ]
    assert TOKEN.encode() not in (tmp_path / "run" / "checkpoint-2" / "training_args.bin").read_bytes()
    assert trainer.args.hub_token == TOKEN


def test_old_names(hub, tmp_path):
    """As transformers 4.57 reads them."""
    import hftrainer

    for given, expected in (
        ({"push_to_hub_organization": "org"}, "org/run"),
        ({"push_to_hub_model_id": "named", "push_to_hub_organization": "org"}, "org/named"),
        ({"push_to_hub_model_id": "named"}, "me/named"),
    ):
        with pytest.warns(FutureWarning, match="Old names"):
            args = hftrainer.TrainingArguments(
                str(tmp_path / "run"), push_to_hub=True, push_to_hub_token=TOKEN, use_cpu=True, **given
            )
        trainer = hftrainer.Trainer(build("hftrainer", "plain", tmp_path / "x")[0].model, args)
        assert trainer.hub_model_id == expected
        assert expected in hub.repos
    with pytest.warns(FutureWarning, match="init_hf_repo"):
        trainer.init_git_repo(at_init=True)


def test_files_that_an_override_puts_into_the_output_folder(hub, tmp_path):
    """Libraries whose models have files of their own copy them from the checkpoint before super() uploads."""
    found = {}
    for name in LIBRARIES:
        library = importlib.import_module(name)

        class WithModules(library.Trainer):
            def _save(self, output_dir=None, state_dict=None):
                super()._save(output_dir, state_dict)
                Path(output_dir or self.args.output_dir, "modules.json").write_text(f"[{self.state.global_step}]")

            def _push_from_checkpoint(self, checkpoint_folder):
                shutil.copy(Path(checkpoint_folder, "modules.json"), self.args.output_dir)
                super()._push_from_checkpoint(checkpoint_folder)

        settings = {"hub_model_id": f"org/{name}", "trainer_class": lambda _, kind=WithModules: kind}
        trainer, _ = make_pushing(name, tmp_path / name / "run", **settings)
        trainer.train()
        commits = hub.repos[f"org/{name}"].branches["main"][1:]
        found[name] = [(commit.message, commit.files["modules.json"]) for commit in commits]
    assert found["hftrainer"] == found["transformers"]
    assert [content for _, content in found["hftrainer"]] == [b"[2]", b"[3]"]
