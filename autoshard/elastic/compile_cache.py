"""What was compiled is kept in the run's folder, by JAX's persistent compilation cache, for all later generations.

The cache's settings are public. Two of its parts are replaced, which needs JAX's private modules `cache_key` and
`compilation_cache`; both are the same from jax 0.10.1 to 0.12:

- On CPU, the key of an entry has a fingerprint of the devices in which those of other processes look different from
  one's own, so that every process looks for an entry of its own. But only process 0 writes any: all others compile
  again in every generation. Here the key has the kinds of the devices and the host's instruction set instead, as the
  compiled program is the same for all processes. On GPUs and TPUs the keys are equal as they are.
- JAX writes an entry in place. A process that is killed meanwhile, or a full disk, leaves a part of it, which is
  neither used nor replaced ever after. Here an entry appears whole, and has a checksum.
"""

import hashlib
import pathlib
import platform
import re
import warnings
from typing import Any

import jax
import xxhash
from jax._src import cache_key, compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from autoshard.errors import FileFormatError
from autoshard.files import write_bytes_atomically
from autoshard.folders import private_folder

COMPILE_CACHE = "compile_cache"
"""Name of the cache's folder in the folder of a run."""

_DIGEST_BYTES = 16
"""Bytes of xxh3_128."""


def use_compile_cache(run_dir: pathlib.Path) -> None:
    """Makes JAX keep all that it compiles from now on in `run_dir`, and look there first.

    Must come before the first compilation of this process.

    Raises:
        FolderError: the cache's folder belongs to another user, or others may write to it: it holds executables.
    """
    folder = private_folder(run_dir / COMPILE_CACHE)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # no least size
    compilation_cache.get_file_cache = lambda path: (CheckedCache(pathlib.Path(path)), path)
    cache_key._hash_accelerator_config = _hash_devices


class CheckedCache(CacheInterface):
    """Entries as files that are whole or absent, each with a checksum in front."""

    def __init__(self, folder: pathlib.Path):
        self._path = folder

    def get(self, key: str) -> bytes | None:
        """The entry, or None if there is none; one that is damaged is removed, and told of in a warning."""
        path = self._file(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        value = content[_DIGEST_BYTES:]
        if content[:_DIGEST_BYTES] == xxhash.xxh3_128_digest(value):
            return value
        warnings.warn(
            f"{path}: the entry of the compilation cache is damaged, and is removed; the program is compiled again.",
            stacklevel=2,
        )
        path.unlink(missing_ok=True)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry, unless it is there; one that cannot be written is told of in a warning."""
        path = self._file(key)
        if path.exists():
            return
        try:
            write_bytes_atomically(path, xxhash.xxh3_128_digest(value) + value)
        except FileFormatError as error:
            warnings.warn(f"The compilation cache: {error}", stacklevel=2)

    def _file(self, key: str) -> pathlib.Path:
        return self._path / f"{key}.xla"


def _hash_devices(hash_obj: Any, devices: Any) -> None:
    """Adds to a key what the compiled program depends on besides program, options and versions."""
    if devices.flat[0].platform == "cpu":
        for device in devices.flat:
            hash_obj.update(device.device_kind.encode())
        hash_obj.update(_instruction_set())
    else:
        _JAX_HASH(hash_obj, devices)


_JAX_HASH = cache_key._hash_accelerator_config


def _instruction_set() -> bytes:
    """What tells hosts apart for which LLVM makes different code: a digest of model and features of the CPU."""
    lines = [platform.machine(), platform.processor()]
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text(errors="replace").partition("\n\n")[0]
        wanted = r"(?:vendor_id|cpu family|model|stepping|flags|Features|CPU \w+)\s*:.*"
        lines += re.findall(f"^{wanted}$", first, re.MULTILINE)
    return hashlib.sha256("\n".join(lines).encode()).digest()
