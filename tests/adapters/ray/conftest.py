import importlib.util
import os

import pytest

#: `make test-adapters` has an environment of its own for these.
collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _cluster():
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((os.getcwd(), os.environ.get("PYTHONPATH", ""))))
        ray.init(num_cpus=2, object_store_memory=10**8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
