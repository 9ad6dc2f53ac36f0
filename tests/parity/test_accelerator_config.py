"""`accelerator_config` in one process: each key changes what it changes in transformers, and nothing else."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from transformers.trainer_pt_utils import AcceleratorConfig as TheirConfig

import hftrainer
from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.errors import InvalidArgument
from tests.support.parity import alike, assert_equal, assert_same, build, compare, train
from tests.support.tiny import Stream, make_plain, plain_data

KEYS = {
    "split_batches": True,
    "dispatch_batches": True,
    "even_batches": False,
    "use_seedable_sampler": False,
    "non_blocking": True,
    "gradient_accumulation_kwargs": {"num_steps": 3, "sync_with_dataloader": False},
}


@pytest.mark.parametrize("key", KEYS)
def test_key(tmp_path, key):
    ours = train("hftrainer", "plain", tmp_path / "ours", accelerator_config={key: KEYS[key]})
    given = copy.deepcopy({key: KEYS[key]})  # transformers writes into it
    assert_same(ours, train("transformers", "plain", tmp_path / "theirs", accelerator_config=given))
    without = train("hftrainer", "plain", tmp_path / "without")
    changes = key in ("use_seedable_sampler", "gradient_accumulation_kwargs")
    assert (ours.logs != without.logs) == changes


@pytest.mark.parametrize("dispatched", [True, False])
def test_stream(tmp_path, dispatched):
    data = {"trainer": {"train_dataset": Stream(38)}}
    compare(tmp_path, "plain", accelerator_config={"dispatch_batches": dispatched}, max_steps=12, **data)


def test_resumed_in_torchs_order(tmp_path):
    settings = {"accelerator_config": {"use_seedable_sampler": False}, "save_strategy": "steps", "save_steps": 4}
    whole = train("hftrainer", "plain", tmp_path / "whole", **settings)
    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    resumed = train("hftrainer", "plain", tmp_path / "resumed", resume=checkpoint, **settings)
    assert resumed.logs[:-1] == whole.logs[:-1]
    assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in resumed.weights.items())


def test_another_order_is_noticed_when_resuming(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 4}
    train("hftrainer", "plain", tmp_path / "a", **settings)
    changed = {"accelerator_config": {"use_seedable_sampler": False}, **settings}
    train("hftrainer", "plain", tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-4"), **changed)
    assert "Resuming with accelerator_config=" in caplog.text


def test_all_forms_are_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KEYS))
    forms = (KEYS, str(path), path, TheirConfig(**KEYS), json.dumps(KEYS))
    read = [
        AcceleratorConfig.read(hftrainer.TrainingArguments(accelerator_config=form).accelerator_config)
        for form in forms
    ]
    assert all(config == AcceleratorConfig(**KEYS) for config in read)
    assert AcceleratorConfig.read(None) == AcceleratorConfig() == AcceleratorConfig.read({})
    args = hftrainer.TrainingArguments(accelerator_config=TheirConfig(**KEYS))
    assert json.loads(args.to_json_string())["accelerator_config"]["split_batches"] is True
    assert args.gradient_accumulation_steps == 3


def test_arguments_of_transformers(tmp_path):
    from transformers import TrainingArguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, accelerator_config={"non_blocking": True}, report_to="none")
    trainer = hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
    assert trainer.get_train_dataloader().non_blocking
    args.accelerator_config.gradient_accumulation_kwargs = {"num_steps": 3}
    hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
    assert args.gradient_accumulation_steps == 3
    args.gradient_accumulation_steps = 2
    with pytest.raises(InvalidArgument, match="contradict each other: give one"):
        hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())


def test_moving_beside_the_computation_needs_pinned_memory(tmp_path, caplog):
    config = {"accelerator_config": {"non_blocking": True}}
    for pinned in (True, False):
        args = hftrainer.TrainingArguments(str(tmp_path), use_cpu=True, **config)
        args.dataloader_pin_memory = pinned  # use_cpu has turned it off
        caplog.clear()
        assert hftrainer.Trainer(make_plain(), args, train_dataset=plain_data()).get_train_dataloader().non_blocking
        assert ("dataloader_pin_memory=False" in caplog.text) is not pinned


def test_configured_state(monkeypatch):
    import accelerate

    asked = {"accelerator_config": {"use_configured_state": True}}
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(InvalidArgument, match="accelerate has no state yet"):
        hftrainer.TrainingArguments(use_cpu=True, **asked)
    accelerate.PartialState(cpu=True)
    assert hftrainer.TrainingArguments(use_cpu=True, **asked).device.type == "cpu"
    monkeypatch.setattr(accelerate.state, "PartialState", _OnAGpu)
    with pytest.raises(InvalidArgument, match="accelerate's state is on cuda:0"):
        hftrainer.TrainingArguments(use_cpu=True, **asked)


@pytest.mark.parametrize(
    "launched", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}], ids=["plain", "launched"]
)
def test_loggers_of_accelerate_work_once_there_are_arguments(monkeypatch, caplog, launched):
    import accelerate
    from accelerate.logging import get_logger

    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    log = get_logger("a.script", log_level="INFO")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(RuntimeError, match="initialize the accelerate state"):
        log.info("too early")
    hftrainer.TrainingArguments("unused", use_cpu=True)
    log.info("begun")
    assert "begun" in caplog.text
    assert accelerate.PartialState().num_processes == 1
    assert not torch.distributed.is_initialized()


class _OnAGpu(SimpleNamespace):
    _shared_state = {"there": True}
    device = torch.device("cuda", 0)


WRONG = [
    ({"split_batch": True}, "has no key 'split_batch': did you mean 'split_batches'?"),
    ({"zzz": True}, "has no key 'zzz': it takes dispatch_batches"),
    ({"split_batches": "yes"}, "['split_batches']='yes': give True or False"),
    ({"split_batches": None}, "['split_batches']=None: give True or False"),
    ({"gradient_accumulation_kwargs": 3}, "['gradient_accumulation_kwargs']=3: give a dict"),
    ({"gradient_accumulation_kwargs": {"num_step": 3}}, "did you mean 'num_steps'?"),
    ({"gradient_accumulation_kwargs": {"num_steps": 0}}, "['num_steps']=0: give a number of micro-batches"),
    ({"gradient_accumulation_kwargs": {"num_steps": True}}, "['num_steps']=True: give a number of micro-batches"),
    ({"gradient_accumulation_kwargs": {"sync_each_batch": 1}}, "['sync_each_batch']=1: give True or False"),
    (TheirConfig, "AcceleratorConfig is a class: give an instance of it"),
    (7, "accelerator_config=7: give a dict, or the path of a JSON file"),
    ("missing.json", "accelerator_config='missing.json' cannot be read: No such file"),
]


@pytest.mark.parametrize(("given", "sentence"), WRONG)
def test_wrong(given, sentence):
    with pytest.raises(InvalidArgument) as caught:
        hftrainer.TrainingArguments(accelerator_config=given)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("text", "sentence"), [("[1]", "must hold a JSON object"), ("{", "is not valid JSON")])
def test_wrong_file(tmp_path, text, sentence):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=sentence):
        hftrainer.TrainingArguments(accelerator_config=str(path))


def test_contradiction():
    config = {"gradient_accumulation_kwargs": {"num_steps": 3}}
    with pytest.raises(InvalidArgument, match="gradient_accumulation_steps=2 and accelerator_config"):
        hftrainer.TrainingArguments(gradient_accumulation_steps=2, accelerator_config=config)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_names(tmp_path):
    args = hftrainer.TrainingArguments(str(tmp_path), use_cpu=True, split_batches=True, dispatch_batches=False)
    trainer = hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
    assert trainer._hftrainer.resolved.accelerator_config == AcceleratorConfig(
        split_batches=True, dispatch_batches=False
    )


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"dispatch_batches": False, "even_batches": False, "non_blocking": True},
        {"split_batches": True, "use_seedable_sampler": False},
        {"gradient_accumulation_kwargs": {"sync_each_batch": True, "adjust_scheduler": False}},
        {"gradient_accumulation_kwargs": {"sync_with_dataloader": True}},
    ],
)
def test_accelerator_tells_its_configuration(tmp_path, config):
    """`accelerator.split_batches` and the others, the gradient state, and the sizes of loaders."""

    def run(name):
        trainer, _ = build(
            name, "plain", tmp_path / name, accelerator_config=copy.deepcopy(config), gradient_accumulation_steps=2
        )
        accelerator, state = trainer.accelerator, trainer.accelerator.gradient_state
        loaders = [trainer.get_train_dataloader(), trainer.get_eval_dataloader(), accelerator.prepare(plain_loader())]
        return [
            *(getattr(accelerator, each) for each in ("split_batches", "dispatch_batches", "even_batches")),
            *(getattr(accelerator, each) for each in ("use_seedable_sampler", "non_blocking")),
            accelerator.gradient_accumulation_steps,
            (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader, state.plugin_kwargs),
            [loader.total_batch_size for loader in loaders],
        ]

    alike(run, assert_equal)


def plain_loader():
    return torch.utils.data.DataLoader(plain_data(10), batch_size=3)


def test_gradient_state_is_that_of_the_accelerator(tmp_path):
    """Loops that were copied set it by accelerate's name; the accelerator tells the same."""
    trainer, _ = build("hftrainer", "plain", tmp_path)
    for synchronized in (False, True):
        trainer.accelerator.gradient_state._set_sync_gradients(synchronized)
        assert trainer.accelerator.sync_gradients is synchronized
        assert trainer.accelerator.gradient_state.sync_gradients is synchronized


@pytest.mark.parametrize("count", [16, 19])
def test_gather_for_metrics_in_the_last_batch(tmp_path, count):
    """Rows beyond the last batch's samples are dropped; what has no rows stays."""
    found = []
    for name in ("hftrainer", "transformers"):
        trainer, _ = build(name, "plain", tmp_path / name)
        gather = trainer.accelerator.gather_for_metrics
        given = {"rows": torch.arange(8), "nested": (torch.ones(8, 2), [torch.zeros(8)])}
        loader = trainer.get_eval_dataloader(plain_data(count))
        found.append([(gather(given), gather(torch.tensor(1.0)), gather(batch)) for batch in loader])
    assert str(found[0]) == str(found[1])
    assert len(found[0][-1][0]["rows"]) == (count % 8 or 8)
