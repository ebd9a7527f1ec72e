"""What a model can be trained on: every task is a value that makes batch number i out of its seed."""
