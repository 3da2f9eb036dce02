"""Cubins: from a spec to its digest, to machine code, to a kernel that can be launched.

digest     what names a kernel, by the code that decides it (sources)
lookup     process → prebuilt folder → cache → compiler
compiler   the one place that needs CuTeDSL
manifest   facts of a kernel, read from its code (elf)
store      a folder of kernels; cache is the user's
loader     cubin → CUkernel, checked against the manifest
builder    many kernels, ahead of time
sass       what the machine code does
"""

from .builder import BuildReport as BuildReport
from .builder import build as build
from .cache import CacheEntry as CacheEntry
from .cache import cache_dir as cache_dir
from .cache import cache_entries as cache_entries
from .cache import clear_cache as clear_cache
from .digest import CUTLASS_DSL_VERSION as CUTLASS_DSL_VERSION
from .digest import CubinError as CubinError
from .digest import digest_of as digest_of
from .loader import LoadedKernel as LoadedKernel
from .loader import load as load
from .lookup import get as get
from .lookup import prebuilt as prebuilt
from .manifest import Manifest as Manifest
from .manifest import Parameter as Parameter
from .store import Compiled as Compiled
