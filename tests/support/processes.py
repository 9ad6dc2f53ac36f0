"""Scripts and ranks in processes of their own, forked from servers that have done the slow imports.

Importing torch, Lightning and transformers takes a script longer than the three steps that it trains, so
multiprocessing's fork servers do it once for each worker of pytest. A script runs as by `python`: its words, folder,
environment and output are its own, and what it registers with `atexit` is called. Use the fixture `processes`, which
also marks the test as slow.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib.util
import io
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed import TCPStore

ROOT = Path(__file__).parents[2]
#: What the trainers need, but for the libraries that read the environment of a script when they are imported.
_LIBRARIES = """
    torch.distributed.launcher.api torch.distributed.fsdp torch.distributed.checkpoint torch._inductor.lowering
    scipy.signal matplotlib.pyplot sklearn.metrics pyarrow pandas bitsandbytes tokenizers safetensors.torch jinja2 yaml
    IPython.display jsonschema httpx requests_toolbelt sentry_sdk aiohttp fsspec.implementations.local multiprocess
""".split()
_TRAINERS = "accelerate.data_loader transformers.trainer hftrainer_lightning.engine hftrainer.trainer".split()


def _server(modules: list[str]) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    # Older releases are tried in environments without some of them.
    server.set_forkserver_preload([name for name in modules if importlib.util.find_spec(name.partition(".")[0])])
    return server


class _Process(ForkServerProcess):
    """A process forked from one of our servers; multiprocessing itself has one server, and so one set of imports."""

    trainers, libraries = _server([*_LIBRARIES, *_TRAINERS]), _server(_LIBRARIES)
    fresh = False

    def start(self) -> None:
        server = self.libraries if self.fresh else self.trainers
        connecting = mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process)
        # Python 3.11 starts a server without the folders of sys.path, and it would import an installed adapter.
        with connecting, mock.patch.dict(os.environ, environment()):
            super().start()


def environment(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For processes that tests start: where the packages are."""
    return {**inherited, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")])}


def _become(output: Any, errors: str, cwd: str, variables: dict[str, str]) -> None:
    """Take the streams, folder and environment of a script, and undo what multiprocessing has set."""
    gc.freeze()  # the imports are shared with the server
    with open(errors, "ab") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(output.fileno() if output else 2, 1)
    sys.stdin = open(os.devnull)  # noqa: SIM115  open for as long as the process lives
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        setattr(sys, name, io.TextIOWrapper(file, write_through=True))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    multiprocessing.set_start_method(None, force=True)  # as in a script, for the processes of loaders


def _run_script(words: list[str], *identity: Any) -> None:
    _become(*identity)
    kind, what = (words[0], words[1]) if words[0] in ("-c", "-m") else ("", words[0])
    sys.argv = [kind or what, *words[2 if kind else 1 :]]
    sys.orig_argv = [sys.executable, *words]  # by which a script starts itself again
    multiprocessing.process._parent_process = None  # else the script could not be started again
    sys.path[0] = "" if kind else str(Path(what).resolve().parent)
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            runpy.run_path(what, run_name="__main__")
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        _end()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        _end()


def _end() -> None:
    """What Python does before it exits, and multiprocessing does only from 3.13 on."""
    threading._shutdown()
    atexit._run_exitfuncs()


def _run_function(call: bytes, answer: Any, *identity: Any) -> None:
    _become(*identity)
    function, args = pickle.loads(call)  # its module is imported with the environment of the rank
    answer.send_bytes(pickle.dumps(function(*args)))


class Started:
    """A process that was started, with the methods of subprocess.Popen that tests use.

    `errors` is the file that takes the standard error; `stdout` is None if what the process prints goes there too.
    """

    def __init__(self, target: Callable, *args: Any, cwd: Any, env: Mapping[str, str], fresh: bool, merge: bool):
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115  deleted with this object
        self.errors = Path(self._file.name)
        read, write = (None, None) if merge else multiprocessing.Pipe(duplex=False)
        self.process = _Process(target=target, args=(*args, write, str(self.errors), str(cwd), dict(env)))
        self.process.fresh = fresh
        self.process.start()
        self.pid = self.process.pid
        self.stdout = None
        if read:
            write.close()
            self.stdout = os.fdopen(os.dup(read.fileno()))
            read.close()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a process of the test", timeout)
        return self.process.exitcode

    def communicate(self) -> tuple[str, str]:
        """Wait for the end; what was printed since the last read, and what went to the standard error."""
        printed = ""
        if self.stdout:
            with self.stdout:
                printed = self.stdout.read()
        self.process.join()
        return printed, self.stderr

    @property
    def stderr(self) -> str:
        return self.errors.read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def start(*words: Any, cwd: Any = None, env: Mapping[str, str] | None = None, fresh=False, merge=False) -> Started:
    """Start a Python script by the words after `python`; folder and environment are those of the tests if not given.

    With `fresh`, transformers, Lightning, huggingface_hub and hftrainer are not imported yet: the script imports them
    in its own order and environment, in two seconds more. With `merge`, it prints to the standard error, in order.
    """
    env = environment() if env is None else env
    line = [str(word) for word in words]
    return Started(_run_script, line, cwd=cwd or os.getcwd(), env=env, fresh=fresh, merge=merge)


def run(*words: Any, **how: Any) -> subprocess.CompletedProcess:
    """Run a Python script to its end; the arguments of `start`."""
    started = start(*words, **how)
    printed, errors = started.communicate()
    return subprocess.CompletedProcess(words, started.returncode, printed, errors)


def read_to_end(terminal: int) -> bytes:
    """What is written to a terminal until its other end is closed; a single read may return a part of it."""
    text = b""
    with contextlib.suppress(OSError):  # EIO is the end
        while part := os.read(terminal, 65536):
            text += part
    return text


def ranks(count: int, store: TCPStore) -> list[dict[str, str]]:
    """The variables of each of `count` ranks on this machine, as torchrun sets them: they meet at `store`."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


class RanksFailed(AssertionError):
    """Not every rank returned: the statuses, and what each has printed."""


def run_ranks(function: Callable, count: int, *args: Any, fresh: bool = False, **variables: str) -> list[Any]:
    """What `function(*given)` returns in each of `count` processes, which are ranks if there are several.

    The function is of a module, for it is pickled by its name; `variables` are in the environment too. If one of the
    processes raises or is ended by a signal, the others are ended too, as torchrun does, and RanksFailed is raised.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = ranks(count, store) if count > 1 else [{}]
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        started, answers = [], []
        for place in places:
            answer, sends = multiprocessing.Pipe(duplex=False)
            env = {**environment(), **place, **variables}
            call = pickle.dumps((function, args))
            one = Started(_run_function, call, sends, cwd=folder, env=env, fresh=fresh, merge=True)
            sends.close()
            started.append(one)
            answers.append(stack.enter_context(answer))
        return _collect(started, answers)


def _collect(started: list[Started], answers: list[Any]) -> list[Any]:
    """Read the answers as they come, and end all processes once one of them has ended without."""
    found: dict[int, bytes] = {}
    while len(found) < len(answers):
        waiting = [answer for number, answer in enumerate(answers) if number not in found]
        for ready in multiprocessing.connection.wait(waiting):
            try:
                found[answers.index(ready)] = ready.recv_bytes()
            except EOFError:
                for one in started:
                    one.terminate()
                raise RanksFailed(_printed(started)) from None
    statuses = [one.wait() for one in started]
    if any(statuses):
        raise RanksFailed(_printed(started))
    return [pickle.loads(found[number]) for number in range(len(answers))]


def _printed(started: list[Started]) -> str:
    printed = [one.communicate()[1] for one in started]
    return "\n".join(f"rank {n}, status {one.returncode}:\n{printed[n]}" for n, one in enumerate(started))
