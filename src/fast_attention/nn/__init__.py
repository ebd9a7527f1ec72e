"""Modules: a mechanism and a shape make parameters; projections around it make a layer."""
