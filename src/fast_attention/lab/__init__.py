"""What the command line is made of: capture, measure, compare, report. Needs the ``lab`` extra."""
