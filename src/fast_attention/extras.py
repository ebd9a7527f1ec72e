"""Install commands for optional extras. This package is on no index; its requirements are."""

from __future__ import annotations

import re
import shlex
from importlib import metadata


def install(extra: str) -> str:
    """The command that installs an extra's packages, whether this package came as a wheel or as a clone."""
    try:
        declared = metadata.requires("fast-attention") or []
    except metadata.PackageNotFoundError:  # run from its source, not installed
        declared = []
    requirements = [line.split(";")[0].strip() for line in declared if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    if not requirements:
        return f"pip install '.[{extra}]' in a clone of fast-attention"
    return f"pip install {' '.join(shlex.quote(each) for each in requirements)}"
