"""`observe` adds measurements to log lines, a journal and warnings, and does not change the training."""

import copy
import json
import logging
import pickle
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.flop_counter import FlopCounterMode

from hftrainer import Trainer, TrainerCallback, TrainingArguments, default_data_collator
from hftrainer.arguments.choices import OBSERVE_PARTS, read_observe
from hftrainer.checkpointing.saved_arguments import read_arguments_of_run
from hftrainer.errors import InvalidArgument
from hftrainer.monitoring.flops import peak_flops
from hftrainer.monitoring.journal import Journal, goodput, read_events, remove_undone_steps
from hftrainer.monitoring.run_facts import RunRecord
from hftrainer.training import monitors
from tests.support.checkpoints import AtStep
from tests.support.parity import assert_same_weights
from tests.support.small_models import (
    language_data,
    make_bert,
    make_llama,
    make_plain,
    make_t5,
    plain_data,
    t5_data,
    text_data,
)

SPEED = {"samples_per_second", "step_seconds"}
SHARES = {"data_wait", "eval_share", "save_share"}


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)
        self.layers = nn.Sequential(*layers)

    def forward(self, x, labels):
        logits = self.layers(x.view(-1, 1, 8, 8))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_convolution():
    torch.manual_seed(1)
    return Convolution()


MODELS = {
    "Llama": (make_llama, language_data(40)),
    "BERT": (make_bert, text_data(40)),
    "T5": (make_t5, t5_data(40)),
    "convolution": (make_convolution, [{"x": torch.randn(64), "labels": i % 3} for i in range(40)]),
}


def train(folder, make_model=make_plain, data=None, callbacks=(), **settings):
    trainer = settings.pop("trainer", {})
    defaults = {"max_steps": 6, "logging_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no"}
    args = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **{**defaults, **settings})
    trainer_kwargs = {"train_dataset": plain_data(40) if data is None else data, **trainer}
    trainer_class = trainer_kwargs.pop("trainer_class", Trainer)
    trainer = trainer_class(make_model(), args, callbacks=list(callbacks), **trainer_kwargs)
    trainer.train()
    return trainer


def loss_lines(trainer):
    return [line for line in trainer.state.log_history if "loss" in line]


def test_observe_accepts_true_false_and_names_of_parts():
    assert read_observe(True) == read_observe(["True"]) == read_observe("true") == frozenset(OBSERVE_PARTS)
    assert read_observe(False) == read_observe(None) == read_observe("False") == read_observe([]) == frozenset()
    assert read_observe("speed,memory") == read_observe(["speed", "memory"]) == frozenset({"speed", "memory"})
    with pytest.raises(InvalidArgument, match="observe has no part 'sped'; did you mean 'speed'"):
        Trainer(make_plain(), TrainingArguments("unused", observe="sped"))
    for name in ("save_minutes", "eval_minutes"):
        with pytest.raises(InvalidArgument, match=f"{name}=0: use a number of minutes above 0"):
            Trainer(make_plain(), TrainingArguments("unused", **{name: 0}))


@pytest.mark.parametrize(
    ("observe", "names"),
    [(False, set()), (True, {*SPEED, *SHARES, "peak_memory_mb"}), ("speed", SPEED), (["time", "journal"], SHARES)],
)
def test_log_lines_get_the_requested_measurements(tmp_path, observe, names):
    trainer = train(tmp_path, observe=observe)
    assert [line.keys() - {"loss", "grad_norm", "learning_rate", "epoch", "step"} for line in loss_lines(trainer)] == [
        names
    ] * 3
    assert (tmp_path / "journal.jsonl").exists() == ("journal" in read_observe(observe))
    assert not [each for each in trainer.callback_handler.callbacks if type(each).__name__ == "Observer"]


def test_later_unobserved_run_writes_the_journal_but_measures_nothing(tmp_path):
    """It writes to the journal, so that the last run there is known, but measures nothing."""
    train(tmp_path, observe=True)
    assert loss_lines(train(tmp_path))[0].keys() == {"loss", "grad_norm", "learning_rate", "epoch", "step"}
    assert [event["event"] for event in read_events(str(tmp_path))].count("begin") == 2


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("trainer_class", [Trainer, OwnStep])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_observing_counts_operations_and_changes_no_bit(tmp_path, monkeypatch, name, recomputes, trainer_class):
    """The result does not change by a bit; the operations of the first micro-batch are those counted apart from it."""
    make_model, data = MODELS[name]
    if recomputes and name == "convolution":
        pytest.skip("it has no activation checkpointing")
    checkpointed = {"activation_checkpointing": recomputes, "trainer": {"trainer_class": trainer_class}}
    plain = train(tmp_path / "plain", make_model, data, **checkpointed)
    made = []
    monkeypatch.setattr(monitors, "peak_flops", lambda *_: 1e9)
    monkeypatch.setattr(
        monitors, "Observer", lambda *args, **named: made.append(observer_class(*args, **named)) or made[-1]
    )
    trainer = train(tmp_path / "observed", make_model, data, observe=True, **checkpointed)
    assert_same_weights(trainer.model.state_dict(), plain.model.state_dict())
    for line, other in zip(loss_lines(trainer), loss_lines(plain), strict=True):
        assert other.items() <= line.items()
        assert line["mfu"] > 0
    model = make_model().train()
    batch = next(iter(plain.get_train_dataloader()))
    with FlopCounterMode(display=False) as counter:
        model(**batch)["loss"].backward()
    assert made[0].flops.counted_operations == pytest.approx(counter.get_total_flops(), rel=0.02)


observer_class = monitors.Observer


def test_peak_flops_come_from_lightning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda"), "bf16-mixed") == peak_flops(torch.device("cuda"), "16-mixed") > 9e14
    assert peak_flops(torch.device("cpu"), "bf16-mixed") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA of tomorrow")
    with pytest.warns(UserWarning, match="FLOPs not found for 'NVIDIA of tomorrow'"):
        assert peak_flops(torch.device("cuda"), "bf16-mixed") is None


def test_tokens_per_second_match_a_count_by_hand(tmp_path):
    """Each line's tokens, padding included, from its rate and time; the last interval has longer samples."""
    data = [{"input_ids": [3] * length, "labels": [3] * length} for length in (5,) * 16 + (9,) * 8]
    trainer = train(tmp_path, make_llama, data, observe=True, train_sampling_strategy="sequential")
    tokens = [line["tokens_per_second"] * line["step_seconds"] * 2 for line in loss_lines(trainer)]
    assert tokens == pytest.approx([2 * 4 * 5, 2 * 4 * 5, 2 * 4 * 9])


class Clock:
    """Stands still, except for the seconds that the slow parts below add."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(Clock, "now", 0.0)
    for name in ("perf_counter", "time"):
        monkeypatch.setattr(time, name, lambda: Clock.now)


class Slow(list):
    def __getitem__(self, index):
        Clock.now += 1
        return super().__getitem__(index)


class SlowSteps(TrainerCallback):
    """Steps of a second, except for those given as number → seconds."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_step_begin(self, args, state, control, **kwargs):
        Clock.now += self.seconds.get(state.global_step + 1, 1)


class SlowEvaluation(Trainer):
    def evaluate(self, *args, **kwargs):
        Clock.now += 6
        return super().evaluate(*args, **kwargs)


def test_time_shares_match_times_by_hand(tmp_path, clock):
    """Between two log lines are 4 steps of a second, 16 samples that are read in one each, and an evaluation of 6."""
    settings = {"eval_strategy": "steps", "eval_steps": 4, "logging_steps": 4, "max_steps": 24, "observe": True}
    settings["trainer"] = {"eval_dataset": plain_data(16), "trainer_class": SlowEvaluation}
    trainer = train(tmp_path, data=Slow(plain_data(200)), callbacks=[SlowSteps({})], **settings)
    expected = {"eval_share": 6 / 26, "data_wait": 16 / 26, "step_seconds": 20 / 4, "samples_per_second": 16 / 20}
    assert [{name: line[name] for name in expected} for line in loss_lines(trainer)[1:]] == [expected] * 5


def collate_slowly(samples):
    Clock.now += 4
    return default_data_collator(samples)


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, 4, collate_fn=collate_slowly)


class SlowOrder(SequentialSampler):
    """With loading processes, the next samples are chosen while a batch is awaited."""

    def __iter__(self):
        for index in super().__iter__():
            Clock.now += 1
            yield index


class OwnOrder(Trainer):
    def _get_train_sampler(self, *_):
        return SlowOrder(self.train_dataset)


@pytest.mark.parametrize(
    ("part", "options"),
    [  # 48 s in twelve batches, and 4 in the one read ahead, which the script's loader does not do
        ("81 % of the time, mostly for the dataset: raise", {"train_dataset": Slow(plain_data(200))}),
        ("81 % of the time, mostly for data_collator: raise", {"data_collator": collate_slowly}),
        ("80 % of the time, mostly for the script's loader: let", {"trainer_class": OwnLoader}),
        # 8 s pass before the first wait, when the first two batches are chosen
        ("72 % of the time, mostly for the loading processes: raise", {"trainer_class": OwnOrder, "workers": 1}),
    ],
)
@pytest.mark.parametrize("logging_steps", [12, 4])
def test_data_wait_warning_names_what_is_slow(tmp_path, caplog, clock, part, options, logging_steps):
    workers = {"dataloader_num_workers": options.get("workers", 0)}
    settings = {"max_steps": 36, "logging_steps": logging_steps, "observe": "warnings", **workers}
    trainer_kwargs = {name: value for name, value in options.items() if name != "workers"}
    train(tmp_path, data=plain_data(200), trainer=trainer_kwargs, callbacks=[SlowSteps({})], **settings)
    messages = [record.getMessage() for record in caplog.records if "Steps wait for data" in record.getMessage()]
    assert len(messages) == 1 and messages[0].startswith(f"Steps wait for data {part}")


def test_slow_step_is_named(tmp_path, clock):
    """Step 16 takes 20 times the median, and not more."""
    train(tmp_path, callbacks=[SlowSteps({16: 20, 18: 30})], max_steps=24, logging_steps=12, observe=True)
    texts = [event["text"] for event in read_events(str(tmp_path)) if event["event"] == "warning"]
    assert texts == ["Step 18 took 30 s, 30 times the median."]


# ---- The journal -----------------------------------------------------------------------------------------------------


def test_journal_has_events_and_seconds_of_a_run(tmp_path, clock):
    settings = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "observe": True}
    settings["trainer"] = {"eval_dataset": plain_data(8), "trainer_class": SlowEvaluation}
    trainer = train(tmp_path, data=Slow(plain_data(24)), callbacks=[SlowSteps({})], **settings)
    events = read_events(str(tmp_path))
    assert (events[0]["event"], events[0]["max_steps"], events[0]["resumed_from"]) == ("begin", 6, None)
    assert {"metric_for_best_model", "greater_is_better"} <= events[0].keys()
    assert (events[-1]["event"], events[-1]["reason"]) == ("end", "complete")
    logs = [{**event["logs"], "step": event["step"]} for event in events if event["event"] == "log"]
    assert logs == json.loads(json.dumps(trainer.state.log_history))
    intervals = [event for event in events if event["event"] == "interval"]
    assert sum(event["steps"] for event in intervals) == 6
    spent = {name: sum(event["seconds"][name] for event in intervals) for name in intervals[0]["seconds"]}
    assert spent == {"steps": 6, "data": 24, "evaluation": 12, "saving": 0}
    assert sum(spent.values()) == events[-1]["time"] - events[0]["time"]
    assert [event["folder"] for event in events if event["event"] == "checkpoint"] == ["checkpoint-3", "checkpoint-6"]
    phases = [event["phase"] for event in events if event["event"] == "phase"]
    assert phases == ["evaluation", "training", "saving", "training"] * 2


def test_journal_has_the_arguments_that_a_checkpoint_has(tmp_path):
    settings = {"observe": True, "hub_token": "secret", "lr_scheduler_type": "cosine", "project": "s3://a:secret@b/c"}
    for name, strategy in (("a", "no"), ("b", "steps")):
        train(tmp_path / name, save_strategy=strategy, save_steps=6, **settings)
    (begin, *_), known = read_events(str(tmp_path / "b")), RunRecord(str(tmp_path / "a")).arguments
    assert begin["arguments"] == read_arguments_of_run(str(tmp_path / "b")) == known | {"save_strategy": "steps"}
    assert "secret" not in (tmp_path / "a" / "journal.jsonl").read_text()


def test_goodput_leaves_out_steps_lost_by_restarts(tmp_path, monkeypatch):
    """10 s of steps, of which 4 s were lost; the next start, after 5 s, repeats them; another run does not count."""
    journal, now = Journal(str(tmp_path)), [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def write(later, *event, **values):
        now[0] += later
        journal.write(*event, **values)

    spent = {"evaluation": 0.0, "saving": 0.0, "data": 0.0}
    write(0, "begin", 0, resumed_from=None)
    write(6, "interval", 6, steps=6, seconds={"steps": 5.5, **spent, "data": 0.5})
    write(4, "interval", 10, steps=4, seconds={"steps": 4.0, **spent})
    write(5, "begin", 6, resumed_from="checkpoint-6")
    write(4, "interval", 10, steps=4, seconds={"steps": 4.0, **spent})
    write(1, "log", 10, logs={})
    events = read_events(str(tmp_path))
    assert goodput(events) == 10 / 20
    assert [event["step"] for event in remove_undone_steps(events) if event["event"] == "interval"] == [6, 10]
    write(0, "end", 10, reason="Ctrl-C")
    write(900, "begin", 10, resumed_from="checkpoint-10")
    assert goodput(read_events(str(tmp_path))) == 10 / 20
    for reason in ("complete", "KeyError"):
        write(0, "end", 10, reason=reason)
        write(50, "begin", 0, resumed_from=None)
        write(2, "interval", 2, steps=2, seconds={"steps": 2.1, **spent})  # from before the first event
        assert goodput(read_events(str(tmp_path))) == 1.0


def test_journal_line_cut_off_by_a_kill_is_ignored(tmp_path):
    Journal(str(tmp_path)).write("begin", 0)
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"time": 1.0, "eve')
    Journal(str(tmp_path)).write("end", 1, reason="complete")
    assert [event["event"] for event in read_events(str(tmp_path))] == ["begin", "end"]


def test_journal_that_cannot_be_written_warns_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    journal = Journal(str(tmp_path / "file"))
    journal.write("begin", 0)
    journal.write("end", 1)
    assert caplog.text.count("The journal cannot be written") == 1


def test_run_continues_when_its_journal_cannot_be_written(tmp_path, caplog):
    """The warning, which warnings in the journal would repeat without end, comes once, and the run goes on."""
    (tmp_path / "journal.jsonl").mkdir()
    assert train(tmp_path, observe=True).state.global_step == 6
    assert caplog.text.count("The journal cannot be written") == 1


class Failing:
    """A collator that calls a function which a copy of it does not have."""

    def __init__(self, function=None):
        self.function = function

    def __call__(self, samples):
        return self.function(samples)

    def __reduce__(self):
        return Failing, ()


def test_copies_have_no_observer_and_errors_end_the_journal(make_trainer):
    """A copy of a Trainer in the middle of a run holds no observer of it; an error ends the journal with its name."""
    trainer = make_trainer(observe=True)

    def fail(*_):
        for made in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
            assert not [each for each in made.callback_handler.callbacks if type(each).__name__ == "Observer"]
        raise ValueError("enough")

    trainer.data_collator = Failing(fail)
    with pytest.raises(ValueError, match="enough"):
        trainer.train()
    end = read_events(trainer.args.output_dir)[-1]
    assert end["reason"] == "ValueError" and end["message"].endswith("enough")
    assert not any(type(handler).__name__ == "_JournalHandler" for handler in logging.getLogger("hftrainer").handlers)


def test_error_of_a_callback_ends_the_journal_at_its_step(tmp_path):
    with pytest.raises(KeyError):
        train(tmp_path, callbacks=[AtStep(2, {}.popitem)], observe=True, save_strategy="steps", save_steps=100)
    last_steps = {event["event"]: event["step"] for event in read_events(str(tmp_path))}
    assert last_steps["checkpoint"] == last_steps["interval"] == last_steps["end"] == 2
