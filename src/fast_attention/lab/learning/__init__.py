"""The commands ``train``, ``tasks`` and ``generate``."""
