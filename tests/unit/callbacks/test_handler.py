"""`CallbackHandler` names the callback that stops a run, and refuses methods with too few parameters."""

import pytest

from hftrainer import TrainerCallback, TrainerControl, TrainerState
from hftrainer.callbacks.handler import CallbackHandler
from hftrainer.errors import NotACallback
from tests.support.checkpoints import SetFlag


class Watches(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        pass


def make_handler(*callbacks):
    return CallbackHandler(callbacks, model=None, processing_class=None, optimizer=None, lr_scheduler=None)


def test_run_is_stopped_by_the_first_callback_that_asks_for_it():
    handler = make_handler(SetFlag("should_training_stop", 0), Watches())
    assert handler.on_step_end(None, TrainerState(), TrainerControl()).should_training_stop
    assert handler.stopped_by == "SetFlag"


@pytest.mark.parametrize("handle", [lambda self: None, staticmethod(lambda args, state: None)])
def test_method_with_too_few_parameters_is_refused_when_it_is_added(handle):
    with pytest.raises(NotACallback, match=r"Own.on_step_end is called with \(args, state, control, \*\*kwargs\), but"):
        make_handler(type("Own", (TrainerCallback,), {"on_step_end": handle}))
