"""`FlagSync`: flags of one of two ranks take effect in both at the same step."""

import signal
from types import SimpleNamespace

import pytest

from hftrainer import TrainerControl
from hftrainer.training.stopping import _FLAGS, FlagSync, SignalListener


def request(**values):
    """What a rank sends: whether it has no request, the signal, the control flags, and Lightning's should_stop."""
    return [int(not values), *(int(values.get(name, 0)) for name in ("signal", *_FLAGS, "should_stop"))]


def make_sync(*flags, world_size=2):
    """A `FlagSync` beside a rank that sends these flags, and what the all-reduces were given and returned."""
    answers, given, returned, saves = iter(flags), [], [], []

    def start_max_over_ranks(values):
        given.append(values)
        maxima = list(map(max, values, next(answers)))
        return lambda: returned.append(maxima) or maxima

    args = SimpleNamespace(world_size=world_size, enable_jit_checkpoint=False)
    processes = SimpleNamespace(start_max_over_ranks=start_max_over_ranks)
    parts = SimpleNamespace(
        trainer=SimpleNamespace(args=args, control=TrainerControl()),
        run=SimpleNamespace(signal_listener=SignalListener(should_save=True)),
        engine=SimpleNamespace(should_stop=False, plan=SimpleNamespace(processes=processes)),
    )
    sync = FlagSync(parts, lambda: saves.append("saved"))
    return sync, SimpleNamespace(given=given, returned=returned, saves=saves)


def flags_of(sync):
    return [name for name in _FLAGS if getattr(sync.trainer.control, name)]


@pytest.mark.parametrize("flag", _FLAGS)
@pytest.mark.parametrize("is_shared", [True, False])
def test_own_request_takes_effect_when_the_other_rank_knows_it(flag, is_shared):
    """It takes effect at once if the other rank has it too, and else at the next step."""
    wish = request(**{flag: 1})
    sync, seen = make_sync(*([wish, request()] if is_shared else [request(), wish]))
    setattr(sync.trainer.control, flag, True)
    sync.sync_after_step()
    assert flags_of(sync) == ([flag] if is_shared else [])
    setattr(sync.trainer.control, flag, False)
    sync.sync_after_step()
    assert seen.given == [wish, request() if is_shared else wish]
    assert flags_of(sync) == ([] if is_shared else [flag])
    assert sync.flags_are_agreed is (flag in ("should_training_stop", "should_epoch_stop"))


def test_request_of_the_other_rank_takes_effect_a_step_later():
    sync, seen = make_sync(request(should_save=1), request(should_save=1))
    sync.sync_after_step()
    assert seen.returned == [] and flags_of(sync) == []
    sync.sync_after_step()
    assert flags_of(sync) == ["should_save"]


def test_after_long_operations_flags_take_effect_at_once():
    sync, _ = make_sync(request(), request(should_epoch_stop=1, should_stop=1))
    sync.trainer.control.should_save = True
    sync.sync_after_step()
    sync.sync_now()
    assert flags_of(sync) == ["should_epoch_stop", "should_save"]
    assert sync.engine.should_stop and sync.flags_are_agreed
    sync.begin_epoch()
    assert not sync.flags_are_agreed


def test_one_process_does_not_synchronize():
    sync, seen = make_sync(world_size=1)
    sync.trainer.control.should_training_stop = True
    sync.sync_after_step()
    sync.sync_now()
    assert seen.given == [] and flags_of(sync) == ["should_training_stop"] and sync.flags_are_agreed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_the_other_rank_saves_and_ends_the_script(number):
    sync, seen = make_sync(request(signal=number))
    sync.stop_if_signalled()
    assert seen.saves == []
    sync.sync_now()
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        sync.stop_if_signalled()
    assert seen.saves == ["saved"]
    assert getattr(raised.value, "code", None) == (None if number == signal.SIGINT else 128 + number)
