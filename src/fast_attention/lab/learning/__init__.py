"""The commands that train a model and let it go on: ``train``, ``generate``."""
