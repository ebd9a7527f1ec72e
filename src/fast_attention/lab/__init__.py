"""The command line and its parts: capturing, measuring, comparing, reporting. Needs the ``lab`` extra.

What a user asked for and cannot have raises an ``InputError``: one line that says what would work.
"""
