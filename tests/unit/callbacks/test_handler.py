"""`CallbackHandler` names the callback that stops a run, and restores the states of several callbacks of a class."""

import pytest

from hftrainer import TrainerCallback, TrainerControl, TrainerState
from hftrainer.callbacks.handler import CallbackHandler, restore_callbacks
from hftrainer.errors import NotACallback


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


class Watches(TrainerCallback):
    def __init__(self, place=None):
        self.place = place

    def on_step_end(self, args, state, control, **kwargs):
        pass


def make_handler(*callbacks):
    return CallbackHandler(callbacks, model=None, processing_class=None, optimizer=None, lr_scheduler=None)


def test_run_is_stopped_by_the_first_callback_that_asks_for_it():
    handler = make_handler(Stops(), Watches())
    assert handler.on_step_end(None, TrainerState(), TrainerControl()).should_training_stop
    assert handler.stopped_by == "Stops"


@pytest.mark.parametrize("handle", [lambda self: None, staticmethod(lambda args, state: None)])
def test_method_with_too_few_parameters_is_refused_when_it_is_added(handle):
    with pytest.raises(NotACallback, match=r"Own.on_step_end is called with \(args, state, control, \*\*kwargs\), but"):
        make_handler(type("Own", (TrainerCallback,), {"on_step_end": handle}))


def test_states_of_a_class_are_restored_in_the_order_of_its_callbacks():
    handler = make_handler(Watches(), Watches())
    states = [{"args": {}, "attributes": {"place": place}} for place in ("first", "second")]
    restore_callbacks(handler, TrainerControl(), {"Watches": states})
    assert [callback.place for callback in handler.callbacks] == ["first", "second"]
