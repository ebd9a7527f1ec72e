"""The seeded faults, one file for each folder of the source."""

import pkgutil
from importlib import import_module

_PARTS = [import_module(f"{__name__}.{part.name}") for part in pkgutil.iter_modules(__path__) if part.name != "fault"]
FAULTS = [fault for part in _PARTS for fault in part.FAULTS]
