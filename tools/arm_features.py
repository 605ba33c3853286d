"""A pytest plugin for `tools/arm_check.sh`: the features of the Arm processor that is emulated.

LLVM reads them from /proc/cpuinfo, which shows the emulating machine's.
"""

import os

import llvmlite.binding as llvm
from llvmlite.binding.targets import FeatureMap

FEATURES = os.environ["NUMBA_CPU_FEATURES"].replace("+", "").split(",")

llvm.get_host_cpu_features = lambda: FeatureMap(dict.fromkeys(FEATURES, True))
llvm.get_host_cpu_name = lambda: "generic"
