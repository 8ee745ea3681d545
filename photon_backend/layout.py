"""What a server needs on disk, and the checks before it starts.

Triton comes from the wheel of nvidia-pytriton: its `tritonserver` program, its Python back end and one stub per Python
version. The variable TRITON_HOME names an installed one instead, such as /opt/tritonserver in NVIDIA's image, which has
one stub, for the Python of that image.

A server gets a private directory (0700) with a back-end directory, a rendered model repository and the sockets. Its
base name is also the prefix of the shared-memory regions, so whatever a killed server left behind is recognised and
removed at the next start: the owner of a directory holds a lock on its file `owner`, and the lock is inherited by
tritonserver and its stubs, so it is free only when all of them are gone.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.metadata
import os
import random
import re
import resource
import shutil
import socket
import sys
import sysconfig
import tempfile
from pathlib import Path

from photon_backend.alive import is_free, lock

REPOSITORY = Path(__file__).resolve().parent.parent / "model_repository"
SHM = Path("/dev/shm")
PREFIX = "photon-"
SHM_BYTES = 16 << 20  # of one stub's region at its start, and each step by which it grows
SHM_SPARE = 64 << 20  # for pictures in flight
FILES = 256  # that one process must be able to open: tritonserver has some 80 of them before anybody connects
FIRST_PORT = 10_000  # of those that a server gets that was given none
SOCKET_PATH_MAX = 107  # bytes of a Unix socket's path


class LaunchError(Exception):
    """One sentence: what is missing, and what to do."""


class Layout:
    """The private directory of one server. The lock on it lives as long as `lock_fd` is open in any process."""

    def __init__(self, front_ends: int, engines: int) -> None:
        remove_leftovers()
        self.directory, self.lock_fd = _claim_directory()
        self.run_dir = self.directory / "run"
        self.backends = self.directory / "backends"
        self.models = self.directory / "models"
        self.libraries = self.directory / "lib"
        try:
            self._check_place(engines)
            self.run_dir.mkdir(mode=0o700)
            self._lay_backend()
            self._render_models(
                {"photon": front_ends, "photon_unary": unary_front_ends(front_ends), "photon_engine": engines}
            )
        except (LaunchError, OSError):  # a full disk
            self.remove()
            raise

    def _check_place(self, engines: int) -> None:
        """Raises LaunchError when a server cannot run in a directory with such a path."""
        place = tempfile.gettempdir()
        if re.search(r"[^\w@%+=:,./-]", str(self.directory)):  # Triton starts its stubs with `bash -c`, unquoted
            raise LaunchError(
                f"The path of the temporary directory, {place}, must have no blanks or signs that mean something to a "
                "shell; set TMPDIR=/tmp."
            )
        if os.statvfs(self.directory).f_flag & os.ST_NOEXEC:
            raise LaunchError(f"Nothing may be executed in {place}; set TMPDIR to another directory.")
        if len(os.fsencode(self.run_dir / f"engine-{engines}.sock")) > SOCKET_PATH_MAX:
            raise LaunchError(f"The temporary directory {place} has too long a path; set TMPDIR=/tmp.")

    def _lay_backend(self) -> None:
        """Back-end directory with the stub of this Python, and a directory with nothing but its libpython."""
        python = self.backends / "python"
        python.mkdir(parents=True)
        shipped = triton_home() / "backends" / "python"
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            (python / name).symlink_to(shipped / name)
        # a copy: Triton takes all rights from the file but its owner's to execute it, and needs to own it for that
        shutil.copy(stub_path(), python)
        self.libraries.mkdir()
        library = libpython()
        if library is not None:
            (self.libraries / library.name).symlink_to(library)

    def _render_models(self, instances: dict[str, int]) -> None:
        """The committed repository with the instance counts filled in; model.py stays a link."""
        for name, count in instances.items():
            (self.models / name).mkdir(parents=True)
            (self.models / name / "1").symlink_to(REPOSITORY / name / "1")
            config = (REPOSITORY / name / "config.pbtxt").read_text()
            config, found = re.subn(r"count: \d+", f"count: {count}", config)
            if found != 1:
                raise LaunchError(f"{REPOSITORY / name / 'config.pbtxt'} must hold one instance count, found {found}.")
            (self.models / name / "config.pbtxt").write_text(config)

    def owned_elsewhere(self) -> bool:
        """True while another process still holds the lock, which nobody can tell once the file was removed. Gives up
        this process's own hold on it."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1
        owner = self.directory / "owner"
        return owner.exists() and not is_free(owner)

    def remove(self) -> None:
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1
        _remove(self.directory)


def _claim_directory() -> tuple[Path, int]:
    """A new private directory and the descriptor that holds its lock."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        fd = lock(directory / "owner")
        if directory.exists():  # a launcher that cleans up may have seen the file before it was locked
            return directory, fd
        os.close(fd)


def unary_front_ends(front_ends: int) -> int:
    """Instances of photon_unary: plain requests hold no stream, so half as many carry them."""
    return max(1, front_ends // 2)


def remove_leftovers() -> list[Path]:
    """Removes directories and shared memory of servers that were killed. Returns the directories."""
    dead = []
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if directory.is_dir() and directory.stat().st_uid == os.getuid() and is_free(directory / "owner"):
            _remove(directory)
            dead.append(directory)
    return dead


def _remove(directory: Path) -> None:
    for region in SHM.glob(f"{directory.name}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def installed_triton() -> Path | None:
    """What TRITON_HOME names."""
    home = os.environ.get("TRITON_HOME")
    return Path(home) if home else None


def triton_home() -> Path:
    """Directory of tritonserver and its back ends: TRITON_HOME, or inside the wheel of nvidia-pytriton."""
    installed = installed_triton()
    if installed is not None:
        if not (installed / "bin" / "tritonserver").exists():
            raise LaunchError(f"TRITON_HOME is {installed}, which has no bin/tritonserver.")
        return installed
    try:
        distribution = importlib.metadata.distribution("nvidia-pytriton")
    except importlib.metadata.PackageNotFoundError as error:
        raise LaunchError(
            "The package nvidia-pytriton, which brings tritonserver, is missing; run make env."
        ) from error
    return Path(str(distribution.locate_file("pytriton/tritonserver")))


def triton_libraries() -> Path:
    installed = installed_triton()
    return installed / "lib" if installed else triton_home().parent.parent / "nvidia_pytriton.libs"


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def stub_path() -> Path:
    stub = "triton_python_backend_stub"
    path = triton_home() / "python_backend_stubs" / python_version() / stub
    if installed_triton():
        path = triton_home() / "backends" / "python" / stub
    elif not path.exists():
        raise LaunchError(f"Triton has no stub for Python {python_version()}; use 3.10 to 3.13.")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"Triton's stub {path} cannot be read; run chmod 755 on it.")
    return path


def libpython() -> Path | None:
    """Shared library that the stub loads; None when the stub finds one by itself (the 3.13 one brings its own)."""
    name = f"libpython{python_version()}.so.1.0"
    if name.encode() not in stub_path().read_bytes():
        return None
    places = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib", sysconfig.get_config_var("LIBPL")]
    for place in places:
        if place and (Path(place) / name).exists():
            return Path(place) / name
    if ctypes.util.find_library(f"python{python_version()}"):
        return None
    raise LaunchError(
        f"{name} is missing, which Triton's Python stub needs; install it (Debian: apt install "
        f"libpython{python_version()}) or use a Python built with --enable-shared."
    )


def check(checkpoint: Path, host: str, ports: dict[str, int], stubs: int) -> None:
    """Raises LaunchError for the first thing that would keep the server from starting."""
    if len(set(ports.values()) - {0}) < sum(port != 0 for port in ports.values()):
        raise LaunchError(f"{', '.join(ports)} must be different ports, got {', '.join(map(str, ports.values()))}.")
    libpython()
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        raise LaunchError(f"numpy {numpy} kills Triton's Python stub; install numpy<2.")
    for name in ("config.json", "tokenizer.json"):
        if not (checkpoint / name).is_file():
            raise LaunchError(f"The checkpoint {checkpoint} has no {name}.")
    if not any(checkpoint.glob("model*.safetensors")):
        raise LaunchError(f"The checkpoint {checkpoint} has no model.safetensors.")
    for variable, port in ports.items():
        check_port(host, port, variable)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < FILES:  # less than 0: no limit
        raise LaunchError(f"Only {files} files may be open and {FILES} are needed; raise the hard limit (ulimit -n).")
    need = stubs * SHM_BYTES + SHM_SPARE
    free = shutil.disk_usage(SHM).free
    if free < need:
        raise LaunchError(
            f"/dev/shm has {free >> 20} MiB free and {need >> 20} are needed; a container gets more with --shm-size=1g."
        )


def check_port(host: str, port: int, variable: str) -> None:
    """Raises LaunchError when the address cannot be bound. `variable` is what the user sets to change it."""
    if not 0 <= port < 1 << 16:
        raise LaunchError(f"{variable} must be a port from 0 to 65535, got {port}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise LaunchError(f"HOST is {host}, which is no address of this machine ({error.strerror}).") from error
        except OSError as error:
            raise LaunchError(f"Port {port} on {host} cannot be used ({error.strerror}); set {variable}.") from error


def free_ports(host: str, number: int) -> list[int]:
    """Different ports that nobody has now. They lie below those that the kernel gives to outgoing connections, or
    one of these might take a port before we bind it. Raises LaunchError."""
    end = 1 << 15  # the kernel's own default
    with contextlib.suppress(OSError):  # not every container shows it
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(FIRST_PORT, end if end > 2 * FIRST_PORT else 1 << 16)
    free: list[int] = []
    for port in random.SystemRandom().sample(ports, 100):
        if len(free) == number:
            return free
        with contextlib.suppress(LaunchError):
            check_port(host, port, "another one")
            free.append(port)
    raise LaunchError(f"No port from {FIRST_PORT} on is free on {host}.")
