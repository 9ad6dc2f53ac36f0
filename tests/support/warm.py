"""A Python that has imported torch, Lightning and transformers already: most of a short script's time is their import.

`PYTHON` is an executable that takes the place of `sys.executable` in tests that start scripts. It hands its arguments,
environment, folder and standard streams to a server, which has the imports done, and forks: the script runs in a
process of its own. The executable waits, passes signals on, and ends as the script does; when it is killed, so is the
script. It runs the ordinary Python instead where that could make a difference: for options of the interpreter, and for
variables that are read at import. `WARM=0` makes it do so always.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import io
import json
import logging
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PYTHON = str(Path(__file__).with_name("warm_python"))
#: For a script that has to do its imports itself.
COLD = {"WARM_FOLDER": ""}
#: For a script that starts others, or itself again: warm as well.
AGAIN = {"WARM_AGAIN": "1", "PYTHON_EXEC": PYTHON}  # which torchrun reads
#: The kind of server that is asked unless the environment names another.
TRAINERS = "trainers"
#: For a script that has to import transformers, Lightning or hftrainer itself.
LIBRARIES = {"WARM_KIND": "libraries"}
#: Kind of server → what it has imported. There is one of each kind that is asked for.
IMPORTS = {
    TRAINERS: (
        *("torch.distributed.launcher.api", "torch.distributed.argparse_util", "accelerate.data_loader"),
        *("transformers.trainer", "hftrainer_lightning.engine", "hftrainer.trainer"),
    ),
    "libraries": (
        *("torch.distributed.launcher.api", "torch.distributed.fsdp", "torch._inductor.lowering"),
        *("scipy.signal", "matplotlib.pyplot", "mpl_toolkits.mplot3d", "sklearn.metrics", "pyarrow", "pandas"),
        # What importing the trainers brings with it, but for what tests look for among the imports.
        *("torchao.quantization", "bitsandbytes", "tokenizers", "safetensors.torch", "regex", "jinja2", "yaml"),
        *("IPython.display", "ipykernel", "jsonschema", "httpx", "httpcore", "requests_toolbelt", "sentry_sdk"),
        *("torch.distributed.checkpoint", "aiohttp", "fsspec.implementations.local", "wrapt", "multiprocess"),
    ),
}
_OF_LIBRARIES = ("ATEN_", "CUDA_", "DNNL_", "MKL_", "MPL", "PYTHON", "TORCH_")
#: Kind → how the variables begin that are read by these imports.
AT_IMPORT = {
    TRAINERS: (*_OF_LIBRARIES, "BITSANDBYTES_", "HF_", "TRANSFORMERS_", "USE_"),
    "libraries": (*_OF_LIBRARIES, "BITSANDBYTES_"),
}
#: Among them, but read when a script runs.
_HARMLESS = {"PYTHONUNBUFFERED", "PYTHON_EXEC", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
#: And those read when it first uses a GPU, which the server does not.
_HARMLESS |= {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}


def environment(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For the processes of tests: where the packages are."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    return {**inherited, "PYTHONPATH": paths}


def spare_what_stays() -> None:
    """Look for neither garbage, plug-ins nor lines of source among all that was imported, again and again.

    Imports make millions of objects, and Lightning asks every package for callbacks whenever it makes a Trainer: each
    is a tenth of the time. torchrun wants the names of its callers, and is given the lines of their files as well: a
    third of what it takes to start two processes.
    """
    gc.set_threshold(20_000, 20, 100)
    inspect.stack = functools.partial(inspect.stack, 0)
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


# ---- The server ---------------------------------------------------------------------------------------------------


def is_ordinary(words: list[str], given: dict[str, str], own: dict[str, str]) -> bool:
    """Whether a script would notice that its imports are done."""
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        return False
    read = AT_IMPORT[given.get("WARM_KIND", TRAINERS)]
    names = {name for name in {*given, *own} if name.startswith(read)} - _HARMLESS
    return all(given.get(name) == own.get(name) for name in names)


#: Name → module, of the server.
_imported: dict[str, ModuleType] = {}


def _leave_the_imports() -> None:
    """Spare a process that ends the taking apart of what the server has imported: most of a short script's time.

    What the script has imported or made itself is taken apart as always. So is all in a process of a group, whose end
    is where threads of others have gone wrong.
    """
    if "RANK" in os.environ:
        return
    kept = {name: module for name, module in _imported.items() if sys.modules.get(name) is module}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # nothing lets go of them
    for name in kept:
        del sys.modules[name]
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # before the destructors of the libraries
    libc.on_exit(libc.fcloseall, None)


class _Script(BaseException):
    """Leaves the server's loop in the process that is to run a script."""


def _received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the client has ended")
        data += part
    return data


class _Server:
    """Forks for each client that connects, until the tests have ended.

    Args:
        path: of the socket.
        owner: the process of the tests.
        imports: the modules.
    """

    def __init__(self, path: str, owner: int, imports: Iterable[str]) -> None:
        self.owner = os.pidfd_open(owner)
        spare_what_stays()
        atexit.register(_leave_the_imports)  # the first, and so the last that is called
        for name in imports:
            if importlib.util.find_spec(name.partition(".")[0]):  # older releases are tried without some of them
                importlib.import_module(name)
            if name.startswith("torchao"):  # older releases configure logging, which is up to the scripts
                logging.getLogger().handlers.clear()
        _imported.update(sys.modules)
        gc.freeze()  # the processes share what is there
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(path)
        self.listening.listen(64)
        self.poll = select.poll()
        self.connections: dict[int, tuple[socket.socket, int]] = {}  # file of a client → it, and its process
        self.processes: dict[int, tuple[socket.socket, int]] = {}  # handle of a process → its client, and it
        for file in (self.owner, self.listening.fileno()):
            self.poll.register(file, select.POLLIN)

    def serve(self) -> None:
        """Returns when the tests have ended; raises `_Script` in each process that it forks."""
        while True:
            for file, _ in self.poll.poll():
                if file == self.owner:
                    return
                if file == self.listening.fileno():
                    self._accept()
                elif file in self.processes:
                    self._end(file)
                elif file in self.connections:
                    self._pass_on(file)

    def _accept(self) -> None:
        connection, _ = self.listening.accept()
        try:
            head, files, _, _ = socket.recv_fds(connection, 4, 3)
            asked = json.loads(_received(connection, int.from_bytes(head, "big")))
        except (EOFError, OSError):  # the client has been killed
            connection.close()
            return
        process = os.fork()
        if process == 0:
            self._leave(connection)
            for file, standard in zip(files, (0, 1, 2), strict=True):
                os.dup2(file, standard)
                os.close(file)
            raise _Script(asked)
        for file in files:
            os.close(file)
        handle = os.pidfd_open(process)
        self.connections[connection.fileno()] = self.processes[handle] = (connection, process)
        for file in (handle, connection.fileno()):
            self.poll.register(file, select.POLLIN)

    def _leave(self, connection: socket.socket) -> None:
        """Close what is the server's."""
        for each in (self.listening, connection, *(other for other, _ in self.connections.values())):
            each.close()
        for handle in (self.owner, *self.processes):
            os.close(handle)

    def _end(self, handle: int) -> None:
        """Tell the client how its process has ended."""
        connection, process = self.processes.pop(handle)
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(OSError):  # the client has been killed
            connection.sendall(f"{os.waitstatus_to_exitcode(status):4d}".encode())
        self.poll.unregister(handle)
        os.close(handle)
        if self.connections.pop(connection.fileno(), None):
            self.poll.unregister(connection)
        connection.close()

    def _pass_on(self, file: int) -> None:
        """Signals that the client has got; its own end is a `kill -9`."""
        connection, process = self.connections[file]
        numbers = connection.recv(16)
        for number in numbers or [signal.SIGKILL]:
            os.kill(process, number)
        if not numbers:
            self.poll.unregister(file)
            del self.connections[file]


def _stand_in_for(client: int) -> None:
    """Answer as the client would, when this process asks for its parent."""
    own, real = os.getpid(), os.getppid

    def getppid() -> int:
        if os.getpid() != own:  # a process that this one has forked
            return real()
        try:
            with open(f"/proc/{client}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[1])
        except FileNotFoundError:  # it has been killed, and soon this process will be
            return 1

    os.getppid = getppid


def become(asked: dict) -> None:
    """Be the process that was asked for."""
    for number, ignored in asked["signals"]:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if ignored else usual)
    words, given = asked["words"], asked["environment"]
    python = given["WARM_PYTHON"]
    own = dict(os.environ)
    unbuffered = words[:1] == ["-u"] or "PYTHONUNBUFFERED" in given
    words = words[1:] if words[:1] == ["-u"] else words
    os.chdir(asked["cwd"])
    if not is_ordinary(words, given, own):
        os.execve(python, [python, *asked["words"]], given)
    os.environ.clear()
    os.environ.update(given)
    sys.stdin = open(0)  # noqa: SIM115  they are open for as long as the process lives
    for name, file in (("stdout", 1), ("stderr", 2)):
        raw = open(file, "wb", buffering=0, closefd=False)  # noqa: SIM115
        buffer = raw if unbuffered else io.BufferedWriter(raw)
        lines = name == "stderr" or os.isatty(file)
        setattr(sys, name, io.TextIOWrapper(buffer, write_through=unbuffered, line_buffering=lines))
    kind, rest = (words[0], words[1:]) if words[0] in ("-c", "-m") else ("", words)
    _stand_in_for(asked["client"])
    if AGAIN.keys() <= given.keys():
        sys.executable = PYTHON
    sys.orig_argv = [sys.executable, *asked["words"]]
    sys.argv = [kind or rest[0], *rest[1:]]
    sys.path[0] = os.path.dirname(os.path.abspath(rest[0])) if not kind else "" if kind == "-c" else os.getcwd()
    _run(kind, rest[0])


def _run(kind: str, what: str) -> None:
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__")]:
        delattr(main, name)
    if kind == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]  # as `python -m` does
    elif kind == "-c":
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        main.__file__ = what
        with io.open_code(what) as file:
            code = compile(file.read(), what, "exec")
        exec(code, vars(main))


# ---- Tests --------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Say in the environment where the server is; the first script that needs it starts it."""
    os.environ["WARM_PYTHON"] = sys.executable
    # As in an environment that is activated: where pyenv is the python3 on the path, it takes longer than the client.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    if "WARM_FOLDER" in os.environ or os.environ.get("WARM") == "0" or sys.platform != "linux":
        return
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    os.environ["WARM_FOLDER"] = str(folder)
    asked = {"environment": environment(), "cwd": str(ROOT), "owner": os.getpid()}
    (folder / "server.json").write_text(json.dumps(asked))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def main(folder: str, kind: str) -> None:
    """The server, and each of the scripts that it runs."""
    owner = json.loads(Path(folder, "server.json").read_text())["owner"]
    try:
        _Server(f"{folder}/{kind}", owner, IMPORTS[kind]).serve()
    except _Script as asked:
        script = asked.args[0]
    else:
        shutil.rmtree(folder, ignore_errors=True)  # of tests that were killed
        return
    become(script)
