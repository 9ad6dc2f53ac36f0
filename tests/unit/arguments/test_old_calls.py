"""Old values, flags, positional arguments and methods from the documents of v4.1 to v4.48 still work."""

import dataclasses
import warnings

import pytest
import torch
import transformers

import hftrainer
from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.checks.unsupported import check_supported
from hftrainer.arguments.lightning_plan import make_plan
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.errors import InvalidArgument, InvalidSetup, UnknownArgument
from tests.support.arguments import make_quiet_trainer
from tests.support.parity import assert_same_weights
from tests.support.small_models import make_plain


def files_of_warnings(caught, text):
    return [each.filename for each in caught if text in str(each.message)]


def make(folder, kind=Trainer, model="plain", **settings):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, **settings}
    return make_quiet_trainer(folder, kind, model, **settings)


def test_model_path_of_a_checkpoint_resumes(tmp_path):
    whole = make(tmp_path)
    whole.train()
    resumed = make(tmp_path)
    with pytest.warns(FutureWarning, match=r"model_path=.* is now train\(resume_from_checkpoint=...\)\.$") as caught:
        resumed.train(model_path=str(tmp_path / "checkpoint-2"))
    assert files_of_warnings(caught, "model_path") == [__file__]
    assert [line["step"] for line in resumed.state.log_history] == [1, 2, 3, 4, 4]
    assert_same_weights(resumed.model.state_dict(), whole.model.state_dict())


def test_model_path_of_a_model_starts_at_step_one(tmp_path):
    """v4.1's scripts pass `model_name_or_path`, a folder of the model alone, or a name on the Hub."""
    make(tmp_path).save_model(str(tmp_path / "model"))
    for path in (str(tmp_path / "model"), "bert-base-uncased"):
        trainer = make(tmp_path, save_strategy="no")
        with pytest.warns(FutureWarning, match=f"{path!r} has no trainer_state.json, so nothing is resumed"):
            assert trainer.train(model_path=path).global_step == 4
        assert trainer.state.log_history[0]["step"] == 1


def test_model_path_true_resumes_and_two_paths_are_refused(tmp_path):
    make(tmp_path).train()
    with pytest.warns(FutureWarning, match="model_path"):
        assert make(tmp_path).train(model_path=True).global_step == 4  # of the last checkpoint, as in v4.15 and later
    with pytest.raises(InvalidArgument, match="the first is the old name of the second"):
        make(tmp_path).train("here", model_path="there")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert make(tmp_path).train(model_path=None).global_step == 4


def test_debug_true_means_tpu_metrics_debug():
    with pytest.warns(FutureWarning, match="debug=True is now debug='tpu_metrics_debug'"):
        args = TrainingArguments("x", debug=True, use_cpu=True)
    assert args.debug == ["tpu_metrics_debug"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.replace(args).debug == ["tpu_metrics_debug"]
        assert TrainingArguments("x", debug=False, sharded_ddp=[], use_cpu=True).debug == []


def test_positional_arguments_of_v4_are_accepted():
    args = TrainingArguments("x", True, True, None, True, "steps", True, 2, 3, None, None, 4, 5, use_cpu=True)
    assert (args.overwrite_output_dir, args.do_train, args.do_predict) == (True, True, True)
    assert (args.eval_strategy, args.prediction_loss_only) == ("steps", True)
    assert (args.per_device_train_batch_size, args.per_device_eval_batch_size) == (2, 3)
    assert (args.gradient_accumulation_steps, args.eval_accumulation_steps) == (4, 5)
    generating = hftrainer.Seq2SeqTrainingArguments("x", False, True, use_cpu=True)
    assert (generating.overwrite_output_dir, generating.do_train) == (False, True)


def test_positional_arguments_of_other_releases_are_refused():
    """v5 begins with the batch size, and the releases of v4 differ after the thirteenth argument."""
    with pytest.raises(InvalidArgument, match=r"overwrite_output_dir=8 by position: .*Pass arguments by name"):
        TrainingArguments("x", 8, 3.0)
    before = ("x", True, True, False, False, "no", False, 2, 2, None, None, 1, 1)
    with pytest.raises(UnknownArgument, match="accepts 13 positional arguments, not 14"):
        TrainingArguments(*before, 5e-5)


def test_subclass_may_pass_positional_arguments():
    @dataclasses.dataclass
    class Mine(TrainingArguments):
        temperature: float = 2.0

    class Own(TrainingArguments):
        def __init__(self, folder, size, *rest, **settings):
            super().__init__(folder, *rest, per_device_train_batch_size=size, **settings)

    assert Mine("x", True, True, temperature=3.0).do_train
    args = Own("x", 5, False, True, use_cpu=True)
    assert (args.per_device_train_batch_size, args.do_train) == (5, True)


@pytest.mark.parametrize(
    "settings",
    [
        {"fp16_backend": "apex"},
        {"fp16_backend": "apex", "fp16_opt_level": "O1"},
        {"half_precision_backend": "apex", "fp16_opt_level": "01"},
    ],
)
def test_apex_backend_becomes_torch_autocast(tmp_path, settings):
    with pytest.warns(FutureWarning, match="backend='apex': NVIDIA Apex has .* torch's float16 autocast") as caught:
        args = TrainingArguments(str(tmp_path), fp16=True, use_cpu=True, **settings)
    assert files_of_warnings(caught, "apex") == [__file__]
    assert not check_supported(ResolvedArguments(args))
    assert make_plan(ResolvedArguments(args)).precision == "16-mixed"
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        dataclasses.replace(args, seed=3)


def test_old_argument_of_a_transformers_object_warns(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    args.jit_mode_eval = True  # 5.23 does not have it
    with pytest.warns(FutureWarning, match="jit_mode_eval=True: torch discontinued TorchScript") as caught:
        Trainer(make_plain(), args)
    assert files_of_warnings(caught, "jit_mode_eval") == [__file__]


def test_neftune_noise_is_switched_by_hand(tmp_path):
    trainer = make(tmp_path, model="bert")
    with pytest.raises(InvalidSetup, match="set neftune_noise_alpha"):
        trainer._activate_neftune(trainer.model)
    with pytest.raises(InvalidSetup, match="call _activate_neftune"):
        trainer._deactivate_neftune(trainer.model)
    trainer.neftune_noise_alpha = 5.0
    tokens, embed = torch.arange(8)[None], trainer.model.train().get_input_embeddings()
    quiet = embed(tokens)
    assert trainer._activate_neftune(trainer.model) is trainer.model
    assert not torch.equal(embed(tokens), quiet)
    trainer._deactivate_neftune(trainer.model)
    assert torch.equal(embed(tokens), quiet)


def test_overridden_neftune_methods_are_called(tmp_path):
    calls = []

    class Own(Trainer):
        def _activate_neftune(self, model):
            calls.append("on")
            return super()._activate_neftune(model)

        def _deactivate_neftune(self, model):
            calls.append("off")
            super()._deactivate_neftune(model)

    trainer = make(tmp_path, Own, "bert", neftune_noise_alpha=5.0, save_strategy="no")
    trainer.train()
    assert calls == ["on", "off"]
    assert not trainer.model.get_input_embeddings()._forward_hooks


def test_propagate_args_to_deepspeed_needs_the_argument(tmp_path):
    with pytest.raises(InvalidSetup, match=r"propagate_args_to_deepspeed\(\) needs the argument deepspeed"):
        make(tmp_path).propagate_args_to_deepspeed()
