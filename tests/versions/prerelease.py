"""Prints the newest pre-release of a package, when it is newer than the newest release; nothing otherwise.

python tests/versions/prerelease.py lightning
"""

import json
import subprocess
import sys

from packaging.version import Version


def newest(package: str, *options: str) -> Version:
    """The version that pip would install, which it asks for without installing it."""
    line = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--dry-run"]
    line += ["--ignore-installed", "--no-deps", "--report", "-", *options, package]
    (found,) = json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE).stdout)["install"]
    return Version(found["metadata"]["version"])


if __name__ == "__main__":
    package = sys.argv[1]
    candidate = newest(package, "--pre")
    if candidate > newest(package):
        print(candidate)
