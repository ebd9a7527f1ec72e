"""Puts the compiled core into the wheel, which then is one of this platform: a build hook of hatchling."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PlatformWheel(BuildHookInterface):
    """Builds the core with every width, for any Python and any torch from the oldest allowed on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the core and name the wheel after its platform."""
        sys.path.insert(0, str(Path(self.root) / "src"))
        from fast_attention.core import FILE, building

        file = Path(self.root) / "build" / "wheel" / FILE.name
        building.build(file, building.ALL)
        build_data["force_include"][str(file)] = f"fast_attention/core/{FILE.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
