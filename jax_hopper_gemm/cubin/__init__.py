"""Cubins: from a spec to its digest, to machine code, to a kernel that can be launched.

digest     what names a kernel: its spec and the code that decides it
lookup     process → prebuilt folder → cache → compiler
compiler   the one place that needs CuTeDSL
manifest   facts of a kernel, read from its code (elf)
store      folders of kernels, and the user's cache
loader     cubin → CUkernel, checked against the manifest
builder    many kernels, ahead of time
sass       what the machine code does
"""

from .builder import BuildReport as BuildReport
from .builder import build as build
from .digest import CubinError as CubinError
from .digest import digest_of as digest_of
from .digest import digest_of_json as digest_of_json
from .loader import LoadedKernel as LoadedKernel
from .loader import load as load
from .lookup import get as get
from .lookup import prebuilt as prebuilt
from .lookup import spec_of as spec_of
from .manifest import Manifest as Manifest
from .manifest import Parameter as Parameter
from .store import Compiled as Compiled
from .store import cache_dir as cache_dir
from .store import clear_cache as clear_cache
from .store import user_cache as user_cache
