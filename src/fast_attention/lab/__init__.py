"""The command line and its parts: capturing, measuring, comparing, reporting. Needs the ``lab`` extra."""
