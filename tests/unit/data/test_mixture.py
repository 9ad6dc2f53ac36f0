"""Proportions, order, log lines and resumes of mixtures; `tests/distributed/test_mixture.py` has several processes."""

import collections
import itertools
import os
import random

import datasets
import pytest

import hftrainer
from hftrainer.data.mixture import MixtureBatchSampler, MixtureDataset, MixturePlan, make_shares
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from tests.support.mixture_sources import SIZES, WEIGHTS, Stream, make_sources
from tests.support.parity import assert_same_weights
from tests.support.small_models import make_plain, plain_data


def more_chat_later(step):
    return WEIGHTS if step < 5 else {"code": 0, "chat": 1}


def train_mixture(folder, sources=None, resume=None, **settings):
    """Train; returns the Trainer, and the micro-batches that it read: the index of each sample, and the loss."""
    defaults = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "logging_steps": 3, "max_steps": 14}
    defaults |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "mixture_weights": WEIGHTS}
    args = hftrainer.TrainingArguments(str(folder), **{**defaults, "save_strategy": "no", **settings})
    read = []

    class RecordingTrainer(hftrainer.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            indices = inputs["x"][:, 0].int().tolist()
            inputs["x"][:, 0] = 0
            loss = super().training_step(model, inputs, num_items_in_batch)
            read.append((indices, loss.item()))
            return loss

    trainer = RecordingTrainer(make_plain(), args, train_dataset=make_sources() if sources is None else sources)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, read


def loss_lines(trainer):
    return [line for line in trainer.state.log_history if "loss" in line]


# ---- The plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 3, 16])
@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.97, 0.02, 0.01], [1, 1, 1], [5, 0, 3]])
def test_plan_keeps_the_proportions_at_every_step(weights, micro_batches):
    names = dict.fromkeys(map(str, range(len(weights))))
    shares = make_shares(dict(zip(names, weights, strict=True)), 1.0, names)
    plan = MixturePlan(shares, len(weights), micro_batches, seed=3)
    drawn = collections.Counter()
    for step in range(1, 10_001):
        drawn.update(source for source, _ in plan.next_step())
        if step % 100 == 0:
            for source, weight in enumerate(weights):
                due = step * micro_batches * weight / sum(weights)
                assert abs(drawn[source] - due) <= 1  # far less than 1 % of 10,000 steps
    assert plan.drawn.tolist() == [drawn[source] for source in range(len(weights))]


def test_weights_may_be_a_function_of_the_step():
    plan = MixturePlan(make_shares(more_chat_later, 1.0, SIZES), 2, 10, seed=0)
    steps = [sorted(source for source, _ in plan.next_step()) for _ in range(8)]
    assert steps == [[0] * 7 + [1] * 3] * 5 + [[1] * 10] * 3


@pytest.mark.parametrize(("temperature", "expected"), [(1, [0.8, 0.2]), (2, [2 / 3, 1 / 3]), (1e9, [0.5, 0.5])])
def test_temperature_flattens_weights_by_size(temperature, expected):
    assert make_shares(None, temperature, {"code": 80, "chat": 20})(0) == pytest.approx(expected)


def test_plan_continues_from_any_step():
    plan = MixturePlan(make_shares(WEIGHTS, 1.0, SIZES), 2, 4, seed=1)
    steps = [plan.next_step() for _ in range(20)]
    for step in (19, 3, 0, 7):
        assert plan.from_step(step).next_step() == steps[step]


# ---- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "workers"), [("map-style", 0), ("streams", 1), ("streams", 2), ("both", 0)])
def test_each_batch_has_one_source_and_logs_are_by_source(tmp_path, caplog, kind, workers):
    trainer, read = train_mixture(tmp_path, make_sources(kind), dataloader_num_workers=workers)
    assert ("is reduced to 1" in caplog.text) == (workers > 1)
    losses = collections.defaultdict(lambda: [0.0, 0])
    for number, line in enumerate(loss_lines(trainer)):
        assert line["loss"] == line["loss/code"] + line["loss/chat"]
        micro_batches = read[9 * number : 9 * number + 9]
        losses.clear()
        for indices, loss in micro_batches:
            assert len({index >= 1000 for index in indices}) == 1  # of one source
            name = "chat" if indices[0] >= 1000 else "code"
            losses[name][0] += loss
            losses[name][1] += len(indices)
        for name, (loss, samples) in losses.items():
            assert line[f"loss/{name}"] == pytest.approx(loss / 3, rel=1e-6)  # in float32 there
            assert line[f"samples/{name}"] == samples
    assert abs(sum(indices[0] < 1000 for indices, _ in read) / len(read) - 0.7) < 0.02
    samples = {"code": [], "chat": []}
    for index in itertools.chain.from_iterable(indices for indices, _ in read):
        samples["chat" if index >= 1000 else "code"].append(index % 1000)
    for name, size in SIZES.items():
        passes = [samples[name][start : start + size] for start in range(0, len(samples[name]) - size + 1, size)]
        assert len(passes) >= 2
        for number, each in enumerate(passes):
            added = 100 * number if kind == "streams" or (kind == "both" and name == "code") else 0
            assert sorted(each) == [added + index for index in range(size)]
    if kind == "map-style":
        assert passes[0] != passes[1]  # another order
        assert loss_lines(trainer)[-1]["epoch/chat"] == pytest.approx(len(samples["chat"]) / 7, abs=1)


def test_sample_order_follows_from_the_seed(tmp_path):
    (_, first), (_, again), (_, other) = (train_mixture(tmp_path, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    _, sequential = train_mixture(tmp_path, train_sampling_strategy="sequential")
    code = [index for indices, _ in sequential for index in indices if index < 1000]
    assert code == [index % 20 for index in range(len(code))]


def test_epochs_have_whole_steps(tmp_path):
    trainer, read = train_mixture(tmp_path, max_steps=-1, num_train_epochs=2)
    assert trainer.state.global_step == 2 * 5  # 27 samples, 6 in a step
    assert len(read) == 30


def test_mixture_column_names_the_source(tmp_path):
    sources = make_sources().items()
    rows = [{"x": row["x"].tolist(), "labels": row["labels"], "kind": name} for name, of in sources for row in of]
    random.Random(0).shuffle(rows)
    trainer, read = train_mixture(tmp_path, datasets.Dataset.from_list(rows), mixture_column="kind")
    assert all(len({index >= 1000 for index in indices}) == 1 for indices, _ in read)
    assert {name for line in loss_lines(trainer) for name in line if name.startswith("loss/")} == {
        "loss/code",
        "loss/chat",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(("map-style", {"dataloader_num_workers": workers}) for workers in (0, 2)),
        *(("both", {"dataloader_num_workers": workers}) for workers in (0, 1)),
        ("map-style", {"mixture_weights": more_chat_later, "max_steps": -1}),
    ],
    ids=["map-style", "loading processes", "streams", "loading process of streams", "function"],
)
def test_resumed_mixture_is_exact(tmp_path, kind, settings):
    count = int(os.environ.get("FUZZ", "2"))
    settings = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 4, **settings}
    settings.setdefault("max_steps", max(14, 2 * count))
    whole, _ = train_mixture(tmp_path, make_sources(kind), **settings)
    last = whole.state.global_step
    for step in sorted(random.Random(4).sample(range(1, last), k=min(count, last - 1))):
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        resumed, _ = train_mixture(tmp_path, make_sources(kind), resume=checkpoint, **settings)
        assert loss_lines(resumed) == loss_lines(whole)
        assert_same_weights(resumed.model.state_dict(), whole.model.state_dict())


def test_dataset_reads_a_micro_batch_at_once():
    sources = {name: datasets.Dataset.from_dict({"x": range(size)}) for name, size in SIZES.items()}
    mixture = MixtureDataset(sources)
    assert mixture.__getitems__([20, 26]) == [{"x": 0}, {"x": 6}]
    assert mixture.__getitems__([3, 20]) == [{"x": 3}, {"x": 0}]  # as a sampler of one's own may ask
    assert MixtureDataset({"code": [3, 4]}).__getitems__([1, 0]) == [4, 3]


def test_set_epoch_continues_the_plan_at_that_epoch():
    names = [str(number) for number in range(100)]
    sources = {name: range(1000) for name in names}
    plan = MixturePlan(make_shares({name: 1 + number for number, name in enumerate(names)}, 1.0, sources), 100, 8, 0)
    batches = MixtureBatchSampler(sources, plan, batch_size=4, seed=0)
    batches.set_epoch(2)
    first = next(iter(batches))
    assert batches.plan.step == 2 * batches.steps == 6250
    for _ in range(6250):
        plan.next_step()
    again = MixtureBatchSampler(sources, plan, batch_size=4, seed=0)
    again.set_epoch(2)
    assert next(iter(again)) == first


def test_resume_with_changed_weights_warns(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    train_mixture(tmp_path, **settings)
    train_mixture(tmp_path, resume=str(tmp_path / "checkpoint-4"), **settings, mixture_weights={"code": 1, "chat": 1})
    assert "Resuming with mixture=" in caplog.text


# ---- What cannot work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "settings", "message"),
    [
        (
            make_sources(),
            {"mixture_weights": {"code": 1, "chta": 1}},
            "'chta', which is no source; did you mean 'chat'",
        ),
        (make_sources(), {"mixture_weights": {"code": 1}}, "no weight for 'chat'"),
        (make_sources(), {"mixture_weights": {"code": 1, "chat": -1}}, "at least 0"),
        (make_sources(), {"mixture_weights": {"code": 0, "chat": 0}}, "one of them above 0"),
        (make_sources(), {"mixture_weights": str}, "must be a dict"),
        (make_sources(), {"mixture_weights": 3}, "use a dict"),
        (make_sources(), {"mixture_weights": lambda step: WEIGHTS}, "cannot be pickled"),
        (make_sources(), {"mixture_temperature": 2}, "choose one"),
        (make_sources(), {"mixture_temperature": 0, "mixture_weights": None}, "above 0"),
        (make_sources("streams"), {"mixture_weights": None}, "whose size is not known"),
        (make_sources("streams"), {"max_steps": -1}, "max_steps must be set"),
        ({"code": [], "chat": plain_data(3)}, {}, r"train_dataset\['code'\] has no samples"),
        ({"code": Stream([]), "chat": plain_data(3)}, {}, r"train_dataset\['code'\] has no samples"),
        ({"code": 3, "chat": plain_data(3)}, {}, r"train_dataset\['code'\] is of type int"),
        ({"test": plain_data(3), "train": plain_data(3)}, {}, r"pass one of its sets, such as dataset\['train'\]"),
        (plain_data(3), {}, "mixture_weights and mixture_temperature need several"),
        (plain_data(3), {"mixture_column": "kind"}, "is of type list, but only a datasets.Dataset has columns"),
        (datasets.Dataset.from_dict({"kinds": ["a"]}), {"mixture_column": "kind"}, "did you mean 'kinds'"),
    ],
)
def test_invalid_mixture_is_refused(tmp_path, sources, settings, message):
    with pytest.raises(InvalidArgument, match=message):
        train_mixture(tmp_path, sources, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"accelerator_config": {"split_batches": True}},
        {"train_sampling_strategy": "group_by_length"},
        {"tokens_per_batch": 100},
    ],
)
def test_conflicting_argument_is_refused(tmp_path, settings):
    with pytest.raises(UnsupportedArgument, match=next(iter(settings))):
        train_mixture(tmp_path, **settings)
