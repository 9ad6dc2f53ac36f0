"""One feature each, on the smallest model that shows it, exactly as transformers does it."""

import importlib

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.parity.support import accuracy, assert_same, build, compare, record, train
from tests.tiny import make_plain, plain_data

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"logging_strategy": "epoch"}, id="log-epoch"),
        pytest.param({"logging_strategy": "no"}, id="log-no"),
        pytest.param({"logging_first_step": True, "logging_steps": 4}, id="log-first-step"),
        pytest.param({"eval_strategy": "epoch", "save_strategy": "epoch"}, id="epoch-epoch"),
        pytest.param({"eval_strategy": "steps"}, id="eval-steps-from-logging-steps"),
        pytest.param({**EVERY_STEP, "eval_on_start": True}, id="eval-on-start"),
        pytest.param({**EVERY_STEP, "eval_delay": 5}, id="eval-delay-steps"),
        pytest.param({"eval_strategy": "epoch", "eval_delay": 2}, id="eval-delay-epochs"),
        pytest.param(
            {
                "logging_steps": 0.2,
                "eval_strategy": "steps",
                "eval_steps": 0.3,
                "save_strategy": "steps",
                "save_steps": 0.15,
            },
            id="fractional-intervals",
        ),
        pytest.param({"num_train_epochs": 1.35}, id="fractional-epochs"),
        pytest.param({"num_train_epochs": 0.2}, id="part-of-an-epoch"),
        pytest.param({"max_steps": 23}, id="max-steps-beyond-epochs"),
        pytest.param({**EVERY_STEP, "load_best_model_at_end": True}, id="best-by-loss"),
        pytest.param({**EVERY_STEP, "load_best_model_at_end": True, "save_total_limit": 1}, id="best-limit-1"),
        pytest.param({**EVERY_STEP, "load_best_model_at_end": True, "save_total_limit": 2}, id="best-limit-2"),
        pytest.param({**EVERY_STEP, "save_total_limit": 2}, id="limit-2"),
        pytest.param(
            {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"},
            id="save-best",
        ),
        pytest.param({**EVERY_STEP, "save_only_model": True}, id="save-only-model"),
        pytest.param({"max_grad_norm": 0.05}, id="clipped"),
        pytest.param({"max_grad_norm": 0.0}, id="not-clipped"),
        pytest.param({"seed": 7}, id="seed"),
        pytest.param({"data_seed": 7}, id="data-seed"),
        pytest.param({"full_determinism": True}, id="full-determinism"),
        pytest.param({"dataloader_drop_last": True, **EVERY_STEP}, id="drop-last"),
        pytest.param({"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3}, id="workers"),
        pytest.param(
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, **EVERY_STEP}, id="persistent-workers"
        ),
        pytest.param({"train_sampling_strategy": "sequential"}, id="sequential"),
        pytest.param({"optim": "adamw_torch", "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}, id="adamw"),
        pytest.param({"logging_nan_inf_filter": False}, id="nan-filter-off"),
        pytest.param({"eval_accumulation_steps": 1, **EVERY_STEP}, id="eval-accumulation"),
        pytest.param({"prediction_loss_only": True, **EVERY_STEP}, id="loss-only"),
        pytest.param({"include_for_metrics": ["loss"], **EVERY_STEP}, id="losses-for-metrics"),
        *(
            pytest.param({"lr_scheduler_type": kind, "warmup_steps": warmup}, id=f"{kind}-{warmup}")
            for kind in ("linear", "cosine", "constant", "constant_with_warmup")
            for warmup in (0, 4, 0.3)
        ),
        pytest.param({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}, id="cosine-2-cycles"),
    ],
)
def test_argument(tmp_path, settings):
    compare(tmp_path, "plain", trainer={"compute_metrics": accuracy}, **settings)


@pytest.mark.parametrize("model", ["tuple", "peft"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_other_models(tmp_path, model, accumulation):
    compare(tmp_path, model, gradient_accumulation_steps=accumulation, **EVERY_STEP, load_best_model_at_end=True)


def test_dict_of_eval_datasets(tmp_path):
    sets = {"first": plain_data()[:9], "second": plain_data()[9:20]}
    settings = {**EVERY_STEP, "load_best_model_at_end": True, "metric_for_best_model": "eval_second_loss"}
    compare(tmp_path, "plain", trainer={"eval_dataset": sets, "compute_metrics": accuracy}, **settings)


def test_model_init(tmp_path):
    compare(tmp_path, "plain", trainer={"model_init": lambda: make_plain_unseeded()})


def make_plain_unseeded():
    from tests.tiny import Plain

    return Plain()


class Stream(IterableDataset):
    """The plain samples, without a length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(plain_data(self.count))


class SizedStream(Stream):
    def __len__(self):
        return self.count


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("count", [38, 12], ids=["ends-within-window", "shorter-than-training"])
def test_iterable_with_max_steps(tmp_path, accumulation, count):
    settings = {"max_steps": 9, "gradient_accumulation_steps": accumulation}
    compare(tmp_path, "plain", trainer={"train_dataset": Stream(count)}, **settings)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_iterable_with_length(tmp_path, accumulation):
    data = {"train_dataset": SizedStream(38), "eval_dataset": SizedStream(13)}
    compare(tmp_path, "plain", trainer=data, gradient_accumulation_steps=accumulation, **EVERY_STEP)


class Noisy(Dataset):
    """Draws from torch's global generator for each sample, as augmentation does."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        sample = self.data[index]
        return {"x": sample["x"] + torch.randn(8), "labels": sample["labels"]}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_data_that_draws_random_numbers(tmp_path, accumulation):
    """Dropout and augmentation take turns at one generator, so samples must be fetched when transformers does."""
    data = {"train_dataset": Noisy(plain_data()), "eval_dataset": Noisy(plain_data()[:11])}
    compare(tmp_path, "plain", trainer=data, gradient_accumulation_steps=accumulation, **EVERY_STEP)


@pytest.mark.parametrize("prepared", [False, True], ids=["plain-loader", "prepared-loader"])
def test_own_dataloaders(tmp_path, prepared):
    def trainer_class(library):
        class Own(library.Trainer):
            def get_train_dataloader(self):
                loader = DataLoader(Noisy(plain_data()), 4, shuffle=True)
                return self.accelerator.prepare(loader) if prepared else loader

            def get_eval_dataloader(self, eval_dataset=None):
                loader = DataLoader(plain_data()[:11], 8)
                return self.accelerator.prepare(loader) if prepared else loader

        return Own

    compare(tmp_path, "plain", trainer_class=trainer_class, **EVERY_STEP)


def test_datasets_library(tmp_path):
    datasets = importlib.import_module("datasets")
    rows = [{"x": sample["x"].tolist(), "label": int(sample["labels"]), "unused": "text"} for sample in plain_data()]
    data = datasets.Dataset.from_list(rows)
    compare(tmp_path, "plain", trainer={"train_dataset": data, "eval_dataset": data.select(range(9))}, **EVERY_STEP)


def make_tokenizer():
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, 50)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize("model", ["bert", "llama"])
def test_tokenizer_pads_batches(tmp_path, model):
    """Samples of different lengths: batches are padded by the tokenizer, predictions with -100."""
    rows = [{"input_ids": [2 + (i * j) % 47 for j in range(3 + i % 6)], "label": i % 3} for i in range(30)]
    if model == "llama":
        rows = [{"input_ids": row["input_ids"]} for row in rows]
    collator = None
    if model == "llama":
        library = importlib.import_module("transformers")
        collator = library.DataCollatorForLanguageModeling(make_tokenizer(), mlm=False)
    given = {"train_dataset": rows, "eval_dataset": rows[:11], "processing_class": make_tokenizer()}
    given |= {"data_collator": collator, "compute_metrics": lambda p: {"shape": list(p.predictions.shape)}}
    compare(tmp_path, model, trainer=given, gradient_accumulation_steps=3, **EVERY_STEP)


def test_masked_language_collator(tmp_path):
    """A collator that draws the mask from the global generator."""
    library = importlib.import_module("transformers")

    def make_model():
        torch.manual_seed(1)
        config = library.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        return library.BertForMaskedLM(config)

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "w49"})
    rows = [{"input_ids": [2 + (i * j) % 40 for j in range(9)]} for i in range(30)]
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    results = []
    for name in ("hftrainer", "transformers"):
        given = {
            "model": make_model(),
            "train_dataset": rows,
            "eval_dataset": rows[:9],
            "data_collator": library.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4),
        }
        results.append(train(name, "plain", tmp_path / name, trainer=given, **EVERY_STEP))
    assert_same(*results)


# ---- Overrides ---------------------------------------------------------------------------------------------------


def compute_loss_full(library):
    class Own(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, label_smoothing=0.1)
            return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    return Own


def compute_loss_any_keyword(library):
    class Own(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            assert "num_items_in_batch" in kwargs
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    return Own


def loss_says_whether_scaled(library):
    class Own(library.Trainer):
        loss_is_scaled_for_ga = True

    return Own


def own_training_step(library):
    class Own(library.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs) / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss * 1.5)
            return loss.detach()

    return Own


def training_step_calls_super(library):
    class Own(library.Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    return Own


def own_optimizer(library):
    class Own(library.Trainer):
        def create_optimizer(self, *args):
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
            return self.optimizer

    return Own


def own_log(library):
    class Own(library.Trainer):
        def log(self, logs, *args, **kwargs):
            logs["twice"] = 2 * logs.get("loss", 0)
            super().log(logs, *args, **kwargs)

    return Own


def own_prediction_step(library):
    class Own(library.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            with torch.enable_grad():  # forces and the like are gradients, in evaluation too
                x = inputs["x"].clone().requires_grad_()
                (slope,) = torch.autograd.grad(model(x)["logits"].sum(), x)
            return loss + slope.abs().mean(), logits, labels

    return Own


def own_evaluate(library):
    class Own(library.Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            metrics["eval_extra"] = 1.0
            return metrics

    return Own


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "trainer_class",
    [
        compute_loss_full,
        compute_loss_any_keyword,
        loss_says_whether_scaled,
        own_training_step,
        training_step_calls_super,
        own_optimizer,
        own_log,
        own_prediction_step,
        own_evaluate,
    ],
)
def test_override(tmp_path, trainer_class, accumulation):
    settings = {"trainer": {"compute_metrics": accuracy}, "gradient_accumulation_steps": accumulation, **EVERY_STEP}
    compare(tmp_path, "plain", trainer_class=trainer_class, **settings)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_compute_loss_func(tmp_path, accumulation):
    def loss_func(outputs, labels, num_items_in_batch=None):
        summed = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        return summed / (num_items_in_batch if num_items_in_batch is not None else len(labels))

    def make():
        model = make_plain()
        original = model.forward
        model.forward = lambda x, labels=None: original(x)
        return model

    results = []
    for name in ("hftrainer", "transformers"):
        given = {"model": make(), "compute_loss_func": loss_func, "compute_metrics": accuracy}
        settings = {"gradient_accumulation_steps": accumulation, **EVERY_STEP}
        results.append(train(name, "plain", tmp_path / name, trainer=given, **settings))
    assert_same(*results)


def test_optimizers_pair(tmp_path):
    results = []
    for name in ("hftrainer", "transformers"):
        model = make_plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        given = {"model": model, "optimizers": (optimizer, scheduler)}
        results.append(train(name, "plain", tmp_path / name, trainer=given))
    assert_same(*results)


def test_optimizer_cls_and_kwargs(tmp_path):
    compare(tmp_path, "plain", trainer={"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 0.05})})


# ---- Callbacks ---------------------------------------------------------------------------------------------------


def stops(library, event, at, switch):
    """A callback that sets a switch of `control` at an event and step."""

    class Sets(library.TrainerCallback):
        pass

    def handler(self, args, state, control, **kwargs):
        if state.global_step == at:
            setattr(control, switch, True)
        return control

    setattr(Sets, event, handler)
    return Sets()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "switch", ["should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save"]
)
@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_substep_end", "on_log", "on_optimizer_step"])
def test_control(tmp_path, event, switch, accumulation):
    results = []
    for name in ("hftrainer", "transformers"):
        library = importlib.import_module(name)
        folder = tmp_path / name
        trainer, recorder = build(name, "plain", folder, gradient_accumulation_steps=accumulation)
        trainer.add_callback(stops(library, event, 2, switch))
        trainer.train()
        results.append(record(trainer, recorder, folder))
    assert_same(*results)


def test_early_stopping(tmp_path):
    results = []
    for name in ("hftrainer", "transformers"):
        library = importlib.import_module(name)
        folder = tmp_path / name
        settings = {**EVERY_STEP, "load_best_model_at_end": True, "learning_rate": 0.3, "num_train_epochs": 5}
        trainer, recorder = build(name, "plain", folder, **settings)
        trainer.add_callback(library.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.01))
        trainer.train()
        results.append(record(trainer, recorder, folder))
        assert trainer.state.global_step < trainer.state.max_steps
    assert_same(*results)


def test_transformers_callbacks_in_our_trainer(tmp_path):
    library = importlib.import_module("transformers")
    settings = {**EVERY_STEP, "load_best_model_at_end": True, "learning_rate": 0.3, "num_train_epochs": 5}
    results = []
    for name in ("hftrainer", "transformers"):
        folder = tmp_path / name
        trainer, recorder = build(name, "plain", folder, **settings)
        trainer.add_callback(library.EarlyStoppingCallback(early_stopping_patience=2))
        trainer.train()
        results.append(record(trainer, recorder, folder))
    assert_same(*results)


def test_model_left_in_eval_mode_by_a_callback(tmp_path):
    """transformers sets training mode before every micro-batch; callbacks rely on it."""

    class Careless:
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.layers[3].eval() if state.global_step % 2 else model.eval()

    results = []
    for name in ("hftrainer", "transformers"):
        library = importlib.import_module(name)
        folder = tmp_path / name
        trainer, recorder = build(name, "plain", folder)
        trainer.add_callback(type("Own", (Careless, library.TrainerCallback), {}))
        trainer.train()
        results.append(record(trainer, recorder, folder))
    assert_same(*results)


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_epoch_begin", "on_train_begin", "on_substep_end"])
def test_evaluate_and_predict_from_a_callback(tmp_path, event):
    results = []
    for name in ("hftrainer", "transformers"):
        library = importlib.import_module(name)
        folder = tmp_path / name
        trainer, recorder = build(name, "plain", folder, gradient_accumulation_steps=2, max_steps=4)

        def handler(self, args, state, control, trainer=trainer, **kwargs):
            trainer.evaluate(plain_data()[:5], metric_key_prefix="inner")
            trainer.predict(plain_data()[:3])

        trainer.add_callback(type("Evaluates", (library.TrainerCallback,), {event: handler}))
        trainer.train()
        results.append(record(trainer, recorder, folder))
    assert_same(*results)


# ---- Alone -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("model", ["plain", "bert", "llama"])
@pytest.mark.parametrize("order", ["evaluate-first", "train-first"])
def test_evaluate_and_predict(tmp_path, model, order, bf16):
    results = []
    for name in ("hftrainer", "transformers"):
        folder = tmp_path / name
        settings = {"max_steps": 3, "bf16": bf16}
        trainer, recorder = build(name, model, folder, trainer={"compute_metrics": sizes}, **settings)
        if order == "evaluate-first":
            trainer.evaluate()
        trainer.train()
        metrics = trainer.evaluate()
        output = trainer.predict(trainer.eval_dataset, metric_key_prefix="try")
        extra = {
            "metrics": list(metrics),
            "test": sorted(output.metrics),
            "sizes": output.metrics["try_sizes"],
            "mode": trainer.model.training,
        }
        results.append((record(trainer, recorder, folder, **extra), output))
    assert_same(results[0][0], results[1][0])
    ours, theirs = results[0][1], results[1][1]
    assert (ours.predictions == theirs.predictions).all()
    assert (ours.label_ids == theirs.label_ids).all()


def sizes(prediction):
    return {"sizes": [list(prediction.predictions.shape), list(prediction.label_ids.shape)]}


def test_predict_without_labels(tmp_path):
    results = []
    for name in ("hftrainer", "transformers"):
        trainer, _ = build(name, "plain", tmp_path / name)
        results.append(trainer.predict([{"x": sample["x"]} for sample in plain_data()[:11]]))
    assert (results[0].predictions == results[1].predictions).all()
    assert results[0].label_ids is None
    assert results[0].metrics.keys() == results[1].metrics.keys()


def test_train_twice(tmp_path):
    results = []
    for name in ("hftrainer", "transformers"):
        folder = tmp_path / name
        trainer, recorder = build(name, "plain", folder, max_steps=4)
        trainer.train()
        trainer.args.max_steps = 7
        trainer.train()
        results.append(record(trainer, recorder, folder))
    assert_same(*results)
